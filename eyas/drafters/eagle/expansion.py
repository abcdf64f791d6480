"""The draft head in the middle of growing trees: states of roots in, scored children of each level out.

Legend: S sessions, W frontier rows, R rows of the level above, L prefix length, J key-value heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.cache.kv import SlotPools
from eyas.config import TreeConfig
from eyas.drafters.captured.prefix import Prefix
from eyas.drafters.ranking import Scorer
from eyas.models.attention import masked_attention
from eyas.models.heads.eagle import EagleHead
from eyas.models.heads.eagle.layer import Projected


class EagleExpansion:
    """Implements Expansion: the prefix's keys and values, followed by those of the tree rows.

    shape: levels, and the most rows that `next` is asked for at each.
    """

    def __init__(
        self, head: EagleHead, scorer: Scorer, pools: SlotPools, prefix: Prefix, states: Tensor, shape: TreeConfig
    ) -> None:
        self._head, self._scorer = head, scorer
        self._states = states[:, None]
        index, lengths = prefix.index, prefix.lengths
        sessions, self._length = index.shape
        self._end = self._length
        self._positions = lengths[:, None] - 1
        room = shape.width * (shape.depth - 1)
        self._keys, self._values = ([_buffer(p, index, room) for p in pool] for pool in (pools.keys, pools.values))
        hidden = torch.arange(self._length, device=states.device) >= lengths[:, None]
        self._folded = head.config.num_heads // head.config.num_kv_heads
        shape_of_bias = (sessions, self._folded, shape.width, self._length + room)
        self._bias = torch.zeros(shape_of_bias, device=states.device, dtype=states.dtype)
        self._bias[..., : self._length].masked_fill_(hidden[:, None, None], float("-inf"))
        self._seen = torch.zeros(sessions, shape.width, 0, dtype=torch.bool, device=states.device)

    def first(self) -> Tensor:
        return self._scorer.scores(self._head.logits(self._states), 0)

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        head, (sessions, width) = self._head, tokens.shape
        above = _rows(self._states, parents)
        # a session near the end of its context is expanded with the others; its budget cuts what lies beyond
        positions = (self._positions + level).clamp(max=head.context_length - 1).expand_as(tokens).flatten()
        self._end += width
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(sessions, -1, -1)
        self._seen = torch.cat([_rows(self._seen, parents), own], dim=2)
        self._bias[..., :width, self._length : self._end].zero_().masked_fill_(~self._seen[:, None], float("-inf"))
        states = head.run(above.flatten(0, 1), head.draft_ids[tokens].flatten(), positions, self._attend)
        self._states = states.view(sessions, width, -1)
        return self._scorer.scores(head.logits(self._states), level)

    def _attend(self, layer: int, rows: Projected) -> Tensor:
        """The level's rows over the prefix and the tree rows above them; their own keys and values are added first."""
        c, sessions = self._head.config, self._states.shape[0]
        width, (keys, values) = rows.key.shape[0] // sessions, (self._keys[layer], self._values[layer])
        keys[:, :, self._end - width : self._end] = rows.key.view(sessions, width, -1, c.head_dim).transpose(1, 2)
        values[:, :, self._end - width : self._end] = rows.value.view(sessions, width, -1, c.head_dim).transpose(1, 2)
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
    """The pool's rows at index [S, L], and room behind them: [S, J, L + room, D]."""
    rows = pool[index].transpose(1, 2)
    return torch.cat([rows, rows.new_zeros(*rows.shape[:2], room, rows.shape[3])], dim=2)


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[s, rows[s]] for every session; x [S, R, ...], rows [S, W]. A single row serves all."""
    return x.gather(1, rows[:, :, None].expand(-1, -1, x.shape[2])) if x.shape[1] > 1 else x.expand(-1, rows.shape[1], -1)
