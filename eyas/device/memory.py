"""Words for a device that is out of memory, and huge pages for tensors on the host.

A pass over 36 MB of weights looks up 9,000 pages of 4 KiB, or 18 of 2 MiB (docs/decisions/0025-huge-pages.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, groupby
from pathlib import Path

import torch
from torch import Tensor, nn

from eyas.device.transfer import MAX_REASON
from eyas.errors import OutOfMemory

HUGE_PAGE = 2 << 20
# Advice to madvise(2): collapse into huge pages now (Linux 6.1 and later), or when memory is first touched.
MADV_COLLAPSE, MADV_HUGEPAGE = 25, 14
MAPPINGS = Path("/proc/self/maps")


@contextmanager
def explain_out_of_memory(problem: str, device: torch.device | str, remedy: str) -> Iterator[None]:
    """Raise OutOfMemory where the body finds no memory.

    Args:
        problem: "no memory for" what it makes.
        remedy: what to do.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(out_of_memory_text(problem, torch.device(device), remedy, error)) from error


def out_of_memory_text(problem: str, device: torch.device, remedy: str, error: Exception) -> str:
    """Return the problem, how much is free, and what to do; then the reason that torch or NumPy gives."""
    free = "an unknown number of"
    if device.type == "cuda" and torch.cuda.is_available():
        free = f"{torch.cuda.mem_get_info(device)[0] / 2**30:.2f}"
    reason = str(error).partition("\n")[0][:MAX_REASON]
    return f"{problem} on {device}, where {free} GiB are free: {remedy}. {reason}"


def to_huge_pages(tensors: Iterable[Tensor], collapse: bool = True) -> None:
    """Ask the kernel to move the memory of these tensors to huge pages. Addresses and contents stay.

    collapse: also move memory that is in use; without it, pages become huge when they are first touched. Where the kernel
    refuses, and for less than a huge page in all, nothing changes. Tensors on other devices and wrapper tensors (quantised
    ones) are skipped.
    """
    plain = [tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"]
    spans = [_memory_of(tensor) for tensor in plain]
    if sum(size for _, size in spans) < HUGE_PAGE or not MAPPINGS.exists():
        return
    wanted = set(chain.from_iterable(range(at // HUGE_PAGE, -(-(at + size) // HUGE_PAGE)) for at, size in spans if size))
    madvise = ctypes.CDLL(None).madvise
    # Advice on what is first touched skips memory around a tensor that is none; to collapse, a page must lie in one mapping.
    parts = [wanted.intersection(mapping) for mapping in _anonymous_mappings()] if collapse else [wanted]
    for pages in parts:
        for first, end in _runs(sorted(pages)):
            memory = ctypes.c_void_p(first * HUGE_PAGE), ctypes.c_size_t((end - first) * HUGE_PAGE)
            if not collapse or madvise(*memory, MADV_COLLAPSE) != 0:
                madvise(*memory, MADV_HUGEPAGE)


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of the tensor's memory."""
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _anonymous_mappings() -> Iterator[range]:
    """Yield the whole huge pages of each writable mapping that belongs to no file."""
    for line in MAPPINGS.read_text().splitlines():
        span, rights, _, _, inode = line.split()[:5]
        first, end = (int(address, 16) for address in span.split("-"))
        if rights.startswith("rw") and inode == "0":
            yield range(-(-first // HUGE_PAGE), end // HUGE_PAGE)


def _runs(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the consecutive numbers as (first, last + 1)."""
    for _, run in groupby(enumerate(pages), lambda item: item[1] - item[0]):
        members = [page for _, page in run]
        yield members[0], members[-1] + 1
