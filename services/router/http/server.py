"""The HTTP listener, body limits, server-sent events, and the cancellation of work whose client has disconnected."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import h11
import uvicorn
from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from eyas.config import HttpConfig, LimitsConfig, TlsConfig
from eyas.errors import ConfigError
from eyas.rpc.admission import Admission, address_of
from eyas.rpc.channel import Certificates, Pem
from eyas.services.discovery.base import cancel_task, repeat
from eyas.services.router.http.errors import CLIENT_CLOSED_REQUEST

RELOAD_INTERVAL_S = 5.0
WAITING_COMMENT = b": waiting for a verifier"
READ_BYTES = 4 * 2**10
BODY_READ_BYTES = 64 * 2**10

_BACKLOG = 2048

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)


class HttpServer:
    """Serves an ASGI application with uvicorn, in the running event loop; signals are left to the service.

    address: host:port once the server has started. The TLS files are checked for changes every RELOAD_INTERVAL_S; new
    connections get the new certificate. limits: bounds of connections, headers and waiting times.
    """

    def __init__(self, app: ASGIApp, config: HttpConfig, tls: TlsConfig, limits: LimitsConfig | None = None) -> None:
        limits = limits or LimitsConfig()
        protocol: Any = partial(HttpConnection, limits=limits)
        self._limits = limits
        self._server = _Server(
            uvicorn.Config(
                app,
                http=protocol,
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=limits.max_header_bytes,
                timeout_keep_alive=math.ceil(limits.idle_timeout_s),
                ssl_certfile=tls.cert_file or None,
                ssl_keyfile=tls.key_file or None,
            )
        )
        self._server.handshake_timeout_s = limits.header_timeout_s
        self._config = config
        self._tls = tls
        self._loaded: Pem | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self) -> None:
        """Listen. Raises ConfigError if the port is taken or the TLS files cannot be used."""
        certificates = Certificates("tls.cert_file and tls.key_file", self._tls.cert_file, self._tls.key_file)
        self._loaded = certificates.pem
        self._server.config.load()
        listener = listen(self._config.host, self._config.port)
        listener.limit_connections(self._limits, has_tls=bool(self._tls.cert_file))
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._serving = asyncio.create_task(self._server.serve([listener]), name="http")
        if self._tls.cert_file:
            reload = repeat(RELOAD_INTERVAL_S, partial(self._reload, certificates), RELOAD_INTERVAL_S)
            self._reloading = asyncio.create_task(reload, name="certificates")
        log.info("HTTP on %s://%s", "https" if self._server.config.ssl else "http", self.address)

    async def stop(self, grace: float) -> None:
        """Refuse new connections, give running requests `grace` seconds, then cancel them."""
        if self._serving is None:
            return
        self._server.config.timeout_graceful_shutdown = math.ceil(grace)
        self._server.should_exit = True
        await asyncio.gather(self._serving, cancel_task(self._reloading))
        await asyncio.gather(*self._server.server_state.tasks, return_exceptions=True)

    async def _reload(self, certificates: Certificates) -> None:
        """Use the present content of the TLS files for new connections."""
        context, pem = self._server.config.ssl, certificates.pem
        if context and pem is not self._loaded:
            context.load_cert_chain(self._tls.cert_file, self._tls.key_file)
            self._loaded = pem


class HttpConnection(H11Protocol, asyncio.BufferedProtocol):
    """A connection of uvicorn's h11 server that bounds what a client may hold. h11 bounds the headers.

    Reads little at once where h11 needs Python code for each few bytes: headers, and bodies in chunks. Closes the connection
    if headers or body do not arrive in time.
    """

    def __init__(self, *arguments: Any, limits: LimitsConfig, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits = limits
        self._waits_for = ""
        self._timer: asyncio.TimerHandle | None = None
        self._buffer = memoryview(b"")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait("headers")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._wait("")
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory of the next read. A view, because asyncio's TLS writes into slices of it."""
        is_plain_body = self.conn.their_state is h11.SEND_BODY and not self._is_chunked
        self._buffer = memoryview(bytearray(BODY_READ_BYTES if is_plain_body else READ_BYTES))
        return self._buffer

    @property
    def _is_chunked(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self.headers)

    def buffer_updated(self, nbytes: int) -> None:
        """Parse what has been read."""
        data, self._buffer = bytes(self._buffer[:nbytes]), memoryview(b"")
        self.data_received(data)

    def data_received(self, data: bytes) -> None:
        """Parse a part of a request."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._update_timer()

    def on_response_complete(self) -> None:
        """Wait for the rest of the body, or for the next request."""
        super().on_response_complete()
        self._update_timer()

    def send_400_response(self, msg: str) -> None:
        """Reject bytes that are no HTTP, unless a response has begun. Their request has no client any more."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()

    def _update_timer(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:
            self._wait("the rest of a rejected body" if self.cycle.response_complete else "body")
        elif self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._wait("headers")
        else:
            self._wait("")  # for the response; or for the next request, with uvicorn's own timer

    def _wait(self, what: str) -> None:
        """Start the timer of what the client has to send next; nothing stops it."""
        if what == self._waits_for:
            return
        if self._timer:
            self._timer.cancel()
        self._waits_for, self._timer = what, None
        if what and not self.transport.is_closing():
            seconds = self._limits.body_timeout_s if what == "body" else self._limits.header_timeout_s
            self._timer = self.loop.call_later(seconds, self._time_out)

    def _time_out(self) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(b"408 Request Timeout", f"the {self._waits_for} did not arrive in time".encode())
        else:
            self.transport.abort()

    def _refuse(self, status: bytes, reason: bytes) -> None:
        """Send a response outside of h11, and close."""
        self.transport.write(_plain_response(status, reason))
        self.transport.close()


def _plain_response(status: bytes, reason: bytes) -> bytes:
    length = str(len(reason)).encode()
    headers = b"Content-Type: text/plain\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: " + length
    return b"HTTP/1.1 " + status + b"\r\n" + headers + b"\r\n\r\n" + reason


class _Server(uvicorn.Server):
    handshake_timeout_s = 60.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as uvicorn does, with an own timeout for TLS handshakes."""
        loop, config = asyncio.get_running_loop(), self.config
        protocol: Any = config.http_protocol_class
        connect = partial(protocol, config=config, server_state=self.server_state, app_state={})
        timeout_s = self.handshake_timeout_s if config.ssl else None
        self.servers = [
            await loop.create_server(connect, sock=listener, ssl=config.ssl, ssl_handshake_timeout=timeout_s)
            for listener in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the service."""
        yield


class LimitedListener(socket.socket):
    """A listening socket that bounds the connections, in all and of each address, from their acceptance to their end.

    So TLS handshakes that are half done count too. Further connections are closed at once.
    """

    _limits: LimitsConfig | None = None

    def limit_connections(self, limits: LimitsConfig, has_tls: bool) -> None:
        """Set the bounds. has_tls: a refused client gets no response that it could read."""
        self._limits, self._has_tls = limits, has_tls
        self._peers: Counter[str] = Counter()

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection. Raises ConnectionAbortedError, which asyncio ignores, if there are too many."""
        connection, address = super().accept()
        if self._limits is None:
            return connection, address
        peer = address_of(address[0])
        if self._peers.total() >= self._limits.max_connections or self._peers[peer] >= self._limits.max_connections_per_peer:
            with connection, contextlib.suppress(OSError):
                connection.setblocking(False)
                if not self._has_tls:
                    connection.send(_plain_response(b"503 Service Unavailable", b"too many connections; try again later"))
            raise ConnectionAbortedError("too many connections")
        self._peers[peer] += 1
        return _Connection(connection.detach(), partial(self._forget, peer)), address

    def _forget(self, peer: str) -> None:
        self._peers[peer] -= 1
        if not self._peers[peer]:
            del self._peers[peer]


class _Connection(socket.socket):
    """An accepted connection. on_close: called once."""

    def __init__(self, fileno: int, on_close: Callable[[], None]) -> None:
        super().__init__(fileno=fileno)
        self._on_close: Callable[[], None] | None = on_close

    def close(self) -> None:
        """Close it, and count it no longer."""
        super().close()
        on_close, self._on_close = self._on_close, None
        if on_close:
            on_close()


def listen(host: str, port: int) -> LimitedListener:
    """Return a listening socket. Raises ConfigError if the port is taken or the host is not this machine's."""
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_ipv6)
    except (OSError, ValueError) as error:  # ValueError: a machine without IPv6
        message = (
            f"cannot listen on {host}:{port}: the port is in use or the host is not ours; set http.port or operations_port"
        )
        raise ConfigError(message) from error
    # asyncio switches off Nagle's algorithm, which delays small writes, only if the object names the protocol TCP.
    return LimitedListener(fileno=listener.detach())


