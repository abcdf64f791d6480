"""The sockets that an HTTP server listens on, and what their clients may hold of them."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from eyas.config import LimitsConfig
from eyas.errors import ConfigError
from eyas.rpc.admission import address_of
from eyas.services.router.http.errors import error_bytes

_BACKLOG = 2048


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
                    connection.send(error_bytes(503, "too many connections; try again later"))
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
