"""`LLM`: the engine in one process, with the same tokens as through the services."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from numbers import Integral

from rich.console import Console
from rich.progress import Progress

from eyas.config import DraftingConfig, EngineConfig, HeadValidation, MethodsConfig, TreeConfig
from eyas.drafters.registry import NO_DRAFTS, build_drafter, build_fuser, default_method, resolve_wiring
from eyas.engine.build import assemble_engine, gather_ranks, load_model
from eyas.errors import EyasError, InvalidRequest, RequestFailed
from eyas.models.checkpoint import resolve_placement
from eyas.models.workers import RankInfo
from eyas.request import Chunk, FinishReason, GenerationStats, Request, SamplingParams, TokenLogprob
from eyas.tokenizer import TextStream, load_tokenizer
from eyas.validation import check_sampling

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """One continuation of a prompt. token_ids end with the stop token, or the token that completed a stop string; text is
    cut before a stop string. seed is the one that was used. logprobs: one per token where asked for."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    seed: int
    stats: GenerationStats
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GenerationResult(Completion):
    """The first completion of a prompt, and all n of them.

    prompt_logprobs: one per token of the prompt where asked for. num_cached_tokens: prompt tokens of the first
    completion that came from the prefix cache.
    """

    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    num_cached_tokens: int = 0


class LLM:
    """A target model with or without a drafter.

    Args:
        model: folder or hub id of the target, any causal LM that transformers loads.
        draft_model: folder or hub id of the draft head, or of another checkpoint that the method loads.
        method: how to draft; "eagle3" if only `draft_model` is given. Without either, decoding is plain.
        device: "auto" takes CUDA where torch finds a GPU, else the CPU.
        dtype: "auto" takes the checkpoint's on a GPU and float32 on the CPU.
        validate_head: "auto" tries the plausible wirings of an EAGLE head and takes the best; "never" trusts its config.

    Raises:
        CheckpointError: weights do not load or fit, or a head guesses no better than chance.
        ConfigError: the method is unknown, its head is missing, or torch has no such device.
    """

    def __init__(
        self,
        model: str,
        draft_model: str | None = None,
        method: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        tree: TreeConfig | None = None,
        engine: EngineConfig | None = None,
        drafting: DraftingConfig | None = None,
        methods: MethodsConfig | None = None,
        validate_head: HeadValidation = "auto",
    ) -> None:
        tree, engine, drafting = tree or TreeConfig(), engine or EngineConfig(), drafting or DraftingConfig()
        head, name = draft_model or "", default_method(method or "", draft_model or "")
        device, dtype = resolve_placement(device, dtype, model)
        fuser = build_fuser(name, head, model, dtype, device)
        with ExitStack() as undo:
            ranks = gather_ranks(RankInfo(0, engine.tensor_parallel_size, device), model, dtype, engine.max_model_len)
            undo.callback(ranks.close)
            target = load_model(model, fuser, dtype, device, engine, ranks)
            wiring = None
            if fuser is not None and validate_head == "auto" and ranks.size == 1:
                wiring = resolve_wiring(name, target, fuser, head, model, dtype, device)
            drafter = None
            if name != NO_DRAFTS:
                drafter = build_drafter(name, model, head, dtype, device, tree, drafting, methods, wiring)
            engine = replace(engine, max_queued_requests=sys.maxsize)
            self._engine = assemble_engine(target, fuser, engine, tree, drafter, ranks)
            undo.pop_all()
        self._ranks = ranks
        self._tokenizer = load_tokenizer(model)
        self._names = itertools.count()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerationResult]:
        """Continue each prompt, given as text or as token ids; one result each, in order.

        sampling: one for all prompts, or one each. Raises InvalidRequest naming the prompt, before anything is run, and
        RequestFailed when the target gives no usable logits. After an error no request of the call is left in the engine.
        """
        is_single = isinstance(prompts, str) or (len(prompts) and all(isinstance(p, Integral) for p in prompts))
        batch: list[Prompt] = [prompts] if is_single else list(prompts)  # type: ignore[list-item, arg-type]
        all_params = [sampling or SamplingParams()] * len(batch) if not isinstance(sampling, Sequence) else list(sampling)
        if len(all_params) != len(batch):
            raise InvalidRequest(
                f"{len(batch)} prompts but {len(all_params)} sampling params; give one for all, or one each"
            )
        running: dict[str, _Generation] = {}
        try:
            groups = []
            for index, (prompt, params) in enumerate(zip(batch, all_params, strict=True)):
                try:
                    groups.append(self._submit(prompt, params, running))
                except EyasError as error:
                    raise type(error)(f"prompt {index}: {error}") from error
            self._run(running)
        except BaseException:
            for request_id in running:
                self._engine.cancel(request_id)
            self._engine.step()  # frees all that they hold
            raise
        return [_result(group) for group in groups]

    def close(self) -> None:
        """Shut down the tensor-parallel worker processes. Nothing can be generated afterwards."""
        self._ranks.close()

    def _submit(self, prompt: Prompt, sampling: SamplingParams, running: dict[str, _Generation]) -> list[_Generation]:
        """Submit the completions of a prompt, and add them to `running`."""
        check_sampling(sampling)
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        for token in ids:
            if not isinstance(token, Integral):
                raise InvalidRequest(f"{token!r} is not a token id; a prompt is text or a list of whole numbers")
        group = []
        for split in sampling.completions(self._tokenizer.bad_token_ids(sampling.bad_words)):
            request = Request(f"{next(self._names)}", tuple(map(int, ids)), split)
            self._engine.submit(request)
            running[request.id] = _Generation(request, TextStream(self._tokenizer, sampling.stop, sampling.min_tokens))
            group.append(running[request.id])
        return group

    def _run(self, running: dict[str, _Generation]) -> None:
        with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("generating", total=len(running))
            while self._engine.has_work:
                for chunk in self._engine.step():
                    running[chunk.request_id].take(chunk)
                    if running[chunk.request_id].stopped:
                        self._engine.cancel(chunk.request_id)
                    elif chunk.finish_reason == "error":
                        raise RequestFailed(f"request {chunk.request_id}: {chunk.message}")
                progress.update(task, completed=sum(r.finish_reason is not None for r in running.values()))


