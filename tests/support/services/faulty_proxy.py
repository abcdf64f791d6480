"""A TCP proxy that stands before a service and breaks its connections in every way that a network can.

Damage must be noticed by the peers, or it is no fault of a connection but another message. TLS authenticates every record,
so any byte may be wrong. The protocol of Redis has no checksum, so only the first byte of a message is made impossible.
"""

import asyncio
import random
import socket
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from eyas.rpc.server import RpcServer
from eyas.services.lifecycle import WorkerRegistration
from eyas.services.local.cluster import free_port

CHUNK_BYTES = 65536
# No message of Redis begins with this byte, and no text in UTF-8 holds it.
IMPOSSIBLE = b"\xff"


@dataclass(eq=False)
class _Link:
    """One connection. silent: its bytes vanish. num_damaged: how many of its next chunks get a wrong byte."""

    caller: StreamWriter
    service: StreamWriter
    silent: bool = False
    num_damaged: int = 0

    def close(self) -> None:
        self.caller.close()
        self.service.close()

    def reset(self) -> None:
        for writer in (self.caller, self.service):
            _reset(writer)


@dataclass(eq=False)
class Proxy:
    """A proxy from `listen` to `service`, both (host, port). Without a fault it passes everything on.

    has_checksums: whether the peers notice any wrong byte. delay_s: every chunk of bytes waits for this time. partitioned:
    bytes vanish in both directions, on new connections too.
    """

    listen: tuple[str, int]
    service: tuple[str, int]
    rng: random.Random
    has_checksums: bool = True
    delay_s: float = 0.0
    partitioned: bool = False
    _passing: asyncio.Event = field(default_factory=asyncio.Event)
    _links: set[_Link] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        return f"{self.listen[0]}:{self.listen[1]}"

    @property
    def port(self) -> int:
        """Where it listens, once it has started."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Listen."""
        self._passing.set()
        self._server = await asyncio.start_server(self._accept, *self.listen)

    async def close(self) -> None:
        """Abort all connections."""
        assert self._server is not None
        self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self) -> None:
        """Reset every connection; both sides notice at once."""
        for link in self._links:
            link.reset()

    def silence(self) -> None:
        """Leave every connection half-open: its bytes vanish from now on, and no side learns of the other's end."""
        for link in self._links:
            link.silent = True

    def damage(self) -> None:
        """Change a byte of the next chunks of every connection."""
        for link in self._links:
            link.num_damaged = 2

    def hold(self) -> None:
        """Keep all bytes until `release`, as lost packets do until they are sent again."""
        self._passing.clear()

    def release(self) -> None:
        """End `hold`."""
        self._passing.set()

    def heal(self) -> None:
        """End every fault but `silence`, which ends with its connections."""
        self.delay_s, self.partitioned = 0.0, False
        self.release()

    async def _accept(self, from_caller: StreamReader, caller: StreamWriter) -> None:
        """Connect a caller to the service."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            from_service, service = await asyncio.open_connection(*self.service)
        except OSError:
            _reset(caller)
            return
        finally:
            self._tasks.discard(task)
        link = _Link(caller, service)
        self._links.add(link)
        ways = (self._pump(link, from_caller, service), self._pump(link, from_service, caller))
        for way in map(asyncio.create_task, ways):
            self._tasks.add(way)
            way.add_done_callback(self._tasks.discard)

    async def _pump(self, link: _Link, source: StreamReader, sink: StreamWriter) -> None:
        """Pass bytes on until a side ends; the caller of a silent link never learns that the service has ended."""
        with suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._passing.wait()
                if link.silent or self.partitioned:
                    continue
                if link.num_damaged:
                    link.num_damaged -= 1
                    data = _with_wrong_byte(data, self.rng) if self.has_checksums else IMPOSSIBLE + data[1:]
                sink.write(data)
                await sink.drain()
        if sink is link.service or not (link.silent or self.partitioned):
            link.close()
            self._links.discard(link)


@asynccontextmanager
async def behind_proxy(service: str) -> AsyncIterator[Proxy]:
    """A proxy before the service at host:port."""
    host, _, port = service.rpartition(":")
    proxy = Proxy((host, free_port()), (host, int(port)), random.Random(0))
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()


@asynccontextmanager
async def registered_behind_proxy(server: RpcServer, registration: WorkerRegistration) -> AsyncIterator[Proxy]:
    """Start a server behind a proxy and register its worker with the proxy's address."""
    async with behind_proxy(await server.start([])) as proxy:
        await registration.register(proxy.address)
        try:
            yield proxy
        finally:
            await registration.deregister()
            await server.stop(0)


def _reset(writer: StreamWriter) -> None:
    """Close a connection with RST instead of FIN."""
    with suppress(OSError):
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _with_wrong_byte(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ rng.randrange(1, 256)]) + data[at + 1 :]
