"""The socket of the HTTP door: uvicorn in the router's own event loop, without hands on its signals. Knows no paths."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from eyas.config import HttpConfig, TlsConfig
from eyas.errors import ConfigError

_BACKLOG = 2048

log = logging.getLogger(__name__)


class HttpDoor:
    """Serves an ASGI application. address: host:port once it has started."""

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
                ssl_certfile=tls.certificate or None,
                ssl_keyfile=tls.key or None,
            )
        )
        self._config = config
        self._serving: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self) -> None:
        """Listen. Raises ConfigError when the port is taken or the TLS files do not do."""
        try:
            self._server.config.load()
        except OSError as error:  # an SSLError is one
            raise ConfigError(f"tls.certificate and tls.key cannot be used: {error}") from error
        listener = listen(self._config.host, self._config.port)
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._serving = asyncio.create_task(self._server.serve([listener]), name="http")
        log.info("HTTP on %s://%s", "https" if self._server.config.ssl else "http", self.address)

    async def stop(self, grace: float) -> None:
        """Refuse new connections, give running requests `grace` seconds, then cancel them."""
        if self._serving is None:
            return
        self._server.config.timeout_graceful_shutdown = math.ceil(grace)
        self._server.should_exit = True
        await self._serving
        await asyncio.gather(*self._server.server_state.tasks, return_exceptions=True)


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
