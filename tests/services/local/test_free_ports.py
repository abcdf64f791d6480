"""A free port belongs to the process that asked for it, although nothing listens there yet."""

import subprocess
import sys

import pytest

from eyas.services.local import cluster
from eyas.services.local.cluster import free_port

# Few enough that ports drawn without a memory would repeat.
PORTS = (20_000, 20_064)
ASK = (
    "from eyas.services.local import cluster as c; c.SERVICE_PORTS = (20_000, 20_064); "
    "print(*(c.free_port() for _ in range(20)))"
)


def test_no_free_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "SERVICE_PORTS", PORTS)
    ours = [free_port() for _ in range(20)]
    theirs = subprocess.run([sys.executable, "-c", ASK], check=True, capture_output=True, text=True).stdout.split()
    assert len({*ours, *map(int, theirs)}) == 40
