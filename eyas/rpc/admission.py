"""Bounds of memory and time for requests that are not decoded yet.

gRPC calls interceptors before it reads the request message. `eyas.rpc.server` rejects unknown callers there. The handler of
an accepted call reads the message itself, under the bounds of `LimitsConfig`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor

from eyas.config import LimitsConfig
from eyas.errors import EyasError, InvalidRequest, Overloaded, TimedOut

LARGE_REQUEST_BYTES = 16 * 2**10
MAX_MESSAGE_FIELDS = 32 * 2**10

# Health checks need no key, so they may hold little.
OPEN_METHODS = "/grpc.health.v1.Health/"
MAX_OPEN_REQUEST_BYTES = 1024
MAX_OPEN_CALLS_PER_ADDRESS = 256

_READS_PER_CALLER = 4
_TOKEN_ID_BYTES = 5
_VARINT, _FIXED64, _LENGTH, _START_GROUP, _END_GROUP, _FIXED32 = range(6)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# What an interceptor calls for the handler of a call.
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


class MemoryBudget:
    """The bytes that the bodies of all unfinished requests may hold together. For one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_held = 0

    @contextmanager
    def reservation(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes further bytes, or raises Overloaded. All are given back at the end."""
        taken = 0

        def take(num_bytes: int) -> None:
            nonlocal taken
            if self.num_held + num_bytes > self._max_bytes:
                raise Overloaded("the unfinished requests hold as much memory as limits.max_pending_bytes allows", 1.0)
            self.num_held += num_bytes
            taken += num_bytes

        try:
            yield take
        finally:
            self.num_held -= taken


class Admission:
    """The bounds of a server's calls before their messages are decoded. memory: what their bodies hold together.

    has_keys: every call except health checks has a known key, which separates callers; otherwise their addresses do.
    """

    def __init__(self, limits: LimitsConfig | None = None, has_keys: bool = False) -> None:
        self._has_keys = has_keys
        self.limits = limits = limits or LimitsConfig()
        self.memory = MemoryBudget(limits.max_pending_bytes)
        num_reads = max(_READS_PER_CALLER, limits.max_pending_bytes // limits.max_request_bytes)
        self._reads = {is_open: _ReadSlots(num_reads) for is_open in (True, False)}
        self._open_calls: Counter[str] = Counter()

    @property
    def grpc_options(self) -> dict[str, int]:
        """Options of a gRPC server that keep the limits."""
        limits = self.limits
        return {
            "grpc.max_receive_message_length": limits.max_request_bytes,
            "grpc.max_metadata_size": limits.max_header_bytes,
            "grpc.absolute_max_metadata_size": limits.max_header_bytes,
            "grpc.max_concurrent_streams": limits.max_concurrent_streams,
            "grpc.max_allowed_incoming_connections": limits.max_connections,
            "grpc.server_handshake_timeout_ms": round(limits.header_timeout_s * 1000),
            "grpc.max_connection_idle_ms": round(limits.idle_timeout_s * 1000),
            "grpc.keepalive_time_ms": round(limits.idle_timeout_s * 1000),
            "grpc.keepalive_timeout_ms": round(limits.header_timeout_s * 1000),
        }

    def caller(self, is_open: bool, context: Any) -> str:
        """Return who shares slots: the calls of one key, or of one address. is_open: a health check, which needs no key."""
        if self._has_keys and not is_open:
            return "".join(dict(context.invocation_metadata() or ()).get("authorization", "").split()[-1:])
        return str(context.peer()).rpartition(":")[0]

    @asynccontextmanager
    async def read(self, method: str, context: Any) -> AsyncIterator[bytes]:
        """Read the only message of a call, and count it as held while the context is open.

        Raises InvalidRequest without a message, TimedOut for one that does not arrive in time, Overloaded.
        """
        is_open = method.startswith(OPEN_METHODS)
        caller = self.caller(is_open, context)
        with self._open_call(caller) if is_open else nullcontext():
            data = await self._read(method, is_open, caller, context)
            with self.memory.reservation() as take:
                take(len(data))
                if len(data) > LARGE_REQUEST_BYTES:
                    kind, max_values = _request_type(method), self.limits.max_request_values
                    await asyncio.to_thread(check_num_fields, data, kind, max_values)
                yield data

    async def _read(self, method: str, is_open: bool, caller: str, context: Any) -> bytes:
        try:
            async with asyncio.timeout(self.limits.body_timeout_s), self._reads[is_open].slot(caller):
                data = await context.read()
        except TimeoutError:
            raise TimedOut(f"the request message did not arrive within {self.limits.body_timeout_s:g} s") from None
        if not isinstance(data, bytes):
            raise InvalidRequest(f"{method} was called without a request message; send one")
        if is_open and len(data) > MAX_OPEN_REQUEST_BYTES:
            raise InvalidRequest(f"a health check of {len(data)} bytes; send {MAX_OPEN_REQUEST_BYTES} at most")
        return data

    @contextmanager
    def _open_call(self, caller: str) -> Iterator[None]:
        """Count a call that needs no key, such as a stream of Watch. Raises Overloaded for too many of one address."""
        if self._open_calls[caller] >= MAX_OPEN_CALLS_PER_ADDRESS:
            raise Overloaded(f"this address has {MAX_OPEN_CALLS_PER_ADDRESS} health checks open; end some", 1.0)
        self._open_calls[caller] += 1
        try:
            yield
        finally:
            self._open_calls[caller] -= 1
            self._open_calls += Counter()  # drops addresses without a call


class _ReadSlots:
    """Bounds how many messages are read at the same time: gRPC buffers each of them. One caller gets a few at most."""

    def __init__(self, num_reads: int) -> None:
        self._all = asyncio.Semaphore(num_reads)
        self._lanes: defaultdict[str, _Lane] = defaultdict(lambda: _Lane(asyncio.Semaphore(_READS_PER_CALLER)))

    @asynccontextmanager
    async def slot(self, caller: str) -> AsyncIterator[None]:
        """Wait for a slot, and hold it while the context is open."""
        lane = self._lanes[caller]
        lane.num_calls += 1
        try:
            async with lane.semaphore, self._all:
                yield
        finally:
            lane.num_calls -= 1
            if not lane.num_calls:
                del self._lanes[caller]


@dataclass
class _Lane:
    semaphore: asyncio.Semaphore
    num_calls: int = 0


class AdmissionInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets the methods with one request read it themselves. Place it before the interceptor that decodes requests.

    on_error: ends a call with the status of an error.
    """

    def __init__(self, admission: Admission, on_error: Callable[[Exception, Any], Awaitable[NoReturn]]) -> None:
        self._admission = admission
        self._on_error = on_error

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return cast("Handler", handler)
        method = handler.unary_stream if handler.response_streaming else handler.unary_unary
        assert not inspect.isasyncgenfunction(method), "a method with one request writes its responses to the context"
        wrap = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
        reading: Any = self._reading(handler_call_details.method, method)
        return wrap(reading, None, handler.response_serializer)

    def _reading(self, name: str, method: Callable[[bytes, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        """Return a method that reads its message itself."""

        async def call(stream: Any, context: Any) -> Any:
            try:
                async with self._admission.read(name, context) as data:
                    return await method(data, context)
            except EyasError as error:
                await self._on_error(error, context)

        return call


def check_num_fields(data: bytes, message: Descriptor | None, max_values: int, max_fields: int = MAX_MESSAGE_FIELDS) -> None:
    """Raises InvalidRequest for a message of more fields than `max_fields`, those of its own messages included.

    Decoding many small messages takes up to 50 times their bytes. A packed list of numbers is one field, which may hold
    `max_values` of 5 bytes. Bytes that are no message pass; decoding them fails. What stands beside them is counted.
    """
    pending, num_fields = [(0, len(data), message)], 0
    while pending:
        at, end, kind = pending.pop()
        try:
            while at < end:
                num_fields += 1
                if num_fields > max_fields:
                    raise InvalidRequest(f"the request has more than {max_fields} fields; send less at once")
                tag, at = _read_varint(data, at)
                wire_type = tag & 7
                if wire_type == _LENGTH:
                    length, at = _read_varint(data, at)
                    field = kind.fields_by_number.get(tag >> 3) if kind else None
                    if field is not None and field.message_type is not None:
                        pending.append((at, min(at + length, end), field.message_type))
                    elif field is not None and field.is_packed and length > _TOKEN_ID_BYTES * max_values:
                        raise InvalidRequest(f"{field.full_name} holds more than {max_values} numbers; send less at once")
                    at += length
                elif wire_type == _VARINT:
                    _, at = _read_varint(data, at)
                elif wire_type in (_FIXED64, _FIXED32):
                    at += 8 if wire_type == _FIXED64 else 4
                elif wire_type not in (_START_GROUP, _END_GROUP):  # a group's fields follow its start
                    break
        except IndexError:
            continue


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a position, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError


def _request_type(method: str) -> Descriptor | None:
    """Return the type of a method's request; None for an unknown method."""
    try:
        return descriptor_pool.Default().FindMethodByName(method.strip("/").replace("/", ".")).input_type
    except KeyError:
        return None
