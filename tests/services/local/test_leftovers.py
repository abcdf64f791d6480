"""What is no longer needed goes back to the system: folders of clusters that were killed, and freed memory."""

import ctypes
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from eyas.device.host import trim_heaps
from eyas.services.local.cluster import free_port, running_cluster

# Redis is the only process of a cluster without services.
RUN = """
from eyas.services.local.cluster import free_port, running_cluster
with running_cluster([], free_port()) as cluster:
    print(cluster.children[0].log.parent, flush=True)
    input()
"""
BLOCK_BYTES, NUM_BLOCKS = 4000, 16_000


def folders(parent: Path) -> set[Path]:
    return set(parent.glob("eyas-*"))


def test_a_start_removes_the_folders_of_killed_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def start() -> tuple[subprocess.Popen[str], Path]:
        pipe, environment = subprocess.PIPE, os.environ | {"TMPDIR": str(tmp_path)}
        process = subprocess.Popen([sys.executable, "-c", RUN], stdin=pipe, stdout=pipe, text=True, env=environment)
        assert process.stdout
        return process, Path(process.stdout.readline().strip())

    with start()[0] as killed, start()[0] as alive:
        assert len(folders(tmp_path)) == 2
        killed.kill()
        killed.wait()
        with suppress(ZeroDivisionError), running_cluster([], free_port()):
            assert len(folders(tmp_path)) == 2, "the folder of the killed one has gone"
            raise ZeroDivisionError
        with running_cluster([], free_port()):
            assert len(folders(tmp_path)) == 3, "an error leaves the logs"
        alive.communicate("\n")
    assert alive.returncode == 0
    assert len(folders(tmp_path)) == 1


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
