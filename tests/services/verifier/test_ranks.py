"""A verifier of several processes: what it answers, what becomes of it when one of them dies, and how pods form one."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eyas.api.request import Request, SamplingParams
from eyas.config import EngineConfig, VerifierConfig
from eyas.errors import ConfigError
from eyas.models.parallel.workers import RankInfo
from eyas.rpc import convert
from eyas.rpc.channel import open_sync_channel
from eyas.rpc.messages import GenerateCall
from eyas.services.local.cluster import free_port, is_serving
from eyas.services.verifier.__main__ import rank_info
from eyas.v1 import generation_pb2, generation_pb2_grpc
from tests.support import reference
from tests.support.services.forks import Popen
from tests.support.tiers import nightly
from tests.support.tiny import write_target

PROMPT = (0, 28, 5, 27)
STATUS = health_pb2.HealthCheckResponse
SECONDS = 90.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny target for outputs that do not end while a test acts."""
    return str(write_target(tmp_path_factory.mktemp("target"), max_model_len=65536))


@contextmanager
def verifier(target: str, port: int, **environment: str) -> Iterator[list[Popen[bytes]]]:
    """One process of a verifier of two ranks."""
    settings = {
        "served_model_name": "tiny", "model": target, "threads": 1, "engine.tensor_parallel_size": 2,
        "engine.max_kv_tokens": 65536, "server.port": port, "registry.url": f"redis://127.0.0.1:{free_port()}/0",
    }  # fmt: skip
    command = [sys.executable, "-m", "eyas.services.verifier", *(f"--set={key}={value}" for key, value in settings.items())]
    process = Popen(command, env={**os.environ, **environment})
    try:
        yield [process]
    finally:
        process.kill()
        process.wait()


@contextmanager
def verifiers(target: str, *ports: int) -> Iterator[list[Popen[bytes]]]:
    """The two processes, which find one another as pods do."""
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    with ExitStack() as stack:
        members = [verifier(target, port, RANK=f"{rank}", **group) for rank, port in enumerate(ports)]
        yield [process for member in members for process in stack.enter_context(member)]


def call_of(max_tokens: int) -> GenerateCall:
    return GenerateCall(Request("r", PROMPT, SamplingParams(max_tokens, 0.8, seed=7, ignore_eos=True)))


def stream(channel: grpc.Channel, max_tokens: int) -> Iterator[generation_pb2.GenerateChunk]:
    message = convert.generate_call_to_proto(call_of(max_tokens))
    return iter(generation_pb2_grpc.GenerationStub(channel).Generate(message, timeout=SECONDS))


def tokens_of(channel: grpc.Channel, max_tokens: int) -> list[int]:
    return [
        token for message in stream(channel, max_tokens) for token in convert.text_chunk_from_proto(message).chunk.token_ids
    ]


def statuses(channel: grpc.Channel, *group: Popen[bytes]) -> Iterator[int]:
    """Health states from SERVING on; all processes of the group must be alive at that time."""
    stub, deadline = health_pb2_grpc.HealthStub(channel), time.monotonic() + SECONDS
    while not is_serving(stub):
        assert all(process.poll() is None for process in group), "a process has ended before it served; see its output"
        assert time.monotonic() < deadline, "the verifier does not come up"
        time.sleep(0.05)
    return (answer.status for answer in stub.Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS))


def followers_of(process: Popen[bytes]) -> list[int]:
    """The processes that rank 0 has started to compute."""

    def children(pid: int) -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    servers = [pid for pid in children(process.pid) if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return [pid for server in servers for pid in children(server)]


@pytest.mark.parametrize("starts_ranks", [False, nightly(True)])
def test_a_killed_rank_ends_streams_and_the_process(starts_ranks: bool, target: str) -> None:
    """Of a verifier that has started its other rank itself, or was found by it."""
    ports = free_port(), free_port()
    with ExitStack() as stack:
        group = verifier(target, ports[0]) if starts_ranks else verifiers(target, *ports)
        first, *others = stack.enter_context(group)
        channel = stack.enter_context(open_sync_channel(f"127.0.0.1:{ports[0]}"))
        health = statuses(channel, first)
        assert next(health) == STATUS.SERVING
        chunks = stream(channel, 60000)
        next(chunks)
        (follower,) = [other.pid for other in others] or followers_of(first)
        os.kill(follower, signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as raised:
            list(chunks)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "rank 1 of 2 is gone" in raised.value.details()
        assert next(health) == STATUS.NOT_SERVING
        assert first.wait(SECONDS) != 0


@pytest.mark.nightly
def test_processes_of_a_group_find_one_another_and_stop_together(target: str) -> None:
    ports, expected = (free_port(), free_port()), reference.generate(target, [*PROMPT], call_of(12).request.sampling)
    with verifiers(target, *ports) as processes, ExitStack() as stack:
        channels = [stack.enter_context(open_sync_channel(f"127.0.0.1:{port}")) for port in ports]
        healths = [statuses(channel, *processes) for channel in channels]
        assert [next(health) for health in healths] == [STATUS.SERVING] * 2
        assert tokens_of(channels[0], 12) == expected
        running = stream(channels[0], 200)
        next(running)
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        assert sum(1 for _ in running) == 199, "what runs may finish"
        assert [process.wait(SECONDS) for process in processes] == [0, 0]


def test_a_rank_ends_when_rank_0_is_gone(target: str) -> None:
    ports = free_port(), free_port()
    with verifiers(target, *ports) as (first, second):
        with open_sync_channel(f"127.0.0.1:{ports[1]}") as channel:
            assert next(statuses(channel, first, second)) == STATUS.SERVING
        first.kill()
        assert second.wait(SECONDS) not in (0, None)


def test_node_and_zone_come_from_the_environment() -> None:
    config = VerifierConfig("m", "t", device="cuda", engine=EngineConfig(tensor_parallel_size=4))
    whole = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}
    assert rank_info(config, whole) == RankInfo(3, 4, "cuda:1", "head", 29500)
    assert rank_info(config, {**whole, "TORCHELASTIC_USE_AGENT_STORE": "True"}).has_store
    assert rank_info(config, {}) == RankInfo(0, 4, "cuda")
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        rank_info(config, {key: value for key, value in whole.items() if key != "MASTER_ADDR"})
    with pytest.raises(ConfigError, match=r"WORLD_SIZE 2 does not fit engine\.tensor_parallel_size 4"):
        rank_info(config, {**whole, "WORLD_SIZE": "2"})
