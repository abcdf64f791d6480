"""What a small model's last tree ran through it: tokens in, slots of accepted rows out. Integers only.

Keys and values of a token depend on the tokens before it alone: what a tree computed for accepted tokens is kept.
Legend: L levels of a tree that were run through the model, W rows of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eyas.cache.slots import Slots
from eyas.models.inputs import Ints


@dataclass(frozen=True)
class TreeRows:
    """What the last tree ran through the model, [L, W] each: tokens, rows of their parents in the level above, slots."""

    tokens: Ints
    parents: Ints
    slots: Slots

    def path(self, tokens: Sequence[int]) -> Slots:
        """Slots of the rows that lead from the root along `tokens`, as far as there are any."""
        row, found = 0, []
        for level, token in enumerate(tokens[: len(self.tokens)]):
            (rows,) = np.nonzero((self.tokens[level] == token) & (self.parents[level] == row))
            if not len(rows):
                break
            row = int(rows[0])
            found.append(self.slots[level, row])
        return np.array(found, dtype=np.int64)


def tree_rows(ran: Ints, scratch: Slots, width: int) -> TreeRows:
    """ran: tokens and parents of all rows, level by level, [2, L * W]. scratch: slots of a tree, the first ones theirs."""
    tokens, parents = ran.reshape(2, -1, width)
    return TreeRows(tokens, parents, scratch[: tokens.size].reshape(-1, width))
