"""The n-grams of one session's tokens: tokens in, earlier places of the last ones out, and how often such places foretold.

A round costs what its new tokens cost, however long the context.

Prompt lookup decoding (Saxena 2023): a session's own tokens in, trees of what followed them before out.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from eyas.config import PromptLookupConfig, TreeConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.drafters.lookup_trees import Floats, Ints, Matches, Trie, merge, select
from eyas.drafters.sessions import Sessions
from eyas.tree import DraftTree

# How much the estimate of a length that was seen seldom leans towards n / (n + 1).
PRIOR_TRIALS = 4.0


@dataclass(frozen=True)
class Occurrence:
    """The context's last `length` tokens stood just before `place` too."""

    place: int
    length: int


class NgramIndex:
    """All n-grams of `shortest` to `longest` tokens, each with the chain of its occurrences."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.tokens = array("q")
        self._lengths = range(shortest, longest + 1)
        # By n-gram: the place behind its latest occurrence; by place: that behind the one before of the n-gram that ends
        # there, 0 if there was none.
        self._latest: list[dict[tuple[int, ...], int]] = [{} for _ in self._lengths]
        self._earlier = [array("q") for _ in self._lengths]
        self._trials = np.zeros(len(self._lengths))
        self._hits = np.zeros(len(self._lengths))

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens, and note for each whether the longest match before it foretold it."""
        for token in tokens:
            self._learn(token)
            self.tokens.append(token)
            place = len(self.tokens)
            last = tuple(self.tokens[-self._lengths[-1] :])
            for n, latest, earlier in zip(self._lengths, self._latest, self._earlier, strict=True):
                if n > place:
                    earlier.append(0)
                    continue
                ngram = last[-n:]
                earlier.append(latest.get(ngram, 0))
                latest[ngram] = place

    def occurrences(self, most: int) -> list[Occurrence]:
        """Earlier places of the context's end, the longest match first, of equal length the latest; `most` at most."""
        found: dict[int, Occurrence] = {}
        for n, earlier in zip(reversed(self._lengths), reversed(self._earlier), strict=True):
            place = earlier[-1] if earlier else 0
            while place and len(found) < most:
                found.setdefault(place, Occurrence(place, n))
                place = earlier[place - 1]
        return list(found.values())

    def log_confidence(self) -> Floats:
        """Log of how often a longest match of `shortest`, ..., `longest` tokens has foretold the next one."""
        prior = np.array([n / (n + 1) for n in self._lengths])
        return np.log((self._hits + PRIOR_TRIALS * prior) / (self._trials + PRIOR_TRIALS))

    def _learn(self, token: int) -> None:
        for i in range(len(self._earlier) - 1, -1, -1):
            earlier = self._earlier[i]
            if earlier and earlier[-1]:
                self._trials[i] += 1
                self._hits[i] += self.tokens[earlier[-1]] == token
                return


# Weight of a match relative to the next better one.
FADING = 0.8


class _Context:
    """One session's tokens."""

    def __init__(self, config: PromptLookupConfig) -> None:
        self.index = NgramIndex(config.min_ngram, config.max_ngram)

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
        self._sessions = Sessions(partial(_Context, config), config.max_cached_tokens)

    @property
    def needs(self) -> DrafterNeeds:
        return DrafterNeeds()

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return self._sessions.answer(contexts, self._grow)

    def release(self, sessions: Sequence[str]) -> None:
        self._sessions.release(sessions)

    def _grow(self, contexts: Sequence[DraftContext], memories: Sequence[_Context]) -> list[DraftTree]:
        roots = [context.tokens[-1] for context in contexts]
        depth = min(self._tree.num_steps, max(context.budget.max_depth for context in contexts))
        found = [memory.index.occurrences(self._config.max_matches) for memory in memories]
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
        known = np.array([match.length - self._config.min_ngram for places in found for match in places])
        trie = merge(matches)
        steps = _steps(trie, known, np.stack([memory.index.log_confidence() for memory in memories]))
        budgets = [replace(c.budget, max_nodes=min(c.budget.max_nodes, self._tree.num_draft_tokens)) for c in contexts]
        return select(trie, trie.along_paths(steps), roots, budgets)


def _steps(trie: Trie, known: Ints, log_confidence: Floats) -> Floats:
    """Below a match every token that was right makes it longer by one."""
    lengths = np.minimum(known[trie.matches] + trie.depths, log_confidence.shape[1] - 1)
    steps: Floats = trie.log_shares() + log_confidence[trie.sessions, lengths]
    return steps
