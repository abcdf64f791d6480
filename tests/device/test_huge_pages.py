"""Weights lie on huge pages where the kernel grants them, and keep their values."""

import ctypes
import mmap
from pathlib import Path

import pytest
import torch
from torch import nn

from eyas.cache.kv_cache import KVCache, KVShape
from eyas.device.host import trim_heaps
from eyas.device.memory import HUGE_PAGE, MADV_COLLAPSE, to_huge_pages
from eyas.models.backends.packed_weights import pack_weights

# The kernel may find no free huge page once, and some a moment later. Memory that never asks for them gets none, so half
# of it on huge pages is proof.
ATTEMPTS = 5
SHAPE = KVShape(4, 40, 40)
# Advice to madvise(2) on what core dumps hold.
MADV_DONTDUMP, MADV_DODUMP = 16, 17


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
    """Bytes on huge pages, among the whole huge pages inside this memory.

    The system counts them for each mapping, so this memory is a mapping of its own meanwhile: one that is not dumped.
    """
    first, end = -(-start // HUGE_PAGE) * HUGE_PAGE, (start + size) // HUGE_PAGE * HUGE_PAGE
    madvise, memory = ctypes.CDLL(None).madvise, (ctypes.c_void_p(first), ctypes.c_size_t(end - first))
    assert madvise(*memory, MADV_DONTDUMP) == 0
    total, inside = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            name, *rest = line.split()
            if "-" in name and not name.endswith(":"):
                begins, ends = (int(address, 16) for address in name.split("-"))
                inside = first <= begins and ends <= end
            elif name == "AnonHugePages:" and inside:
                total += int(rest[0]) * 1024
    assert madvise(*memory, MADV_DODUMP) == 0
    return total


def own_weight(num_outputs: int, num_inputs: int) -> nn.Parameter:
    """A random weight in memory that this process never had before: no heap, whose pages may be huge already."""
    memory = mmap.mmap(-1, 4 * num_outputs * num_inputs, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    weight = torch.frombuffer(memory, dtype=torch.float32).view(num_outputs, num_inputs)
    return nn.Parameter(weight.normal_(generator=torch.Generator().manual_seed(0)))


@pytest.mark.skipif(not granted(), reason="this kernel makes no huge pages when asked, or without being asked")
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_weights_lie_on_huge_pages(packed: bool) -> None:
    layer = nn.Linear(1024, 10240, bias=False)
    layer.weight = own_weight(10240, 1024)  # 40 MiB
    before = layer(torch.ones(2, 1024))
    if packed:
        pack_weights(layer)
    weight = layer.packed if packed else layer.weight
    if weight.is_mkldnn:
        start, size = torch.ops.mkldnn.data_ptr(weight), torch.ops.mkldnn._nbytes(weight)
    else:
        start, size = weight.data_ptr(), weight.nbytes
    assert packed or huge_bytes(start, size) == 0
    for _ in range(ATTEMPTS):
        to_huge_pages([*layer.parameters(), *layer.buffers()])
        moved = huge_bytes(start, size)
        if moved > size // 2:
            break
    if moved <= size // 2 and not granted(size // HUGE_PAGE):
        pytest.skip("no memory in one piece is left")
    assert moved > size // 2
    torch.testing.assert_close(layer(torch.ones(2, 1024)), before, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not granted(), reason="this kernel makes no huge pages when asked, or without being asked")
def test_slots_take_huge_pages_when_they_are_used() -> None:
    trim_heaps()  # a heap that keeps freed memory would clear it, which uses its small pages
    caches, gains = [], []
    for _ in range(ATTEMPTS):
        caches.append(KVCache(2**16, [SHAPE], 0, torch.float32, torch.device("cpu")))  # kept: the next takes other memory
        keys = caches[-1].keys[0]  # 40 MiB
        to_huge_pages([keys], collapse=False)
        before = huge_bytes(keys.data_ptr(), keys.nbytes)
        keys += 1
        gains.append(huge_bytes(keys.data_ptr(), keys.nbytes) - before)
        if gains[-1] > keys.nbytes // 2:
            return
        if not granted(keys.nbytes // HUGE_PAGE):
            pytest.skip("no memory in one piece is left")
    pytest.fail(f"huge pages hold {gains} bytes of {keys.nbytes}")


def test_tensors_without_memory_are_skipped() -> None:
    to_huge_pages([torch.empty(0, 4), torch.empty(4, 4, device="meta")])
