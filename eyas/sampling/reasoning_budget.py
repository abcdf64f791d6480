"""Ends the reasoning of an output that has used up its budget of tokens.

Every node of a tree follows its own path, so that drafted outputs are the same as plain ones.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from eyas.api.request import ReasoningBudget
from eyas.arrays import Ints
from eyas.protocol.tree import DraftTree

NO_TOKEN = -1


@dataclass(frozen=True)
class _State:
    """State of a history.

    Attributes:
        is_open: it is inside the reasoning.
        num_tokens: of reasoning so far.
        latest: the tokens since the last mark, as many as a mark has.
    """

    is_open: bool
    num_tokens: int = 0
    latest: tuple[int, ...] = ()

    def after(self, token: int, budget: ReasoningBudget) -> _State:
        """Return where the history stands with one more token."""
        mark = budget.end_ids if self.is_open else budget.start_ids
        latest = (*self.latest, token)[-len(mark) :]
        if latest == mark:
            return _State(not self.is_open, self.num_tokens)
        return _State(self.is_open, self.num_tokens + self.is_open, latest)

    def forced(self, budget: ReasoningBudget) -> int:
        """Return the only token that may follow, which goes on with the end of the reasoning; `NO_TOKEN` if others may."""
        if not self.is_open or self.num_tokens < budget.num_tokens:
            return NO_TOKEN
        ends = budget.end_ids
        return next(ends[n] for n in range(len(ends) - 1, -1, -1) if self.latest[len(self.latest) - n :] == ends[:n])


class BudgetFollower:
    """Counts the reasoning of one request: of its committed tokens once, as they come, and along the paths of its trees.

    Args:
        num_prompt: tokens before the output.
    """

    def __init__(self, budget: ReasoningBudget, num_prompt: int) -> None:
        self._budget = budget
        self._state = _State(budget.is_open)
        self._num_followed = num_prompt

    def forced(self, tokens: Seq[int], tree: DraftTree) -> Ints:
        """Return for each node the only token that may follow it, or `NO_TOKEN` [n]. tokens: the committed ones."""
        for token in tokens[self._num_followed :]:
            self._state = self._state.after(token, self._budget)
        self._num_followed = len(tokens)
        states = [self._state]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            states.append(states[parent].after(token, self._budget))
        return np.array([state.forced(self._budget) for state in states])
