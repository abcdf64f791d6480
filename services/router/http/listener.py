"""The sockets that an HTTP server listens on, and what their clients may hold of them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from eyas.config import LimitsConfig
from eyas.errors import ConfigError
from eyas.rpc.admission import address_of
from eyas.services.router.http.errors import error_bytes

OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
BACKLOG = 2048

log = logging.getLogger(__name__)


class LimitedListener(socket.socket):
    """A listening socket that bounds the connections, in all and of each address, from their acceptance to their end.

    So TLS handshakes that are half done count too. Further connections are closed at once. They are also when the process
    is out of file descriptors, for which the listener keeps a spare one: asyncio would leave them waiting and log each try.
    """

    _limits: LimitsConfig | None = None
    _spare = -1

    def limit_connections(self, limits: LimitsConfig, has_tls: bool) -> None:
        """Set the bounds. has_tls: a refused client gets no response that it could read."""
        self._limits, self._has_tls = limits, has_tls
        self._peers: Counter[str] = Counter()
        self._num_open = 0
        self._keep_spare()

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection. Raises ConnectionAbortedError, which asyncio ignores, if there are too many."""
        try:
            connection, address = super().accept()
        except OSError as error:
            if error.errno not in OUT_OF_DESCRIPTORS or self._spare < 0:
                raise
            self._refuse_next(error)
            raise ConnectionAbortedError("out of file descriptors") from error
        if self._limits is None:
            return connection, address
        self._keep_spare()
        peer = address_of(address[0])
        if self._num_open >= self._limits.max_connections or self._peers[peer] >= self._limits.max_connections_per_peer:
            self._refuse(connection)
            raise ConnectionAbortedError("too many connections")
        counted = _Connection(connection.detach(), partial(self._forget, peer))
        self._num_open += 1
        self._peers[peer] += 1
        return counted, address

    def close(self) -> None:
        """Close it, and the spare descriptor."""
        super().close()
        self._release_spare()

    def _refuse_next(self, error: OSError) -> None:
        """Refuse a connection that waits, with the spare descriptor."""
        log.warning("refused a connection: %s; raise `ulimit -n`", error.strerror, extra={"rate_limited": True})
        self._release_spare()
        with contextlib.suppress(OSError):
            connection, _ = super().accept()
            self._refuse(connection)
        self._keep_spare()

    def _refuse(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            if not self._has_tls:
                connection.send(error_bytes(503, "too many connections; try again later"))

    def _keep_spare(self) -> None:
        if self._spare < 0:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _release_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _forget(self, peer: str) -> None:
        self._num_open -= 1
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
        listener = socket.create_server((host.strip("[]"), port), family=family, backlog=BACKLOG, dualstack_ipv6=is_ipv6)
    except (OSError, ValueError) as error:  # ValueError: a machine without IPv6
        message = (
            f"cannot listen on {host}:{port}: the port is in use or the host is not ours; set http.port or operations_port"
        )
        raise ConfigError(message) from error
    # asyncio switches off Nagle's algorithm, which delays small writes, only if the object names the protocol TCP.
    return LimitedListener(fileno=listener.detach())
