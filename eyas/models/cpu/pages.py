"""Huge pages for what every pass reads, weights, keys and values, on the CPU under Linux.

A pass over 36 MB of weights touches 9,000 pages of 4 KiB and must find out where each of them lies; of 2 MiB it touches 18
(docs/decisions/0025-huge-pages.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path

import torch
from torch import Tensor, nn

HUGE = 2 << 20
# Advice to the kernel: huge pages here now (Linux 6.1 and later); they are welcome, which it sees to in its own time.
NOW, WELCOME = 25, 14
MAPPINGS = Path("/proc/self/maps")


def to_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Have the memory of these tensors moved to huge pages, with what lies between them; addresses and contents stay.

    A wish: where the kernel does not grant it nothing changes. Tensors that are not on the CPU or made of others, as
    quantised ones are, are passed over.
    """
    wanted = {block for tensor in tensors if _has_memory(tensor) for block in _blocks(tensor)}
    if not wanted or not MAPPINGS.exists():
        return
    advise = ctypes.CDLL(None).madvise
    for piece in _anonymous():
        for first, end in _runs(sorted(wanted.intersection(piece))):
            place = ctypes.c_void_p(first * HUGE), ctypes.c_size_t((end - first) * HUGE)
            if advise(*place, NOW) != 0:
                advise(*place, WELCOME)


def weights_of(model: nn.Module) -> Iterator[Tensor]:
    """All that a model computes with."""
    return chain(model.parameters(), model.buffers())


def _has_memory(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"


def _blocks(tensor: Tensor) -> range:
    """Numbers of the huge pages that hold it, in part or whole."""
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        start, size = torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    else:
        start, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
    return range(start // HUGE, -(-(start + size) // HUGE)) if size else range(0)


def _anonymous() -> Iterator[range]:
    """The whole huge pages of each piece of writable memory that is no file's."""
    for line in MAPPINGS.read_text().splitlines():
        span, rights, _, _, inode = line.split()[:5]
        first, end = (int(address, 16) for address in span.split("-"))
        if rights.startswith("rw") and inode == "0":
            yield range(-(-first // HUGE), end // HUGE)


def _runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Numbers in a row, the first and one past the last."""
    for _, run in groupby(enumerate(blocks), lambda place: place[1] - place[0]):
        members = [block for _, block in run]
        yield members[0], members[-1] + 1
