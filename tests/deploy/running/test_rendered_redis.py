"""The chart's Redis with its settings: leases stay when other keys fill its memory, and a password may be anything."""

import asyncio
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from eyas.config import RegistryConfig
from eyas.rpc.messages import Lease, Load, ModelInfo
from eyas.services.discovery.redis_registry import Registry
from eyas.services.local.cluster import free_port
from tests.deploy.charts import containers, rendered
from tests.deploy.running.substitutions import Local
from tests.support.services.redis_server import answers

pytestmark = pytest.mark.nightly

LEASE = Lease("verifier", "v:1", "incarnation", ModelInfo("m", "f", 10, 10), Load(1))


NEVER = Retry(NoBackoff(), 0)
PASSWORD = """a 'b' "c" \\ $d #e"""


@contextmanager
def redis(folder: Path, memory: str) -> Iterator[Redis]:
    """The chart's Redis with this password and limit of memory, and a client with the password."""
    [container] = [found for _, found in containers(rendered("cpu-demo")) if found["name"] == "redis"]
    port = free_port()
    words = Local({("redis", 6379): port}, {}, folder).words("redis", [*container["command"], *container["args"]])
    (folder / "redis" / "tmp").mkdir(parents=True)
    command = [re.sub(r"(?m)^maxmemory .*$", f"maxmemory {memory}", word) for word in words]
    process = subprocess.Popen(
        command, env={"PATH": os.environ["PATH"], "REDIS_PASSWORD": PASSWORD}, stdout=subprocess.DEVNULL
    )
    try:
        with Redis(port=port, password=PASSWORD) as client:
            while not answers(client):
                assert process.poll() is None, "redis did not start"
                time.sleep(0.01)
            assert PASSWORD not in Path(f"/proc/{process.pid}/cmdline").read_text()
            yield client
    finally:
        process.kill()
        process.wait()


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
    with redis(tmp_path, "4mb") as client:
        address = f"127.0.0.1:{client.get_connection_kwargs()['port']}"
        asyncio.run(lease_survives(f"redis://:{quote(PASSWORD)}@{address}/0", client))


def test_redis_serves_no_client_without_the_password(tmp_path: Path) -> None:
    with redis(tmp_path, "64mb") as client:
        port = client.get_connection_kwargs()["port"]
        for password in (None, "", "wrong", PASSWORD + " "):
            with Redis(port=port, password=password, retry=NEVER) as other, pytest.raises(AuthenticationError):
                other.ping()
