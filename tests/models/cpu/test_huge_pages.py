"""Weights lie on huge pages where the kernel grants them, and keep their values."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
import torch
from torch import nn

from eyas.cache.kv_cache import KVCache
from eyas.models.cpu import HUGE_PAGE, MADV_COLLAPSE, pack_weights, to_huge_pages

# The kernel may find no free huge page once, and some a moment later. What never asks for them never gets them.
ATTEMPTS = 5


def granted(num_huge: int = 8) -> bool:
    """Whether this kernel collapses memory into huge pages on request, but not by itself."""
    policy = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not policy.exists() or "[always]" in policy.read_text():
        return False
    size = (num_huge + 1) * HUGE_PAGE
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    inside = -(-start // HUGE_PAGE) * HUGE_PAGE
    return bool(
        ctypes.CDLL(None).madvise(ctypes.c_void_p(inside), ctypes.c_size_t(num_huge * HUGE_PAGE), MADV_COLLAPSE) == 0
    )


def huge_bytes(start: int, size: int) -> int:
    """Bytes on huge pages in the mappings of this process that overlap these addresses."""
    total, inside = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            name, *rest = line.split()
            if "-" in name and not name.endswith(":"):
                first, end = (int(address, 16) for address in name.split("-"))
                inside = first < start + size and start < end
            elif name == "AnonHugePages:" and inside:
                total += int(rest[0]) * 1024
    return total


@pytest.mark.skipif(not granted(), reason="this kernel makes no huge pages when asked, or without being asked")
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_weights_lie_on_huge_pages(packed: bool) -> None:
    layer = nn.Linear(1024, 10240, bias=False)  # 40 MiB, which glibc never takes from memory that it has used before
    before = layer(torch.ones(2, 1024))
    if packed:
        pack_weights(layer)
    weight = layer.packed if packed else layer.weight
    if weight.is_mkldnn:
        start, size = torch.ops.mkldnn.data_ptr(weight), torch.ops.mkldnn._nbytes(weight)
    else:
        start, size = weight.data_ptr(), weight.nbytes
    earlier = huge_bytes(start, size)
    for _ in range(ATTEMPTS):
        to_huge_pages([*layer.parameters(), *layer.buffers()])
        moved = huge_bytes(start, size) - earlier
        if moved >= size - 2 * HUGE_PAGE:
            break
    if moved < size - 2 * HUGE_PAGE and not granted(size // HUGE_PAGE):
        pytest.skip("no memory in one piece is left")
    assert moved >= size - 2 * HUGE_PAGE
    torch.testing.assert_close(layer(torch.ones(2, 1024)), before, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not granted(), reason="this kernel makes no huge pages when asked, or without being asked")
def test_slots_take_huge_pages_when_they_are_used() -> None:
    gains = []
    for _ in range(ATTEMPTS):
        keys = KVCache(2**16, [(4, 40)], 0, torch.float32, torch.device("cpu")).keys[0]  # 40 MiB
        to_huge_pages([keys], collapse=False)
        before = huge_bytes(keys.data_ptr(), keys.nbytes)  # the mapping may have been joined with that of other tensors
        keys += 1
        gains.append(huge_bytes(keys.data_ptr(), keys.nbytes) - before)
        if gains[-1] > keys.nbytes // 2:
            return
        if not granted(keys.nbytes // HUGE_PAGE):
            pytest.skip("no memory in one piece is left")
    pytest.fail(f"huge pages hold {gains} bytes of {keys.nbytes}")


def test_tensors_without_memory_are_skipped() -> None:
    to_huge_pages([torch.empty(0, 4), torch.empty(4, 4, device="meta")])
