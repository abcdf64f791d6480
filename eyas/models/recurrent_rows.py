"""Lays the rows of a pass out for recurrent layers: where each row's convolution looks, and which rows are computed at once.

Legend: B segments, R packed rows, W width of the convolution, Q rows of the longest piece of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from eyas.arrays import Bools, Ints
from eyas.cache.states import START, StateStep
from eyas.device.transfer import upload
from eyas.kernels.arguments import BLOCK_ROWS, NO_MASK, ScanTables

if TYPE_CHECKING:
    from eyas.models.inputs import Segment

# Rows of a prompt that are computed at once: the work on a row grows with them, the work on states falls.
PIECE_ROWS = 64


@dataclass(frozen=True)
class Pieces:
    """Rows of several segments that are computed at once, padded to one shape.

    Attributes:
        segments: which, [B].
        rows: their packed rows [B, Q]; padding repeats a row.
        is_row: whether a cell is no padding [B, Q].
        seen: whether a cell lies on the path to another, itself included: [B, Q, Q].
        kept: whether a cell's update goes to the state behind the piece: all of a prompt's, none of a tree's [B, Q].
        last: the cell at the end of a piece [B].
        marked: pieces behind which the state is kept, and the rows of the pools for it.
    """

    segments: Tensor
    rows: Tensor
    is_row: Tensor
    seen: Tensor
    kept: Tensor
    last: Tensor
    marked: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class ConvolutionWindows:
    """Places in the inputs of a convolution: W - 1 columns for each segment, and behind these all packed rows.

    Attributes:
        columns: for each segment, which of its old columns and pending inputs are its columns [B, W - 1].
        rows: the inputs that each row sees, the oldest first [R, W].
        ends: the columns to keep of each segment [B, W - 1], and of each mark.
        marks: rows of the pools that take the columns of marks.
    """

    columns: Tensor
    rows: Tensor
    ends: Tensor
    marks: tuple[Tensor, Tensor] | None


class RecurrentRows:
    """Layout of a pass for recurrent layers.

    Attributes:
        read, write: rows of the pools [B].
        pending: rows of the stash to add to what is read [B, most], its mask, and the last of each segment; None for none.
        stashed: packed rows of tree nodes, and their rows of the stash; None for none.

    Args:
        scratch: row of the pools for segments without a StateStep, which begin at zero.
    """

    def __init__(self, segments: Sequence[Segment], scratch: int, device: torch.device) -> None:
        self._segments = segments
        self._device = device
        self._steps = [segment.states or StateStep(START, scratch) for segment in segments]
        self._counts: Ints = np.array([len(segment.tokens) for segment in segments], np.int64)
        self._starts: Ints = self._counts.cumsum() - self._counts
        self._parents = np.concatenate([_parents(*own) for own in zip(segments, self._starts.tolist(), strict=True)])
        self._is_tree = [s.stash >= 0 or _is_branched(own) for s, own in zip(self._steps, segments, strict=True)]
        self._windows: dict[int, ConvolutionWindows] = {}
        self.read = self._upload([step.read for step in self._steps])
        self.write = self._upload([step.write for step in self._steps])
        self.pending = self._pending()
        self.stashed = self._stashed()

    def windows(self, width: int) -> ConvolutionWindows:
        """Return where convolutions of this width in tokens look."""
        if width not in self._windows:
            self._windows[width] = self._find_windows(width)
        return self._windows[width]

    def _pending(self) -> tuple[Tensor, Tensor, Tensor] | None:
        most = max(len(step.pending) for step in self._steps)
        if not most:
            return None
        counts = np.array([len(step.pending) for step in self._steps])
        rows = np.zeros((len(self._steps), most), np.int64)
        for row, step in zip(rows, self._steps, strict=True):
            row[: len(step.pending)] = step.pending
        mask = np.arange(most) < counts[:, None]
        return upload(rows, self._device), upload(mask, self._device), self._upload(np.maximum(counts - 1, 0))

    def _stashed(self) -> tuple[Tensor, Tensor] | None:
        found = [
            (start + np.arange(count), step.stash + np.arange(count))
            for step, start, count in zip(self._steps, self._starts.tolist(), self._counts.tolist(), strict=True)
            if step.stash >= 0
        ]
        if not found:
            return None
        rows, places = (np.concatenate(side) for side in zip(*found, strict=True))
        return self._upload(rows), self._upload(places)

    def _find_windows(self, width: int) -> ConvolutionWindows:
        past = width - 1
        count = len(self._steps)
        owners = np.repeat(np.arange(count), self._counts)
        # up: the input before each one. A segment's first row follows its columns, the latest first.
        columns = np.arange(count * past)
        rows = np.where(self._parents < 0, owners * past + past - 1, count * past + self._parents)
        up = np.concatenate([columns - (columns % past > 0), rows])
        seen = np.empty((len(owners), width), np.int64)
        seen[:, past] = count * past + np.arange(len(owners))
        for column in range(past - 1, -1, -1):
            seen[:, column] = up[seen[:, column + 1]]
        own = columns.reshape(count, past)
        ends = np.where(np.array(self._is_tree)[:, None], own, seen[self._starts + self._counts - 1, 1:])
        marks = [(start + after - 1, row) for step, start in zip(self._steps, self._starts, strict=True)
                 for after, row in step.marks]  # fmt: skip
        pending = np.array([len(step.pending) for step in self._steps])
        kept: tuple[Tensor, Tensor] | None = None
        if marks:
            at, into = np.array(marks).T
            kept = self._upload(seen[at, 1:]), self._upload(into)
        latest = pending[:, None] + np.arange(past)
        return ConvolutionWindows(self._upload(latest), self._upload(seen), self._upload(ends), kept)

    @cached_property
    def waves(self) -> list[Pieces]:
        """Cut prompts into pieces. The n-th pieces of all segments are computed together, pieces of similar size at once."""
        cuts = [_cuts(count, step, count if is_tree else PIECE_ROWS) for count, step, is_tree in
                zip(self._counts.tolist(), self._steps, self._is_tree, strict=True)]  # fmt: skip
        waves = list[Pieces]()
        for number in range(max(map(len, cuts)) - 1):
            buckets: dict[int, list[tuple[int, int, int]]] = {}
            for index, own in enumerate(cuts):
                if number + 1 < len(own):
                    start, end = own[number], own[number + 1]
                    buckets.setdefault((end - start - 1).bit_length() // 2, []).append((index, start, end))
            waves += [self._pieces(bucket) for bucket in buckets.values()]
        return waves

    @cached_property
    def tables(self) -> ScanTables:
        """Return the same rows as the recurrent kernel reads them."""
        segments, blocks, pending = list[int](), list[int](), list[int]()
        masks = [NO_MASK]
        num_blocks = num_cells = num_spare = 0
        fields = zip(self._segments, self._steps, self._starts.tolist(), self._counts.tolist(), self._is_tree, strict=True)
        for segment, step, start, count, is_tree in fields:
            cuts = _cuts(count, step, BLOCK_ROWS)
            marks = dict(step.marks)
            for first, end in pairwise(cuts):
                blocks += [start + first, start + end, marks.get(end, -1)]
            visible = segment.visible if is_tree else None
            num_spare += segment.states is None
            write = -num_spare if segment.states is None else step.write
            segments += [num_blocks, num_blocks + len(cuts) - 1, start, count, step.read, write, len(pending)]
            segments += [len(step.pending), step.stash, -1 if visible is None else num_cells, int(is_tree)]
            pending += step.pending.tolist()
            num_blocks += len(cuts) - 1
            if visible is not None:
                masks.append(visible.ravel())
                num_cells += visible.size
        words = self._upload(segments + blocks + pending)
        ends = len(segments), len(segments) + len(blocks)
        return ScanTables(
            words[: ends[0]], words[ends[0] : ends[1]], words[ends[1] :], upload(np.concatenate(masks), self._device),
            num_spare,
        )  # fmt: skip

    def _pieces(self, bucket: Sequence[tuple[int, int, int]]) -> Pieces:
        counts = np.array([end - start for _, start, end in bucket])
        most = int(counts.max())
        cells = np.minimum(np.arange(most), counts[:, None] - 1)
        seen: Bools = np.zeros((len(bucket), most, most), np.bool_)
        marked = list[tuple[int, int]]()
        for place, (index, start, end) in enumerate(bucket):
            count = end - start
            visible = self._segments[index].visible
            seen[place, :count, :count] = np.tri(count, dtype=np.bool_) if visible is None else visible
            marked += [(place, row) for after, row in self._steps[index].marks if after == end]
        is_row = np.arange(most) < counts[:, None]
        is_prompt = np.array([not self._is_tree[index] for index, _, _ in bucket])
        rows = cells + np.array([self._starts[index] + start for index, start, _ in bucket])[:, None]
        return Pieces(
            self._upload([index for index, _, _ in bucket]),
            self._upload(rows),
            upload(is_row, self._device),
            upload(seen, self._device),
            upload(is_row & is_prompt[:, None], self._device),
            self._upload(counts - 1),
            (self._upload([place for place, _ in marked]), self._upload([row for _, row in marked])) if marked else None,
        )

    def _upload(self, values: Sequence[int] | Ints) -> Tensor:
        # kernels read a tensor's memory, whose numbers must lie in its order
        return upload(np.ascontiguousarray(values, np.int64), self._device)


def _is_branched(segment: Segment) -> bool:
    """Return whether a segment is no chain."""
    visible = segment.visible
    return visible is not None and bool((visible != np.tri(len(visible), dtype=np.bool_)).any())


def _parents(segment: Segment, start: int) -> Ints:
    """Return the packed row before each row of a segment that begins at `start`; -1 for the first of a path.

    Rows come after their ancestors, so the parent is the last row that a row sees before itself.
    """
    assert not len(segment.others), "recurrent layers have no nodes of earlier passes"
    count = len(segment.tokens)
    if segment.visible is None:
        found = np.arange(count) - 1
    else:
        above = np.tril(segment.visible, -1)
        found = np.where(above.any(1), count - 1 - above[:, ::-1].argmax(1), -1)
    return np.where(found < 0, -1, found + start)


def _cuts(count: int, step: StateStep, most: int) -> list[int]:
    """Return where the pieces of a segment begin and end. most: rows of one."""
    return sorted({*range(0, count, most), *(after for after, _ in step.marks), count})
