"""The registry on a real Redis: leases live as long as their workers beat, and readers outlive Redis."""

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from eyas.config import PeersConfig, RegistryConfig
from eyas.errors import ConfigError
from eyas.rpc.identity import SharedToken
from eyas.rpc.messages import Lease, Load, ModelInfo
from eyas.services.discovery.redis_registry import Placement, Registry
from eyas.services.local.cluster import free_port
from tests.support.services.redis_server import running_redis
from tests.support.services.scripted_verifier import until

MODEL = ModelInfo("demo", "f1", 4096, 2048, "h1")
LEASE = Lease("verifier", "127.0.0.1:1", "one", MODEL, Load(1, 2, 3))


@asynccontextmanager
async def registry(
    url: str, ttl: float = 60.0, heartbeat: float = 0.05, token: SharedToken | None = None
) -> AsyncIterator[Registry]:
    one = Registry(RegistryConfig(url, ttl, heartbeat), token)
    try:
        yield one
    finally:
        await one.withdraw()
        await one.close()


async def is_empty(reader: Registry) -> bool:
    return not await reader.leases("verifier")


async def test_a_lease_follows_the_load_of_its_worker(url: str) -> None:
    loads = iter(range(10_000))
    async with registry(url) as worker, registry(url) as reader:
        await worker.publish(lambda: replace(LEASE, load=Load(num_running=next(loads))))
        await reader.watch("verifier")
        await until(lambda: reader.known("verifier")[0].load.num_running >= 3)


async def test_withdrawing_removes_the_lease_at_once(url: str) -> None:
    async with registry(url) as worker, registry(url) as reader:
        await worker.publish(lambda: LEASE)
        await worker.withdraw()
        assert await reader.leases("verifier") == []


async def test_a_lease_without_heartbeat_runs_out(url: str) -> None:
    async with registry(url) as reader:
        worker = Registry(RegistryConfig(url, ttl_s=20, heartbeat_interval_s=10))
        await worker.publish(lambda: LEASE)
        await worker.close()
        assert await reader.leases("verifier") == [LEASE]
        redis = Redis.from_url(url)
        (key,) = await redis.keys("eyas:lease:verifier:*")
        assert 0 < await redis.pttl(key) <= 20_000
        await redis.pexpire(key, 1)
        await redis.aclose()
        await until(partial(is_empty, reader))


async def test_a_lease_that_does_not_parse_hides_no_other(url: str, caplog: pytest.LogCaptureFixture) -> None:
    redis = Redis.from_url(url)
    async with registry(url) as worker, registry(url) as reader:
        await worker.publish(lambda: LEASE)
        await redis.sadd("eyas:leases:verifier", "other")
        await redis.set("eyas:lease:verifier:other", '{"role": "verifier"}', px=60_000)
        assert await reader.leases("verifier") == [LEASE]
    await redis.aclose()
    assert "does not parse" in caplog.text


async def test_a_worker_is_known_while_its_lease_is_damaged(url: str) -> None:
    redis = Redis.from_url(url)
    async with registry(url) as worker, registry(url) as reader:
        await worker.publish(lambda: LEASE)
        await reader.watch("verifier")
        for damaged in (b'{"role": "verifier"', b"\xff"):
            await redis.set("eyas:lease:verifier:one", damaged)
            await reader.refresh()
            assert reader.known("verifier") == (LEASE,)
    await redis.aclose()


