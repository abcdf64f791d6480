"""A line between a service and whoever dials it, which swallows all that is sent while it is cut: no error, no end."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from eyas.rpc.server import RpcServer
from eyas.services.lifecycle import WorkerRegistration


@dataclass
class Cable:
    """address: dial it instead of the service's own. Set `cut` to have everything vanish from then on."""

    listener: socket.socket
    service: tuple[str, int]
    cut: threading.Event = field(default_factory=threading.Event)
    ends: list[socket.socket] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def take(self) -> None:
        """Connect each caller with the service, until the listener is closed."""
        with suppress(OSError):
            while True:
                caller, _ = self.listener.accept()
                callee = socket.create_connection(self.service)
                self.ends += [caller, callee]
                for source, sink in ((caller, callee), (callee, caller)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not self.cut.is_set():
                    sink.sendall(data)
            if not self.cut.is_set():
                sink.shutdown(socket.SHUT_WR)


@contextmanager
def cable(service: str) -> Iterator[Cable]:
    """A line to the service at host:port."""
    host, _, port = service.rpartition(":")
    line = Cable(socket.create_server(("127.0.0.1", 0)), (host, int(port)))
    taking = threading.Thread(target=line.take, daemon=True)
    taking.start()
    try:
        yield line
    finally:
        line.listener.shutdown(socket.SHUT_RDWR)
        line.listener.close()
        for end in line.ends:
            end.close()
        taking.join()


@asynccontextmanager
async def entered(server: RpcServer, registration: WorkerRegistration) -> AsyncIterator[Cable]:
    """A line to a server, by whose address its worker is known until the end; then both are gone."""
    with cable(await server.start([])) as line:
        await registration.register(line.address)
        try:
            yield line
        finally:
            await registration.deregister()
            await server.stop(0)
