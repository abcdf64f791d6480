"""A TCP proxy that delays each piece of data, as a long wire does."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Queue

CHUNK_BYTES = 65536
MAX_CHUNKS = 256


@dataclass(eq=False)
class DelayingProxy:
    """A TCP proxy on loopback before the service at `port`: each piece of data arrives `delay_s` after it was sent.

    Pieces follow one another without waiting for each other, as on a long wire. A way holds MAX_CHUNKS of them at most.
    num_bytes: what has gone to the service.
    """

    port: int
    delay_s: float = 0.0
    num_bytes: int = 0
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    _ends: list[socket.socket] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def start(self) -> None:
        """Accept connections until `close`."""
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        for end in (self.listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        """Connect every caller to the service; one that cannot be is closed, and the next can try."""
        while True:
            try:
                caller, _ = self.listener.accept()
            except OSError:
                return  # the proxy is closed
            try:
                self._connect(caller)
            except OSError:
                caller.close()

    def _connect(self, caller: socket.socket) -> None:
        service = socket.create_connection(("127.0.0.1", self.port))
        self._ends += [caller, service]
        for source, sink in ((caller, service), (service, caller)):
            sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            way: Queue[tuple[float, bytes]] = Queue(MAX_CHUNKS)
            threading.Thread(target=self._read, args=(source, way, sink is service), daemon=True).start()
            threading.Thread(target=self._write, args=(sink, way), daemon=True).start()

    def _read(self, source: socket.socket, way: Queue[tuple[float, bytes]], is_request: bool) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                self.num_bytes += len(data) if is_request else 0
                way.put((time.perf_counter() + self.delay_s, data))
        way.put((0.0, b""))

    def _write(self, sink: socket.socket, way: Queue[tuple[float, bytes]]) -> None:
        with suppress(OSError):
            while (piece := way.get())[1]:
                due, data = piece
                time.sleep(max(due - time.perf_counter(), 0.0))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
