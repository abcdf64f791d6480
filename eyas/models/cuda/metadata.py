"""Packs segments for the attention kernel: one array of integers, uploaded in one copy.

Words, all int32: tokens, positions, slots and logits indices [4, rows aligned]; tiles [tiles, TILE_WORDS]; then, for each
segment, the slots of its prefix and its mask, one bit for each pair of its rows. A tile holds TILE_WORDS words:

    0, 1  its first row, and its number of rows
    2, 3  place of the segment's first own key in `slots` and `key_positions`, and words of a mask row
    4, 5  length of the prefix, and the word at which it begins
    6, 7  the word at which the mask of the tile's first row begins, and the number of own keys that its rows may see
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.models.inputs import AttentionMetadata, MetadataShape, PackedInputs, Segment
from eyas.tensors import Bools, upload

Words = npt.NDArray[np.int32]

TILE_WORDS = 8
ALIGNMENT = 16  # words; keeps every view aligned for wide loads
MAX_SPLITS = 32
# Keys from which on a tile is cut into more parts than filling the device takes: others would wait for one long prefix.
LONG_PART = 2048
# Parts of a long prefix where tiles alone fill the device, and the most rows of all parts together: they take memory.
LONG_SPLITS = 8
MAX_PART_ROWS = 4096


@dataclass(frozen=True)
class Tiling:
    """What good tile sizes depend on.

    heads_per_kv: query heads that share keys; they are rows of one matrix product. num_kv: key-value heads.
    num_processors: of the device; each should have two programs. max_rows: of a matrix product that registers can hold.
    longest: the most keys that a row may see.
    """

    heads_per_kv: int
    num_kv: int
    num_processors: int
    max_rows: int = 64
    longest: int = 1 << 30

    def tile_rows(self, longest: int) -> int:
        """Rows per tile: as few as the matrix unit takes if no segment has more, else as many as fit."""
        few = max(1, 16 // self.heads_per_kv)
        return few if longest <= few else max(1, self.max_rows // self.heads_per_kv)

    def shape(self, rows: int, logits: int, tiles: int, tile_rows: int, filled: int | None = None) -> MetadataShape:
        """A shape whose keys are cut so that even a few tiles fill the device. filled: tiles that are no padding, all by
        default."""
        even = min(MAX_SPLITS, max(1, 2 * self.num_processors // ((filled or max(tiles, 1)) * self.num_kv)))
        long = min(LONG_SPLITS, MAX_PART_ROWS // max(rows, 1), self.longest // LONG_PART)
        return MetadataShape(rows, logits, tiles, tile_rows, max(even, long), even)


def tight_shape(segments: Sequence[Segment], tiling: Tiling) -> MetadataShape:
    """The shape of segments without padding."""
    counts = [len(s.tokens) for s in segments]
    tile_rows = tiling.tile_rows(max(counts))
    tiles = sum(-(-count // tile_rows) for count in counts)
    return tiling.shape(sum(counts), count_logits(segments), tiles, tile_rows)


def bucket_shape(rows: int, max_segments: int, tiling: Tiling) -> MetadataShape:
    """A shape for any segments, at most `max_segments`, of `rows` rows together; logits are computed for all rows."""
    tile_rows = tiling.tile_rows(rows)
    tiles = min(rows, max_segments + 1 + rows // tile_rows)
    return tiling.shape(rows, rows, tiles, tile_rows, -(-rows // tile_rows))


def max_words(shape: MetadataShape) -> int:
    """The most words that a pass of this shape can take, without its prefixes."""
    return _num_fixed_words(shape) + shape.rows * -(-shape.rows // 32)


def count_logits(segments: Sequence[Segment]) -> int:
    """Rows whose logits are asked for."""
    return sum(len(s.logits_indices) for s in segments)


def pack_with_metadata(
    segments: Sequence[Segment], shape: MetadataShape, scratch: int, device: torch.device
) -> PackedInputs:
    """Segments padded to a shape. Rows behind the last segment write to slot `scratch` and attend to nothing."""
    return view(upload(build_words(segments, shape, scratch), device), shape, count_logits(segments))


def build_words(segments: Sequence[Segment], shape: MetadataShape, scratch: int) -> Words:
    """The words of a pass."""
    rows = np.zeros((4, _aligned(shape.rows)), dtype=np.int32)
    rows[2] = scratch
    tiles = np.zeros((shape.tiles, TILE_WORDS), dtype=np.int32)
    ragged: list[npt.NDArray[np.integer]] = []
    start = tile = num_logits = 0
    at = _num_fixed_words(shape)
    for segment in segments:
        count, length = len(segment.tokens), len(segment.prefix)
        rows[:3, start : start + count] = segment.tokens, segment.positions, segment.slots
        rows[3, num_logits : num_logits + len(segment.logits_indices)] = segment.logits_indices + start
        firsts = np.arange(0, count, shape.tile_rows)
        own = tiles[tile : tile + len(firsts)]
        own[:, 0] = start + firsts
        own[:, 1] = np.minimum(shape.tile_rows, count - firsts)
        mask = _mask_words(segment)
        stride = len(mask) // count
        own[:, 2:6] = start, stride, length, at
        own[:, 6], own[:, 7] = at + length + firsts * stride, firsts + own[:, 1]  # no row sees a later one
        ragged += [segment.prefix, mask]
        start, tile, num_logits = start + count, tile + len(firsts), num_logits + len(segment.logits_indices)
        at += length + len(mask)
    firsts = np.arange(start, shape.rows, shape.tile_rows)  # padding, which sees nothing
    tiles[tile : tile + len(firsts), 0] = firsts
    tiles[tile : tile + len(firsts), 1] = np.minimum(shape.tile_rows, shape.rows - firsts)
    return np.concatenate([rows.ravel(), tiles.ravel(), *ragged], dtype=np.int32, casting="same_kind")


def view(words: Tensor, shape: MetadataShape, num_logits: int) -> PackedInputs:
    """A pass over words that are on the device."""
    stride = _aligned(shape.rows)
    rows = words[: 4 * stride].view(4, stride)[:, : shape.rows]
    tiles = words[4 * stride : _num_fixed_words(shape)].view(shape.tiles, TILE_WORDS)
    tokens, positions, slots, logits_indices = rows.long()
    metadata = AttentionMetadata(shape, num_logits, words, words, tiles, rows[1], rows[2], rows[1])
    return PackedInputs(tokens, positions, slots, logits_indices[: shape.logits], groups=(), metadata=metadata)


def _num_fixed_words(shape: MetadataShape) -> int:
    """Words before the prefixes and masks."""
    return 4 * _aligned(shape.rows) + TILE_WORDS * shape.tiles


def _mask_words(segment: Segment) -> Words:
    """The segment's mask; each row begins a word."""
    count = len(segment.tokens)
    return mask_words(np.tri(count, dtype=np.bool_) if segment.visible is None else segment.visible).ravel()


def mask_words(visible: Bools) -> Words:
    """Which keys each row sees, [n, k], as words of 32 bits [n, ceil(k / 32)]."""
    packed = np.packbits(visible, axis=1, bitorder="little")
    padded = np.zeros((len(visible), 4 * -(-visible.shape[1] // 32)), dtype=np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view("<i4")


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
