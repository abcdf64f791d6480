"""`LLM` and `AsyncLLM`: the engine in one process, under vLLM's names, with the same tokens as through the services."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, Self, cast

from eyas.api.outputs import OutputBuilder, RequestOutput, TextChunk, TextDecoder
from eyas.api.request import Chunk, Prompt, Request, SamplingParams, paired, split_prompt
from eyas.config import (
    DraftingConfig,
    EngineConfig,
    GenerationDefaults,
    HeadValidation,
    MethodsConfig,
    ServedModel,
    SpecialTokensInContent,
    TreeConfig,
)
from eyas.config.checks import one_of
from eyas.config.engine import INT8
from eyas.config.vllm_arguments import Speculation, engine_config, speculation
from eyas.device.placement import use_threads
from eyas.drafters.draft_head import DraftHead
from eyas.engine.async_engine import AsyncEngine
from eyas.engine.build import assemble_engine, gather_ranks, load_model
from eyas.engine.engine import Engine
from eyas.errors import ConfigError, EyasError, InvalidRequest
from eyas.models.checkpoint import Checkpoint
from eyas.models.generation_config import sampling_defaults
from eyas.models.heads.fusers import FeatureFuser
from eyas.models.parallel.workers import RankInfo
from eyas.models.placement import pass_dtype, resolve_placement
from eyas.progress import progress
from eyas.text.chat_template import ChatTemplate, load_template, special_tokens
from eyas.text.content_text import ContentText
from eyas.text.tokenizer import TextStream, Tokenizer, load_tokenizer

Message = Mapping[str, Any]
OutputKind = Literal["cumulative", "delta", "final_only"]


@dataclass
class _Call:
    """The outputs of a call.

    Attributes:
        running: ids of its requests that have not ended.
        changed: indices of the outputs with something new, or an error.
    """

    outputs: list[OutputBuilder] = field(default_factory=list)
    running: dict[str, None] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)


class _Completion(NamedTuple):
    """A completion in progress, and the output that it belongs to."""

    request: Request
    decoder: TextDecoder
    output: OutputBuilder

    def add(self, chunk: Chunk) -> None:
        """Add a chunk; what comes after a stop string does not count."""
        if not self.decoder.stopped:
            self.output.add(self.decoder.add(chunk))


class LLM:
    """A target model with or without a drafter. Not safe for use from several threads.

    Args:
        model: folder or hub id of the target, any causal LM that transformers loads.
        draft_model: folder or hub id of the draft head, or of another checkpoint that the method loads.
        method: how to draft; if only `draft_model` is given, the method that it is for. Without either, the target's own
            module for multi-token prediction drafts if its checkpoint has one; "none" decodes plainly.
        dtype: of the weights. "auto" takes the checkpoint's on a GPU and float32 on the CPU.
        device: "auto" takes CUDA where torch finds a GPU, else the CPU.
        validate_head: "auto" tries the plausible wirings of an EAGLE head and takes the best; "never" trusts its config.
        speculative_config: vLLM's way to name draft model, method and length of the drafts.
        chat_template: file with a Jinja template for `chat`; empty takes the tokenizer's.
        generation_config: where parameters come from if `sampling_params` is None: "auto" takes those of the model's
            generation_config.json, "vllm" and "none" the defaults of SamplingParams.
        seed: makes the seeds of requests without one; None draws them.
        threads: of torch in this process; 0 takes what `eyas.device.placement.use_threads` says.
        arguments: vLLM's arguments, such as max_num_seqs, and the settings of EngineConfig, which change `engine`.

    Raises:
        CheckpointError: weights do not load or fit, or a head of another folder guesses no better than chance.
        ConfigError: the method is unknown, its head is missing, torch has no such device, or an argument is unknown.
    """

    def __init__(  # noqa: PLR0913  # keywords as a user of vLLM knows them
        self,
        model: str,
        draft_model: str | None = None,
        method: str | None = None,
        dtype: Any = "auto",
        device: str = "auto",
        tree: TreeConfig | None = None,
        engine: EngineConfig | None = None,
        drafting: DraftingConfig | None = None,
        methods: MethodsConfig | None = None,
        validate_head: HeadValidation = "auto",
        *,
        tokenizer: str | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        chat_template: str = "",
        generation_config: GenerationDefaults = "auto",
        seed: int | None = None,
        threads: int = 0,
        **arguments: Any,
    ) -> None:
        engine = replace(engine_config(arguments, engine or EngineConfig()), max_queued_requests=sys.maxsize)
        one_of(GenerationDefaults, generation_config=generation_config)
        checkpoint = Checkpoint(model)
        self._default_params = SamplingParams(**sampling_defaults(checkpoint, generation_config))  # type: ignore[arg-type]
        self._tokenizer = load_tokenizer(tokenizer or model)  # before the weights, which take longer
        drafts = _speculation(speculative_config, draft_model, method, tree, methods or MethodsConfig())
        device, dtype = resolve_placement(device, _dtype_name(dtype), checkpoint)
        passes = pass_dtype(checkpoint, dtype, device, engine, threads)
        use_threads(threads, (device, passes))
        drafting = drafting or DraftingConfig(cuda_graphs=engine.cuda_graphs)
        drafting = replace(drafting, quantization=drafts.quantization or drafting.quantization)
        head = DraftHead(drafts.draft_model, drafts.method, checkpoint, engine.tensor_parallel_size == 1)
        shape = drafts.tree or TreeConfig()
        fuser: FeatureFuser | None = None
        with head.falling_back():
            fuser = head.build_fuser(checkpoint, passes, device)
        with progress(waits=True) as shown, ExitStack() as undo:
            shown.show(f"loading {model}")
            ranks = gather_ranks(RankInfo(0, engine.tensor_parallel_size, device), model, dtype, engine.max_model_len)
            undo.callback(ranks.close)
            target = load_model(checkpoint, fuser, dtype, device, engine, ranks)
            wiring, drafter = None, None
            with head.falling_back():
                if fuser is not None and validate_head == "auto" and ranks.size == 1:
                    wiring = head.resolve_wiring(target, fuser, checkpoint, passes, device)
                if head.drafts:
                    drafting = head.resolve_drafting(drafting, checkpoint, passes, device, engine.quantization == INT8)
                    drafter = head.build_drafter(checkpoint, passes, device, shape, drafting, drafts.methods, wiring)
            if not head.drafts:
                fuser = None
                target.set_aux_hidden_state_layers(())
            levels = head.resolve_tree(shape)
            self.llm_engine: Engine = assemble_engine(target, fuser, engine, levels, drafter, ranks)
            undo.pop_all()
        self._ranks = ranks
        self._served = ServedModel(model, tokenizer or model, chat_template)
        self._seeds = random.Random(seed) if seed is not None else None
        self._names, self._numbers = itertools.count(), itertools.count()
        self._running: dict[str, tuple[_Completion, _Call, int]] = {}  # with the index of its output in a call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Shut down the tensor-parallel worker processes. Nothing can be generated afterwards."""
        self._ranks.close()

    def get_tokenizer(self) -> Tokenizer:
        """Return the target's tokenizer."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters with what the model recommends; those of calls without `sampling_params`."""
        return self._default_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        draft: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt, given as text or as token ids; one output each, in order.

        Raises InvalidRequest naming the prompt, before anything is run, and RequestFailed when the target gives no usable
        logits. After an error no request of the call is left in the engine.

        Args:
            sampling_params: one for all prompts, or one each.
            use_tqdm: whether a terminal shows progress, or a class like tqdm.
            draft: False decodes plainly, with the same tokens.
        """
        call = self._submit(prompts, sampling_params, draft)
        with _progress(use_tqdm, len(call.outputs)) as advance:
            for output in self._run(call):
                output.unread.clear()
                advance(not output.num_running)
        return [output.output() for output in call.outputs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        special_tokens_in_content: SpecialTokensInContent = "token",
    ) -> list[RequestOutput]:
        """Generate the assistant's next message of a conversation, or of each of several.

        Raises ConfigError for a model without a template, InvalidRequest for messages that the template refuses, and what
        `generate` raises.

        Args:
            chat_template: text of a Jinja template instead of the model's.
            special_tokens_in_content: "text" keeps names of special tokens in messages from becoming such tokens.
        """
        variables = {"add_generation_prompt": add_generation_prompt, "tools": tools} | dict(chat_template_kwargs or {})
        prompts = self.chat_prompts(messages, chat_template, special_tokens_in_content, **variables)
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        draft: bool = True,
    ) -> Iterator[RequestOutput]:
        """Yield what each step adds: outputs with new text and tokens only. Leaving the iterator early cancels the rest.

        Several prompts take turns; `request_id` counts them. Raises as `generate`, when the first output is asked for.
        """
        for output in self._run(self._submit(prompts, sampling_params, draft)):
            yield output.delta()

    def chunks(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[TextChunk]:
        """Yield the chunks of a prompt's completions, as a router streams them. Raises as `stream`."""
        for output in self._run(self._submit([prompt], sampling_params, draft=True)):
            yield from output.take()

    @cached_property
    def _content_text(self) -> ContentText:
        return ContentText(self._tokenizer)

    def chat_prompts(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        chat_template: str | None = None,
        special_tokens_in_content: SpecialTokensInContent = "token",
        **variables: Any,
    ) -> list[Prompt]:
        """Render conversations with the chat template, as prompts for `generate` and `stream`. Raises as `chat`.

        Args:
            special_tokens_in_content: as of `chat`.
            variables: for the template, such as enable_thinking.
        """
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if is_one else messages)
        if chat_template is None:
            template = load_template(self._served)
        else:
            template = ChatTemplate(chat_template, special_tokens(self._served.tokenizer), self._served.name)
        if template is None:
            raise ConfigError(f"{self._served.name} has no chat template; give LLM a file with one as chat_template")
        one_of(SpecialTokensInContent, special_tokens_in_content=special_tokens_in_content)
        if special_tokens_in_content == "text":
            contents = self._content_text
            texts = [template.render(conversation, variables, False, contents.mark) for conversation in conversations]
            return [
                {"prompt": contents.plain(text), "prompt_token_ids": contents.encode(text, sys.maxsize)} for text in texts
            ]
        texts = [template.render(conversation, variables) for conversation in conversations]
        return [{"prompt": text, "prompt_token_ids": self._tokenizer.encode_rendered(text)} for text in texts]

    def begin(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str | None = None, draft: bool = True
    ) -> list[_Completion]:
        """Return the completions of a prompt, as requests for the engine. Raises InvalidRequest."""
        text, ids = split_prompt(prompt)
        if ids is None:
            assert text is not None
            ids = self._tokenizer.encode(text)
        if sampling_params.seed is None and self._seeds is not None:
            sampling_params = replace(sampling_params, seed=self._seeds.getrandbits(64))
        request_id = f"{next(self._names)}" if request_id is None else request_id
        output = OutputBuilder(request_id, text, ids, sampling_params.n, self._tokenizer)
        completions = []
        words, stop = sampling_params.bad_words, sampling_params.stop
        context = partial(self._tokenizer.left_context, ids, sampling_params.structured_outputs is not None)
        specials = self._tokenizer.specials_in(stop) if stop else ()
        split = sampling_params.completions(self._tokenizer.bad_token_ids(words) if words else ())
        for index, own in enumerate(split):  # the engine may still hold a cancelled request of the same id
            stream = TextStream(self._tokenizer, stop, sampling_params.min_tokens, context=context, stop_specials=specials)
            decoder = TextDecoder(stream, sampling_params.stop_token_ids, len(ids), own.seed, index)
            request = Request(f"{request_id}#{next(self._numbers)}", ids, own, num_draft_tokens=0 if draft else 1)
            completions.append(_Completion(request, decoder, output))
        return completions

    def _submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        draft: bool,
    ) -> _Call:
        """Submit the completions of all prompts, or of none."""
        call = _Call()
        try:
            for index, (prompt, own) in enumerate(paired(prompts, sampling_params, self._default_params)):
                try:
                    completions = self.begin(prompt, own, draft=draft)
                    call.outputs.append(completions[0].output)
                    for completion in completions:
                        self.llm_engine.submit(completion.request)
                        self._running[completion.request.id] = completion, call, index
                        call.running[completion.request.id] = None
                except EyasError as error:
                    raise type(error)(f"prompt {index}: {error}") from error
        except BaseException:
            self._cancel(call)
            raise
        return call

    def _run(self, call: _Call) -> Iterator[OutputBuilder]:
        """Step until all outputs are finished, and yield those that have something unread.

        Cancels what is left when the caller stops. Raises RequestFailed.
        """
        try:
            while call.running or call.changed:
                if not call.changed:
                    self._step()
                changed, call.changed = sorted(call.changed), set()
                for output in [call.outputs[index] for index in changed]:
                    if output.error:
                        raise type(output.error)(f"request {output.request_id}: {output.error}")
                    if output.unread:
                        yield output
        finally:
            self._cancel(call)

    def _step(self) -> None:
        """Run a step, and give its chunks to the outputs of all calls that are under way."""
        for chunk in self.llm_engine.step():
            if (found := self._running.get(chunk.request_id)) is None:
                continue
            completion, call, index = found
            completion.add(chunk)
            call.changed.add(index)
            if completion.decoder.stopped:
                self.llm_engine.cancel(chunk.request_id)
            if completion.decoder.stopped or chunk.finish_reason:
                del self._running[chunk.request_id], call.running[chunk.request_id]

    def _cancel(self, call: _Call) -> None:
        """Cancel what is left of a call, and free all that it and stop strings leave in the engine."""
        for request_id in list(call.running):
            self.llm_engine.cancel(request_id)
            del self._running[request_id], call.running[request_id]
        if self.llm_engine.has_work:
            self._step()


