"""Handling of a call from either listener: check it, encode its prompt, dispatch its completions, decode their tokens."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

from eyas.api.outputs import TextChunk, TextDecoder
from eyas.api.request import Chunk, SamplingParams
from eyas.api.validation import check_request
from eyas.errors import EyasError, InvalidRequest, TimedOut, Unavailable, UnknownModel
from eyas.rpc.messages import GenerateCall, ModelInfo
from eyas.services.router.client_threads import ClientThreads
from eyas.services.router.dispatch.dispatcher import Dispatcher, RequestContext, no_verifier
from eyas.services.router.dispatch.workers import WorkerPool
from eyas.services.router.models import RouterModel
from eyas.services.router.telemetry import Arrival, RequestSpan, RouterTelemetry
from eyas.text.tokenizer import TextStream, Tokenizer

# Completions of one body that run at once. Each costs the event loop some time at every step of its verifier.
MAX_CONCURRENT_COMPLETIONS = 128
STOPPING = "the router is stopping; send the request again"


# How many chunks, and of how many bytes, the router holds for a busy client: of each completion while a feed has them, and
# of all together while they come on their own streams. The verifier keeps the rest.
MAX_READY, MAX_READY_BYTES = 64, 2**18

# All chunks that were ready when the reader came for them: one step's, or more of them while it sent the last ones.
ReadyChunks: TypeAlias = AsyncGenerator[list[TextChunk], None]
Work: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
Task: TypeAlias = asyncio.Task[None]

# Bad words as token ids, and the special tokens that stop strings hold.
Words: TypeAlias = tuple[tuple[tuple[int, ...], ...], frozenset[int]]


class GenerationService:
    """Service of models.

    Attributes:
        configured: models by their names, without aliases.
        threads: for the work that clients' texts cause.

    Args:
        request_timeout_s: the longest duration of a request.
    """

    def __init__(
        self,
        models: Sequence[RouterModel],
        workers: WorkerPool,
        dispatcher: Dispatcher,
        request_timeout_s: float,
        telemetry: RouterTelemetry,
    ) -> None:
        self.configured = {model.name: model for model in models}
        self._aliases = {alias: model.name for model in models for alias in model.aliases}
        self._telemetry = telemetry
        self._workers = workers
        self._dispatcher = dispatcher
        self._request_timeout_s = request_timeout_s
        self._has_ended = False
        self._running = set[Task]()  # of all streams
        self.threads = ClientThreads()
        self._last_words: tuple[SamplingParams, Words] = SamplingParams(), ((), frozenset())

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may give: of the configured models, and their aliases."""
        return (*self.configured, *self._aliases)

    def models(self) -> tuple[ModelInfo, ...]:
        """Return the configured models that a live verifier serves, once for each of their names."""
        infos = {lease.model.name: lease.model for lease in self._workers.snapshot().verifiers}
        served = {name: infos.get(self._aliases.get(name, name)) for name in self.names}
        return tuple(replace(info, name=name) for name, info in served.items() if info)

    async def model(self, name: str) -> ModelInfo:
        """Return the requested model, as the verifier with the longest context serves it; wait for one if there is none.

        name: may be empty if one model is configured. Raises UnknownModel, InvalidRequest, Unavailable.
        """
        name = self._resolve(name)
        if info := self._served(name):
            return info
        timeout_s = min(self._dispatcher.retry.budget_s, self._request_timeout_s)
        with self._telemetry.waiting():
            info = await self._workers.wait_for(lambda: self._served(name), timeout_s)
        if info is None:
            raise no_verifier(name)
        return info

    def end_calls(self) -> None:
        """End all calls with Unavailable, running and later ones: the router stops."""
        self._has_ended = True
        for task in self._running:
            task.cancel()

    @contextmanager
    def record_rejection(self, arrival: Arrival, operation: str = "text_completion") -> Iterator[None]:
        """Record an EyasError of the body as the end of the request. operation: as in `stream`."""
        try:
            yield
        except EyasError:
            with self._telemetry.arrived(arrival, operation):
                raise

    async def prepare(self, call: GenerateCall, caller: str, is_rendered: bool = False) -> GenerateCall:
        """Return the call with its model, id and token ids.

        Raises InvalidRequest, UnknownModel, Unavailable, Overloaded, and PoisonRequest for a request that has just ended
        verifiers.

        Args:
            caller: see ClientThreads.
            is_rendered: the prompt's text contains its special tokens.
        """
        name = self._resolve(call.model)
        info = await self.model(name)
        prompt_ids = call.request.prompt_ids
        if call.prompt_text:
            prompt_ids = await self.encode(info, call.prompt_text, caller, is_rendered)
        request = replace(call.request, id=call.request.id or uuid.uuid4().hex, prompt_ids=prompt_ids)
        check_request(request, info.vocab_size, info.max_model_len)
        bad_token_ids, stop_specials = await self._words_as_ids(request.sampling, name, caller)
        if bad_token_ids:
            sampling = request.sampling
            ids = (*sampling.bad_token_ids, *bad_token_ids)
            request = replace(request, sampling=replace(sampling, bad_words=(), bad_token_ids=ids))
        prepared = replace(call, request=request, prompt_text=None, model=name, stop_specials=stop_specials)
        self._dispatcher.check(prepared)
        return prepared

    async def _words_as_ids(self, sampling: SamplingParams, model: str, caller: str) -> Words:
        """Return what bad words and stop strings are as tokens, encoded in a thread, once for all prompts of a body."""
        if not sampling.bad_words and not sampling.stop:
            return (), frozenset()
        last, words = self._last_words
        if last is not sampling:
            words = await self.threads.run(caller, _words_as_ids, self.configured[model].tokenizer, sampling)
            self._last_words = sampling, words
        return words

    async def encode(self, info: ModelInfo, text: str, caller: str, is_rendered: bool = False) -> tuple[int, ...]:
        """Return the token ids of a text, encoded in a thread. Raises InvalidRequest for a text that cannot fit.

        is_rendered: the text contains its special tokens.
        """
        encode = self.configured[info.name].tokenizer.encode_within
        return await self.threads.run(caller, encode, text, info.max_model_len, is_rendered)

    def stream(
        self,
        calls: Sequence[GenerateCall],
        operation: str = "text_completion",
        timeout_s: float | None = None,
        count: Callable[[int], object] = lambda _: None,
    ) -> ReadyChunks:
        """Return the chunks of all completions of a body's calls, as they come; closing it early cancels them.

        Args:
            calls: what `prepare` returned. Their completions are numbered through.
            operation: "chat" or "text_completion", as in the GenAI conventions.
            timeout_s: the client's own limit for each call.
            count: gets the number of each chunk's tokens, read or not.

        Raises:
            TimedOut: at the earlier of the client's and the router's limit.
            EyasError: as `Dispatcher.run`, and Unavailable when the router stops.
        """
        timeout_s = min(timeout_s or self._request_timeout_s, self._request_timeout_s)
        call_slots, slots = (asyncio.Semaphore(MAX_CONCURRENT_COMPLETIONS) for _ in range(2))

        async def run_call(call: GenerateCall, first: int, queue: ReadyQueue) -> None:
            """Queue the chunks of one call, whose completions begin with the number `first`."""
            context = RequestContext(asyncio.get_running_loop().time() + timeout_s, queue.wait_for_room, body=slots)
            with self._telemetry.request(call, operation) as traced:
                try:
                    if self._has_ended:
                        raise _stopping()
                    call = traced.set_call(call)
                    if traced.texts is not None:
                        decode = self.configured[call.model].tokenizer.decode
                        traced.prompt_text = await asyncio.to_thread(decode, call.request.prompt_ids)

                    works = (
                        partial(self._dispatcher.run, completion, context, partial(_take, decoder, traced, count, queue))
                        for completion, decoder in self._completions(call, first)
                    )
                    await run_all(works, call.request.sampling.n, slots)
                    await queue.wait_until_read()  # a client that leaves before counts as such
                except TimeoutError as error:
                    raise TimedOut(f"the request was not done within {timeout_s:.1f} s") from error
                except asyncio.CancelledError:
                    if self._has_ended:  # counted as UNAVAILABLE, not as a client that left
                        raise _stopping() from None
                    raise

        def run_calls(queue: ReadyQueue) -> Coroutine[Any, Any, None]:
            firsts = accumulate((call.request.sampling.n for call in calls), initial=0)
            works = (partial(run_call, call, first, queue) for call, first in zip(calls, firsts, strict=False))
            return run_all(works, len(calls), call_slots)

        return ready_chunks(run_calls, self._running)

    def _completions(self, call: GenerateCall, first: int) -> Iterator[tuple[GenerateCall, TextDecoder]]:
        """Yield each completion of a call, with what decodes its chunks. first: number of the first."""
        tokenizer, request = self.configured[call.model].tokenizer, call.request
        is_constrained = request.sampling.structured_outputs is not None
        left_context = partial(tokenizer.left_context, request.prompt_ids, is_constrained)
        for index, sampling in enumerate(request.sampling.completions(), first):
            completion = replace(request, sampling=sampling)
            text = TextStream(
                tokenizer,
                request.sampling.stop,
                request.sampling.min_tokens,
                skip_special_tokens=call.skip_special_tokens,
                include_stop=call.include_stop,
                kept_tokens=call.kept_tokens,
                context=left_context,
                stop_specials=call.stop_specials,
            )
            stop_token_ids, num_prompt = request.sampling.stop_token_ids, len(request.prompt_ids)
            decoder = TextDecoder(text, stop_token_ids, num_prompt, sampling.seed, index)
            yield replace(call, request=completion), decoder

    def _served(self, name: str) -> ModelInfo | None:
        if self._has_ended:
            raise _stopping()
        infos = (lease.model for lease in self._workers.snapshot().verifiers if lease.model.name == name)
        return max(infos, key=lambda info: info.max_model_len, default=None)

    def _resolve(self, model: str) -> str:
        if (found := self._aliases.get(model, model)) in self.configured:
            return found
        if model:
            raise UnknownModel(f"model {model[:80]!r} is not served here; known: {', '.join(self.names)}", "model")
        if len(self.configured) > 1:
            raise InvalidRequest(f"several models are served here; name one of {', '.join(self.configured)}", "model")
        return next(iter(self.configured))


