"""A `Client` of a router, over gRPC, with vLLM's outputs. It needs no torch.

A request whose router or connection fails is sent again with the same seed, to the next address if there are several. The
answer is the same, so that what came before is not yielded again.
"""

from __future__ import annotations

import itertools
import math
import random
import secrets
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import grpc

from eyas.api.outputs import OutputBuilder, RequestOutput, TextChunk
from eyas.api.request import Prompt, Request, SamplingParams, paired, split_prompt
from eyas.errors import ConfigError, EyasError, Overloaded, RequestFailed, TimedOut, Unavailable
from eyas.rpc.channel import ChannelOptions, Metadata, open_sync_channel
from eyas.rpc.convert import generate_call_to_proto, models_from_proto, text_chunk_from_proto
from eyas.rpc.identity import Certificates, channel_credentials
from eyas.rpc.messages import NO_DRAFTER, GenerateCall, ModelInfo
from eyas.rpc.status import status_error
from eyas.v1.generation_pb2 import ListModelsRequest
from eyas.v1.generation_pb2_grpc import GenerationStub

LIST_TIMEOUT_S = 10.0
MAX_PARALLEL_CALLS = 64


@dataclass(frozen=True)
class RetryPolicy:
    """Rules for sending a failed call again.

    Attributes:
        max_attempts: attempts in a row without a new token, with the first one.
        initial_backoff_s: longest wait before the second attempt; it doubles from one to the next.
        max_backoff_s: limit of that wait. A server that says when to come back is waited for in any case.
        budget_s: limit of all waits of a request.
    """

    max_attempts: int = 5
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    budget_s: float = 30.0


