"""Workers found by a list: who answers is live, who only looks alive is not."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eyas.config import DiscoveryConfig, ServerConfig
from eyas.errors import ConfigError
from eyas.rpc.channel import open_channel
from eyas.rpc.convert import leases_from_proto
from eyas.rpc.messages import Lease, Load
from eyas.rpc.server import RpcServer
from eyas.services.discovery.base import Discovery
from eyas.services.lifecycle import AnnouncedWorker, WorkerRegistration
from eyas.services.local.cluster import free_port
from eyas.v1.worker_pb2 import StatusRequest
from eyas.v1.worker_pb2_grpc import WorkerStub
from tests.support.services.pods import Worker, discovering, names, pod_router, pod_worker, settings
from tests.support.services.scripted_verifier import CALL, MODEL, REST, send, tokens_of, until


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def test_a_worker_is_found_as_it_describes_itself() -> None:
    async with pod_worker(zone="here") as worker, pod_worker(role="draft") as drafter:
        config = settings("static", verifiers=(worker.address,), drafters=(drafter.address,))
        async with discovering(config, "verifier", "draft") as discovery:
            await until(lambda: bool(discovery.known("verifier") and discovery.known("draft")))
            assert (discovery.known("verifier"), discovery.known("draft")) == ((worker.lease,), (drafter.lease,))


async def test_a_list_is_synced_once_all_have_answered_or_failed() -> None:
    async with pod_worker() as worker:
        config = settings("static", verifiers=(worker.address, f"127.0.0.1:{free_port()}"))
        async with discovering(config) as discovery:
            assert not discovery.has_synced("verifier")
            await until(lambda: discovery.has_synced("verifier"))
            assert names(discovery) == {worker.incarnation}, "none is missing by then"
            assert not discovery.has_synced("draft"), "it is not watched"


async def test_a_real_worker_serves_its_state() -> None:
    server = RpcServer(ServerConfig(host="0.0.0.0"))
    worker = AnnouncedWorker("draft", MODEL, lambda: Load(1), "here", lambda: frozenset({3}), incarnation="one")
    registration = WorkerRegistration(server, None, worker)
    address = await server.start([])
    await registration.register(address)  # without leases a wildcard address is no error
    async with open_channel(f"127.0.0.1:{port_of(address)}") as channel:
        answer = await WorkerStub(channel).Status(StatusRequest())
    await registration.deregister()
    await server.stop(0)
    assert leases_from_proto(answer, "there:1")[0] == Lease(
        "draft", "there:1", "one", MODEL, Load(1), "here", frozenset({3})
    )


async def test_a_worker_that_stops_serving_is_left_at_once() -> None:
    async with pod_worker() as worker:
        config = settings("static", verifiers=(worker.address,), probe_interval_s=0.05, stale_after_s=600.0)
        async with discovering(config) as discovery:
            await until(lambda: names(discovery) == {worker.incarnation})
            await worker.server.set_serving(False)
            await until(lambda: not names(discovery))
            await worker.server.set_serving(True)
            await until(lambda: names(discovery) == {worker.incarnation})


async def test_a_killed_worker_is_dropped_and_its_successor_is_new() -> None:
    port = free_port()
    async with discovering(settings("static", verifiers=(f"127.0.0.1:{port}",), stale_after_s=600.0)) as discovery:
        async with pod_worker(port=port) as first:
            await until(lambda: names(discovery) == {first.incarnation})
        await until(lambda: not names(discovery))
        async with pod_worker(port=port) as second:
            await until(lambda: names(discovery) == {second.incarnation})


@asynccontextmanager
async def silent_worker(stale_after_s: float) -> AsyncIterator[tuple[Worker, Discovery]]:
    """A worker that was found and answers nothing now, and the discovery that found it."""
    async with pod_worker() as worker:
        config = settings("static", verifiers=(worker.address,), probe_timeout_s=0.05, stale_after_s=stale_after_s)
        async with discovering(config) as discovery:
            await until(lambda: names(discovery) == {worker.incarnation})
            worker.gate.clear()
            yield worker, discovery


async def test_a_healthy_worker_that_answers_nothing_is_dropped() -> None:
    async with silent_worker(stale_after_s=0.2) as (worker, discovery):
        await until(lambda: not names(discovery))
        async with open_channel(worker.address) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        worker.gate.set()
        await until(lambda: names(discovery) == {worker.incarnation})


async def test_one_slow_answer_does_not_cost_a_worker_its_place() -> None:
    async with silent_worker(stale_after_s=600.0) as (worker, discovery):
        asked = worker.num_asked
        await until(lambda: worker.num_asked >= asked + 3)
        assert names(discovery) == {worker.incarnation}


async def test_a_worker_of_another_role_is_no_worker_of_this_one(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        pod_worker(role="draft") as drafter,
        discovering(settings("static", verifiers=(drafter.address,))) as discovery,
    ):
        await until(lambda: drafter.num_asked >= 3)
        assert not names(discovery)
    assert caplog.text.count("it is a draft service, where a verifier service was expected") == 1


async def test_a_worker_with_two_addresses_is_one() -> None:
    async with pod_worker() as worker:
        other = worker.address.replace("127.0.0.1", "localhost")
        async with discovering(settings("static", verifiers=(other, worker.address))) as discovery:
            asked = worker.num_asked
            await until(lambda: worker.num_asked >= asked + 6)
            assert discovery.known("verifier") == (worker.lease,)


async def test_a_router_serves_without_any_registry() -> None:
    async with (
        pod_worker() as one,
        pod_worker() as other,
        pod_router(settings("static", verifiers=(one.address, other.address))) as (address, workers),
    ):
        await until(lambda: bool(workers.reachable) and len(workers.snapshot().verifiers) == 2)
        call = replace(CALL, request=replace(CALL.request, session="s"))
        for _ in range(3):
            assert tokens_of(await send(address, call)) == REST
    assert sorted(len(worker.script.calls) for worker in (one, other)) == [0, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "static", "verifiers": ("host",)}, "address 'host' is not host:port"),
        ({"kind": "static", "drafters": (":7",)}, "address ':7' is not host:port"),
        ({"verifiers": ("host:1",)}, "workers are listed, but kind is redis"),
        ({"probe_interval_s": 0.0}, "probe_interval_s is 0.0; it must be above 0"),
    ],
)
def test_a_wrong_setting_is_reported(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DiscoveryConfig(**changes)  # type: ignore[arg-type]
