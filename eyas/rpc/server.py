"""gRPC server with health, authentication and reflection."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from eyas.config import ServerConfig
from eyas.errors import (
    ConfigError,
    EyasError,
    InvalidRequest,
    Unauthenticated,
)
from eyas.rpc.admission import OPEN_METHODS, Admission, AdmissionInterceptor, Continuation, Handler
from eyas.rpc.channel import MAX_MESSAGE_BYTES
from eyas.rpc.grpc_private import ClientHasGone, aio_server
from eyas.rpc.messages import ERROR_KEY
from eyas.rpc.status import error_trailers, status_of
from eyas.v1 import generation_pb2

GENERATION_SERVICE = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
# The name that liveness probes ask for: SERVING while the event loop runs.
LIVE = "live"

log = logging.getLogger(__name__)

_GRPC_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
)

# Checks of a call; each raises Unauthenticated. The first gets the metadata, before any message is read. The second gets
# the call's authentication context, which has the names in the client's certificate.
MetadataCheck = Callable[[Iterable[tuple[str, str]]], object]
CertificateCheck = Callable[[Mapping[str, Iterable[bytes]]], None]


def _accept(evidence: object) -> None:
    """Accept every call."""


class RpcServer:
    """A gRPC server with health (Check, Watch, List), and reflection if `config` asks for it.

    Construct it inside the running event loop. Register servicers on `aio` before `start`. Health answers NOT_SERVING until
    `set_serving(True)`, except for LIVE.

    Args:
        config: address to listen on.
        credentials: TLS credentials; None disables TLS.
        check_metadata, check_certificate: checks of every call except health checks; by default all are accepted.
        admission: bounds messages, connections and time; None accepts messages of up to MAX_MESSAGE_BYTES.
    """

    def __init__(
        self,
        config: ServerConfig,
        credentials: grpc.ServerCredentials | None = None,
        check_metadata: MetadataCheck = _accept,
        check_certificate: CertificateCheck = _accept,
        admission: Admission | None = None,
    ) -> None:
        interceptors: list[grpc.aio.ServerInterceptor[Any, Any]] = [
            _AuthenticationInterceptor(check_metadata),
            *([AdmissionInterceptor(admission, _abort)] if admission else []),
            _ErrorInterceptor(check_certificate),
        ]
        options = dict(_GRPC_OPTIONS) | (admission.grpc_options if admission else {})
        self.aio: Any = aio_server(interceptors, tuple(options.items()))
        self._config = config
        self._credentials = credentials
        self._admission = admission
        self._limiting: asyncio.Task[None] | None = None
        self._health = _Health()
        self._names: tuple[str, ...] = ()
        self._closers: list[Callable[[], Awaitable[None]]] = [self._health.close]

    def before_stop(self, close: Callable[[], Awaitable[None]]) -> None:
        """Register a callback for the start of `stop`. It should end streams that never end by themselves."""
        self._closers.append(close)

    async def start(self, service_names: Sequence[str]) -> str:
        """Start to serve. Returns the host:port under which other services reach this one.

        service_names: full names of the registered services, for health and reflection.
        Raises ConfigError if the port is in use.
        """
        host, port = self._config.host, self._config.port
        try:
            if self._credentials is None:
                bound = self.aio.add_insecure_port(_join(host, port))
            else:
                bound = self.aio.add_secure_port(_join(host, port), self._credentials)
        except RuntimeError as error:
            reason = "the port is in use or the host is not ours; set server.port or server.host"
            raise ConfigError(f"cannot listen on {_join(host, port)}: {reason}") from error
        self._names = ("", health.SERVICE_NAME, *service_names)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.aio)
        if self._config.reflection:
            reflection.enable_server_reflection([*self._names[1:], reflection.SERVICE_NAME], self.aio)
        await self.set_serving(False)
        await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        await self.aio.start()
        if self._admission:
            self._limiting = asyncio.create_task(self._admission.limit_connections(bound), name="connections")
        return _join(self._config.advertise_host or host, bound)

    async def set_serving(self, serving: bool, *unavailable: str) -> None:
        """Set the health of every service. unavailable: full names of services that are NOT_SERVING nevertheless."""
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            is_serving = serving and name not in unavailable
            await self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)

    async def stop(self, grace: float) -> None:
        """Reject new calls, give running ones `grace` seconds, then cancel them."""
        if self._limiting:
            self._limiting.cancel()
        for close in self._closers:
            await close()
        await self.aio.stop(grace)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


class _Health(health.aio.HealthServicer):  # type: ignore[name-defined,misc]
    """The library's health servicer, with List, and with Watch streams that end when the server stops."""

    def __init__(self) -> None:
        super().__init__()
        self._closed = asyncio.Event()
        self._statuses: dict[str, int] = {}

    async def set(self, service: str, status: int) -> None:
        """Set the health of a service."""
        self._statuses[service] = status
        await super().set(service, status)

    async def List(  # noqa: N802
        self, request: health_pb2.HealthListRequest, context: object
    ) -> health_pb2.HealthListResponse:
        response = health_pb2.HealthCheckResponse
        statuses = {name: response(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802
        tasks = [asyncio.ensure_future(super().Watch(request, context)), asyncio.ensure_future(self._closed.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def close(self) -> None:
        """Send NOT_SERVING to watchers and end their streams."""
        self._statuses = dict.fromkeys(self._statuses, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self.enter_graceful_shutdown()
        self._closed.set()


Method = Callable[[Any, Any], Awaitable[Any] | AsyncIterator[Any]]


class _AuthenticationInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Interceptor that refuses calls by their metadata, before their messages are read.

    Health checks stay open for probes.
    """

    def __init__(self, check: MetadataCheck) -> None:
        self._check = check

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        if not handler_call_details.method.startswith(OPEN_METHODS):
            try:
                self._check(cast("Iterable[tuple[str, str]]", handler_call_details.invocation_metadata or ()))
            except Unauthenticated as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: Unauthenticated) -> Handler:
    """Return a handler that ends a call with an error. It takes a stream, so gRPC reads no message for it."""

    async def refuse(requests: object, context: Any) -> NoReturn:
        await _abort(error, context)

    return grpc.stream_unary_rpc_method_handler(refuse)


class _ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Interceptor that converts errors of servicers to status codes. check: of the client's certificate, before the
    servicer.
    """

    def __init__(self, check: CertificateCheck) -> None:
        self._check = check

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None  # type: ignore[return-value]  # unknown method; gRPC answers UNIMPLEMENTED
        kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"  # such as unary_stream
        method = getattr(handler, kind)
        decode = _Decoder(handler_call_details.method, handler.request_deserializer)
        read = decode.each if handler.request_streaming else decode
        check = _accept if handler_call_details.method.startswith(OPEN_METHODS) else self._check
        wrap = getattr(grpc, f"{kind}_rpc_method_handler")
        # gRPC would answer bytes that it cannot decode with UNKNOWN and the name of an exception
        wrapped: Handler = wrap(_guard(method, read, check), None, handler.response_serializer)
        return wrapped


@dataclass(frozen=True)
class _Decoder:
    """Decoder of the requests of a method. Raises InvalidRequest for bytes that are not its message."""

    method: str
    deserialize: Callable[[bytes], Any]

    def __call__(self, data: bytes) -> Any:
        try:
            return self.deserialize(data)
        except Exception as error:
            log.warning("%s got a request that cannot be decoded: %s", self.method, error, extra={"rate_limited": True})
            raise InvalidRequest(
                f"the {len(data)} bytes of the request are not the message of {self.method}; encode it as in protos/eyas/v1"
            ) from None

    async def each(self, stream: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        """Decode the requests of a stream. Close it at the end: gRPC's generator holds its last message in a cycle."""
        async with aclosing(cast("AsyncGenerator[bytes]", aiter(stream))) as requests:
            async for data in requests:
                yield self(data)


def _arity(streaming: bool) -> str:
    return "stream" if streaming else "unary"


def _guard(method: Method, read: Callable[[Any], Any], check: CertificateCheck) -> Method:
    async def call(request: Any, context: Any) -> Any:
        try:
            check(context.auth_context())
            answer = method(read(request), context)
            if not isinstance(answer, AsyncIterator):
                return await answer
            # a call that ends while a write waits leaves the generator open, in a cycle
            async with aclosing(cast("AsyncGenerator[Any]", answer)) as responses:
                async for response in responses:
                    await context.write(response)
        except Exception as error:
            await _abort(error, context)

    return call


async def _abort(error: Exception, context: Any) -> NoReturn:
    """End a call with the status of an error. A client that has gone gets none, and is no error."""
    try:
        if isinstance(error, grpc.aio.AbortError | ClientHasGone):
            raise error
        if isinstance(error, EyasError):
            traceback.clear_frames(error.__traceback__)  # else a call's messages stay until a full garbage collection
            await context.abort(status_of(error), str(error), error_trailers(error))
        log.error("internal error in a call", exc_info=error, extra={"rate_limited": True})
        await context.abort(grpc.StatusCode.INTERNAL, "internal error", ((ERROR_KEY, "RequestFailed"),))
    except ClientHasGone:
        raise asyncio.CancelledError from None
    raise AssertionError("abort raises")
