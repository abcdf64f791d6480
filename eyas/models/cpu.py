"""Linear layers on the CPU over weights packed for oneDNN: a float32 model in, the same model out, faster over few rows.

torch multiplies float32 matrices by MKL, which takes two to three times as long for the 8 to 64 rows of a tree on processors
that are not Intel's (docs/decisions/0024-packed-weights.md). Legend: R rows, K inputs, N outputs.

Huge pages for what every pass reads, weights, keys and values, on the CPU under Linux.

A pass over 36 MB of weights touches 9,000 pages of 4 KiB and must find out where each of them lies; of 2 MiB it touches 18
(docs/decisions/0025-huge-pages.md).

A loaded model in, the same model out, its weights laid out as the CPU reads them fastest.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Rows that the packed layout is made for; it serves any number.
PACKED_ROWS = 8
# Layers that transformers calls one after the other on the same rows.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PackedLinear(nn.Linear):
    """A linear layer whose weight is kept in oneDNN's layout only."""

    packed: Tensor

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A copy [N, K], for a model that looks at more than the layer's output."""
        return self.packed.to_dense()

    def forward(self, rows: Tensor) -> Tensor:
        """rows [..., K] to [..., N]."""
        return _multiply(rows, self.packed, self.bias)


class MergedLinear:
    """Siblings in one product. The first computes for all, the last lets go of it."""

    def __init__(self, packed: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> None:
        """packed: the siblings' weights one below the other. sizes: N of each."""
        self.packed, self._bias, self._sizes = packed, bias, list(sizes)
        self._rows: Tensor | None = None
        self._parts: Sequence[Tensor] = ()

    def weight(self, place: int) -> Tensor:
        """A copy of the weight of the sibling at `place`."""
        return torch.split(self.packed.to_dense(), self._sizes)[place]

    def part(self, rows: Tensor, place: int) -> Tensor:
        """What the sibling at `place` makes of the rows."""
        if rows is not self._rows:
            self._rows, self._parts = rows, torch.split(_multiply(rows, self.packed, self._bias), self._sizes, -1)
        part = self._parts[place]
        if place == len(self._sizes) - 1:
            self._rows, self._parts = None, ()
        return part


class MergedLinearPart(nn.Linear):
    """One of several linear layers over the same rows."""

    joint: MergedLinear
    place: int

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A copy [N, K]."""
        return self.joint.weight(self.place)

    def forward(self, rows: Tensor) -> Tensor:
        """rows [..., K] to [..., N]."""
        return self.joint.part(rows, self.place)


def pack_weights(model: nn.Module) -> None:
    """Pack every plain linear layer of float32 on the CPU, where torch was built with oneDNN; others stay as they are."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for module in model.modules():
        for names in SIBLINGS:
            siblings: list[Any] = [getattr(module, name, None) for name in names]
            if all(_packs(sibling) for sibling in siblings) and len({sibling.weight.shape[1] for sibling in siblings}) == 1:
                _join(siblings)
    for module in model.modules():
        if _packs(module):
            _pack(module)


def _packs(module: Any) -> bool:
    weight = module.weight if type(module) is nn.Linear else None
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype == torch.float32


@torch.no_grad()
def _join(siblings: Sequence[Any]) -> None:
    biases = [sibling.bias for sibling in siblings if sibling.bias is not None]
    if len(biases) not in (0, len(siblings)):
        return
    weight = torch.cat([sibling.weight for sibling in siblings])
    bias = torch.cat(biases) if biases else None
    joint = MergedLinear(_packed(weight), bias, [len(sibling.weight) for sibling in siblings])
    siblings[0].register_buffer("packed", joint.packed, persistent=False)  # for whoever counts or moves weights' memory
    for place, sibling in enumerate(siblings):
        del sibling.weight
        sibling.joint, sibling.place, sibling.bias = joint, place, None
        sibling.__class__ = MergedLinearPart


@torch.no_grad()
def _pack(module: Any) -> None:
    module.register_buffer("packed", _packed(module.weight.detach()), persistent=False)
    del module.weight
    module.__class__ = PackedLinear


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)  # type: ignore[no-any-return]


def _multiply(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")  # type: ignore[no-any-return]


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


def lay_out(model: nn.Module) -> None:
    """Pack its linear layers and move its weights to huge pages; what is not on the CPU stays as it is."""
    pack_weights(model)
    to_huge_pages(weights_of(model))
