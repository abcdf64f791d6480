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
from eyas.cache.prefix_cache import Slots
from eyas.device.transfer import upload
from eyas.kernels.arguments import Ranked
from eyas.kernels.plain.layers import take_rows
from eyas.models.backends.attention_metadata import TILE_WORDS, Tiling, Words, mask_words
from eyas.models.inputs import AttentionMetadata, MetadataShape, PackedInputs, PaddedGroup


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
        rows: of trees, before the first is added to the sessions' prefixes.
    """

    states: Tensor
    tokens: Tensor
    rows: Levels


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
        spare: the last slot of the KV cache, for padding.
    """

    trees: RowLayout
    chains: RowLayout
    max_sessions: int
    spare: int = 0


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

    def inputs(self, number: int, masks: Tensor, tokens: Tensor) -> PackedInputs:
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
        return PackedInputs(tokens.flatten(), positions, slots, numbers, metadata=metadata)


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

    def level(self, level: int, parents: Tensor, tokens: Tensor) -> SlotLevels:
        """Add the rows of the next level, from 1: tokens, and rows of their parents in the level above, [S, W]."""
        layout = self.rows.layout
        assert parents.shape[1] == layout.widths[level - 1], "a level has as many rows as its layout"
        # A row sees what its parent sees, and itself: one "or" of mask words for each level.
        masks = layout.own_bits[layout.ends[level - 1] : layout.ends[level]].expand(self.rows.sessions, -1, -1)
        if self.masks is not None:
            masks = take_rows(self.masks, parents) | masks
        return SlotLevels(self.rows, masks, self.rows.inputs(level - 1, masks.contiguous(), tokens))

    def all_at_once(self, tokens: Tensor, is_causal: bool = False) -> SlotLevels:
        """Add the rows of the only pass, tokens [S, W]. They see what the layout says; if `is_causal`, none behind them."""
        masks = self.rows.layout.own_causal if is_causal else self.rows.layout.visible_words
        return SlotLevels(self.rows, masks, self.rows.inputs(0, masks, tokens))


class GroupLevels:
    """The rows of trees so far, for the plain attention, behind prefixes that are padded to the longest.

    lengths: of the prefixes without padding, int64 [S]. packed: the newest rows.

    Args:
        prefixes: slots of each session.
        scratch: slots for the rows of each tree, as many for all.
        max_model_len: see RowLayout.
    """

    packed: PackedInputs

    def __init__(
        self, prefixes: Sequence[Slots], scratch: Sequence[Slots], max_model_len: int, device: torch.device
    ) -> None:
        lengths = np.array([len(own) for own in prefixes])
        self._max_model_len, self._end = max_model_len, int(lengths.max())
        keys = np.empty((len(prefixes), self._end + len(scratch[0])), dtype=np.int64)
        for row, own, extra in zip(keys, prefixes, scratch, strict=True):
            row[: len(own)] = own
            # a session's own first slot: NaN in another session's would spread through masked attention
            row[len(own) : self._end] = own[:1]
            row[self._end :] = extra
        self._keys, self.lengths = upload(keys, device), upload(lengths, device)
        self._key_positions = torch.arange(self._end, device=device).expand(len(prefixes), -1)
        self._seen = (self._key_positions < self.lengths[:, None])[:, None]

    def without_last(self, count: int) -> GroupLevels:
        """Leave out the last `count` slots of each prefix, before the first rows are added."""
        found = copy(self)
        found.lengths = self.lengths - count
        found._seen = (self._key_positions < found.lengths[:, None])[:, None]
        return found

    def level(self, level: int, parents: Tensor, tokens: Tensor) -> GroupLevels:
        """Add the rows of the next level, from 1; parents and tokens [S, W]."""
        own = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
        positions = (self.lengths[:, None] + (level - 1)).expand_as(tokens)
        return self._with(tokens, take_rows(self._seen, parents), own, positions)

    def all_at_once(self, tokens: Tensor, is_causal: bool = False) -> GroupLevels:
        """Add the rows of the only pass, tokens [S, W]. They see each other; if `is_causal`, none behind them."""
        count, device = tokens.shape[1], tokens.device
        own = torch.ones(count, count, dtype=torch.bool, device=device)
        own = own.tril() if is_causal else own
        positions = self.lengths[:, None] + torch.arange(count, device=device)
        return self._with(tokens, self._seen.expand(-1, count, -1), own, positions)

    def _with(self, tokens: Tensor, seen: Tensor, own: Tensor, positions: Tensor) -> GroupLevels:
        """Add rows at positions [S, W].

        Args:
            seen: what they see of the keys so far [S, W, keys].
            own: and of each other [W, W].
        """
        found = copy(self)
        # sessions near the end of their context are expanded with the others; their budget cuts what lies beyond
        positions = positions.clamp(max=self._max_model_len - 1)
        found._seen = torch.cat([seen, own.expand(len(tokens), -1, -1)], dim=2)
        found._key_positions = torch.cat([self._key_positions, positions], dim=1)
        found._end += tokens.shape[1]
        keys, slots = self._keys[:, : found._end], self._keys[:, self._end : found._end]
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


# The rows of trees so far. A row of a level sees the prefix, its ancestors and itself.
Levels = SlotLevels | GroupLevels


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