@dataclass(frozen=True)
class Connection:
    """Addresses of the routers, and the way to call them.

    Attributes:
        address: host:port of the router, or several with commas between them.
        api_key: for routers with API keys.
        tls: TLS with the system's certificate authorities; ca_file implies it.
        ca_file: PEM file of the authority that signed the router's certificate.
        cert_file: PEM file of a client certificate; key_file: its key.
        tls_server_name: name expected in the certificate, if it differs from the host.
        retry: when a failed call is sent again.

    Raises ConfigError for files that cannot be used.
    """

    address: str = "127.0.0.1:50050"
    api_key: str = field(default="", repr=False)
    tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    tls_server_name: str = ""
    retry: RetryPolicy = RetryPolicy()

    @property
    def addresses(self) -> list[str]:
        """Each address by itself."""
        return [one.strip() for one in self.address.split(",")]

    @property
    def metadata(self) -> Metadata:
        """Metadata of every call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def channel_options(self) -> ChannelOptions:
        """Return the keepalive and TLS. Raises ConfigError."""
        if self.tls or self.ca_file or self.cert_file:
            pem = Certificates("the client's certificates", self.cert_file, self.key_file, self.ca_file).pem
            return ChannelOptions(credentials=channel_credentials(pem), server_name=self.tls_server_name)
        if self.tls_server_name:
            raise ConfigError(f"the server name {self.tls_server_name} needs TLS; ask for it, or give a CA certificate")
        return ChannelOptions()


class _Resumption:
    """Output of a call so far, so that another attempt can continue it."""

    def __init__(self, call: GenerateCall, policy: RetryPolicy, timeout_s: float | None) -> None:
        sampling = call.request.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(64))
        self.call = replace(call, request=replace(call.request, sampling=sampling))
        self._policy = policy
        self._deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._received: list[list[int]] = [[] for _ in range(sampling.n)]
        self._running = set(range(sampling.n))
        self._position = [0] * sampling.n  # tokens of this attempt
        self._num_failures = 0
        self._waited_s = 0.0

    def restart(self) -> float | None:
        """Begin an attempt; return the seconds that are left, None without a limit. Raises TimedOut."""
        self._position = [0] * len(self._received)
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimedOut("the request was not done in its time")
        return None if math.isinf(remaining_s) else remaining_s

    def accept(self, chunk: TextChunk) -> TextChunk | None:
        """Return what is new in a chunk, None if nothing is. Raises RequestFailed if it differs from what came before."""
        index, token_ids = chunk.chunk.index, chunk.chunk.token_ids
        received, position = self._received[index], self._position[index]
        known = received[position : position + len(token_ids)]
        if list(token_ids[: len(known)]) != known:
            raise RequestFailed("the answer changed between two attempts; the model's numerics depend on the batch")
        self._position[index] += len(token_ids)
        received += token_ids[len(known) :]
        if len(known) < len(token_ids):
            self._num_failures = 0
        is_last = chunk.chunk.finish_reason is not None and index in self._running
        if is_last:
            self._running.discard(index)
        elif received and len(known) == len(token_ids):
            return None
        return _without_first(chunk, len(known)) if position or known else chunk

    def backoff_s(self, error: EyasError) -> float:
        """Return the seconds to wait before the next attempt. Raises the error if there is none, or TimedOut."""
        policy = self._policy
        self._num_failures += 1
        longest_s = min(policy.initial_backoff_s * 2.0 ** (self._num_failures - 1), policy.max_backoff_s)
        delay_s = random.uniform(0.5, 1.0) * longest_s
        if isinstance(error, Overloaded):
            delay_s = max(delay_s, error.retry_after or 0.0)
        is_final = not isinstance(error, Unavailable | Overloaded) or self._num_failures >= policy.max_attempts
        if is_final or self._waited_s + delay_s > policy.budget_s:
            raise error
        if time.monotonic() + delay_s > self._deadline:
            raise TimedOut(f"the request was not done in its time; its last attempt failed: {error}") from error
        self._waited_s += delay_s
        return delay_s

    def check_complete(self) -> None:
        """Raises Unavailable if the stream has ended before all completions."""
        if self._running:
            raise Unavailable("the router ended the stream before the answer; it may have stopped")


class Client:
    """A client for threads. Arguments as of `Connection`. Calls of one client share its connections."""

    def __init__(self, address: str = "127.0.0.1:50050", **options: Any) -> None:
        self._connection = Connection(address, **options)
        self._options = self._connection.channel_options()
        self._channels = {one: open_sync_channel(one, self._options) for one in self._connection.addresses}
        self._turns = itertools.cycle(self._channels)
        self._current = next(self._turns)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; running calls end."""
        for channel in self._channels.values():
            channel.close()

    def models(self) -> tuple[ModelInfo, ...]:
        """Return the models that the router serves now. Raises EyasError."""
        try:
            stub = GenerationStub(self._channels[self._current])
            metadata = self._connection.metadata
            return tuple(models_from_proto(stub.ListModels(ListModelsRequest(), timeout=LIST_TIMEOUT_S, metadata=metadata)))
        except grpc.RpcError as error:
            raise _error(error) from error

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Continue each prompt, given as text or as token ids; one output each, in order. options: as of `stream`."""
        calls = _paired(prompts, sampling_params)
        with ThreadPoolExecutor(min(len(calls), MAX_PARALLEL_CALLS) or 1) as pool:
            return list(pool.map(lambda call: self._whole(*call, **options), calls))

    def stream(  # noqa: PLR0913  # fields of a request, all by keyword
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str = "",
        model: str = "",
        session_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        draft: bool = True,
        timeout_s: float | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Yield what is new: outputs with new text and tokens only. Closing the generator cancels the request.

        Args:
            prompt: text or token ids.
            sampling_params: how to draw tokens; None takes the model's own defaults, as `LLM.generate` does.
            request_id: for logs; the router makes one if it is empty.
            model: name of the model; needed if the router serves several.
            session_id: groups the requests of a conversation.
            priority: 0 is normal, higher is more urgent.
            cache_salt: only requests with an equal salt share cached prefixes.
            draft: False asks for plain decoding, with the same tokens.
            timeout_s: longest duration, retries included.

        Raises:
            InvalidRequest: the router refuses the request.
            Unavailable, Overloaded: no attempt of the retry policy succeeded.
            TimedOut, Unauthenticated, PermissionDenied, RequestFailed: as their names say.
        """
        call = _call(prompt, sampling_params, request_id, model, session_id, priority, cache_salt, draft)
        builder = _builder(call)
        with closing(self.chunks(call, timeout_s)) as chunks:
            for chunk in chunks:
                yield _added(builder, chunk).delta()

    def chunks(self, call: GenerateCall, timeout_s: float | None = None) -> Generator[TextChunk, None, None]:
        """Yield the chunks of a call, as `stream` does its outputs."""
        resumption = _Resumption(call, self._connection.retry, timeout_s)
        message, metadata = generate_call_to_proto(resumption.call), self._connection.metadata
        while True:
            stub = GenerationStub(self._channels[self._current])
            responses = stub.Generate(message, timeout=resumption.restart(), metadata=metadata)
            try:
                for response in responses:
                    if (chunk := resumption.accept(text_chunk_from_proto(response))) is not None:
                        yield chunk
                resumption.check_complete()
                return
            except (grpc.RpcError, Unavailable) as error:
                delay_s = resumption.backoff_s(_error(error))
            finally:
                responses.cancel()  # type: ignore[no-untyped-call]
            self._current = next(self._turns)
            time.sleep(delay_s)

    def _whole(self, prompt: Prompt, sampling_params: SamplingParams | None, **options: Any) -> RequestOutput:
        timeout_s = options.pop("timeout_s", None)
        call = _call(prompt, sampling_params, **options)
        builder = _builder(call)
        for chunk in self.chunks(call, timeout_s):
            _added(builder, chunk)
        return builder.output()


