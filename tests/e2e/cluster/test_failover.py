"""Workers start, stop and die; the tokens of running requests stay equal."""

import asyncio
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from eyas.config import RegistryConfig
from eyas.errors import Unauthenticated
from eyas.request import SamplingParams
from eyas.rpc.channel import open_sync_channel
from eyas.rpc.messages import NO_DRAFTER
from eyas.rpc.server import status_error
from eyas.services.cluster import TOKEN_VARIABLE, Child, Cluster, free_port
from eyas.services.discovery.registry import Registry
from eyas.services.local import CONFIGS
from eyas.v1 import worker_pb2
from eyas.v1.worker_pb2_grpc import WorkerStub
from tests.e2e.client import Generated, generate

PROMPT = (0, 282, 659, 276)
SEEDED = SamplingParams(max_tokens=1500, temperature=0.8, top_p=0.95, ignore_eos=True, seed=7)


@contextmanager
def another(service: str, cluster: Cluster, logs: Path, *settings: str) -> Iterator[Child]:
    """One more service of the cluster, on a port of its own."""
    port = free_port()
    command = [sys.executable, "-m", f"eyas.services.{service}", "--config", str(CONFIGS / f"{service}.yaml")]
    joining = (
        f"server.port={port}",
        f"registry.url=redis://{cluster['redis'].address}/0",
        f"peers.token_env={TOKEN_VARIABLE}",
    )
    for setting in (*joining, *settings):
        command += ["--set", setting]
    environment = cluster["verifier"].environment
    child = Child(service, f"127.0.0.1:{port}", command, logs / f"{service}.log", environment=environment)
    try:
        yield child
    finally:
        child.process.kill()
        child.process.wait()


def session_on(worker: Child, cluster: Cluster) -> str:
    """A session that the router has bound to `worker`, found by asking."""

    async def is_there(session: str) -> bool:
        registry = Registry(RegistryConfig(f"redis://{cluster['redis'].address}/0"))
        try:
            while (placement := await registry.placement(session)) is None:
                await asyncio.sleep(0.01)
            leases = await registry.leases("verifier")
            return placement.verifier in [lease.incarnation for lease in leases if lease.address == worker.address]
        finally:
            await registry.close()

    for number in itertools.count():
        generate(cluster["router"].address, PROMPT, SamplingParams(max_tokens=1), session=f"s{number}")
        if asyncio.run(is_there(f"s{number}")):
            return f"s{number}"
    raise AssertionError


def test_a_request_continues_exactly_on_another_verifier(demo_cluster: Cluster, tmp_path: Path) -> None:
    """SIGKILL to the verifier in the middle of a request at a seeded temperature, with its drafter."""
    moved_at: list[int] = []

    def kill_and_go_on(out: Generated) -> bool:
        if len(out.token_ids) >= 20 and dying.process.poll() is None:
            dying.process.kill()
            dying.process.wait()
        if not moved_at and f"verifier {dying.address}: " in demo_cluster["router"].log.read_text():
            moved_at.append(len(out.token_ids))
        return bool(moved_at) and len(out.token_ids) >= moved_at[0] + 50

    # With more slots than the other, it is the one that the router chooses while both are idle.
    with another("verifier", demo_cluster, tmp_path, "engine.max_kv_tokens=20000") as dying:
        demo_cluster.wait(dying)
        session = session_on(dying, demo_cluster)
        out = generate(demo_cluster["router"].address, PROMPT, SEEDED, enough=kill_and_go_on, session=session)
    plain = generate(demo_cluster["router"].address, PROMPT, replace(SEEDED, max_tokens=len(out.token_ids)), NO_DRAFTER)
    assert moved_at
    assert out.finish_reason is None
    assert out.token_ids == plain.token_ids


def test_workers_of_a_local_cluster_refuse_strangers(demo_cluster: Cluster) -> None:
    for name in ("verifier", "draft"):
        with open_sync_channel(demo_cluster[name].address) as channel, pytest.raises(grpc.RpcError) as caught:
            WorkerStub(channel).Status(worker_pb2.StatusRequest(), timeout=30)
        assert isinstance(status_error(caught.value), Unauthenticated)
        token = demo_cluster[name].environment[TOKEN_VARIABLE]
        assert not any(token in word for word in demo_cluster[name].command)
        assert token not in demo_cluster[name].log.read_text()
