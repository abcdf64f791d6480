"""From a request's token chunks to what its client sees: text, stop strings, totals. Knows no network.

The completions of one request side by side: a stream of chunks for each in, one stream for the client out.

What both doors of the router do with a call: check, encode, relay, decode. Knows no gRPC server and no HTTP.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from contextvars import copy_context
from dataclasses import replace

from eyas.errors import EyasError, InvalidRequest, TimedOut, Unavailable, UnknownModel
from eyas.request import Chunk, GenerationStats, Request
from eyas.rpc.messages import GenerateCall, ModelInfo, TextChunk, Totals
from eyas.services.router.dispatcher import Dispatcher, PlacementHint, TrailerSink
from eyas.services.router.telemetry import RouterTelemetry
from eyas.services.router.workers import WorkerPool
from eyas.tokenizer import Tokenizer
from eyas.validation import check_fit, check_request


class OutputProcessor:
    """The answer of one completion as it grows. asked: the request as it came, with its stop strings. The completion's own
    request must have its seed."""

    def __init__(self, asked: Request, completion: Request, index: int, tokenizer: Tokenizer) -> None:
        self._index = index
        self._num_prompt_tokens = len(completion.prompt_ids)
        self._text = tokenizer.stream(asked.sampling.stop, asked.sampling.min_tokens)
        self._stats = GenerationStats()
        self._num_output_tokens = 0
        self._num_cached = 0
        self._seed = completion.sampling.seed

    def add(self, chunk: Chunk) -> TextChunk:
        """The next chunk for the client; after one with a finish reason no more may be added."""
        piece = self._text.push(chunk.token_ids)
        chunk = replace(chunk.first(len(piece.texts)), index=self._index)
        if piece.stopped:
            chunk = replace(chunk, finish_reason="stop")
        self._stats.add(chunk)
        if not self._num_output_tokens:  # of the first verifier, should there be several
            self._num_cached = chunk.num_cached
        self._num_output_tokens += len(chunk.token_ids)
        finished = chunk.finish_reason is not None
        rest = self._text.flush() if finished and not piece.stopped else ""
        seed, self._seed = self._seed, None
        return TextChunk(
            chunk=chunk,
            text=piece.text + rest,
            text_lengths=tuple(map(len, piece.texts)),
            seed=seed,
            totals=self._totals() if finished else None,
        )

    def _totals(self) -> Totals:
        return Totals(self._num_prompt_tokens, self._num_output_tokens, self._stats, self._num_cached)


async def completion(answer: OutputProcessor, chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[TextChunk, None]:
    """What the client sees of one completion. Ends its chunks early at a stop string: the verifier would go on."""
    async with aclosing(chunks):
        async for chunk in chunks:
            shown = answer.add(chunk)
            yield shown
            if shown.chunk.finish_reason != chunk.finish_reason:
                return


async def merged(streams: Sequence[AsyncGenerator[TextChunk, None]]) -> AsyncGenerator[TextChunk, None]:
    """The chunks of all streams as they come. Leaving early, or an error of one stream, ends all.

    Each stream keeps one context for its life: what it logs is about its own request to the end.
    """
    contexts = [copy_context() for _ in streams]
    waiting = {
        asyncio.create_task(_next(stream), context=context): (stream, context)
        for stream, context in zip(streams, contexts, strict=True)
    }
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream, context = waiting.pop(task)
                chunk = task.result()
                if chunk is not None:
                    yield chunk
                    waiting[asyncio.create_task(_next(stream), context=context)] = stream, context
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[TextChunk, None]) -> TextChunk | None:
    return await anext(stream, None)


class GenerationService:
    """Serves the models that have a tokenizer here. request_timeout_s: longest life of a request, in seconds."""

    def __init__(
        self,
        tokenizers: Mapping[str, Tokenizer],
        workers: WorkerPool,
        relay: Dispatcher,
        request_timeout_s: float,
        telemetry: RouterTelemetry | None = None,
    ) -> None:
        self._telemetry = telemetry or RouterTelemetry()
        self._tokenizers = tokenizers
        self._workers = workers
        self._relay = relay
        self._request_timeout = request_timeout_s

    def models(self) -> tuple[ModelInfo, ...]:
        """The configured models that a live verifier serves."""
        infos = {lease.model.name: lease.model for lease in self._workers.fleet().verifiers}
        return tuple(infos[name] for name in self._tokenizers if name in infos)

    def model(self, asked: str) -> ModelInfo:
        """What is known of the model that is asked for, of the verifier that takes the longest requests.

        asked: may be empty where one model is served. Raises UnknownModel, InvalidRequest, Unavailable.
        """
        name = self._name(asked)
        infos = [lease.model for lease in self._workers.fleet().verifiers if lease.model.name == name]
        if not infos:
            raise Unavailable(f"no verifier of model {name!r} is alive; start one or try again later")
        return max(infos, key=lambda info: info.max_model_len)

    def tokenizer(self, model: str) -> Tokenizer:
        """The tokenizer of a model that `model` has named."""
        return self._tokenizers[model]

    @contextmanager
    def refusals(self, call: GenerateCall, operation: str = "text_completion") -> Iterator[None]:
        """An error of the body is the end of the request, and is told as such. operation: see `stream`."""
        try:
            yield
        except EyasError:
            with self._telemetry.request(call, operation):
                raise

    async def prepare(self, call: GenerateCall) -> GenerateCall:
        """The call with its model, id, token ids and seed filled in. Raises InvalidRequest, UnknownModel, Unavailable."""
        name = self._name(call.model)
        check_request(call.request)
        info = self.model(name)
        request = replace(
            call.request,
            id=call.request.id or uuid.uuid4().hex,
            prompt_ids=await self._prompt_ids(call, info),
            sampling=call.request.sampling.seeded(),
        )
        check_fit(request, info.vocab_size, info.max_model_len)
        return replace(call, request=request, prompt_text=None, model=name)

    async def encode_rendered(self, info: ModelInfo, text: str) -> tuple[int, ...]:
        """Token ids of a text that holds its special tokens already. Raises InvalidRequest for one that cannot fit."""
        tokenizer = self._tokenizers[info.name]
        return await _encoded(tokenizer, tokenizer.encode_rendered, text, info)

    async def stream(
        self, call: GenerateCall, timeout: float | None, sink: TrailerSink, operation: str = "text_completion"
    ) -> AsyncGenerator[TextChunk, None]:
        """What the client sees of all completions of a prepared call, as it comes; leaving early cancels them.

        timeout: the client's own limit, in seconds. operation: as the GenAI conventions name it. Raises TimedOut at the
        earlier of the limits, and what Relay raises.
        """
        left = min(timeout or self._request_timeout, self._request_timeout)
        deadline = asyncio.get_running_loop().time() + left
        try:
            with self._telemetry.request(call, operation) as observed:
                own = observed.prepared(call)
                if observed.texts is not None:
                    observed.asked_text = self._tokenizers[call.model].decode(call.request.prompt_ids)
                async with aclosing(merged(self._completions(own, deadline, sink))) as chunks:
                    async for chunk in chunks:
                        observed.saw(chunk)
                        yield chunk
        except TimeoutError as error:
            raise TimedOut(f"the request was not done within {left:.1f} s") from error

    def _completions(self, call: GenerateCall, deadline: float, sink: TrailerSink) -> list[AsyncGenerator[TextChunk, None]]:
        """A stream of chunks for each completion of a call."""
        tokenizer, request, home = self._tokenizers[call.model], call.request, PlacementHint()
        split = request.sampling.completions(tokenizer.bad_token_ids(request.sampling.bad_words))
        requests = [replace(request, sampling=sampling) for sampling in split]
        answers = [OutputProcessor(request, one, index, tokenizer) for index, one in enumerate(requests)]
        chunks = [self._relay.stream(replace(call, request=one), home, deadline, sink) for one in requests]
        return [completion(answer, stream) for answer, stream in zip(answers, chunks, strict=True)]

    async def _prompt_ids(self, call: GenerateCall, info: ModelInfo) -> tuple[int, ...]:
        tokenizer = self._tokenizers[info.name]
        if not call.prompt_text:
            return call.request.prompt_ids
        return await _encoded(tokenizer, tokenizer.encode, call.prompt_text, info)

    def _name(self, asked: str) -> str:
        names = tuple(self._tokenizers)
        if asked in self._tokenizers:
            return asked
        if asked:
            raise UnknownModel(f"model {asked!r} is not served here; known: {', '.join(names)}", "model")
        if len(names) > 1:
            raise InvalidRequest(f"several models are served here; name one of {', '.join(names)}", "model")
        return names[0]


async def _encoded(
    tokenizer: Tokenizer, encode: Callable[[str], tuple[int, ...]], text: str, info: ModelInfo
) -> tuple[int, ...]:
    """Encodes beside the event loop, and not at all what cannot fit."""
    if (least := tokenizer.least_tokens(text)) > info.max_model_len:
        message = f"prompt of at least {least} tokens exceeds the context of {info.max_model_len} tokens"
        raise InvalidRequest(message, "prompt")
    return await asyncio.to_thread(encode, text)
