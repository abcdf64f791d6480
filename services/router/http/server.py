"""The HTTP server of a router: its listeners, its certificates, and how it drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from eyas.config import HttpConfig, LimitsConfig, TlsConfig
from eyas.rpc.identity import Certificates, Pem
from eyas.services.discovery.base import cancel_task, repeat
from eyas.services.router.http.connection import HttpConnection
from eyas.services.router.http.listener import BACKLOG, listen
from eyas.services.router.http.turns import Turns

RELOAD_INTERVAL_S = 5.0
# Seconds in which the last clients of a server that stops read their answers.
ERROR_DELIVERY_S = 0.2
# Connections that are accepted in one round of the event loop; TLS makes each cost more than 1 ms.
ACCEPTS_PER_ROUND = 16

log = logging.getLogger(__name__)


class HttpServer:
    """Server of an ASGI application with uvicorn, in the running event loop; signals are left to the service.

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
