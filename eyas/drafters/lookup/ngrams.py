"""The n-grams of one session's tokens: tokens in, earlier places of the last ones out, and how often such places foretold.

A round costs what its new tokens cost, however long the context.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eyas.drafters.lookup.matches import Floats

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
