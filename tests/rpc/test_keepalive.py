"""A worker that hangs, or that the network has swallowed, is given up within seconds: no connection ends by itself there."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eyas.config import DraftClientConfig, PeersConfig, RegistryConfig, RetryConfig, ServerConfig
from eyas.drafters.base import Draft, DrafterNeeds
from eyas.protocol.tree import DraftTree
from eyas.rpc.channel import ChannelOptions, Peers
from eyas.rpc.server import RpcServer
from eyas.services.discovery.redis_registry import Registry
from eyas.services.lifecycle import AnnouncedWorker, WorkerRegistration
from eyas.services.verifier.draft_client import RemoteDrafter
from eyas.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from tests.support.services.faulty_proxy import Proxy, behind_proxy, registered_behind_proxy
from tests.support.services.scripted_verifier import (
    CALL,
    LEASE_S,
    MODEL,
    REST,
    TOKENS,
    Load,
    Script,
    ScriptedVerifier,
    failure,
    router,
    send,
    tokens_of,
    until,
    worker,
)
from tests.support.services.toy_drafting import ToyDrafter, context, eventually, serving

ENDLESS = RetryConfig(max_attempts=10_000, budget_s=60.0, initial_backoff_s=0.01, max_backoff_s=0.05)
IMPATIENT = PeersConfig(keepalive_interval_s=0.1, keepalive_timeout_s=1.0)
SERVER = """
import asyncio
from eyas.config import ServerConfig
from eyas.rpc.server import RpcServer

async def main():
    server = RpcServer(ServerConfig())
    print(await server.start([]), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@contextmanager
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        try:
            yield child, child.stdout.readline().strip()
        finally:
            child.kill()


async def reached(stub: health_pb2_grpc.HealthStub) -> None:
    """Wait until the service answers, a minute at most."""
    async with asyncio.timeout(60):
        while True:
            with suppress(grpc.aio.AioRpcError):
                assert await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60)
                return
            await asyncio.sleep(0.02)


def test_a_stopped_process_is_dropped_and_taken_back_on_resume() -> None:
    async def body(child: subprocess.Popen[str], address: str) -> None:
        request = health_pb2.HealthCheckRequest()
        async with Peers(IMPATIENT).open_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(request)
            assert await watch.read()
            quiet = asyncio.ensure_future(watch.read())
            await asyncio.wait([quiet], timeout=8 * IMPATIENT.keepalive_interval_s)
            if quiet.done():
                with pytest.raises(grpc.aio.AioRpcError, match="ping timeout"):  # a busy machine; no complaint of the server
                    await quiet
                await body(child, address)
                return
            child.send_signal(signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError, match="ping timeout"):
                await quiet
            child.send_signal(signal.SIGCONT)
            await reached(stub)

    with process() as (child, address):
        asyncio.run(body(child, address))


def test_keepalive_respects_the_default_limits_of_grpc_servers() -> None:
    """They hang up on a second ping within 5 minutes of silence, as a request has that waits in a queue."""
    assert dict(ChannelOptions().grpc_options)["grpc.keepalive_time_ms"] > 300_000  # type: ignore[operator]


@asynccontextmanager
async def behind(url: str, script: Script) -> AsyncIterator[Proxy]:
    """A scripted verifier that is known by the address of a proxy to it."""
    server = RpcServer(ServerConfig())
    add_GenerationServicer_to_server(ScriptedVerifier(script), server.aio)
    registry = Registry(RegistryConfig(url, LEASE_S, 0.05))
    registration = WorkerRegistration(server, registry, AnnouncedWorker("verifier", MODEL, lambda: Load(0, 0, 10_000)))
    async with registered_behind_proxy(server, registration) as proxy:
        yield proxy


async def test_requests_move_away_from_an_unreachable_verifier(url: str) -> None:
    queue, other = Script(TOKENS, gate=asyncio.Event()), Script(TOKENS)
    async with behind(url, queue) as proxy, router(url, peers=Peers(IMPATIENT), retry=ENDLESS) as address:
        asking = asyncio.create_task(send(address, CALL))
        await until(lambda: bool(queue.calls))
        async with worker(url, other):
            proxy.partitioned = True
            found = tokens_of(await asking)
    assert found == REST


async def test_without_another_verifier_a_lost_keepalive_is_reported(url: str) -> None:
    queue = Script(TOKENS, gate=asyncio.Event())
    once = RetryConfig(max_attempts=1)
    async with behind(url, queue) as proxy, router(url, peers=Peers(IMPATIENT), retry=once) as address:
        asking = asyncio.create_task(failure(address, CALL))
        await until(lambda: bool(queue.calls))
        proxy.partitioned = True
        status, reason = await asking
    assert status is grpc.StatusCode.UNAVAILABLE
    assert "not answer keepalive pings" in reason


async def test_an_unreachable_drafter_is_dropped_and_dialled_again() -> None:
    needs, patient = DrafterNeeds(features=True), DraftClientConfig(draft_timeout_s=20.0)
    with serving(ToyDrafter()) as address:
        async with behind_proxy(address) as proxy:
            with closing(RemoteDrafter(proxy.address, needs, patient, peers=Peers(IMPATIENT))) as remote:

                def ask(session: str) -> list[Draft]:
                    return remote.request([context(session, range(10, 15))])()

                await until(lambda: remote.connected)
                proxy.partitioned = True
                assert await asyncio.to_thread(ask, "a") == [None], "long before the deadline"
                assert not remote.connected
                proxy.partitioned = False
                tree = DraftTree.chain([14, 15, 16, 17])
                await asyncio.to_thread(eventually, lambda: ask("b") == [tree])
