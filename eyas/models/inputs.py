"""Packs ragged work into one forward pass: segments of rows in, index tensors and masks out. Knows no sequences.

Legend: R packed rows, B segments of a group, Q rows and K keys of the longest segment of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from eyas.tensors import Bools, Ints, upload


@dataclass(frozen=True)
class Segment:
    """Rows of one sequence in a forward pass.

    tokens, positions, slots: token id, absolute position and KV slot of each row, [n].
    prefix: slots of the tokens before them, in order of position; all rows see all of these, [L].
    visible: visible[i, j] tells whether row i sees row j, [n, n]; None for causal rows. No row sees a later one.
    wanted: rows whose logits are wanted, counted within the segment.
    """

    tokens: Ints
    positions: Ints
    slots: Ints
    prefix: Ints
    visible: Bools | None
    logits_indices: Ints


class Group:
    """Segments of similar size, padded to one shape (B, Q). Tensors are laid out when they are first asked for.

    run: first slot and last + 1 if the keys are one sequence's in consecutive slots, so that they need no gathering.
    """

    def __init__(self, segments: Sequence[Segment], starts: Ints, alone: bool, device: torch.device) -> None:
        """starts: packed row of each segment's first; alone: whether these are all segments of the pass."""
        self._segments = segments
        self._starts = starts
        self._device = device
        self._counts = [len(s.tokens) for s in segments]
        self._lengths = [len(s.prefix) for s in segments]
        self._padded = len(set(self._counts)) > 1
        self.shape = (len(segments), max(self._counts))
        self.run = _run(segments[0]) if len(segments) == 1 else None
        self._alone = alone

    @cached_property
    def whole(self) -> bool:
        """Whether the cells are all packed rows in their order."""
        return self._alone and not self._padded

    @cached_property
    def open(self) -> bool:
        """Whether every cell sees every key."""
        return self.shape[1] == 1 and len(set(self._lengths)) == 1

    @cached_property
    def rows(self) -> Tensor:
        """Packed row of each cell [B, Q]; padding repeats a row."""
        return _tensor(self._cell_rows + self._starts[:, None], self._device)

    @cached_property
    def cells(self) -> Tensor | None:
        """Flat cells that are no padding [n]; None if all."""
        if not self._padded:
            return None
        return _tensor(np.flatnonzero(np.arange(self.shape[1]) < np.array(self._counts)[:, None]), self._device)

    @cached_property
    def keys(self) -> Tensor:
        """Slot of each key [B, K]."""
        return self._keyed([np.concatenate([s.prefix, s.slots]) for s in self._segments])

    @cached_property
    def key_positions(self) -> Tensor:
        """Absolute position of each key [B, K], for sliding windows."""
        return self._keyed([np.concatenate([np.arange(len(s.prefix)), s.positions]) for s in self._segments])

    @cached_property
    def query_positions(self) -> Tensor:
        """Absolute position of each cell [B, Q]."""
        rows = zip(self._segments, self._cell_rows, strict=True)
        return _tensor(np.stack([s.positions[r] for s, r in rows]), self._device)

    @cached_property
    def mask(self) -> Tensor:
        """What each cell sees [B, Q, K]."""
        mask = np.zeros((*self.shape, self._num_keys), dtype=np.bool_)
        mask[:, :, 0] = True  # a padding row must see something, or its softmax is NaN
        for b, segment in enumerate(self._segments):
            n, length = self._counts[b], self._lengths[b]
            mask[b, :n, :length] = True
            mask[b, :n, length : length + n] = np.tri(n, dtype=np.bool_) if segment.visible is None else segment.visible
        return upload(mask, self._device)

    @cached_property
    def _cell_rows(self) -> Ints:
        last: Ints = np.array(self._counts)[:, None] - 1
        return np.minimum(np.arange(self.shape[1]), last)

    @property
    def _num_keys(self) -> int:
        return max(map(sum, zip(self._counts, self._lengths, strict=True)))

    def _keyed(self, columns: Sequence[Ints]) -> Tensor:
        keys = np.empty((len(columns), self._num_keys), dtype=np.int64)
        for b, column in enumerate(columns):
            keys[b, : len(column)] = column
            keys[b, len(column) :] = column[0]  # of its own: what is masked still spreads if it is NaN
        return _tensor(keys, self._device)


