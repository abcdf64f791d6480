"""The inputs of one forward pass: segments of rows, and the index tensors and masks that attention reads for them.

Legend: R packed rows, B segments of a group, Q rows and K keys of the longest segment of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.arrays import Bools, Int32s, Ints
from eyas.cache.slot_tables import TableId
from eyas.cache.states import StateStep
from eyas.device.transfer import upload
from eyas.kernels.arguments import NO_MASK, NO_SLOTS, RowKeys
from eyas.models.recurrent_rows import RecurrentRows
from eyas.protocol.commit import NoiseKey
from eyas.sampling.acceptance import PackedTrees


class Segment(NamedTuple):
    """Rows of one sequence in a forward pass.

    tokens, positions, slots: token id, absolute position and KV slot of each row, [n].
    prefix: slots of the tokens before the rows, ordered by position, [L]. Every row sees the whole prefix.
    visible: visible[i, j] is whether row i sees row j, [n, n]; None for causal rows. No row sees a later one.
    logits_indices: rows whose logits are computed, counted within the segment.
    noise_key: lets ranks that share the vocabulary draw at these rows. None: rank 0 gets their logits.
    others: slots of earlier rows that only some rows see, such as nodes of a draft tree that grows, [m]. visible is then
        [n, m + n], these first. Not for sliding windows, nor for parts at fixed positions.
    table: the slot table that begins with the prefix; None if it is of this pass alone.
    states: of recurrent layers; None begins at zero and keeps nothing.
    """

    tokens: Ints
    positions: Ints
    slots: Ints
    prefix: Ints
    visible: Bools | None
    logits_indices: Ints
    noise_key: NoiseKey | None = None
    others: Ints = NO_SLOTS
    table: TableId | None = None
    states: StateStep | None = None

    def part(self, start: int, end: int) -> Segment:
        """Return rows `start` to `end` of a causal segment; the rows before them join the prefix."""
        assert self.visible is None, "only causal segments can be cut"
        inside = (self.logits_indices >= start) & (self.logits_indices < end)
        return Segment(
            tokens=self.tokens[start:end],
            positions=self.positions[start:end],
            slots=self.slots[start:end],
            prefix=np.concatenate([self.prefix, self.slots[:start]]),
            visible=None,
            logits_indices=self.logits_indices[inside] - start,
            noise_key=self.noise_key,
        )


class SegmentRows(NamedTuple):
    """Rows of all segments of a pass, one segment after the other.

    Attributes:
        tokens, positions, slots: of the rows, [R].
        logits_indices: packed rows whose logits are computed.
        counts: rows of each segment, [B].
    """

    tokens: Ints
    positions: Ints
    slots: Ints
    logits_indices: Ints
    counts: Ints


@dataclass(eq=False)
class Segments(Sequence[Segment]):
    """The segments of a pass, with the rows of all of them as arrays.

    Attributes:
        rows: of all segments.
        prefixes, noise_keys, tables, states: as in Segment, [B].
        trees: what the segments are, if they were made as arrays of trees. Then each segment is made on first use.
    """

    rows: SegmentRows
    prefixes: Sequence[Ints]
    noise_keys: Sequence[NoiseKey | None]
    tables: Sequence[TableId | None]
    states: Sequence[StateStep | None]
    trees: PackedTrees | None = None
    _given: Sequence[Segment] = ()

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Segments:
        """Return any segments of a pass with their arrays; the same object if it has them."""
        if isinstance(segments, Segments):
            return segments
        tokens, positions, slots, wanted = (
            np.concatenate([NO_SLOTS, *[getattr(segment, name) for segment in segments]])
            for name in ("tokens", "positions", "slots", "logits_indices")
        )
        counts = np.array([len(s.tokens) for s in segments], np.int64)
        num_wanted = np.array([len(s.logits_indices) for s in segments], np.int64)
        # Wanted rows are numbered within their segment; packed rows begin where the segment does.
        wanted = wanted + np.repeat(counts.cumsum() - counts, num_wanted)
        return cls(
            SegmentRows(tokens, positions, slots, wanted, counts),
            prefixes=[s.prefix for s in segments],
            noise_keys=[s.noise_key for s in segments],
            tables=[s.table for s in segments],
            states=[s.states for s in segments],
            _given=segments,
        )

    @property
    def num_logits(self) -> int:
        """Rows whose logits are asked for."""
        return len(self.rows.logits_indices)

    def row_keys(self) -> RowKeys:
        """Return the keys that the rows see, for the kernels of the CPU."""
        counts, ends, prefixes = self.rows.counts, np.cumsum(self.rows.counts), self.prefixes
        causal, num_others = np.zeros(len(counts), np.bool_), np.zeros(len(counts), np.int64)
        if self.trees is not None:
            masks = self.trees.masks
        else:
            prefixes = [np.concatenate([s.prefix, s.others]) if len(s.others) else s.prefix for s in self._given]
            num_others[:] = [len(s.others) for s in self._given]
            causal[:] = [s.visible is None for s in self._given]
            masks = np.concatenate([NO_MASK, *(s.visible.ravel() for s in self._given if s.visible is not None)])
        return RowKeys(
            starts=ends - counts,
            ends=ends,
            prefix=np.concatenate([NO_SLOTS, *prefixes]),
            prefix_ends=np.cumsum([len(own) for own in prefixes], dtype=np.int64),
            causal=causal,
            num_masked=num_others,
            visible=masks,
            positions=self.rows.positions.astype(np.int64, copy=False),
        )

    def __len__(self) -> int:
        return len(self.prefixes)

    def __getitem__(self, index: Any) -> Any:
        return self._segments[index]

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    @cached_property
    def _segments(self) -> Sequence[Segment]:
        if self.trees is None:
            return self._given
        (tokens, positions, slots, rows, counts), visible, segments = self.rows, self.trees.visible, list[Segment]()
        ends = np.cumsum(counts).tolist()
        fields = (self.prefixes, self.noise_keys, self.tables, self.states)
        for start, end, prefix, key, table, states in zip([0, *ends[:-1]], ends, *fields, strict=True):
            own, count = slice(start, end), end - start
            seen, wanted = visible[own, :count], rows[:count]
            rows_of = tokens[own], positions[own], slots[own]
            segments.append(Segment(*rows_of, prefix, seen, wanted, key, NO_SLOTS, table, states))
        return segments


@dataclass
class PackedInputs:
    """The rows of all segments, one segment after the other, [R];

    Attributes:
        logits_indices: packed rows whose logits are computed.
        metadata: what the attention kernel reads instead of groups; rows and logits_indices may then be padded at the end.
        attend: replaces `attention.attend`.
        segments: those that were packed, for groups, for kernels of the CPU and for recurrent layers.
        own_groups: in place of groups of the segments.
        prompts: the long prompts that a pass with metadata ends with, one each, if a library may attend for them.
        before_prompts: the rows before these, if there are any.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    logits_indices: Tensor
    attend: Callable[..., Tensor] | None = None
    metadata: AttentionMetadata | None = None
    segments: Sequence[Segment] = ()
    own_groups: tuple[PaddedGroup, ...] = ()
    prompts: tuple[LongPrompt, ...] = ()
    before_prompts: PackedInputs | None = None
    _biases: dict[tuple[int, int | None, torch.dtype, int], Tensor] = field(default_factory=dict)
    _recurrent: RecurrentRows | None = None

    @property
    def num_logits(self) -> int:
        """Rows whose logits are asked for, without padding."""
        return self.metadata.num_logits if self.metadata else len(self.logits_indices)

    @cached_property
    def groups(self) -> tuple[PaddedGroup, ...]:
        """The segments as the plain attention reads them. Similar row counts and prefix lengths share a padded group.

        A long segment therefore does not enlarge the short ones; the number of groups grows with the logarithm of lengths.
        """
        if self.own_groups or self.metadata is not None:
            return self.own_groups
        starts = np.cumsum([0] + [len(s.tokens) for s in self.segments])
        buckets: dict[tuple[int, int], list[int]] = {}
        for index, segment in enumerate(self.segments):
            # A bucket holds row counts within a factor of 4 and prefix lengths within a factor of 8.
            size = ((len(segment.tokens) - 1).bit_length() // 2, len(segment.prefix).bit_length() // 3)
            buckets.setdefault(size, []).append(index)
        parts = [([self.segments[i] for i in bucket], starts[np.array(bucket)]) for bucket in buckets.values()]
        return tuple([PaddedGroup(own, firsts, len(parts) == 1, self.tokens.device) for own, firsts in parts])

    def recurrent(self, scratch: int) -> RecurrentRows:
        """Return what recurrent layers need; scratch: see `RecurrentRows`. All layers share the result."""
        if self._recurrent is None:
            self._recurrent = RecurrentRows(self.segments, scratch, self.tokens.device)
        return self._recurrent

    def bias(self, index: int, window: int | None, dtype: torch.dtype, heads_per_kv: int) -> Tensor | None:
        """Return the additive mask of a group [B, 1, heads_per_kv * Q, K]: 0 where a cell sees a key, else -inf. None if all
        see all.

        window: of sliding-window attention, in tokens. All layers share the result.
        """
        group = self.groups[index]
        if window is None and group.unmasked:
            return None
        wanted = (index, window, dtype, heads_per_kv)
        if wanted not in self._biases:
            mask = group.mask
            if window is not None:
                mask = mask & (group.query_positions[:, :, None] - group.key_positions[:, None, :] < window)
            bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
            # Heads of a group have the same mask: repeated, because they are queries side by side.
            self._biases[wanted] = bias[:, None].repeat(1, 1, heads_per_kv, 1)
        return self._biases[wanted]


def pack(segments: Sequence[Segment], device: torch.device) -> PackedInputs:
    """Pack segments for the plain attention and for kernels of the CPU."""
    segments = Segments.of(segments)
    rows = segments.rows
    tokens, positions, slots = upload(np.stack(rows[:3]).astype(np.int64, copy=False), device)
    wanted = upload(rows.logits_indices.astype(np.int64, copy=False), device)
    return PackedInputs(tokens, positions, slots, wanted, segments=segments)


class PaddedGroup:
    """Segments of similar size, padded to one shape (B, Q). Each tensor is made on first use.

    A cell is a place in that shape; cells behind the last row of a segment are padding.
    covers_pass: whether the cells are all packed rows, in their order. unmasked: whether every cell sees every key.
    slot_range: first slot and last slot + 1 if one sequence's keys lie in consecutive slots, so that none is gathered.

    Args:
        starts: packed row at which each segment begins.
        is_only: whether the pass has no other group.
    """

    slot_range: tuple[int, int] | None = None

    def __init__(self, segments: Sequence[Segment], starts: Ints, is_only: bool, device: torch.device) -> None:
        self._segments = segments
        self._starts = starts
        self._device = device
        self._counts = [len(s.tokens) for s in segments]
        self._lengths = [len(s.prefix) for s in segments]
        self._num_others = [len(s.others) for s in segments]
        self._padded = len(set(self._counts)) > 1
        self.shape = (len(segments), max(self._counts))
        self.covers_pass = is_only and not self._padded
        self.unmasked = self.shape[1] == 1 and len(set(self._lengths)) == 1 and not any(self._num_others)
        self._num_keys = max(map(sum, zip(self._counts, self._lengths, self._num_others, strict=True)))
        # One sequence whose slots are consecutive: a view of the pool replaces a gather of its keys and values.
        if len(segments) == 1 and not self._num_others[0]:
            slots = np.concatenate([segments[0].prefix, segments[0].slots])
            first, last = int(slots[0]), int(slots[-1])
            if last - first == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
                self.slot_range = (first, last + 1)

    @cached_property
    def rows(self) -> Tensor:
        """Packed row of each cell [B, Q]; padding repeats a row."""
        return upload(self._cell_rows + self._starts[:, None], self._device)

    @cached_property
    def filled_cells(self) -> Tensor | None:
        """Flat cells that are not padding [n]; None if there is no padding."""
        if not self._padded:
            return None
        return upload(np.flatnonzero(np.arange(self.shape[1]) < np.array(self._counts)[:, None]), self._device)

    @cached_property
    def keys(self) -> Tensor:
        """Slot of each key [B, K]."""
        return self._padded_keys([np.concatenate([s.prefix, s.others, s.slots]) for s in self._segments])

    @cached_property
    def key_positions(self) -> Tensor:
        """Absolute position of each key [B, K], for sliding windows."""
        assert not any(self._num_others), "rows with other keys have no window"
        return self._padded_keys([np.concatenate([np.arange(len(s.prefix)), s.positions]) for s in self._segments])

    @cached_property
    def query_positions(self) -> Tensor:
        """Absolute position of each cell [B, Q]."""
        rows = zip(self._segments, self._cell_rows, strict=True)
        return upload(np.stack([s.positions[r] for s, r in rows]), self._device)

    @cached_property
    def mask(self) -> Tensor:
        """Return whether each cell sees each key [B, Q, K]. Example: a prefix of 2 and a tree of a root with two children:

        1 1 | 1 0 0
        1 1 | 1 1 0
        1 1 | 1 0 1
        """
        mask = np.zeros((*self.shape, self._num_keys), dtype=np.bool_)
        mask[:, :, 0] = True  # a padding row must see something, or its softmax is NaN
        for b, segment in enumerate(self._segments):
            n, length, others = self._counts[b], self._lengths[b], self._num_others[b]
            mask[b, :n, :length] = True
            own = np.tri(n, dtype=np.bool_) if segment.visible is None else segment.visible
            mask[b, :n, length : length + others + n] = own
        return upload(mask, self._device)

    @cached_property
    def _cell_rows(self) -> Ints:
        last: Ints = np.array(self._counts)[:, None] - 1
        return np.minimum(np.arange(self.shape[1]), last)

    def _padded_keys(self, columns: Sequence[Ints]) -> Tensor:
        keys = np.empty((len(columns), self._num_keys), dtype=np.int64)
        for b, column in enumerate(columns):
            keys[b, : len(column)] = column
            keys[b, len(column) :] = column[0]  # a key of the same sequence: a masked NaN still spreads
        return upload(keys, self._device)


class LongPrompt(PaddedGroup):
    """A prompt whose keys and values are copied for a library, see `copied_keys`.

    Attributes:
        num_keys: without padding.

    Args:
        start: packed row at which it begins.
    """

    def __init__(self, segment: Segment, start: int, device: torch.device) -> None:
        super().__init__([segment], np.array([start]), False, device)
        self.num_keys = self._num_keys
        self._num_keys = copied_keys(self.num_keys)


def copied_keys(num_keys: int) -> int:
    """Return the keys of a copy with room for `num_keys`: a multiple of an eighth of the next power of two.

    Copies have few sizes, four from 1,025 to 2,048 keys: the allocator keeps the memory of each, and every chunk of a prompt
    has more keys than the last.
    """
    step = max(1, (1 << (num_keys - 1).bit_length()) // 8)
    return -(-num_keys // step) * step


@dataclass(frozen=True)
class MetadataShape:
    """Sizes of a pass over AttentionMetadata, padding included; a captured graph fixes them.

    Attributes:
        rows, logits: packed rows, and rows whose logits are computed.
        tiles: runs of at most `tile_rows` rows of one segment.
        splits: parts into which the keys of a tile are cut at most.
        even_splits: parts of a tile with few keys.
        fixed_part: keys of a part, if parts begin at fixed positions so that results do not depend on the batch; else 0.
            Then `tiles` counts a tile once for each part, and part_rows is the number of rows of their results.
        shared_tiles: of `tiles`, those over a prefix that several segments share; rows then have twice the results.
    """

    rows: int
    logits: int
    tiles: int
    tile_rows: int
    splits: int
    even_splits: int
    fixed_part: int = 0
    part_rows: int = 0
    shared_tiles: int = 0

    @property
    def num_results(self) -> int:
        """Results of each row that are combined."""
        return self.splits * (2 if self.shared_tiles else 1)


@dataclass(frozen=True)
class AttentionMetadata:
    """Arrays that the attention kernel reads, in the layout of eyas.models.backends.attention_metadata. All int32.

    A row sees the slots of its prefix, which are in `words`, and of its segment's own keys those that `masks` allows. Masks
    lie in the words of the pass, and `words` is the same tensor unless a SlotMemory keeps the prefixes.

    Attributes:
        tiles: [tiles, 10], or [tiles, 12] with parts at fixed positions.
        positions: [rows].
        slots, key_positions: of own keys.
        num_logits: rows whose logits are asked for, the first of those computed.
    """

    shape: MetadataShape
    num_logits: int
    words: Tensor
    masks: Tensor
    tiles: Tensor
    positions: Tensor
    slots: Tensor
    key_positions: Tensor


class TreePaths(NamedTuple):
    """Paths: the own keys of each row of the trees of a pass, by depth. depths: keys of a row in each segment, 0 if causal
    [B].
    """

    words: Int32s
    depths: Ints


def tree_paths(segments: Segments) -> TreePaths:
    """Return the paths of all segments, as parts at fixed positions need them."""
    if segments.trees is not None:
        return _packed_paths(segments.trees)
    found = [_path_words(segment) for segment in segments]
    return TreePaths(
        np.concatenate([NO_SLOTS.astype(np.int32), *(own.ravel() for own in found)]),
        np.array([own.shape[1] for own in found], np.int64),
    )


def _packed_paths(trees: PackedTrees) -> TreePaths:
    """Find `_path_words` of each tree: in each turn all rows go one node up."""
    # Example: trees of the shapes root - a - b and root - {a, b}, rows 0 1 2 | 3 4 5. The first is causal, so it needs no
    # path; the second has the paths [0 .], [0 1], [0 2], each own key at its depth.
    rows, firsts = np.arange(len(trees.roots)), trees.nodes.firsts
    is_causal = np.logical_and.reduceat(trees.above == np.maximum(rows - 1, trees.roots), firsts)
    depths = np.where(is_causal, 0, np.maximum.reduceat(trees.depths, firsts) + 1)
    sizes, own = trees.nodes.counts * depths, rows - trees.roots
    words = np.zeros(int(sizes.sum()), dtype=np.int32)
    # at: the place in `words` at which the path of each row begins.
    at = np.repeat(sizes.cumsum() - sizes, trees.nodes.counts) + own * np.repeat(depths, trees.nodes.counts)
    key = kept = np.flatnonzero(np.repeat(depths, trees.nodes.counts))
    for _ in range(int(depths.max())):
        words[at[kept] + trees.depths[key]] = own[key]
        key = trees.above[key]
    return TreePaths(words, depths)


def _path_words(segment: Segment) -> Int32s:
    """Return the own keys of each row of a tree by depth [n, depths]; nothing for causal rows [n, 0]."""
    depths = segment.positions - len(segment.prefix)
    if segment.visible is None or not (segment.visible != np.tri(len(depths), dtype=np.bool_)).any():
        return np.zeros((len(depths), 0), dtype=np.int32)
    paths = np.zeros((len(depths), int(depths.max()) + 1), dtype=np.int32)
    row, key = np.nonzero(segment.visible)
    paths[row, depths[key]] = key
    return paths