class AsyncLLM:
    """`LLM` for asyncio: requests join and leave the running batch one by one. The engine runs in a thread of its own.

    Takes the arguments of LLM and raises as it does. Use it from one event loop at a time.
    """

    def __init__(self, model: str, **arguments: Any) -> None:
        self._llm = LLM(model, **arguments)
        self._engine = AsyncEngine(self._llm.llm_engine)
        self._running: dict[str, list[str]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """End the engine's thread after the present step, and the tensor-parallel worker processes."""
        self._engine.stop()
        self._llm.close()

    def get_tokenizer(self) -> Tokenizer:
        """Return the target's tokenizer."""
        return self._llm.get_tokenizer()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output of a prompt as it grows; leaving the generator early cancels the request.

        Raises InvalidRequest, and RequestFailed when the target gives no usable logits or the engine fails.

        Args:
            request_id: for `abort`; unique among running requests.
            output_kind: "cumulative" yields all so far, as vLLM does by default, "delta" what is new, "final_only" the
                whole output at the end.
        """
        begun = self._llm.begin(prompt, sampling_params or self._llm.get_default_sampling_params(), request_id)
        completions = {one.request.id: one for one in begun}
        output = begun[0].output
        if output.request_id in self._running:
            raise InvalidRequest(f"request_id {output.request_id!r} is running already; give another", "request_id")
        if not self._running:
            self._engine.start()
        self._running[output.request_id] = list(completions)
        try:
            async with aclosing(self._engine.generate(*(one.request for one in begun))) as chunks:
                async for chunk in chunks:
                    completion = completions[chunk.request_id]
                    completion.add(chunk)
                    if completion.decoder.stopped:
                        self._engine.cancel(chunk.request_id)
                    if output.error:
                        raise type(output.error)(f"request {output.request_id}: {output.error}")
                    if output_kind == "delta" and output.unread:
                        yield output.delta()
                    elif output_kind == "cumulative" or not output.num_running:
                        yield output.output()
                    if not output.num_running:
                        return
        finally:
            del self._running[output.request_id]

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        chat_template: str | None = None,
        **variables: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate the assistant's next message; as `generate`. variables: for the chat template. Raises as `LLM.chat`."""
        (prompt,) = self._llm.chat_prompts(messages, chat_template, **variables)
        return self.generate(prompt, sampling_params, request_id, output_kind=output_kind)

    async def abort(self, request_id: str) -> None:
        """End a request. Its generator yields a last output with the finish reason "cancelled". Unknown ids are ignored."""
        for name in self._running.get(request_id, ()):
            self._engine.cancel(name)


def _speculation(
    config: Mapping[str, Any] | None,
    draft_model: str | None,
    method: str | None,
    tree: TreeConfig | None,
    methods: MethodsConfig,
) -> Speculation:
    """Return how to draft, from vLLM's arguments or Eyas' own. Raises ConfigError for both."""
    drafts = Speculation(draft_model or "", method or "", tree, methods)
    if config is not None:
        if draft_model or method:
            raise ConfigError("speculative_config and draft_model or method say both how to draft; give one of them")
        drafts = speculation(config, methods)
    return replace(drafts, tree=tree or drafts.tree)


def _dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, given as a torch.dtype or under one of vLLM's names."""
    name = str(dtype).removeprefix("torch.")
    return {"half": "float16", "float": "float32"}.get(name, name)


@contextmanager
def _progress(use_tqdm: bool | Callable[..., Any], total: int) -> Iterator[Callable[[bool], object]]:
    """Show a progress bar of prompts; yields what to call with whether one more is done."""
    if callable(use_tqdm):
        with closing(use_tqdm(total=total, desc="Processed prompts")) as bar:
            yield bar.update
        return
    if not (use_tqdm and sys.stderr.isatty()):
        yield bool  # shows nothing
        return
    with progress() as shown:
        shown.show("generating", 0, total)
        yield shown.advance
