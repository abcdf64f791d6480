"""Packs segments for the attention kernel: one array of integers, uploaded in one copy.

Words, all int32: tokens, positions, slots and logits indices [4, rows aligned]; tiles [tiles, TILE_WORDS]; the slots of all
prefixes, unless a SlotMemory keeps them; then the mask of each segment, one bit for each pair of its rows. A tile holds
TILE_WORDS words:

    0, 1  its first row, and its number of rows
    2, 3  place of the segment's first own key in `slots` and `key_positions`, and words of a mask row
    4, 5  length of the prefix, and the word at which it begins, among these or in the SlotMemory
    6, 7  the word at which the mask of the tile's first row begins, and the number of own keys that its rows may see
    8, 9  the first key that it reads, and the number of results that stand before its own for each row

Own keys are those of the segment's rows. If segments have other keys too, the slots of all own keys, one segment after the
other and the others first, stand behind the masks.

Where neighbouring segments begin with the same long prefix, tiles of rows of all of them read it once for all. Their results
stand behind those of the other tiles, which begin behind that prefix (cascade attention, Ye et al., 2024).

Parts at fixed positions make results independent of the batch. Then a tile is listed once for each of its parts, in
FIXED_TILE_WORDS words, and instead of masks there are the paths of tree nodes: the own keys of a row, by position.

    0 to 2, 4, 5  as above
    3, 6, 7  rows with paths: all of a tree, else 1; the word at which the first row's path begins, and words of a path
    8, 9  first key of the part, and the key behind its last one, by position
    10, 11  place of the part's results, in rows; and how many parts the tile has, FOLLOWS for all but the first of them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, starmap
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.arrays import Bools, Ints
from eyas.cache.kv_cache import SlotMemory, TableWrites
from eyas.device.host import has_numba
from eyas.device.transfer import upload
from eyas.kernels.arguments import LONG_PART
from eyas.kernels.choice import tree_kernels
from eyas.models.inputs import (
    AttentionMetadata,
    LongPrompt,
    MetadataShape,
    PackedInputs,
    Segment,
    SegmentRows,
    Segments,
    tree_paths,
)

Words = npt.NDArray[np.int32]

TILE_WORDS = 10
FIXED_TILE_WORDS = 12
FOLLOWS = -1
ALIGNMENT = 16  # words; keeps every view aligned for wide loads
MAX_SPLITS = 32
# Parts of a long prefix where tiles alone fill the device, and the most rows of all parts together: they take memory.
LONG_SPLITS = 8
MAX_PART_ROWS = 4096
# Keys of a prefix that segments share, at least, and those that a pass must spare: it is then launched kernel by kernel.
SHARED_KEYS = 512
SPARED_KEYS = 1 << 16
# Keys of a part at fixed positions, a multiple of the keys that a program holds; parts beyond one for each tile of a graph.
FIXED_PART = 1024
MAX_MORE_PARTS = 256


@dataclass(frozen=True)
class Tiling:
    """Device and head sizes on which good tile sizes depend.

    Attributes:
        heads_per_kv: query heads that share keys; they are rows of one matrix product.
        num_kv: key-value heads.
        num_processors: of the device; each should have two programs.
        max_rows: of a matrix product that registers can hold.
        library_rows: of a prompt from which on a library attends for it, see `with_prompts`; 0 for never.
        longest: the most keys that a row may see.
        fixed_part: keys of parts at fixed positions; 0 cuts keys so that the device is full, and results depend on the
            batch.
    """

    heads_per_kv: int
    num_kv: int
    num_processors: int
    max_rows: int = 64
    library_rows: int = 0
    longest: int = 1 << 30
    fixed_part: int = 0

    def tile_rows(self, longest: int) -> int:
        """Return the rows per tile: as few as the matrix unit takes if no segment has more, else as many as fit."""
        few = max(1, 16 // self.heads_per_kv)
        return few if longest <= few and not self.fixed_part else self.most_rows

    @property
    def most_rows(self) -> int:
        """Rows of the largest tile."""
        return max(1, self.max_rows // self.heads_per_kv)

    def shape(self, rows: int, logits: int, tiles: int, tile_rows: int, filled: int | None = None) -> MetadataShape:
        """Return a shape whose keys are cut so that even a few tiles fill the device. filled: tiles that are no padding, all
        by default.
        """
        even = min(MAX_SPLITS, max(1, 2 * self.num_processors // ((filled or max(tiles, 1)) * self.num_kv)))
        long = min(LONG_SPLITS, MAX_PART_ROWS // max(rows, 1), self.longest // LONG_PART)
        return MetadataShape(rows, logits, tiles, tile_rows, max(even, long), even)


def tight_shape(segments: Segments, tiling: Tiling, runs: Sequence[SharedRun] = ()) -> MetadataShape:
    """Return the shape of segments without padding. runs: those of `shared_runs`."""
    counts = segments.rows.counts.tolist()
    tile_rows = tiling.tile_rows(max(counts))
    if tiling.fixed_part:
        needs = count_parts(segments, tile_rows, tiling.fixed_part)
        return MetadataShape(
            sum(counts), segments.num_logits, needs.tiles, tile_rows, 1, 1, tiling.fixed_part, needs.part_rows
        )
    tile_rows = tiling.most_rows if runs else tile_rows
    shared = sum(-(-run.rows // tile_rows) for run in runs)
    tiles = sum([-(-count // tile_rows) for count in counts]) + shared
    shape = tiling.shape(sum(counts), segments.num_logits, tiles, tile_rows)
    return replace(shape, shared_tiles=shared)


class SharedRun(NamedTuple):
    """Neighbouring segments, from one to another, their rows together, and the length of the prefix that they share."""

    first: int
    end: int
    rows: int
    length: int


def shared_runs(segments: Segments, tiling: Tiling) -> list[SharedRun]:
    """Return all segments of a pass in runs with a shared prefix, or 0 slots of it; nothing if that would spare too few
    keys, and nothing for parts at fixed positions.
    """
    if tiling.fixed_part:
        return []
    prefixes = segments.prefixes
    long = [prefix[SHARED_KEYS - 1] for prefix in prefixes if len(prefix) >= SHARED_KEYS]
    if len(set(long)) == len(long) or not any(starmap(_num_common, pairwise(prefixes))):
        return []
    runs, first, spared = list[SharedRun](), 0, 0
    # Segments that share a prefix are neighbours: a run ends where the common beginning does.
    for end in range(1, len(segments) + 1):
        if end < len(segments) and _num_common(prefixes[first], prefixes[end]) > 0:
            continue
        counts = segments.rows.counts[first:end].tolist()
        length = min((_num_common(prefixes[first], other) for other in prefixes[first + 1 : end]), default=0)
        # Each of the run's own tiles would read the prefix: a shared tile pays if they are twice as many.
        tiles, shared = sum(-(-count // tiling.most_rows) for count in counts), -(-sum(counts) // tiling.most_rows)
        length = length if tiles >= 2 * shared else 0
        spared += (tiles - shared) * length
        runs.append(SharedRun(first, end, sum(counts), length))
        first = end
    return runs if spared >= SPARED_KEYS else []


def _num_common(one: Ints, other: Ints) -> int:
    """Return the slots that two prefixes begin with; 0 for fewer than SHARED_KEYS. The same slot at a position has the same
    before it, since a slot of the prefix cache belongs to one prefix.
    """
    low, high = SHARED_KEYS, min(len(one), len(other))
    if high < low or one[low - 1] != other[low - 1]:
        return 0
    # Binary search: slots are equal up to some position, and differ beyond.
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[middle - 1] == other[middle - 1] else (low, middle - 1)
    return low


def bucket_shape(rows: int, max_segments: int, tiling: Tiling) -> MetadataShape:
    """Return a shape for any segments, at most `max_segments`, of `rows` rows together; logits are computed for all rows."""
    tile_rows = tiling.tile_rows(rows)
    # Each segment may end in a tile that is not full: one tile more for each, and no more tiles than rows.
    tiles = min(rows, max_segments + 1 + rows // tile_rows)
    if tiling.fixed_part:
        most = -(-tiling.longest // tiling.fixed_part)
        parts = min(tiles * most, tiles + MAX_MORE_PARTS)
        part_rows = min(parts * tile_rows, rows * most, rows + MAX_PART_ROWS)
        return MetadataShape(rows, rows, parts, tile_rows, 1, 1, tiling.fixed_part, part_rows)
    return tiling.shape(rows, rows, tiles, tile_rows, -(-rows // tile_rows))


class PartCount(NamedTuple):
    """Memory that parts at fixed positions take: tiles listed once for each part, and rows of results of all of them."""

    tiles: int
    part_rows: int


def count_parts(segments: Segments, tile_rows: int, part: int) -> PartCount:
    """Return what a pass takes without padding."""
    cut = _cut_tiles(segments.rows, tile_rows, part)
    return PartCount(int(cut.parts.sum()), int(cut.parts @ cut.rows))


def has_room(shape: MetadataShape, segments: Segments) -> bool:
    """Return whether a shape of `bucket_shape` holds the parts of a pass whose rows it holds."""
    if not shape.fixed_part:
        return True
    needs = count_parts(segments, shape.tile_rows, shape.fixed_part)
    padding = -(-(shape.rows - len(segments.rows.slots)) // shape.tile_rows)
    return needs.tiles + padding <= shape.tiles and needs.part_rows <= shape.part_rows


def max_words(shape: MetadataShape) -> int:
    """Return the most words that a pass of this shape can take, without its prefixes."""
    # -(-a // b) rounds up: each row of a mask takes whole words of 32 bits.
    return _num_fixed_words(shape) + shape.rows * (shape.rows if shape.fixed_part else -(-shape.rows // 32))


def pack_with_metadata(
    segments: Segments,
    shape: MetadataShape,
    scratch: int,
    device: torch.device,
    runs: Sequence[SharedRun] = (),
    memory: SlotMemory | None = None,
) -> PackedInputs:
    """Return segments padded to a shape. Rows behind the last segment write to slot `scratch` and attend to nothing.

    Args:
        runs: those that the shape was made for.
        memory: keeps the prefixes, if they fit.
    """
    writes = memory.place(segments.tables, segments.prefixes) if memory else None
    words = build_words(segments, shape, scratch, runs, writes.prefixes if writes else None)
    if memory is None or writes is None:
        packed = view(upload(words, device), shape, segments.num_logits)
    else:
        packed = view(_upload_and_write(words, writes, memory, device), shape, segments.num_logits, memory.words)
    if not _has_others(segments):
        return packed
    assert packed.metadata is not None
    slots = packed.metadata.masks[-sum(len(segment.others) + len(segment.slots) for segment in segments) :]
    # positions are for sliding windows, which such rows do not have
    return replace(packed, metadata=replace(packed.metadata, slots=slots, key_positions=slots))


def with_prompts(packed: PackedInputs, segments: Segments, tiling: Tiling) -> PackedInputs:
    """Let a library attend for the long prompts that a pass ends with, and the kernel for the rows before them.

    Args:
        packed: the segments with metadata, without padding and without runs that share a prefix.
    """
    if not tiling.library_rows or tiling.fixed_part or segments.trees is not None:
        return packed
    first = len(segments)
    while first and _is_long_prompt(segments[first - 1], tiling.library_rows):
        first -= 1
    if first == len(segments) or packed.metadata is None:
        return packed
    counts = segments.rows.counts.tolist()
    starts = np.cumsum([0, *counts])
    prompts = [LongPrompt(segments[n], int(starts[n]), packed.tokens.device) for n in range(first, len(counts))]
    before = None
    if first:
        # tiles are in the order of the rows
        tile_rows = packed.metadata.shape.tile_rows
        num_tiles = sum(-(-count // tile_rows) for count in counts[:first])
        shape = tiling.shape(int(starts[first]), 0, num_tiles, tile_rows)
        before = replace(packed, metadata=replace(packed.metadata, shape=shape))
    return replace(packed, prompts=tuple(prompts), before_prompts=before)


def _is_long_prompt(segment: Segment, least: int) -> bool:
    return segment.visible is None and not len(segment.others) and len(segment.tokens) >= least


def _upload_and_write(words: Words, writes: TableWrites, memory: SlotMemory, device: torch.device) -> Tensor:
    """Return the words of a pass on the device, behind the writes to its slot memory; all of it travels in one copy."""
    count, start = len(writes.at), _aligned(len(words))
    padding = np.zeros(start - len(words), dtype=np.int32)  # the addresses of writes have 64 bits
    at, slots = writes.at.astype(np.int64, copy=False).view(np.int32), writes.slots.astype(np.int32)
    try:
        uploaded = upload(np.concatenate([words, padding, at, slots]) if count else words, device)
        if count:
            end = start + 2 * count
            memory.words.index_copy_(0, uploaded[start:end].view(torch.int64), uploaded[end:])
    except BaseException:
        memory.forget()
        raise
    return uploaded[: len(words)]


def _has_others(segments: Segments) -> bool:
    """Return whether rows see keys of their segments that are not of the pass."""
    return segments.trees is None and any(len(segment.others) for segment in segments)


def build_words(
    segments: Segments,
    shape: MetadataShape,
    scratch: int,
    runs: Sequence[SharedRun] = (),
    kept_prefixes: Ints | None = None,
) -> Words:
    """Return the words of a pass.  kept_prefixes: where each prefix begins, if a SlotMemory keeps them [B]."""
    is_usual = kept_prefixes is not None and not (shape.fixed_part or runs)
    if is_usual and segments.trees is not None and has_numba():
        rows, seen, lengths = segments.rows, segments.trees.words.view("<i4"), _sizes(segments.prefixes)
        sizes = shape.rows, _aligned(shape.rows), shape.tile_rows, shape.tiles, TILE_WORDS, scratch
        return cast(Words, tree_kernels().tree_words(*rows[:3], rows.counts, seen, lengths, kept_prefixes, np.array(sizes)))
    return words_of_all(segments, shape, scratch, runs, kept_prefixes)


def words_of_all(
    segments: Segments,
    shape: MetadataShape,
    scratch: int,
    runs: Sequence[SharedRun] = (),
    kept_prefixes: Ints | None = None,
) -> Words:
    """Build the words, as `build_words`, of any segments."""
    # The four lines of rows: tokens, positions, slots, rows of logits. Padding writes to the scratch slot.
    rows = np.zeros((4, _aligned(shape.rows)), dtype=np.int32)
    rows[2] = scratch
    tiles = np.zeros((shape.tiles, _tile_words(shape)), dtype=np.int32)
    packed, prefixes = segments.rows, segments.prefixes
    counts, lengths = packed.counts, _sizes(prefixes)
    starts, num_rows, has_others = counts.cumsum() - counts, len(packed.tokens), _has_others(segments)
    assert not (has_others and shape.fixed_part), "parts at fixed positions know the keys of the pass alone"
    others = _sizes([segment.others for segment in segments]) if has_others else np.zeros_like(counts)
    num_own = counts + others
    own = _part_tiles(segments, shape) if shape.fixed_part else _split_tiles(counts, others, segments, shape)
    # Prefixes follow the fixed words, then come the masks or paths, then other keys.
    ends = _num_fixed_words(shape) + (lengths.cumsum() if kept_prefixes is None else np.zeros_like(lengths))
    at = ends - lengths if kept_prefixes is None else kept_prefixes
    if segments:
        rows[0, :num_rows], rows[1, :num_rows], rows[2, :num_rows] = packed.tokens, packed.positions, packed.slots
        rows[3, : len(packed.logits_indices)] = packed.logits_indices
        words, owner = own.tiles, own.owner
        # Word 0: first packed row. 2: first own key. 4, 5: length and place of the prefix. 6: place of the first mask.
        words[:, 0] += starts[owner]
        words[:, 2] = (num_own.cumsum() - num_own)[owner]
        words[:, 4], words[:, 5] = lengths[owner], at[owner]
        words[:, 6] += ends[-1]
        if runs:
            words[:, 8] = np.repeat([run.length for run in runs], [run.end - run.first for run in runs])[owner]
            tiles[len(words) :] = _shared_tiles(runs, shape, at)
        tiles[: len(words)] = words
    firsts = np.arange(num_rows, shape.rows, shape.tile_rows)  # padding, which sees nothing
    padding = tiles[len(own.tiles) : len(own.tiles) + len(firsts)]
    padding[:, 0], padding[:, 1] = firsts, np.minimum(shape.tile_rows, shape.rows - firsts)
    keys = [part for segment in segments for part in (segment.others, segment.slots)] if has_others else []
    sent = prefixes if kept_prefixes is None else ()
    return np.concatenate([rows.ravel(), tiles.ravel(), *sent, own.seen, *keys], dtype=np.int32, casting="same_kind")


def _numbers_within(counts: Ints) -> Ints:
    """Return 0, 1 and so on in each of some groups of these sizes, one group after the other."""
    # Example: counts 2, 3 give [0 1 0 1 2].
    return np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)


def _sizes(arrays: Sequence[npt.NDArray[Any]]) -> Ints:
    return np.array(list(map(len, arrays)), dtype=np.int64)


def _shared_tiles(runs: Sequence[SharedRun], shape: MetadataShape, places_of_prefixes: Ints) -> Words:
    """Return tiles of rows of several segments over the prefix that they share. They cover all rows, some with no key."""
    tiles, start = [], 0
    for run in runs:
        for first in range(0, run.rows, shape.tile_rows):
            count, at = min(shape.tile_rows, run.rows - first), places_of_prefixes[run.first]
            tiles.append((start + first, count, 0, 0, run.length, at, 0, 0, 0, shape.splits))
        start += run.rows
    return np.array(tiles, dtype=np.int32)


class OwnTiles(NamedTuple):
    """The tiles of all segments, one segment after the other: their words, and the number of the segment of each.

    Word 0 counts from the segment's, word 6 from the first of `seen`; words 2, 4 and 5 are 0. seen: words of all masks, or
    of all paths.
    """

    tiles: Words
    owner: Ints
    seen: Words


def _split_tiles(counts: Ints, others: Ints, segments: Segments, shape: MetadataShape) -> OwnTiles:
    """Cut segments into tiles.

    Args:
        counts, others: rows of each segment, and other keys that they see.
    """
    # Example with tile_rows 4 and counts 3, 6: tiles_of 1, 2; owner 0 1 1; firsts 0 0 4.
    tiles_of = -(-counts // shape.tile_rows)
    owner = np.repeat(np.arange(len(counts)), tiles_of)
    firsts = _numbers_within(tiles_of) * shape.tile_rows
    strides = -(-(counts + others) // 32)
    tiles = np.zeros((len(owner), TILE_WORDS), dtype=np.int32)
    tiles[:, 0] = firsts
    tiles[:, 1] = np.minimum(shape.tile_rows, counts[owner] - firsts)
    tiles[:, 3] = strides[owner]
    sizes = counts * strides
    tiles[:, 6] = (sizes.cumsum() - sizes)[owner] + firsts * strides[owner]
    tiles[:, 7] = others[owner] + firsts + tiles[:, 1]  # no row sees a later one
    return OwnTiles(tiles, owner, _mask_words(counts, strides, segments))


def _mask_words(counts: Ints, strides: Ints, segments: Segments) -> Words:
    """Return the masks of all segments, one bit for each pair of rows; each row begins a word. All become words at once."""
    if segments.trees is not None:
        words = segments.trees.words.view("<i4")
        if (strides == strides[0]).all():
            return words[:, : strides[0]].ravel()
        # Masks of segments with different strides: keep only the words that a row of its segment has.
        return words[np.arange(words.shape[1]) < np.repeat(strides, counts)[:, None]]
    bits, end = np.zeros((int(counts @ strides), 32), dtype=np.bool_), 0
    for segment, count, stride in zip(segments, counts.tolist(), strides.tolist(), strict=True):
        visible = np.tri(count, dtype=np.bool_) if segment.visible is None else segment.visible
        start, end = end, end + count * stride
        own = bits[start:end] if stride == 1 else bits[start:end].reshape(count, 32 * stride)
        own[:, : visible.shape[1]] = visible  # without columns: rows see nothing
    return mask_words(bits).ravel()


def _part_tiles(segments: Segments, shape: MetadataShape) -> OwnTiles:
    """Return the tiles at fixed positions: one for each part of the keys that a tile of rows sees."""
    packed = segments.rows
    paths = tree_paths(segments)
    cut = _cut_tiles(packed, shape.tile_rows, shape.fixed_part)
    # A tile is listed once for each part of its keys: [8 : 9] are the positions of the part.
    number = _numbers_within(cut.parts)
    tile = np.repeat(np.arange(len(cut.parts)), cut.parts)
    owner, sizes = cut.owner[tile], packed.counts * paths.depths
    tiles = np.zeros((len(number), FIXED_TILE_WORDS), dtype=np.int32)
    tiles[:, 0], tiles[:, 1] = cut.firsts[tile], cut.rows[tile]
    tiles[:, 3] = np.where(paths.depths[owner] > 0, tiles[:, 1], 1)
    tiles[:, 6] = (sizes.cumsum() - sizes)[owner] + tiles[:, 0] * paths.depths[owner]
    tiles[:, 7] = paths.depths[owner]
    tiles[:, 8] = number * shape.fixed_part
    tiles[:, 9] = np.minimum(tiles[:, 8] + shape.fixed_part, cut.ends[tile])
    tiles[:, 10] = np.cumsum(tiles[:, 1]) - tiles[:, 1]
    # The first part of a tile says how many there are; the program that runs it combines the results.
    tiles[:, 11] = np.where(number == 0, cut.parts[tile], FOLLOWS)
    return OwnTiles(tiles, owner, paths.words)


class CutTiles(NamedTuple):
    """Tiles of the rows of all segments: segment, first row within it, rows, the position behind the last key that they see,
    and the parts that these keys are cut into."""

    owner: Ints
    firsts: Ints
    rows: Ints
    ends: Ints
    parts: Ints


def _cut_tiles(packed: SegmentRows, tile_rows: int, part: int) -> CutTiles:
    tiles_of = -(-packed.counts // tile_rows)
    owner = np.repeat(np.arange(len(tiles_of)), tiles_of)
    firsts = _numbers_within(tiles_of) * tile_rows
    rows = np.minimum(tile_rows, packed.counts[owner] - firsts)
    starts = (packed.counts.cumsum() - packed.counts)[owner] + firsts
    # The highest position of a tile's rows bounds the keys that they see.
    ends = np.maximum.reduceat(packed.positions, starts) + 1 if len(starts) else starts
    return CutTiles(owner, firsts, rows, ends, -(-ends // part))


def view(words: Tensor, shape: MetadataShape, num_logits: int, prefixes: Tensor | None = None) -> PackedInputs:
    """Return a pass over words that are on the device. prefixes: the words of a SlotMemory, if prefixes are there."""
    stride, width = _aligned(shape.rows), _tile_words(shape)
    rows = words.as_strided((4, shape.rows), (stride, 1))
    tiles = words.as_strided((shape.tiles, width), (width, 1), words.storage_offset() + 4 * stride)
    tokens, positions, slots, logits_indices = rows.long().unbind()
    with_prefixes = words if prefixes is None else prefixes
    metadata = AttentionMetadata(shape, num_logits, with_prefixes, words, tiles, rows[1], rows[2], rows[1])
    return PackedInputs(tokens, positions, slots, logits_indices[: shape.logits], metadata=metadata)


def _num_fixed_words(shape: MetadataShape) -> int:
    """Return the words before the prefixes and masks."""
    return 4 * _aligned(shape.rows) + _tile_words(shape) * shape.tiles


def _tile_words(shape: MetadataShape) -> int:
    return FIXED_TILE_WORDS if shape.fixed_part else TILE_WORDS


def mask_words(visible: Bools) -> Words:
    """Return which keys each row sees, [n, k], as words of 32 bits [n, ceil(k / 32)]."""
    # Bit k of word w says that the row sees key 32 w + k, little-endian on every machine.
    packed = np.packbits(visible, axis=1, bitorder="little")
    padded = np.zeros((len(visible), 4 * -(-visible.shape[1] // 32)), dtype=np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view("<i4")


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
