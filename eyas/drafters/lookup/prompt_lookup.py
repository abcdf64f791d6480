"""Prompt lookup decoding (Saxena 2023): what followed the last tokens where they stood before in the same session.

`eyas.kernels.cpu.lookups` has the same drafter, compiled.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from itertools import chain

import numpy as np

from eyas.arrays import Ints, Reals
from eyas.config import PromptLookupConfig, TreeConfig
from eyas.drafters.base import DraftContext, LocalDrafter
from eyas.drafters.lookup.base import HitRates, MatchDrafter, Matches, Trie, match_steps
from eyas.drafters.sessions import MemoryLedger
from eyas.kernels.choice import compiled_or

# Weight of a match relative to the next better one.
MATCH_DECAY = 0.8


class NgramIndex:
    """One session's tokens and all of their n-grams of `min_ngram` to `max_ngram` tokens.

    A round costs in proportion to its new tokens, however long the context is.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.tokens = array("q")
        self._lengths = range(min_ngram, max_ngram + 1)
        # For each length: the place behind the latest occurrence of an n-gram; and for each place, the place behind the
        # previous occurrence of the n-gram that ends there, 0 if there is none.
        self.latest: list[dict[tuple[int, ...], int]] = [{} for _ in self._lengths]
        self.previous_places = [array("q") for _ in self._lengths]
        self.rates = HitRates(self._lengths)

    @property
    def size(self) -> int:
        return len(self.tokens)

    def extend(self, context: DraftContext) -> None:
        """Append the context's tokens, and count for each whether the longest match before it predicted it."""
        for token in context.tokens:
            self._count_hit(token)
            self.tokens.append(token)
            place = len(self.tokens)
            last = tuple(self.tokens[-self._lengths[-1] :])
            for n, latest, previous in zip(self._lengths, self.latest, self.previous_places, strict=True):
                if n > place:
                    previous.append(0)
                    continue
                ngram = last[-n:]
                previous.append(latest.get(ngram, 0))
                latest[ngram] = place

    def occurrences(self, max_matches: int) -> dict[int, int]:
        """Return places behind earlier occurrences of the last tokens, and how many tokens match there.

        Longer matches come first, then later places.
        """
        ending = tuple(self.tokens[-self._lengths[-1] :])
        found: dict[int, int] = {}
        for n, latest, previous in zip(*map(reversed, (self._lengths, self.latest, self.previous_places)), strict=True):
            place = latest.get(ending[-n:], 0) if len(ending) >= n else 0
            while place and len(found) < max_matches:
                if place < len(self.tokens):
                    found.setdefault(place, n)
                place = previous[place - 1]
        return found

    def behind(self, places: Ints, depth: int) -> tuple[Ints, Ints]:
        """Return the tokens from each place on [M, depth], and how many of them the text has [M]. What is beyond its end is
        of no use.
        """
        text = np.frombuffer(self.tokens, np.int64)  # a view: tokens can be appended once it is gone
        tokens: Ints = text[np.minimum(places[:, None] + np.arange(depth), len(text) - 1)]
        return tokens, np.minimum(len(text) - places, depth)

    def _count_hit(self, token: int) -> None:
        for i in range(len(self.previous_places) - 1, -1, -1):
            previous = self.previous_places[i]
            if previous and previous[-1]:
                self.rates.count(self._lengths[i], self.tokens[previous[-1]] == token)
                return


class PromptLookupDrafter(MatchDrafter[NgramIndex]):
    """Matches in the context, the longest first, merged into a tree.

    A node's score is the hit rate of matches of its length in this session, times its share among the continuations.
    """

    def __init__(self, tree: TreeConfig, config: PromptLookupConfig) -> None:
        new_index = partial(NgramIndex, config.min_ngram, config.max_ngram)
        super().__init__(MemoryLedger(new_index, config.max_cached_tokens), tree)
        self._config = config

    def _find(self, memories: Sequence[NgramIndex], depth: int) -> Matches:
        found = [index.occurrences(self._config.max_matches) for index in memories]
        sessions = np.repeat(np.arange(len(found)), [len(each) for each in found])
        matched = np.fromiter(chain.from_iterable([each.values() for each in found]), np.int64, len(sessions))
        texts = [
            index.behind(np.fromiter(each, np.int64, len(each)), depth) for index, each in zip(memories, found, strict=True)
        ]
        tokens, lengths = (np.concatenate(column) for column in zip(*texts, strict=True))
        ranks = np.concatenate([np.arange(len(each)) for each in found])
        return Matches(sessions, tokens, lengths, MATCH_DECAY**ranks, matched)

    def _log_steps(
        self, trie: Trie, matches: Matches, contexts: Sequence[DraftContext], memories: Sequence[NgramIndex]
    ) -> Reals:
        return match_steps(trie, matches, [index.rates for index in memories])


def prompt_lookup(tree: TreeConfig, config: PromptLookupConfig) -> LocalDrafter:
    """Return the drafter, compiled if numba is installed."""

    def compiled() -> LocalDrafter:
        from eyas.drafters.lookup.compiled import CompiledPromptLookup

        return CompiledPromptLookup(tree, config)

    return compiled_or(compiled, lambda: PromptLookupDrafter(tree, config))