class Clock:
    """In place of the module `time` of the registry. A test moves it, and no wait of a busy machine does."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("eyas.services.discovery.redis_registry.time", clock)
    return clock


async def test_workers_are_known_while_an_emptied_redis_fills_again(url: str, clock: Clock) -> None:
    redis = Redis.from_url(url)
    async with registry(url) as worker, registry(url, heartbeat=50.0) as reader:
        await worker.publish(lambda: LEASE)
        await reader.watch("verifier")
        await worker.close()
        for _ in range(2):
            await redis.flushall()
            await reader.refresh()
            assert reader.known("verifier") == (LEASE,)
        clock.now += 60.0
        await reader.refresh()
        assert reader.known("verifier") == ()
    await redis.aclose()


async def test_no_worker_outlives_its_lease_by_a_redis_that_changes(url: str) -> None:
    redis = Redis.from_url(url)
    async with registry(url, ttl=1.0) as worker, registry(url, ttl=60.0, heartbeat=50.0) as reader:
        published_at = time.monotonic()
        await worker.publish(lambda: LEASE)
        await reader.watch("verifier")
        await worker.close()
        await redis.delete("eyas:lease:verifier:one")

        async def is_forgotten() -> bool:
            await redis.set("eyas:contents", f"{time.monotonic()}")
            await reader.refresh()
            return reader.known("verifier") == ()

        is_early = not await is_forgotten()
        assert is_early or time.monotonic() - published_at > 1.0
        await until(is_forgotten)
    await redis.aclose()


async def test_an_unchanged_lease_is_checked_once(url: str, tmp_path: Path) -> None:
    class Counting(SharedToken):
        num_checks = 0

        def has_signed(self, message: bytes, signature: str) -> bool:
            self.num_checks += 1
            return super().has_signed(message, signature)

    (tmp_path / "token").write_text("t" * 32)
    token = Counting(PeersConfig(token_file=str(tmp_path / "token")))
    async with registry(url, 60.0, 50.0, token) as worker, registry(url, 60.0, 50.0, token) as reader:
        await worker.publish(lambda: LEASE)
        for _ in range(3):
            assert await reader.leases("verifier") == [LEASE]
        assert token.num_checks == 1
        await worker.write([replace(LEASE, load=Load(9))])
        assert (await reader.leases("verifier"))[0].load == Load(9)
        assert token.num_checks == 2


TOKEN = SharedToken(PeersConfig(token_env="TOKEN"), {"TOKEN": "0123456789abcdef"})
OTHER_TOKEN = SharedToken(PeersConfig(token_env="TOKEN"), {"TOKEN": "fedcba9876543210"})


async def test_only_leases_signed_with_the_token_are_read(url: str, caplog: pytest.LogCaptureFixture) -> None:
    forged = [replace(LEASE, incarnation="without", address="h:1"), replace(LEASE, incarnation="other", address="h:2")]
    async with (
        registry(url, token=TOKEN) as worker,
        registry(url, token=TOKEN) as reader,
        registry(url) as without,
        registry(url, token=OTHER_TOKEN) as other,
    ):
        await worker.publish(lambda: LEASE)
        await without.publish(lambda: forged[0])
        await other.publish(lambda: forged[1])
        assert await reader.leases("verifier") == [LEASE]
        assert len(await without.leases("verifier")) == 3
    assert "ignored the lease of verifier without: it is not signed with the shared token" in caplog.text
    assert "ignored the lease of verifier other: it is not signed with the shared token" in caplog.text


async def test_a_signed_lease_is_no_lease_elsewhere_or_later(url: str, caplog: pytest.LogCaptureFixture) -> None:
    redis = Redis.from_url(url)
    async with registry(url, token=TOKEN) as worker, registry(url, token=TOKEN) as reader:
        await worker.publish(lambda: LEASE)
        signed = await redis.get("eyas:lease:verifier:one")
        changed = signed.replace(b"127.0.0.1:1", b"127.0.0.1:2")
        assert changed != signed
        for role, incarnation, value in (
            ("draft", "one", signed),
            ("verifier", "two", signed),
            ("verifier", "three", changed),
        ):
            await redis.sadd(f"eyas:leases:{role}", incarnation)
            await redis.set(f"eyas:lease:{role}:{incarnation}", value)
        assert (await reader.leases("verifier"), await reader.leases("draft")) == ([LEASE], [])
        await worker.withdraw()
        async with registry(url, ttl=1.0, token=TOKEN) as brief:
            await brief.publish(lambda: LEASE)
            while (signed := await redis.get("eyas:lease:verifier:one")) is None:
                pass  # it had run out before its next heartbeat
        await redis.sadd("eyas:leases:verifier", "one")
        await redis.set("eyas:lease:verifier:one", signed)
        await until(partial(is_empty, reader))
    await redis.aclose()
    for reason in ("it is the lease of verifier one", "it is not signed"):
        assert reason in caplog.text


async def test_a_placement_is_found_again(url: str) -> None:
    async with registry(url) as one, registry(url) as other:
        await one.place("session", Placement("v", "d"))
        assert await other.placement("session") == Placement("v", "d")
        assert await other.placement("unknown") is None


async def test_a_placement_that_does_not_parse_is_none(url: str, caplog: pytest.LogCaptureFixture) -> None:
    redis = Redis.from_url(url)
    async with registry(url) as one:
        for text in ("{", '{"drafter": "d"}', "7", b"\xff"):
            await redis.set("eyas:placement:session", text)
            assert await one.placement("session") is None
            await one.place("session", Placement("v"))
    await redis.aclose()
    assert "does not parse" in caplog.text


@pytest.mark.parametrize(
    "url", ["", "host:6379", "redis+sentinel://host:1/main", "redis://me:secret@host:x", "redis://host?colour=red"]
)
def test_a_url_that_redis_does_not_take_is_a_clear_mistake(url: str) -> None:
    with pytest.raises(ConfigError, match=r"registry\.url is .*expected one such as") as raised:
        Registry(RegistryConfig(url))
    assert "secret" not in str(raised.value)


async def test_deployments_with_other_prefixes_share_a_redis(url: str) -> None:
    one, two = (Registry(RegistryConfig(url, 60.0, prefix=prefix)) for prefix in ("eyas", "other"))
    await one.publish(lambda: LEASE)
    await one.place("session", Placement("v"))
    assert await one.leases("verifier") == [LEASE]
    assert await two.leases("verifier") == []
    assert (await one.placement("session"), await two.placement("session")) == (Placement("v"), None)
    await one.withdraw()
    for registry in (one, two):
        await registry.close()
    with pytest.raises(ConfigError, match="prefix is empty"):
        RegistryConfig(prefix="")


async def test_known_leases_survive_a_redis_outage_or_empty_restart(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    port = free_port()
    with caplog.at_level(logging.INFO):
        with running_redis(port) as url:
            worker, reader = (Registry(RegistryConfig(url, 60.0, 0.05)) for _ in range(2))
            await worker.publish(lambda: LEASE)
            await reader.watch("verifier")
            assert reader.known("verifier") == (LEASE,)
        await worker.close()
        await until(lambda: "is away" in caplog.text)
        assert reader.known("verifier") == (LEASE,)
        with pytest.raises(RedisError):
            await reader.leases("verifier")
        await reader.place("session", Placement("v"))
        assert await reader.placement("session") is None
        with running_redis(port):
            await until(lambda: "is back" in caplog.text)
            assert reader.known("verifier") == (LEASE,)
            clock.now += 61.0
            await until(lambda: reader.known("verifier") == ())
        await reader.close()


async def test_a_worker_publishes_again_when_redis_returns(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    async with registry(url) as worker, registry(url) as reader:
        await worker.publish(lambda: LEASE)
        await reader.watch("verifier")
        assert reader.known("verifier") == ()
        with running_redis(port):
            await until(lambda: reader.known("verifier") == (LEASE,))
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert 2 <= len(warnings) <= 4, "one per registry and outage"
