"""Prompt lookup decoding (Saxena 2023): a session's own tokens in, trees of what followed them before out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from eyas.config import PromptLookupConfig, TreeConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.drafters.lookup.matches import Floats, Ints, Matches, Trie, merge
from eyas.drafters.lookup.ngrams import NgramIndex
from eyas.drafters.lookup.selection import select
from eyas.drafters.lookup.sessions import Sessions
from eyas.tree import DraftTree

# Weight of a match relative to the next better one.
FADING = 0.8


class _Context:
    """One session's tokens."""

    def __init__(self, config: PromptLookupConfig) -> None:
        self.index = NgramIndex(config.shortest, config.longest)

    @property
    def size(self) -> int:
        return len(self.index.tokens)

    def take(self, context: DraftContext) -> None:
        self.index.extend(context.tokens)


class PromptLookupDrafter(LocalDrafter):
    """Matches in the context, the longest first, merged into a tree. A node's score is how often matches of its length have
    foretold the next token in this session, times its share among the continuations. Not for use from several threads."""

    def __init__(self, tree: TreeConfig, config: PromptLookupConfig) -> None:
        self._tree = tree
        self._config = config
        self._sessions = Sessions(partial(_Context, config), config.num_tokens)

    @property
    def needs(self) -> DrafterNeeds:
        return DrafterNeeds()

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return self._sessions.answer(contexts, self._grow)

    def release(self, sessions: Sequence[str]) -> None:
        self._sessions.release(sessions)

    def _grow(self, contexts: Sequence[DraftContext], memories: Sequence[_Context]) -> list[DraftTree]:
        roots = [context.tokens[-1] for context in contexts]
        depth = min(self._tree.depth, max(context.budget.max_depth for context in contexts))
        found = [memory.index.occurrences(self._config.num_matches) for memory in memories]
        sessions = np.repeat(np.arange(len(found)), [len(places) for places in found])
        if not len(sessions) or depth < 1:
            return [DraftTree.root_only(root) for root in roots]
        rows = [
            memory.index.tokens[match.place : match.place + depth]
            for memory, places in zip(memories, found, strict=True)
            for match in places
        ]
        lengths = np.array([len(row) for row in rows])
        tokens = np.zeros((len(rows), depth), np.int64)
        tokens[np.arange(depth) < lengths[:, None]] = np.concatenate(rows)
        ranks = np.concatenate([np.arange(len(places)) for places in found])
        matches = Matches(sessions, tokens, lengths, FADING**ranks)
        known = np.array([match.length - self._config.shortest for places in found for match in places])
        trie = merge(matches)
        steps = _steps(trie, known, np.stack([memory.index.log_confidence() for memory in memories]))
        budgets = [replace(c.budget, max_nodes=min(c.budget.max_nodes, self._tree.nodes)) for c in contexts]
        return select(trie, trie.along_paths(steps), roots, budgets)


def _steps(trie: Trie, known: Ints, log_confidence: Floats) -> Floats:
    """Below a match every token that was right makes it longer by one."""
    lengths = np.minimum(known[trie.matches] + trie.depths, log_confidence.shape[1] - 1)
    steps: Floats = trie.log_shares() + log_confidence[trie.sessions, lengths]
    return steps
