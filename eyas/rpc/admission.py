"""Bounds of memory and time for requests that are not decoded yet.

gRPC calls interceptors before it reads the request message. `eyas.rpc.server` rejects unknown callers there. The handler of
an accepted call reads the message itself, under the bounds of `LimitsConfig`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from ipaddress import IPv6Address, IPv6Network, ip_address
from threading import Lock
from typing import Any, NoReturn, TypeAlias, cast
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor

from eyas.config import LimitsConfig
from eyas.errors import EyasError, InvalidRequest, Overloaded, TimedOut
from eyas.rpc.fair_share import Callers, FairLimit, FairSlots

LARGE_REQUEST_BYTES = 16 * 2**10
MAX_MESSAGE_FIELDS = 32 * 2**10

# HTTP headers and gRPC metadata that may hold an API key.
KEY_HEADERS = ("authorization", "x-api-key")

# Health checks need no key, so they may hold little.
OPEN_METHODS = "/grpc.health.v1.Health/"
MAX_OPEN_REQUEST_BYTES = 1024
MAX_OPEN_CALLS_PER_ADDRESS = 256

SWEEP_INTERVAL_S = 1.0
# For Redis, the workers' channels, files and threads.
RESERVED_DESCRIPTORS = 128
_MIN_READS = 4
_TOKEN_ID_BYTES = 5
_VARINT, _FIXED64, _LENGTH, _START_GROUP, _END_GROUP, _FIXED32 = range(6)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# What an interceptor calls for the handler of a call.
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
log = logging.getLogger(__name__)


def address_of(peer: str) -> str:
    """Return the IP address of a peer as gRPC names it, such as "ipv4:10.0.0.1:5000", or of an address itself.

    Of an IPv6 address the network of 64 bits, in which one machine may choose its address.
    """
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else peer
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    return str(address.ipv4_mapped or IPv6Network((address, 64), strict=False))


def close_surplus_connections(port: int, most: int) -> int:
    """Shut down what each address has of connections to a port of this process beyond `most`; returns their number.

    gRPC has no such limit, and shows no connection without a call. So this finds them among the file descriptors.
    The highest of them go, which are the latest ones if none were closed between.
    """
    try:
        descriptors = sorted(map(int, os.listdir("/dev/fd")))
    except FileNotFoundError:  # not on this system
        return 0
    num_of, num_closed = Counter[str](), 0
    for descriptor in descriptors if len(descriptors) > most else ():
        try:
            with _duplicate(descriptor) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                    continue
                if connection.getsockname()[1] != port:
                    continue
                address = address_of(connection.getpeername()[0])
                num_of[address] += 1
                if num_of[address] > most:
                    connection.shutdown(socket.SHUT_RDWR)
                    num_closed += 1
        except OSError:  # no socket, one that listens, or closed meanwhile
            continue
    return num_closed


def fit_descriptors(limits: LimitsConfig, num_servers: int) -> LimitsConfig:
    """Return limits whose connections leave this process file descriptors for its other work.

    The process may then open as many files as its hard limit allows. num_servers: that take connections.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = max((hard - RESERVED_DESCRIPTORS) // num_servers, 1)
    if hard == resource.RLIM_INFINITY or most >= limits.max_connections:
        return limits
    log.warning(
        "this process may open %d files, so each server takes %d connections instead of limits.max_connections %d",
        hard, most, limits.max_connections,
    )  # fmt: skip
    return replace(limits, max_connections=most)


def _duplicate(descriptor: int) -> socket.socket:
    """Return a socket of its own for the connection of a file descriptor. Raises OSError if it is none."""
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


class MemoryBudget:
    """The bytes that all unfinished requests may hold together: bodies, and output until it is sent. Thread-safe."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._lock = Lock()  # guards the limit
        self._limit = FairLimit(limits.max_pending_bytes, limits.max_request_bytes)

    @property
    def num_held(self) -> int:
        """The bytes that they hold now."""
        return self._limit.num_held

    @contextmanager
    def reservation(self, caller: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes further bytes, or raises Overloaded. All are given back at the end.

        It raises InvalidRequest for more than a caller may ever hold. After the end it takes nothing, as a thread may still
        work for a request that was cancelled.
        """
        taken, callers = 0, (caller,)
        is_open = True

        def take(num_bytes: int) -> None:
            nonlocal taken
            if (needed := taken + num_bytes) > self._limit.most:
                raise InvalidRequest(
                    f"this request and its response take some {needed} bytes of memory, above the {self._limit.most} that a "
                    "key or address may hold of limits.max_pending_bytes; ask for fewer log-probabilities or completions, "
                    "send several requests, stream long answers, or raise the limit"
                )
            with self._lock:
                if not is_open:
                    return
                if not self._limit.fits(callers, num_bytes):
                    who = "this key or address holds its share" if num_bytes <= self._limit.num_free else "requests hold all"
                    hint = "try again when some end, and stream long answers"
                    raise Overloaded(f"{who} of limits.max_pending_bytes in unfinished requests; {hint}", 1.0)
                self._limit.take(callers, num_bytes)
                taken += num_bytes

        try:
            yield take
        finally:
            with self._lock:
                is_open = False
                self._limit.take(callers, -taken)


def given_key(headers: Mapping[str, Any]) -> str:
    """Return the API key in headers or metadata with lower-case names; empty without one."""
    scheme, _, key = str(headers.get("authorization", "")).partition(" ")
    return (key.strip() if scheme.lower() == "bearer" else "") or str(headers.get("x-api-key", "")).strip()


class Admission:
    """The bounds of a server's calls before their messages are decoded. memory: what their bodies hold together.

    has_keys: every call except health checks has a known key, which separates callers; otherwise their addresses do.
    """

    def __init__(self, limits: LimitsConfig | None = None, has_keys: bool = False) -> None:
        self._has_keys = has_keys
        self.limits = limits = limits or LimitsConfig()
        self.memory = MemoryBudget(limits)
        num_reads = max(_MIN_READS, limits.max_pending_bytes // limits.max_request_bytes)
        self._reads = {is_open: _ReadSlots(num_reads, limits.header_timeout_s) for is_open in (True, False)}
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

    async def limit_connections(self, port: int) -> None:
        """Close what an address has of connections to a port beyond the limit, until cancelled."""
        most = self.limits.max_connections_per_peer
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                num_closed = await asyncio.to_thread(close_surplus_connections, port, most)
            except OSError as error:
                log.warning("cannot count the connections of each address: %s", error, extra={"rate_limited": True})
                continue
            if num_closed:
                reason = (
                    "closed %d connections to port %d of addresses that have more than %d (limits.max_connections_per_peer)"
                )
                log.warning(reason, num_closed, port, most, extra={"rate_limited": True})

    def callers(self, headers: Mapping[str, Any], peer: str, is_open: bool = False) -> Callers:
        """Return the names that a call counts for: its key, if there are keys, and its address.

        Args:
            headers: or metadata, with a key in one of `KEY_HEADERS`.
            peer: IP address, or what gRPC says.
            is_open: a call that needs no key.
        """
        has_key = self._has_keys and not is_open
        key = given_key(headers) if has_key else ""
        return (*([key] if key else ()), address_of(peer))

    @asynccontextmanager
    async def read(self, method: str, context: Any) -> AsyncIterator[bytes]:
        """Read the only message of a call, and count it as held while the context is open.

        Raises InvalidRequest without a message, TimedOut for one that does not arrive in time, Overloaded.
        """
        is_open = method.startswith(OPEN_METHODS)
        callers = self.callers(dict(context.invocation_metadata() or ()), str(context.peer()), is_open)
        with self._open_call(callers[0]) if is_open else nullcontext():
            data = await self._read(method, is_open, callers, context)
            with self.memory.reservation(callers[0]) as take:
                take(len(data))
                if len(data) > LARGE_REQUEST_BYTES:
                    kind, max_values = _request_type(method), self.limits.max_request_values
                    await asyncio.to_thread(check_num_fields, data, kind, max_values)
                yield data

    async def _read(self, method: str, is_open: bool, callers: Callers, context: Any) -> bytes:
        clock = asyncio.get_running_loop().time
        started_at = clock()
        try:
            async with asyncio.timeout(self.limits.body_timeout_s) as timeout, self._reads[is_open].slot(callers, timeout):
                data = await context.read()
        except TimeoutError:
            raise TimedOut(f"the request message did not arrive within {clock() - started_at:.1f} s") from None
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
    """Bounds how many messages are read at the same time: gRPC buffers each of them. Callers share the slots fairly.

    contended_timeout_s: how long a read may take in which a caller waits for a slot. gRPC does not say whether a part of a
    message has come.
    """

    def __init__(self, num_reads: int, contended_timeout_s: float) -> None:
        self.slots = FairSlots(num_reads)
        self._contended_timeout_s = contended_timeout_s
        self._reads: dict[asyncio.Timeout, tuple[Callers, float]] = {}

    @asynccontextmanager
    async def slot(self, callers: Callers, timeout: asyncio.Timeout) -> AsyncIterator[None]:
        """Wait for a slot, and hold it while the context is open. timeout: around it; comes earlier if others wait."""
        await self.slots.take(callers, on_wait=partial(self._shorten, callers))
        self._reads[timeout] = callers, asyncio.get_running_loop().time() + self._contended_timeout_s
        for others in self.slots.waiting:
            self._shorten(others)
        try:
            yield
        finally:
            del self._reads[timeout]
            self.slots.give(callers)

    def _shorten(self, waiting: Callers) -> None:
        """Shorten the reads that keep these callers from a slot: their own, or all if there is no slot."""
        for timeout, (callers, until) in self._reads.items():
            when, is_in_the_way = timeout.when(), set(callers) & set(waiting) or not self.slots.num_free
            if is_in_the_way and not timeout.expired() and when is not None and when > until:
                timeout.reschedule(until)


class AdmissionInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Interceptor that lets the methods with one request read it themselves. Place it before the interceptor that decodes
    requests.

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