def _paired(
    prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams | None]]:
    """Return each prompt with its parameters; None where the model's own count. Raises InvalidRequest."""
    pairs = paired(prompts, sampling_params)
    return [(prompt, None if sampling_params is None else params) for prompt, params in pairs]


def _call(
    prompt: Prompt,
    sampling_params: SamplingParams | None,
    request_id: str = "",
    model: str = "",
    session_id: str = "",
    priority: int = 0,
    cache_salt: str = "",
    draft: bool = True,
) -> GenerateCall:
    text, ids = split_prompt(prompt)
    sampling = sampling_params or SamplingParams()
    request = Request(request_id, ids or (), sampling, session_id, priority, cache_salt=cache_salt)
    drafter = "" if draft else NO_DRAFTER
    return GenerateCall(request, text if ids is None else None, model, drafter, uses_model_defaults=sampling_params is None)


def _builder(call: GenerateCall) -> OutputBuilder:
    request = call.request
    return OutputBuilder(request.id, call.prompt_text, request.prompt_ids, request.sampling.n)


def _added(builder: OutputBuilder, chunk: TextChunk) -> OutputBuilder:
    """Add a chunk. Raises the error of one that says that the request failed."""
    builder.add(chunk)
    if builder.error:
        raise builder.error
    return builder


def _without_first(chunk: TextChunk, num_tokens: int) -> TextChunk:
    """Return a chunk without its first tokens, their text, and what an earlier attempt gave already."""
    inner, lengths = chunk.chunk, chunk.text_lengths
    new = replace(
        inner,
        token_ids=inner.token_ids[num_tokens:],
        is_draft_token=inner.is_draft_token[num_tokens:],
        logprobs=inner.logprobs[num_tokens:],
        prompt_logprobs=(),
        num_cached=0,
    )
    text = chunk.text[sum(lengths[:num_tokens]) :]
    return replace(chunk, chunk=new, text=text, text_lengths=lengths[num_tokens:], seed=None)


def _error(error: BaseException) -> EyasError:
    """Return the EyasError behind a failed attempt."""
    if isinstance(error, EyasError):
        return error
    failed = cast("grpc.RpcError", error)
    if failed.code() is grpc.StatusCode.CANCELLED:
        return Unavailable("the router cancelled the call; it may be stopping")
    raised = status_error(failed)
    if failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not isinstance(raised, TimedOut):  # gRPC's own, at timeout_s
        return TimedOut("the request was not done in its time")
    return raised
