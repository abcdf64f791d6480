"""Linear layers on the CPU over weights packed for oneDNN: a float32 model in, the same model out, faster over few rows.

torch multiplies float32 matrices by MKL, which takes two to three times as long for the 8 to 64 rows of a tree on processors
that are not Intel's (docs/decisions/0024-packed-weights.md). Legend: R rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class Joint:
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


class JoinedLinear(nn.Linear):
    """One of several linear layers over the same rows."""

    joint: Joint
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
    joint = Joint(_packed(weight), bias, [len(sibling.weight) for sibling in siblings])
    siblings[0].register_buffer("packed", joint.packed, persistent=False)  # for whoever counts or moves weights' memory
    for place, sibling in enumerate(siblings):
        del sibling.weight
        sibling.joint, sibling.place, sibling.bias = joint, place, None
        sibling.__class__ = JoinedLinear


@torch.no_grad()
def _pack(module: Any) -> None:
    module.register_buffer("packed", _packed(module.weight.detach()), persistent=False)
    del module.weight
    module.__class__ = PackedLinear


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)  # type: ignore[no-any-return]


def _multiply(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")  # type: ignore[no-any-return]
