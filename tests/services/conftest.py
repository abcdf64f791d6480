"""An empty registry for every test that asks for one."""

from collections.abc import Iterator

import pytest
from redis import Redis

from eyas.services.local.cluster import free_port
from tests.services.redis_server import running_redis


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with running_redis(free_port()) as url:
        yield url


@pytest.fixture
def url(redis_url: str) -> str:
    with Redis.from_url(redis_url) as client:
        client.flushall()
    return redis_url
