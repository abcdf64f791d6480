"""What is no longer needed goes back to the system: folders of clusters, and freed memory."""

import ctypes
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from eyas.device.host import trim_heaps
from eyas.services.local.cluster import free_port, running_cluster

BLOCK_BYTES, NUM_BLOCKS = 4000, 16_000


def test_only_an_error_leaves_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis is the only process of a cluster without services."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with running_cluster([], free_port()):
        assert len(list(tmp_path.glob("eyas-*"))) == 1
    assert not list(tmp_path.glob("eyas-*"))
    with suppress(ZeroDivisionError), running_cluster([], free_port()):
        raise ZeroDivisionError
    assert len(list(tmp_path.glob("eyas-*"))) == 1


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and glibc")
def test_freed_memory_below_what_is_in_use_is_returned() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    for block in blocks[:-1]:
        libc.free(block)
    before = resident_bytes()
    trim_heaps()
    assert before - resident_bytes() > BLOCK_BYTES * NUM_BLOCKS / 2
    libc.free(blocks[-1])
