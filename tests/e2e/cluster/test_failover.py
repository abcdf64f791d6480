"""Workers start, stop and die; the tokens of running requests stay equal."""

import asyncio
import itertools
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from eyas.api.request import SamplingParams, StructuredOutputs
from eyas.config import RegistryConfig
from eyas.errors import Unauthenticated
from eyas.rpc.channel import open_sync_channel
from eyas.rpc.messages import NO_DRAFTER
from eyas.rpc.status import status_error
from eyas.services.discovery.redis_registry import Registry
from eyas.services.local.cluster import TOKEN_VARIABLE, Child, Cluster, free_port
from eyas.services.local.demo import CONFIGS
from eyas.v1 import worker_pb2
from eyas.v1.worker_pb2_grpc import WorkerStub
from tests.support.services.grpc_client import Generated, generate

PROMPT = (0, 282, 659, 276)
NUMBERS = {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
LONG = {"type": "object", "required": ["x"], "properties": {"x": NUMBERS | {"minItems": 400}}}
STRUCTURED = SamplingParams(
    max_tokens=1500, temperature=0.8, top_p=0.95, ignore_eos=True, seed=7, structured_outputs=StructuredOutputs(json=LONG)
)


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


def verifier_of(session: str, cluster: Cluster) -> str:
    """The address of the live verifier that serves a session, or served it last; empty if there is none."""

    async def read() -> str:
        registry = Registry(RegistryConfig(f"redis://{cluster['redis'].address}/0"))
        try:
            placement, leases = await registry.placement(session), await registry.leases("verifier")
            return next((lease.address for lease in leases if placement and lease.incarnation == placement.verifier), "")
        finally:
            await registry.close()

    return asyncio.run(read())


def session_on(worker: Child, cluster: Cluster) -> str:
    """A session that the router has bound to `worker`, found by asking."""
    for number in itertools.count():
        generate(cluster["router"].address, PROMPT, SamplingParams(max_tokens=1), session=f"s{number}")
        while not (address := verifier_of(f"s{number}", cluster)):
            time.sleep(0.01)
        if address == worker.address:
            return f"s{number}"
    raise AssertionError


def test_a_request_continues_exactly_elsewhere_and_back(demo_cluster: Cluster, tmp_path: Path) -> None:
    """A structured request at a seeded temperature, with its drafter, moves twice. Free ones move in tests/chaos.

    SIGSTOP to its verifier moves it to another one. SIGCONT, and SIGKILL to the other one, bring it back.
    """
    first = demo_cluster["verifier"]
    moved_at: list[int] = []

    def stop_kill_and_go_on(out: Generated) -> bool:
        num_tokens = len(out.token_ids)
        if not moved_at and num_tokens >= 20:
            first.process.send_signal(signal.SIGSTOP)
        if len(moved_at) == 1 and num_tokens >= moved_at[0] + 20 and second.process.poll() is None:
            first.process.send_signal(signal.SIGCONT)
            second.process.kill()
            second.process.wait()
        has_failed = num_tokens >= 20 if not moved_at else second.process.poll() is not None
        target = first if moved_at else second
        if len(moved_at) < 2 and has_failed and verifier_of(session, demo_cluster) == target.address:
            moved_at.append(num_tokens)
        return len(moved_at) == 2 and num_tokens >= moved_at[1] + 20

    with another("verifier", demo_cluster, tmp_path, "validate_head=never") as second:
        demo_cluster.wait(second)
        session = session_on(first, demo_cluster)
        try:
            out = generate(demo_cluster["router"].address, PROMPT, STRUCTURED, enough=stop_kill_and_go_on, session=session)
        finally:
            first.process.send_signal(signal.SIGCONT)
    plain = generate(demo_cluster["router"].address, PROMPT, replace(STRUCTURED, max_tokens=len(out.token_ids)), NO_DRAFTER)
    assert len(moved_at) == 2
    assert out.finish_reason is None
    assert out.token_ids == plain.token_ids


def test_workers_of_a_local_cluster_refuse_strangers(demo_cluster: Cluster) -> None:
    for name in ("verifier", "draft"):
        with open_sync_channel(demo_cluster[name].address) as channel, pytest.raises(grpc.RpcError) as caught:
            WorkerStub(channel).Status(worker_pb2.StatusRequest(), timeout=250)
        assert isinstance(status_error(caught.value), Unauthenticated)
        token = demo_cluster[name].environment[TOKEN_VARIABLE]
        assert not any(token in word for word in demo_cluster[name].command)
        assert token not in demo_cluster[name].log.read_text()
