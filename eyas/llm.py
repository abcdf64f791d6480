"""The engine in one process: prompts in, results out, no network. The same tokens as through the services."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral

from rich.console import Console
from rich.progress import Progress

from eyas.config import EagleConfig, EngineConfig, TreeConfig
from eyas.drafters.build import build_drafter
from eyas.engine.build import build_engine, gather_ranks
from eyas.errors import ConfigError, EyasError, InvalidRequest, RequestFailed
from eyas.models.parallel.ranks import Place
from eyas.request import Chunk, FinishReason, GenerationStats, Request, SamplingParams
from eyas.text import TextStream, TokenText, load_tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class GenerationResult:
    """What became of one prompt. token_ids end with the stop token, or the token that completed a stop string; text is
    cut before a stop string. seed is the one that was used."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    seed: int
    stats: GenerationStats


class LLM:
    """A target model, with a drafter or without.

    target: folder or hub id of any causal LM that transformers loads. draft: folder or hub id of a draft head.
    drafter: its method; taken from `draft` if left out. Neither: plain decoding.
    Raises CheckpointError for weights that do not load or fit, ConfigError for an unknown drafter.
    """

    def __init__(
        self,
        target: str,
        draft: str | None = None,
        drafter: str | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        tree: TreeConfig | None = None,
        engine: EngineConfig | None = None,
        eagle: EagleConfig | None = None,
    ) -> None:
        tree, engine, eagle = tree or TreeConfig(), engine or EngineConfig(), eagle or EagleConfig()
        if drafter and not draft:
            raise ConfigError(f"drafter {drafter!r} needs a draft head; give draft=PATH_OR_ID")
        name = drafter or ("eagle3" if draft else None)
        proposer = build_drafter(name, target, draft, dtype, device, tree, eagle) if name and draft else None
        self._ranks = gather_ranks(Place(0, engine.tensor_parallel, device), target, dtype)
        self._engine = build_engine(
            target, draft or "", dtype, device, replace(engine, max_waiting=sys.maxsize), tree, proposer, self._ranks
        )
        self._tokenizer = load_tokenizer(target)
        self._names = itertools.count()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerationResult]:
        """Continue each prompt, given as text or as token ids; one result each, in order.

        sampling: one for all prompts, or one each. Raises InvalidRequest naming the prompt, before anything is run, and
        RequestFailed when the target gives no usable logits. Whatever is raised, nothing of the call is left behind.
        """
        batch = _listed(prompts)
        params = [sampling or SamplingParams()] * len(batch) if not isinstance(sampling, Sequence) else list(sampling)
        if len(params) != len(batch):
            raise InvalidRequest(f"{len(batch)} prompts but {len(params)} sampling params; give one for all, or one each")
        running: dict[str, _Generation] = {}
        try:
            self._submit(batch, params, running)
            self._run(running)
        except BaseException:
            for request_id in running:
                self._engine.cancel(request_id)
            self._engine.reap()
            raise
        return [generation.result() for generation in running.values()]

    def close(self) -> None:
        """Send the processes home that share the target, if there are any. Nothing can be generated after it."""
        self._ranks.close()

    def _submit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], running: dict[str, _Generation]) -> None:
        for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
            try:
                ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
                request = Request(f"{next(self._names)}", ids, sampling.seeded())
                self._engine.submit(request)
            except EyasError as error:
                raise type(error)(f"prompt {index}: {error}") from error
            running[request.id] = _Generation(request, self._tokenizer)

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
    """A prompt on its way."""

    request: Request
    tokenizer: TokenText
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    stats: GenerationStats = field(default_factory=GenerationStats)
    finish_reason: FinishReason | None = None
    stopped: bool = False
    stream: TextStream = field(init=False)

    def __post_init__(self) -> None:
        self.stream = self.tokenizer.stream(self.request.sampling.stop)

    def take(self, chunk: Chunk) -> None:
        """Count a chunk; what follows a stop string does not count."""
        if self.stopped:
            return
        piece = self.stream.push(chunk.token_ids)
        counted = replace(chunk, token_ids=chunk.token_ids[: len(piece.texts)], foreseen=chunk.foreseen[: len(piece.texts)])
        self.token_ids += counted.token_ids
        self.texts.append(piece.text)
        self.stats.add(counted)
        self.stopped = piece.stopped
        self.finish_reason = "stop" if piece.stopped else chunk.finish_reason
        if self.finish_reason and not piece.stopped:
            self.texts.append(self.stream.flush())

    def result(self) -> GenerationResult:
        assert self.finish_reason is not None
        assert self.request.sampling.seed is not None
        return GenerationResult(
            prompt_token_ids=self.request.prompt_ids,
            token_ids=tuple(self.token_ids),
            text="".join(self.texts),
            finish_reason=self.finish_reason,
            seed=self.request.sampling.seed,
            stats=self.stats,
        )


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt becomes a list of one."""
    if isinstance(prompts, str) or (len(prompts) and all(isinstance(p, Integral) for p in prompts)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    wrong = [token for token in prompt if not isinstance(token, Integral)]
    if wrong:
        raise InvalidRequest(f"{wrong[0]!r} is no token id; a prompt is text or a list of whole numbers")
    return tuple(int(token) for token in prompt)