@dataclass(frozen=True)
class MetadataShape:
    """Sizes of a pass over tables, padding included; a captured graph fixes them.

    rows, wanted: packed rows, and those whose logits are computed. tiles: runs of at most `tile_rows` rows of one segment.
    splits: parts into which the keys of a tile are cut.
    """

    rows: int
    wanted: int
    tiles: int
    tile_rows: int
    splits: int


@dataclass(frozen=True)
class AttentionMetadata:
    """What the kernel reads in place of groups; laid out by eyas.models.cuda.tables. All int32, views of `words`.

    words: everything. tiles: [tiles, 8]. positions, slots: [rows]. num_logits: rows whose logits are wanted, first of all
    that are computed.
    """

    shape: MetadataShape
    num_logits: int
    words: Tensor
    tiles: Tensor
    positions: Tensor
    slots: Tensor


@dataclass
class PackedInputs:
    """One forward pass. wanted: packed rows whose logits are wanted, in order of segments. biases keeps masks once made.

    attend: stands in for `eyas.models.attention.attend`; None takes that.
    tables: for the kernel, instead of groups; rows and wanted rows may then be padded at the end.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    logits_indices: Tensor
    groups: tuple[Group, ...]
    attend: Callable[..., Tensor] | None = None
    biases: dict[tuple[int, int | None, torch.dtype, int], Tensor] = field(default_factory=dict)
    tables: AttentionMetadata | None = None

    @cached_property
    def alone(self) -> Group | None:
        """The only group, if it is one segment."""
        group = self.groups[0] if self.groups else None
        return group if group and group.whole and group.shape[0] == 1 else None

    @property
    def num_logits(self) -> int:
        """Rows whose logits are wanted, without padding."""
        return self.tables.num_logits if self.tables else len(self.logits_indices)

    def bias(self, group: int, window: int | None, dtype: torch.dtype, heads_per_kv: int) -> Tensor | None:
        """Additive mask [B, 1, heads_per_kv * Q, K]: 0 where a cell sees a key, -inf elsewhere; None where all is seen.
        Shared by all layers."""
        if window is None and self.groups[group].open:
            return None
        wanted = (group, window, dtype, heads_per_kv)
        if wanted not in self.biases:
            self.biases[wanted] = _bias(self.groups[group], window, dtype, heads_per_kv)
        return self.biases[wanted]


def pack(segments: Sequence[Segment], device: torch.device) -> PackedInputs:
    """Lay segments one after the other. Segments of similar row count and prefix length share a padded group, so that a
    long one does not blow up the short ones beside it; the number of groups grows with the logarithm of lengths only."""
    starts = np.cumsum([0] + [len(s.tokens) for s in segments])
    buckets: dict[tuple[int, int], list[int]] = {}
    for index, segment in enumerate(segments):
        size = ((len(segment.tokens) - 1).bit_length() // 2, len(segment.prefix).bit_length() // 3)
        buckets.setdefault(size, []).append(index)
    alone = len(buckets) == 1
    return PackedInputs(
        tokens=_tensor(_joined([s.tokens for s in segments]), device),
        positions=_tensor(_joined([s.positions for s in segments]), device),
        slots=_tensor(_joined([s.slots for s in segments]), device),
        logits_indices=_tensor(_joined([s.logits_indices + starts[i] for i, s in enumerate(segments)]), device),
        groups=tuple(Group([segments[i] for i in b], starts[np.array(b)], alone, device) for b in buckets.values()),
    )


def _joined(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]


def _run(segment: Segment) -> tuple[int, int] | None:
    slots = segment.slots if not len(segment.prefix) else np.concatenate([segment.prefix, segment.slots])
    first, last = int(slots[0]), int(slots[-1])
    consecutive = last - first == len(slots) - 1 and bool((np.diff(slots) == 1).all())
    return (first, last + 1) if consecutive else None


def _bias(group: Group, window: int | None, dtype: torch.dtype, heads_per_kv: int) -> Tensor:
    mask = group.mask
    if window is not None:
        near = group.query_positions[:, :, None] - group.key_positions[:, None, :] < window
        mask = mask & near
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return bias[:, None].repeat(1, 1, heads_per_kv, 1)


def _tensor(array: Ints, device: torch.device) -> Tensor:
    return upload(np.ascontiguousarray(array, dtype=np.int64), device)
