"""A drafter for checks: it is told what plain decoding said, and drafts that, with a wrong guess beside each right one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.tree import DraftTree


class ReplayDrafter(LocalDrafter):
    """Trees that are as large as the budget allows and are accepted for as long as speculation repeats plain decoding."""

    needs = DrafterNeeds()

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._scripts: Mapping[str, Sequence[int]] = {}

    def follow(self, scripts: Mapping[str, Sequence[int]]) -> None:
        """From now on, draft from these: prompt and output by session."""
        self._scripts = scripts

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [self._tree(context) for context in contexts]

    def release(self, sessions: Sequence[str]) -> None:
        pass

    def _tree(self, context: DraftContext) -> DraftTree:
        """A chain of the script, each node with a sibling that comes before it."""
        budget, script = context.budget, self._scripts[context.session]
        levels = min(budget.max_depth, (budget.max_nodes - 1) // 2) if budget.wants_tree else 0
        tokens, parents = [context.tokens[-1]], [0]
        above = 0
        for token in script[context.committed : context.committed + levels]:
            tokens += [(token + 1) % self._vocab_size, token]
            parents += [above, above]
            above = len(tokens) - 1
        return DraftTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))
