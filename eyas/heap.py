"""How this process keeps freed memory, where malloc is glibc's, and huge pages; elsewhere nothing happens.

A pass over 36 MB of weights looks up 9,000 pages of 4 KiB, or 18 of 2 MiB (docs/decisions/0025-huge-pages.md).

Between two steps a process that computes on the CPU keeps what it frees, and a service gives it back from time to time.
By default every thread has a heap of its own, and large blocks go back to the kernel at once, which clears them again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn

# Parameters of mallopt(3), from malloc.h, and the largest values that two of them take.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_NEVER_TRIM, _LARGEST_MMAP_THRESHOLD = 2**31 - 1, 32 << 20

HUGE_PAGE = 2 << 20
# Advice to madvise(2): collapse into huge pages now (Linux 6.1 and later), or when memory is first touched.
MADV_COLLAPSE, MADV_HUGEPAGE = 25, 14
MAPPINGS = Path("/proc/self/maps")


def keep_freed_memory() -> None:
    """Keep memory up to the peak, until `trim_heaps`.

    Each layer of a pass over many sequences takes and frees megabytes. Where they go back to the kernel, a layer with 64
    sequences takes 2,500 page faults, more time than all other work on them.
    """
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)


def share_heaps() -> None:
    """Let all threads share two heaps, so that what one frees serves the others. glibc alone has eight heaps a core."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def trim_heaps() -> None:
    """Return freed memory to the system, also what lies between used blocks.

    What `keep_freed_memory` kept goes too; the next step takes it again.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def to_huge_pages(tensors: Iterable[Tensor], collapse: bool = True) -> None:
    """Ask the kernel to move the memory of these tensors to huge pages. Addresses and contents stay.

    collapse: also move memory that is in use; without it, pages become huge when they are first touched. Where the kernel
    refuses, nothing changes. Tensors on other devices and wrapper tensors (quantised ones) are skipped.
    """
    plain = [tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"]
    wanted = {page for tensor in plain for page in _huge_pages_of(tensor)}
    if not wanted or not MAPPINGS.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    for mapping in _anonymous_mappings():
        for first, end in _runs(sorted(wanted.intersection(mapping))):
            memory = ctypes.c_void_p(first * HUGE_PAGE), ctypes.c_size_t((end - first) * HUGE_PAGE)
            if not collapse or madvise(*memory, MADV_COLLAPSE) != 0:
                madvise(*memory, MADV_HUGEPAGE)


def _huge_pages_of(tensor: Tensor) -> range:
    """Numbers of the huge pages that hold the tensor, in part or whole."""
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        start, size = torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    else:
        start, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
    return range(start // HUGE_PAGE, -(-(start + size) // HUGE_PAGE)) if size else range(0)


def _anonymous_mappings() -> Iterator[range]:
    """Whole huge pages of each writable mapping that belongs to no file."""
    for line in MAPPINGS.read_text().splitlines():
        span, rights, _, _, inode = line.split()[:5]
        first, end = (int(address, 16) for address in span.split("-"))
        if rights.startswith("rw") and inode == "0":
            yield range(-(-first // HUGE_PAGE), end // HUGE_PAGE)


def _runs(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Consecutive numbers as (first, last + 1)."""
    for _, run in groupby(enumerate(pages), lambda item: item[1] - item[0]):
        members = [page for _, page in run]
        yield members[0], members[-1] + 1
