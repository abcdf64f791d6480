"""URLs of the registry: bad ones are refused, passwords masked, and prefixes separate deployments."""

import pytest

from eyas.config import RegistryConfig, masked
from eyas.errors import ConfigError
from eyas.rpc.messages import Lease, Load, ModelInfo
from eyas.services.discovery.redis_registry import Placement, Registry

LEASE = Lease("verifier", "127.0.0.1:1", "one", ModelInfo("demo", "f1", 4096, 2048, "h1"), Load(1, 2, 3))


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


@pytest.mark.parametrize("url", ["redis+sentinel://host:26379/main", "redis://host:port/0", "host:6379"])
def test_a_bad_url_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(ConfigError, match=r"registry\.url is .*; expected one such as redis://"):
        Registry(RegistryConfig(url))


def test_passwords_in_urls_are_masked() -> None:
    assert masked("rediss://user:secret@host:1/0?password=hidden") == "rediss://***@host:1/0?password=***"
    assert masked("redis://host?sentinel_password=hidden&db=1") == "redis://host?sentinel_password=***&db=1"


def test_an_empty_prefix_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefix is empty"):
        RegistryConfig(prefix="")
