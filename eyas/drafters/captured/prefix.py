"""Slots of sessions side by side: one ragged list each in, one padded table out. Knows no heads.

Legend: S sessions, L prefix length, the longest or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eyas.cache.slots import Slots
from eyas.models.tensors import upload


@dataclass(frozen=True)
class Prefix:
    """index: slots of each session's prefix, padding behind them, int64 [S, L]. lengths: without padding, int64 [S]."""

    index: Tensor
    lengths: Tensor


def fill_in_slots(cells: Slots, slots: Sequence[Slots]) -> None:
    """Into the first rows of cells [S, L]. Padding names a session's own first slot: what is hidden spreads if it is NaN."""
    for row, own in zip(cells, slots, strict=False):
        row[: len(own)] = own
        row[len(own) :] = own[:1]


def tight_prefix(slots: Sequence[Slots], device: torch.device) -> Prefix:
    """On the device, padded to the longest."""
    lengths = np.array([len(own) for own in slots])
    index = np.empty((len(slots), int(lengths.max())), dtype=np.int64)
    fill_in_slots(index, slots)
    return Prefix(upload(index, device), upload(lengths, device))
