"""Ends the reasoning of an output that has used up its budget of tokens.

Every node of a tree follows its own path, so that drafted outputs are the same as plain ones.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from eyas.request import ReasoningBudget
from eyas.tensors import Bools
from eyas.tree import DraftTree


@dataclass(frozen=True)
class _State:
    """Where a history stands.

    Attributes:
        is_open: it is inside the reasoning.
        num_tokens: of reasoning so far.
        latest: the latest tokens outside of the reasoning, as many as begin it.
    """

    is_open: bool
    num_tokens: int = 0
    latest: tuple[int, ...] = ()

    def after(self, token: int, budget: ReasoningBudget) -> _State:
        """Return where the history stands with one more token."""
        if self.is_open:
            is_end = token == budget.end_id
            return _State(not is_end, self.num_tokens + (not is_end))
        latest = (*self.latest, token)[-len(budget.start_ids) :]
        return _State(latest == budget.start_ids, self.num_tokens, latest)


class BudgetFollower:
    """Counts the reasoning of one request: of its committed tokens once, as they come, and along the paths of its trees."""

    def __init__(self, budget: ReasoningBudget, num_prompt: int) -> None:
        """num_prompt: tokens before the output."""
        self.budget = budget
        self._state = _State(budget.is_open)
        self._num_followed = num_prompt

    def must_end(self, tokens: Seq[int], tree: DraftTree) -> Bools:
        """Return for each node whether only the end of the reasoning may follow it [n]. tokens: the committed ones."""
        for token in tokens[self._num_followed :]:
            self._state = self._state.after(token, self.budget)
        self._num_followed = len(tokens)
        states = [self._state]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            states.append(states[parent].after(token, self.budget))
        return np.array([state.is_open and state.num_tokens >= self.budget.num_tokens for state in states])
