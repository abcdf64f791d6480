"""The HTTP server, body limits, server-sent events, and the cancellation of work whose client has disconnected."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import uvicorn
from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.config import HttpConfig, LimitsConfig, TlsConfig
from eyas.rpc.admission import Admission
from eyas.rpc.channel import Certificates, Pem
from eyas.services.discovery.base import cancel_task, repeat
from eyas.services.router.http.connection import HttpConnection
from eyas.services.router.http.errors import CLIENT_CLOSED_REQUEST
from eyas.services.router.http.listener import BACKLOG, listen
from eyas.services.router.http.turns import Turns

RELOAD_INTERVAL_S = 5.0
# Seconds in which the last clients of a server that stops read their answers.
ERROR_DELIVERY_S = 0.2
# Connections that are accepted in one round of the event loop; TLS makes each cost more than 1 ms.
ACCEPTS_PER_ROUND = 16
WAITING_COMMENT = b": waiting for a verifier"

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)


class HttpServer:
    """Serves an ASGI application with uvicorn, in the running event loop; signals are left to the service.

    address: host:port once the server has started. The TLS files are checked for changes every RELOAD_INTERVAL_S; new
    connections get the new certificate. limits: bounds of connections, headers and waiting times.
    """

    def __init__(self, app: ASGIApp, config: HttpConfig, tls: TlsConfig, limits: LimitsConfig | None = None) -> None:
        limits = limits or LimitsConfig()
        protocol: Any = partial(HttpConnection, limits=limits, turns=Turns())
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
        """Refuse new connections, give running requests `grace` seconds, answer them with status 503, and cancel them."""
        if self._serving is None:
            return
        self._server.config.timeout_graceful_shutdown = math.ceil(grace + ERROR_DELIVERY_S)
        self._server.should_exit = True
        ending = asyncio.get_running_loop().call_later(grace, self.end_requests, True)
        await asyncio.gather(self._serving, cancel_task(self._reloading))
        ending.cancel()
        await asyncio.gather(*self._server.server_state.tasks, return_exceptions=True)

    def end_requests(self, has_body: bool = False) -> None:
        """Refuse the requests whose bodies are still missing, with status 503. has_body: and all that are not answered."""
        for connection in list(self._server.server_state.connections):
            if isinstance(connection, HttpConnection):
                connection.end_request(has_body)

    async def _reload(self, certificates: Certificates) -> None:
        """Use the present content of the TLS files for new connections."""
        context, pem = self._server.config.ssl, certificates.pem
        if context and pem is not self._loaded:
            context.load_cert_chain(self._tls.cert_file, self._tls.key_file)
            self._loaded = pem


class _Server(uvicorn.Server):
    handshake_timeout_s = 60.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as uvicorn does, with an own timeout for TLS handshakes."""
        loop, config = asyncio.get_running_loop(), self.config
        protocol: Any = config.http_protocol_class
        connect = partial(protocol, config=config, server_state=self.server_state, app_state={})
        timeout_s = self.handshake_timeout_s if config.ssl else None
        options: dict[str, Any] = {"ssl": config.ssl, "ssl_handshake_timeout": timeout_s, "backlog": ACCEPTS_PER_ROUND}
        self.servers = []
        for listener in sockets or ():
            self.servers.append(await loop.create_server(connect, sock=listener, **options))
            listener.listen(BACKLOG)  # asyncio has set it to the number of accepts
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the service."""
        yield


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
        caller, *_ = self._admission.callers(headers, (scope.get("client") or ("",))[0])

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


class HeadAsGet:
    """ASGI middleware that lets every GET route respond to HEAD, which probes use. The server leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self._app({**scope, "method": "GET"} if is_head else scope, receive, send)


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
