"""The HTTP listener, body limits, server-sent events, and the cancellation of work whose client has disconnected."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import AsyncGenerator, Awaitable, Iterator
from functools import partial
from typing import TypeVar

import uvicorn
from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.config import HttpConfig, TlsConfig
from eyas.errors import ConfigError
from eyas.rpc.channel import Certificates, Pem
from eyas.services.discovery.base import cancel_task, repeat

MAX_BODY_BYTES = 16 * 2**20
RELOAD_INTERVAL_S = 5.0
WAITING_COMMENT = ": waiting for a verifier"

_BACKLOG = 2048

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)


class HttpServer:
    """Serves an ASGI application with uvicorn, in the running event loop; signals are left to the service.

    address: host:port once the server has started. The TLS files are checked for changes every RELOAD_INTERVAL_S; new
    connections get the new certificate.
    """

    def __init__(self, app: ASGIApp, config: HttpConfig, tls: TlsConfig) -> None:
        self._server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                ssl_certfile=tls.cert_file or None,
                ssl_keyfile=tls.key_file or None,
            )
        )
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


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the service."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ConfigError if the port is taken or the host is not this machine's."""
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_ipv6)
    except (OSError, ValueError) as error:  # ValueError: a machine without IPv6
        message = f"cannot listen on {host}:{port}: the port is in use or the host is not ours; set http.port"
        raise ConfigError(message) from error
    # asyncio switches off Nagle's algorithm, which delays small writes, only if the object names the protocol TCP.
    return socket.socket(fileno=listener.detach())


class BodyLimit:
    """ASGI middleware that rejects bodies above MAX_BODY_BYTES with status 413, by their header or while they arrive."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_received = 0
        too_long = HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes; send less at once")

        async def limited_receive() -> Message:
            nonlocal num_received
            length = Headers(scope=scope).get("content-length", "")
            if length.isdigit() and int(length) > MAX_BODY_BYTES:
                raise too_long
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > MAX_BODY_BYTES:
                raise too_long
            return message

        await self._app(scope, limited_receive if scope["type"] == "http" else receive, send)


class ClientDisconnected(HTTPException):
    """The client has closed the connection before its response was complete."""

    def __init__(self) -> None:
        super().__init__(499, "the client has disconnected")  # nginx's status for its log; the client does not receive it


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


class EventStream(Response):
    """Server-sent events. events: the data of those after the first; each is requested when the one before is sent.

    While none comes, a comment is sent every `keepalive_interval_s`, so that no proxy closes a silent connection.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: str, events: AsyncGenerator[str, None], headers: dict[str, str], keepalive_interval_s: float
    ) -> None:
        super().__init__(headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._keepalive_interval_s = keepalive_interval_s
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnected):
                await cancel_on_disconnect(receive, self._send(send))
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send_text(send, f"data: {self._first}")
        keepalive = asyncio.create_task(self._send_comments(send))
        try:
            async for event in self._events:
                await self._send_text(send, f"data: {event}")
        finally:
            await cancel_task(keepalive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_comments(self, send: Send) -> None:
        """Send a comment whenever the stream has been silent for the interval, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            silence_s = clock() - self._sent_at
            if silence_s >= self._keepalive_interval_s:
                await self._send_text(send, WAITING_COMMENT)
                silence_s = 0.0
            await asyncio.sleep(self._keepalive_interval_s - silence_s)

    async def _send_text(self, send: Send, text: str) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": f"{text}\n\n".encode(), "more_body": True})
