"""A TCP proxy that drops all data while it is cut, without an error and without closing a connection."""

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from eyas.rpc.server import RpcServer
from eyas.services.lifecycle import WorkerRegistration


@dataclass
class CuttableProxy:
    """A proxy before a service. address: to dial instead of the service's. Set `cut` to drop all data."""

    listener: socket.socket
    service: tuple[str, int]
    cut: threading.Event = field(default_factory=threading.Event)
    ends: list[socket.socket] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def take(self) -> None:
        """Connect each caller to the service until the listener is closed."""
        with suppress(OSError):
            while True:
                caller, _ = self.listener.accept()
                self.ends.append(caller)
                callee = socket.create_connection(self.service)
                self.ends.append(callee)
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
def cuttable_proxy(service: str) -> Iterator[CuttableProxy]:
    """A proxy before the service at host:port."""
    host, _, port = service.rpartition(":")
    proxy = CuttableProxy(socket.create_server(("127.0.0.1", 0)), (host, int(port)))
    taking = threading.Thread(target=proxy.take, daemon=True)
    taking.start()
    try:
        yield proxy
    finally:
        proxy.listener.shutdown(socket.SHUT_RDWR)
        taking.join()
        proxy.listener.close()
        for end in proxy.ends:
            end.close()


@asynccontextmanager
async def registered_behind_proxy(server: RpcServer, registration: WorkerRegistration) -> AsyncIterator[CuttableProxy]:
    """Start a server behind a proxy and register its worker with the proxy's address."""
    with cuttable_proxy(await server.start([])) as proxy:
        await registration.register(proxy.address)
        try:
            yield proxy
        finally:
            await registration.deregister()
            await server.stop(0)
