"""Rows of draft trees with keys and values in slots of the KV cache, as the attention kernel reads them.

A tree adds its rows in passes: one for each level, or one in all for heads that draft all levels at once. A row sees the
prefix of its session and, of the rows that its session's tree has added, those that its mask allows. What the passes of a
round need besides tokens and masks is laid out on the host as one array of int32 words:

    rows      [3, S * R]  position and slot of each row, pass by pass; and its number within the pass
    own       [2, S, R]   slot and position of each session's own rows
    tiles     of each pass [tiles, TILE_WORDS], see eyas.models.backends.attention_metadata
    prefixes  slots, one session after the other

Legend: S sessions, W rows of a session in a pass, R rows of a session in all passes, M words of a mask row.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.arrays import Bools, Ints
from eyas.cache.kv_cache import KVCache
from eyas.cache.prefix_cache import Slots
from eyas.device.transfer import upload
from eyas.kernels.arguments import Projected, Ranked
from eyas.kernels.plain.layers import take_rows
from eyas.models.backends.attention_metadata import TILE_WORDS, Tiling, Words, mask_words
from eyas.models.heads.eagle import EagleHead
from eyas.models.inputs import AttentionMetadata, MetadataShape, PackedInputs, PaddedGroup
from eyas.models.layers.attention import masked_attention


@dataclass(frozen=True)
class PaddedPrefix:
    """Prefixes padded to the longest, as the plain attention reads them.

    Attributes:
        slots: int64 [S, L]; padding repeats a session's own first slot, because NaN in another session's slot would spread
            through masked attention.
        lengths: without padding, int64 [S].
        scratch: slots for the rows of each tree [S, R].
    """

    slots: Tensor
    lengths: Tensor
    scratch: Tensor

    @classmethod
    def of(cls, slots: Sequence[Slots], scratch: Sequence[Slots], device: torch.device) -> PaddedPrefix:
        """Return the prefixes of sessions, copied to the device."""
        lengths = np.array([len(own) for own in slots])
        cells = np.empty((len(slots), int(lengths.max())), dtype=np.int64)
        for row, own in zip(cells, slots, strict=True):
            row[: len(own)] = own
            row[len(own) :] = own[:1]
        return cls(upload(cells, device), upload(lengths, device), upload(np.stack(scratch), device))


class GrowthShape(NamedTuple):
    """Shape in which trees grow together: levels below the root, and most nodes that are expanded at each."""

    num_steps: int
    top_k: int


@dataclass(frozen=True)
class Roots:
    """Roots from which trees grow.

    Attributes:
        states: of the drafter, behind the last commit [S, H].
        tokens: the target's ids, int64 [S].
        cached: what lies before.
    """

    states: Tensor
    tokens: Tensor
    cached: PaddedPrefix | SlotRows


@dataclass(frozen=True)
class RowLayout:
    """The rows of trees of one shape.

    Attributes:
        widths: W of each pass.
        max_model_len: positions beyond are taken as the last one; budgets cut what is there.
        visible: which rows of the only pass see each other [W, W], for all sessions; None if rows see the row above theirs,
            what that sees, and themselves.
    """

    widths: tuple[int, ...]
    tiling: Tiling
    max_model_len: int
    device: torch.device
    visible: Bools | None = None

    def __post_init__(self) -> None:
        """Copy the constant masks to the device now: a graph that is captured cannot."""
        _ = self.own_bits, self.own_causal, self.visible_words

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Rows of a session before each pass, and in all."""
        return (0, *accumulate(self.widths))

    @property
    def num_rows(self) -> int:
        """R."""
        return self.ends[-1]

    @property
    def has_levels(self) -> bool:
        """Return whether a pass is a level of the trees, each of whose rows is a node."""
        return self.num_rows > 0 and self.visible is None

    @property
    def stride(self) -> int:
        """M."""
        return -(-self.num_rows // 32)

    @property
    def tile_rows(self) -> int:
        """Rows of a tile."""
        return self.tiling.tile_rows(max(self.widths, default=1))

    @cached_property
    def own_bits(self) -> Tensor:
        """Mask words with the bit of the row itself, int32 [R, M]."""
        return upload(mask_words(np.eye(self.num_rows, dtype=np.bool_)), self.device)

    @cached_property
    def visible_words(self) -> Tensor:
        """Mask words of the only pass, int32 [W, M]; of no row if there are several passes."""
        visible = np.zeros((0, self.num_rows), dtype=np.bool_) if self.visible is None else self.visible
        return upload(mask_words(visible), self.device)

    @cached_property
    def own_causal(self) -> Tensor:
        """Mask words of rows that see themselves and the rows before them, int32 [R, M]."""
        return upload(mask_words(np.tri(self.num_rows, dtype=np.bool_)), self.device)

    def num_fixed_words(self, sessions: int) -> int:
        """Return the words before the prefixes."""
        return sessions * (5 * self.num_rows + TILE_WORDS * sum(map(self._num_tiles, self.widths)))

    def shape(self, sessions: int, number: int) -> MetadataShape:
        """Return the shape of a pass."""
        rows, tiles = sessions * self.widths[number], sessions * self._num_tiles(self.widths[number])
        return replace(self.tiling, longest=self.max_model_len).shape(rows, rows, tiles, self.tile_rows)

    def build_words(self, slots: Sequence[Slots], scratch: Sequence[Slots] | Ints, sessions: int) -> Words:
        """Return the words of a round, padded to `sessions`.

        Rows of padding sessions attend to nothing.

        Args:
            slots: of the prefixes.
            scratch: R slots of each session, padding too.
        """
        lengths = np.zeros(sessions, dtype=np.int64)
        lengths[: len(slots)] = [len(own) for own in slots]
        own_slots = np.stack(list(scratch)).reshape(sessions, self.num_rows)
        # [S, R] each; a level lies one position below the level above.
        positions = np.minimum(lengths[:, None] + self._offsets, self.max_model_len - 1)
        spans = list(zip(self.ends, self.ends[1:], strict=False))
        # Passes follow one another; within a pass the rows of all sessions.
        rows = [np.concatenate([x[:, a:b].ravel() for a, b in spans] or [lengths[:0]]) for x in (positions, own_slots)]
        numbers = np.concatenate([np.arange(sessions * (b - a)) for a, b in spans] or [lengths[:0]])
        starts = self.num_fixed_words(sessions) + np.cumsum(lengths) - lengths
        tiles = [self._tiles(number, lengths, starts, len(slots)).ravel() for number in range(len(self.widths))]
        parts = [*rows, numbers, own_slots.ravel(), positions.ravel(), *tiles, *slots]
        return np.concatenate(parts, dtype=np.int32, casting="same_kind")

    @cached_property
    def _offsets(self) -> Ints:
        """Position of each row behind the last slot of the prefix, [R]."""
        if self.visible is not None:
            return np.arange(self.num_rows)
        return np.repeat(np.arange(len(self.widths)), self.widths)

    def _num_tiles(self, width: int) -> int:
        return -(-width // self.tile_rows)

    def _tiles(self, number: int, lengths: Ints, starts: Ints, count: int) -> Ints:
        """Return the tiles of a pass [S, tiles of a session, TILE_WORDS]; `count` sessions are no padding."""
        width, sessions = self.widths[number], np.arange(len(lengths))[:, None]
        firsts = np.arange(0, width, self.tile_rows)[None]
        tiles = np.zeros((len(lengths), firsts.shape[1], TILE_WORDS), dtype=np.int64)
        # Word 0: first row. 1: rows. 2, 3: first own key and mask stride. 4, 5: length and place of the prefix. 6: first
        # mask. 7: own keys that the rows may see, 0 for padding.
        tiles[..., 0] = sessions * width + firsts
        tiles[..., 1] = np.minimum(self.tile_rows, width - firsts)
        tiles[..., 2], tiles[..., 3] = sessions * self.num_rows, self.stride
        tiles[..., 4], tiles[..., 5] = lengths[:, None], starts[:, None]
        tiles[..., 6] = (firsts if self.visible is not None else tiles[..., 0]) * self.stride
        tiles[..., 7] = np.where(sessions < count, self.ends[number + 1], 0)
        return tiles


@dataclass(frozen=True)
class TreeSlots:
    """Slots of the rows of trees, if the attention kernel serves them.

    Attributes:
        trees, chains: layouts of deterministic trees and of sampled chains.
        max_sessions: of a round.
        first: of the slots that all rounds share; None if each session has slots of its own.
        spare: the last slot of the KV cache, for padding.
    """

    trees: RowLayout
    chains: RowLayout
    max_sessions: int
    first: int | None = 0
    spare: int = 0

    @property
    def num_slots(self) -> int:
        """Slots that rounds share."""
        return self.max_sessions * self._num_rows

    def rows(self, sessions: int) -> list[Slots]:
        """Return the shared slots of each session's tree."""
        assert self.first is not None, "sessions have slots of their own"
        return list(self.first + np.arange(sessions * self._num_rows).reshape(sessions, -1))

    @property
    def _num_rows(self) -> int:
        return max(self.trees.num_rows, self.chains.num_rows)


class SlotRows:
    """The words of a round on the device, and the inputs of its passes.

    Args:
        words: the output of `RowLayout.build_words`; there may be more behind.
    """

    def __init__(self, layout: RowLayout, words: Tensor, sessions: int) -> None:
        self.layout, self.sessions, self._words = layout, sessions, words
        count = sessions * layout.num_rows
        self._words_of_rows = words[: 3 * count].view(3, count)
        self._rows = self._words_of_rows.long()
        self._own = words[3 * count : 5 * count].view(2, count)
        self._tiles = words[5 * count : layout.num_fixed_words(sessions)].view(-1, TILE_WORDS)

    def inputs(self, number: int, masks: Tensor, tokens: Tensor | None = None) -> PackedInputs:
        """Return a pass, session by session.

        Args:
            masks: int32 [S, W, M]; [W, M] if all sessions share them.
            tokens: [S, W].
        """
        layout, sessions = self.layout, self.sessions
        here = slice(sessions * layout.ends[number], sessions * layout.ends[number + 1])
        positions, slots, numbers = self._rows[:, here]
        shape, first = layout.shape(sessions, number), sum(layout.shape(sessions, n).tiles for n in range(number))
        own_slots, own_positions = self._own
        tiles = self._tiles[first : first + shape.tiles]
        places = self._words_of_rows[0, here]
        metadata = AttentionMetadata(shape, shape.rows, self._words, masks, tiles, places, own_slots, own_positions)
        ids = numbers if tokens is None else tokens.flatten()
        return PackedInputs(ids, positions, slots, numbers, metadata=metadata)


@dataclass(frozen=True)
class SlotLevels:
    """The rows of trees so far, for the attention kernel.

    Attributes:
        masks: of the newest rows [S, W, M].
        newest: their pass.
    """

    rows: SlotRows
    masks: Tensor | None = None
    newest: PackedInputs | None = None

    @property
    def packed(self) -> PackedInputs:
        """The pass of the newest rows."""
        assert self.newest is not None, "no row was added"
        return self.newest

    def level(self, level: int, parents: Tensor, tokens: Tensor | None = None) -> SlotLevels:
        """Add the rows of the next level, from 1. parents: row of each one's parent in the level above, [S, W]."""
        layout = self.rows.layout
        assert parents.shape[1] == layout.widths[level - 1], "a level has as many rows as its layout"
        # A row sees what its parent sees, and itself: one "or" of mask words for each level.
        masks = layout.own_bits[layout.ends[level - 1] : layout.ends[level]].expand(self.rows.sessions, -1, -1)
        if self.masks is not None:
            masks = take_rows(self.masks, parents) | masks
        return SlotLevels(self.rows, masks, self.rows.inputs(level - 1, masks.contiguous(), tokens))

    def all_at_once(self, masks: Tensor | None = None) -> SlotLevels:
        """Add the rows of the only pass. masks: [W, M], by default those of the layout."""
        masks = self.rows.layout.visible_words if masks is None else masks
        return SlotLevels(self.rows, masks, self.rows.inputs(0, masks))


class GroupLevels:
    """The rows of trees for the plain attention. packed: the newest level."""

    packed: PackedInputs

    def __init__(self, cached: PaddedPrefix, max_model_len: int) -> None:
        self._max_model_len, self._length = max_model_len, cached.slots.shape[1]
        self._keys = torch.cat([cached.slots, cached.scratch], 1)
        places = torch.arange(self._length, device=cached.slots.device)
        self._seen = (places < cached.lengths[:, None])[:, None]
        self._root = cached.lengths[:, None] - 1
        self._key_positions = places.expand(len(cached.slots), -1)

    def level(self, level: int, parents: Tensor, tokens: Tensor) -> GroupLevels:
        """Add the rows of the next level, from 1; parents and tokens [S, W]."""
        sessions, width = tokens.shape
        # sessions near the end of their context are expanded with the others; their budget cuts what lies beyond
        positions = (self._root + level).clamp(max=self._max_model_len - 1).expand_as(tokens)
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(sessions, -1, -1)
        found = copy(self)
        found._seen = torch.cat([take_rows(self._seen, parents), own], dim=2)
        found._key_positions = torch.cat([self._key_positions, positions], dim=1)
        end = self._length + width * level
        keys, slots = self._keys[:, :end], self._keys[:, end - width : end]
        rows = torch.arange(tokens.numel(), device=tokens.device)
        group = LevelGroup(rows.view_as(tokens), keys, found._seen, positions, found._key_positions)
        found.packed = PackedInputs(tokens.flatten(), positions.flatten(), slots.flatten(), rows, own_groups=(group,))
        return found


class LevelGroup(PaddedGroup):
    """One level of all sessions' trees, from tensors that are on the device already."""

    def __init__(self, rows: Tensor, keys: Tensor, mask: Tensor, query_positions: Tensor, key_positions: Tensor) -> None:
        self.shape = (rows.shape[0], rows.shape[1])
        self.covers_pass = True
        self.unmasked = False
        self.filled_cells = None
        self.rows = rows
        self.keys = keys
        self.mask = mask
        self.query_positions = query_positions
        self.key_positions = key_positions


class BufferAttention:
    """The rows of trees without the kernel. Keys and values of the rows follow a copy of the prefix in each layer:

        [ prefix, L cells | padding masked ] [ level 1, W rows ] [ level 2, W rows ] ...

    positions: of the newest rows, [S * W].

    Args:
        shape: number of levels, and the most rows of a level.
    """

    positions: Tensor

    def __init__(self, head: EagleHead, kv: KVCache, cached: PaddedPrefix, shape: GrowthShape) -> None:
        self._config, self._max_model_len = head.config, head.max_model_len
        index, lengths, dtype = cached.slots, cached.lengths, kv.keys[0].dtype
        sessions, self._length = index.shape
        self._end = self._length
        self._root = lengths[:, None] - 1
        room = shape.top_k * (shape.num_steps - 1)
        self._keys, self._values = ([_buffer(p, index, room) for p in pool] for pool in (kv.keys, kv.values))
        hidden = torch.arange(self._length, device=index.device) >= lengths[:, None]
        self._folded = head.config.num_heads // head.config.num_kv_heads
        shape_of_bias = (sessions, self._folded, shape.top_k, self._length + room)
        self._bias = torch.zeros(shape_of_bias, device=index.device, dtype=dtype)
        self._bias[..., : self._length].masked_fill_(hidden[:, None, None], float("-inf"))
        self._seen = torch.zeros(sessions, shape.top_k, 0, dtype=torch.bool, device=index.device)

    def level(self, level: int, parents: Tensor) -> BufferAttention:
        """Add the rows of the next level, from 1. parents: row of each one's parent in the level above, [S, W]."""
        own = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
        # seen [S, W, rows so far]: what the parent sees, then the identity for the new rows.
        seen = torch.cat([take_rows(self._seen, parents), own], dim=2)
        return self._with(seen, (self._root + level).expand_as(parents))

    def chain(self, count: int) -> BufferAttention:
        """Add `count` rows after the root; each sees those before it."""
        ahead = torch.arange(1, count + 1, device=self._root.device)
        seen = torch.ones(count, count, dtype=torch.bool, device=ahead.device).tril()
        return self._with(seen.expand(len(self._root), -1, -1), self._root + ahead)

    def _with(self, seen: Tensor, positions: Tensor) -> BufferAttention:
        found = copy(self)
        # sessions near the end of their context are expanded with the others; their budget cuts what lies beyond
        found._seen, found.positions = seen, positions.clamp(max=self._max_model_len - 1).flatten()
        found._end += seen.shape[1]
        found._bias[..., : seen.shape[1], self._length : found._end].zero_().masked_fill_(~seen[:, None], float("-inf"))
        return found

    def attend(self, layer: int, rows: Projected) -> Tensor:
        """Store keys and values of the newest rows, then attend from them; [S * W, heads, d]."""
        c, sessions = self._config, len(self._root)
        width, (keys, values) = rows.key.shape[0] // sessions, (self._keys[layer], self._values[layer])
        keys[:, :, self._end - width : self._end] = rows.key.view(sessions, width, -1, c.head_dim).transpose(1, 2)
        values[:, :, self._end - width : self._end] = rows.value.view(sessions, width, -1, c.head_dim).transpose(1, 2)
        # [S * W, heads, d] to [S, kv heads, heads per kv head * W, d]: heads that share keys become rows.
        query = rows.query.view(sessions, width, c.num_kv_heads, -1, c.head_dim).permute(0, 2, 3, 1, 4)
        attended = masked_attention(
            query.reshape(sessions, c.num_kv_heads, -1, c.head_dim),
            keys[:, :, : self._end],
            values[:, :, : self._end],
            self._bias[..., :width, : self._end].reshape(sessions, 1, self._folded * width, self._end),
            c.head_dim**-0.5,
        )
        attended = attended.view(sessions, c.num_kv_heads, -1, width, c.head_dim).permute(0, 3, 1, 2, 4)
        return attended.reshape(sessions * width, c.num_heads, c.head_dim)


def _buffer(pool: Tensor, index: Tensor, room: int) -> Tensor:
    """Copy the pool's rows at index [S, L] and append `room` empty cells: [S, J, L + room, D]."""
    rows = pool[index].transpose(1, 2)
    return torch.cat([rows, rows.new_zeros(*rows.shape[:2], room, rows.shape[3])], dim=2)


@dataclass(frozen=True)
class GrownRows:
    """Rows of a tree of one session: target token ids [R], depths from 1 [R], and the states before them [R, H].

    Attributes:
        slots: of their keys and values, [R].
        nodes: their numbers, [R]; those of new nodes follow the tree's last one.
        parents: numbers of the nodes above [R].
        is_exact: whether the states before them are behind true features alone, [R].
        others: slots of more nodes that rows see.
        visible: which of these, and then of the rows, each row sees, [R, others + R].
    """

    tokens: Ints
    depths: Ints
    features: Tensor
    slots: Slots
    nodes: Ints
    parents: Ints
    is_exact: Bools
    others: Slots
    visible: Bools


class FoundRows(NamedTuple):
    """Result of a pass over rows of trees: states [R, H] and best children [R, C], draft ids, session by session."""

    states: Tensor
    best: Ranked