class BodyLimit:
    """ASGI middleware that bounds each body, and what all unfinished requests hold together.

    A body above `limits.max_request_bytes` is rejected with status 413, by its header or while it arrives. A body counts
    as held from its arrival to the end of the response. `hold` in the request's state counts further bytes until then.
    """

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission
        self._max_bytes = admission.limits.max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        too_long = HTTPException(413, f"the body is longer than {self._max_bytes} bytes; send less at once")
        headers, num_received = Headers(scope=scope), 0
        announced = headers.get("content-length", "")
        caller, *_ = self._admission.callers(headers.get("authorization", ""), (scope.get("client") or ("",))[0])

        with self._admission.memory.reservation(caller) as take:
            scope.setdefault("state", {})["hold"] = take

            async def limited_receive() -> Message:
                nonlocal num_received
                if announced.isdigit() and int(announced) > self._max_bytes:
                    raise too_long
                message = await receive()
                num_bytes = len(message.get("body", b""))
                num_received += num_bytes
                if num_received > self._max_bytes:
                    raise too_long
                take(num_bytes)
                return message

            await self._app(scope, limited_receive, send)


class ClientDisconnected(HTTPException):
    """The client has closed the connection before its response was complete."""

    def __init__(self) -> None:
        super().__init__(CLIENT_CLOSED_REQUEST, "the client has disconnected")  # which does not receive it


