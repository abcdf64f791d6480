"""A server that is out of file descriptors refuses connections, says so once a minute, and goes on when some are free."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from eyas.config import LimitsConfig
from eyas.rpc.admission import RESERVED_DESCRIPTORS, fit_descriptors

NUM_FILES = 64
CHILD = """
import asyncio, os, resource, signal
resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, NUM_FILES))
from eyas.config import HttpConfig, LimitsConfig, ServerConfig, TlsConfig
from eyas.rpc.admission import Admission
from eyas.rpc.server import RpcServer
from eyas.services.router.http.server import HttpServer
from eyas.telemetry.logging import configure_logging

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})

async def main():
    configure_logging()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    grpc = RpcServer(ServerConfig(), admission=Admission(LimitsConfig()))
    http = HttpServer(app, HttpConfig(), TlsConfig(), LimitsConfig())
    address = await grpc.start([])
    await http.start()
    print(http.address, address, flush=True)
    await stop.wait()
    await asyncio.gather(http.stop(0), grpc.stop(0))

asyncio.run(main())
""".replace("NUM_FILES", str(NUM_FILES))
REQUESTS = (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")


@asynccontextmanager
async def servers(log: Path) -> AsyncIterator[tuple[subprocess.Popen[str], list[tuple[str, int]]]]:
    """A process with few file descriptors, and the addresses of its HTTP and its gRPC server."""
    with log.open("w") as errors:
        child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert child.stdout
        addresses = (await asyncio.to_thread(child.stdout.readline)).split()
        yield child, [(host, int(port)) for host, _, port in (address.rpartition(":") for address in addresses)]
    finally:
        child.send_signal(signal.SIGTERM)
        await asyncio.to_thread(child.communicate)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def answer(address: tuple[str, int], request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    try:
        async with asyncio.timeout(5):
            return await reader.read(9)
    except (TimeoutError, ConnectionError):
        return b""
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", [0, 1], ids=["HTTP", "gRPC"])
async def test_a_server_out_of_descriptors_recovers(tmp_path: Path, kind: int) -> None:
    log = tmp_path / "log"
    async with servers(log) as (child, addresses):
        assert all([await answer(*pair) for pair in zip(addresses, REQUESTS, strict=True)])
        with ExitStack() as stack:
            for _ in range(2 * NUM_FILES):
                stack.enter_context(socket.create_connection(addresses[kind], 5))
            await asyncio.sleep(0.5)
            started = processor_seconds(child.pid)
            await asyncio.sleep(1.5)
            assert processor_seconds(child.pid) - started < 0.5
            if kind == 0:
                assert await answer(addresses[kind], REQUESTS[kind]) == b"HTTP/1.1 "
        async with asyncio.timeout(30):
            while not await answer(addresses[kind], REQUESTS[kind]):
                await asyncio.sleep(0.1)
    lines = log.read_text().splitlines()
    assert sum("refused a connection" in line for line in lines) == (1 if kind == 0 else 0)
    assert len(lines) < 10, lines[:20]


@pytest.mark.parametrize(("num_files", "most"), [(100_000, 4096), (1128, 500), (64, 1)])
def test_connections_leave_descriptors_for_other_work(
    num_files: int, most: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert RESERVED_DESCRIPTORS == 128
    monkeypatch.setattr(resource, "getrlimit", lambda _: (num_files, num_files))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    assert fit_descriptors(LimitsConfig(), 2).max_connections == most
    assert ("instead of limits.max_connections" in caplog.text) == (most < 4096)
