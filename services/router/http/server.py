"""What stands before every path below /v1: a known key, and a body that is not too long. Knows no bodies.

The socket of the HTTP door: uvicorn in the router's own event loop, without hands on its signals. Knows no paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn
from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.config import HttpConfig, TlsConfig
from eyas.errors import ConfigError, Unauthenticated
from eyas.rpc.channel import Certificates, Pem
from eyas.services.router.api_keys import ApiKeys
from eyas.services.router.http.responses import ErrorResponse, refusal, status_refusal
from eyas.services.tasks import every, stop

MAX_BODY_BYTES = 16 * 2**20


class Authenticator:
    """ASGI middleware. Health and metrics are open to all; bodies of up to MAX_BODY_BYTES come in."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refused = self._refused(headers)
        if refused:
            await JSONResponse(refused.body, refused.kind.status, refused.headers)(scope, receive, send)
            return
        await self._app(scope, _limited(receive), send)

    def _refused(self, headers: Headers) -> ErrorResponse | None:
        if not self._keys.admit(headers.get("authorization", "")):
            message = "no known API key; send one as the header 'Authorization: Bearer KEY'"
            return refusal(Unauthenticated(message))
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            return status_refusal(413, _too_long())
        return None


def _limited(receive: Receive) -> Receive:
    """The same messages, up to where their bodies together are too long."""
    taken = 0

    async def counted() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > MAX_BODY_BYTES:
            raise HTTPException(413, _too_long())
        return message

    return counted


def _too_long() -> str:
    return f"the body is longer than {MAX_BODY_BYTES} bytes; send less at once"


RENEW_SECONDS = 5.0

_BACKLOG = 2048

log = logging.getLogger(__name__)


class HttpServer:
    """Serves an ASGI application. address: host:port once it has started. renew_seconds: how often the TLS files are looked
    at; connections that are made after they have changed get the new certificate."""

    def __init__(self, app: ASGIApp, config: HttpConfig, tls: TlsConfig, renew_seconds: float = RENEW_SECONDS) -> None:
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
        self._renew_seconds = renew_seconds
        self._shown: Pem | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self) -> None:
        """Listen. Raises ConfigError when the port is taken or the TLS files do not do."""
        certificates = Certificates("tls.cert_file and tls.key_file", self._tls.cert_file, self._tls.key_file)
        self._shown = certificates.pem
        self._server.config.load()
        listener = listen(self._config.host, self._config.port)
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._serving = asyncio.create_task(self._server.serve([listener]), name="http")
        if self._tls.cert_file:
            renew = every(self._renew_seconds, partial(self._renew, certificates))
            self._renewing = asyncio.create_task(renew, name="certificates")
        log.info("HTTP on %s://%s", "https" if self._server.config.ssl else "http", self.address)

    async def stop(self, grace: float) -> None:
        """Refuse new connections, give running requests `grace` seconds, then cancel them."""
        if self._serving is None:
            return
        self._server.config.timeout_graceful_shutdown = math.ceil(grace)
        self._server.should_exit = True
        await asyncio.gather(self._serving, stop(self._renewing))
        await asyncio.gather(*self._server.server_state.tasks, return_exceptions=True)

    async def _renew(self, certificates: Certificates) -> None:
        """Show those who connect from now on what the files hold."""
        context, pem = self._server.config.ssl, certificates.pem
        if context and pem is not self._shown:
            context.load_cert_chain(self._tls.cert_file, self._tls.key_file)
            self._shown = pem


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the service."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the port is taken or the host is not ours.

    It names its protocol, for asyncio sends small writes at once, without Nagle's wait, only where it reads TCP there.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        message = f"cannot listen on {host}:{port}: the port is in use or the host is not ours; set http.port"
        raise ConfigError(message) from error
    return listener