async def cancel_on_disconnect(receive: Receive, work: Awaitable[ResultT]) -> ResultT:
    """Await `work`; if the client disconnects first, cancel it, wait for its end and raise ClientDisconnected.

    receive: that of the request, after its body has been read.
    """
    task, disconnect = asyncio.ensure_future(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class BlockResponse(Response):
    """A response in blocks of bytes, which are sent one by one: no layer below copies all of it at once."""

    def __init__(self, blocks: list[bytes], headers: Mapping[str, str] | None, media_type: str) -> None:
        super().__init__(headers=headers, media_type=media_type)
        self.headers["content-length"] = str(sum(map(len, blocks)))
        self._blocks = blocks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_blocks(send, self._blocks)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_blocks(send: Send, blocks: Iterable[bytes]) -> None:
    for block in blocks:
        await send({"type": "http.response.body", "body": block, "more_body": True})


class EventStream(Response):
    """Server-sent events. events: the lines of those after the first; each is requested when the one before is sent.

    While none comes, a comment is sent every `keepalive_interval_s`, so that no proxy closes a silent connection.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: list[bytes],
        events: AsyncGenerator[list[bytes], None],
        headers: dict[str, str],
        keepalive_interval_s: float,
    ) -> None:
        super().__init__(headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._keepalive_interval_s = keepalive_interval_s
        self._sent_at = 0.0
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnected):
                await cancel_on_disconnect(receive, self._send(send))
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send_event(send, self._first)
        keepalive = asyncio.create_task(self._send_comments(send))
        try:
            async for event in self._events:
                await self._send_event(send, event)
        finally:
            await cancel_task(keepalive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_comments(self, send: Send) -> None:
        """Send a comment whenever the stream has been silent for the interval, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            silence_s = clock() - self._sent_at
            if silence_s >= self._keepalive_interval_s:
                await self._send_event(send, [WAITING_COMMENT])
                silence_s = 0.0
            await asyncio.sleep(self._keepalive_interval_s - silence_s)

    async def _send_event(self, send: Send, blocks: list[bytes]) -> None:
        async with self._sending:  # a comment would break an event in blocks
            self._sent_at = asyncio.get_running_loop().time()
            *before, last = blocks
            await _send_blocks(send, [*before, last + b"\n\n"])


def to_bytes(text: str) -> bytes:
    r"""Return text that holds JSON as UTF-8; half of a surrogate pair, of an echoed field, becomes JSON's escape \ud800."""
    return text.encode("utf-8", "backslashreplace")