@dataclass
class _Generation:
    """A completion in progress."""

    request: Request
    stream: TextStream
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    stats: GenerationStats = field(default_factory=GenerationStats)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stopped: bool = False
    num_cached: int = 0

    def take(self, chunk: Chunk) -> None:
        """Add a chunk; tokens after a stop string are left out."""
        if self.stopped:
            return
        piece = self.stream.push(chunk.token_ids)
        counted = chunk.first(len(piece.texts))
        self.num_cached += chunk.num_cached
        self.token_ids += counted.token_ids
        self.texts.append(piece.text)
        self.logprobs += counted.logprobs
        self.prompt_logprobs += counted.prompt_logprobs
        self.stats.add(counted)
        self.stopped = piece.stopped
        self.finish_reason = "stop" if piece.stopped else chunk.finish_reason
        if self.finish_reason and not piece.stopped:
            self.texts.append(self.stream.flush())

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        assert self.request.sampling.seed is not None
        return Completion(
            token_ids=tuple(self.token_ids),
            text="".join(self.texts),
            finish_reason=self.finish_reason,
            seed=self.request.sampling.seed,
            stats=self.stats,
            logprobs=tuple(self.logprobs),
        )


def _result(group: Sequence[_Generation]) -> GenerationResult:
    completions, first = tuple(generation.completion() for generation in group), group[0]
    return GenerationResult(
        **vars(completions[0]),
        prompt_token_ids=first.request.prompt_ids,
        completions=completions,
        prompt_logprobs=first.prompt_logprobs,
        num_cached_tokens=first.num_cached,
    )