def _words_as_ids(tokenizer: Tokenizer, sampling: SamplingParams) -> Words:
    return tokenizer.bad_token_ids(sampling.bad_words), tokenizer.specials_in(sampling.stop)


def _take(
    decoder: TextDecoder, traced: RequestSpan, count: Callable[[int], object], queue: ReadyQueue, received: Chunk
) -> bool | None:
    """Queue a chunk of a completion with its text. A stop string ends it, for the verifier would go on."""
    chunk = decoder.add(received)
    traced.add(chunk)
    count(len(chunk.chunk.token_ids))
    is_slow = queue.add(chunk)
    return None if decoder.stopped else is_slow


async def run_all(works: Iterable[Work], num_works: int, slots: asyncio.Semaphore) -> None:
    """Run all works at once, several as tasks, so that log lines carry each request's id. An error of one ends all.

    Each is started once there is a slot, one in each round of the event loop, and then the next is taken from `works`. So a
    body of many prompts neither keeps it from other requests nor fills the memory that each garbage collection visits.
    """
    if num_works == 1:
        (work,) = works
        await work()
        return
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                await slots.acquire()
                group.create_task(work()).add_done_callback(lambda _: slots.release())
                await asyncio.sleep(0)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


class ReadyQueue:
    """Queue of chunks for a reader that takes all of them at once. has_news: set while there is something for it."""

    def __init__(self) -> None:
        self.has_news = asyncio.Event()
        self._chunks: list[TextChunk] = []
        self._num_bytes = 0
        self._num_unread = Counter[int]()
        self._has_room = asyncio.Event()
        self._readings: list[asyncio.Event] = []

    def add(self, chunk: TextChunk) -> bool:
        """Queue a chunk; return whether too many of its completion wait."""
        inner = chunk.chunk
        self._chunks.append(chunk)
        self._num_bytes += inner.num_bytes
        self._num_unread[inner.index] += 1
        self.has_news.set()
        num_unread = self._num_unread[inner.index]
        return num_unread >= MAX_READY or (num_unread > 1 and self._num_bytes >= MAX_READY_BYTES)

    async def wait_for_room(self) -> None:
        """Wait while as much is queued as the router holds for a client."""
        while len(self._chunks) >= MAX_READY or self._num_bytes >= MAX_READY_BYTES:
            self._has_room.clear()
            await self._has_room.wait()

    async def wait_until_read(self) -> None:
        """Wait until the reader is done with all that has been queued."""
        self._readings.append(is_read := asyncio.Event())
        self.has_news.set()
        await is_read.wait()

    def take(self) -> tuple[list[TextChunk], list[asyncio.Event]]:
        """Remove and return all chunks, and what the reader sets once it is done with them."""
        taken = self._chunks, self._readings
        self._chunks, self._readings = [], []
        self._num_bytes = 0
        self._num_unread.clear()
        self._has_room.set()
        self.has_news.clear()
        return taken


async def ready_chunks(work: Callable[[ReadyQueue], Coroutine[Any, Any, None]], running: set[Task]) -> ReadyChunks:
    """Yield what a work queues, all that is ready at once. Closing it early, or an error of the work, ends the work.

    running: has the work's task until then. Who cancels it ends the stream with Unavailable.
    """
    queue = ReadyQueue()
    task = asyncio.create_task(work(queue))
    task.add_done_callback(lambda _: queue.has_news.set())
    running.add(task)
    try:
        while True:
            await queue.has_news.wait()
            is_last = task.done()
            chunks, readings = queue.take()
            if chunks:
                yield chunks
            for is_read in readings:
                is_read.set()
            if is_last:
                if task.cancelled():
                    raise _stopping()
                task.result()
                return
    finally:
        running.discard(task)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _stopping() -> Unavailable:
    return Unavailable(STOPPING)
