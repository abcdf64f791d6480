"""Suffix decoding (Oliaro et al. 2024, 2411.04975): what followed the last tokens before, in the session and in outputs that
other sessions of the same tenant have had.

Texts are kept as they are, with the places of their n-grams of `min_ngram` tokens; longer matches are found by comparing
backwards from these places. The output of a session that ends, or is evicted, is kept for the later ones. Outputs are kept
for each tenant and salt: no session is ever drafted another tenant's text. When they are full, the older half of the least
recently used ones goes first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import numpy as np

from eyas.arrays import Reals
from eyas.config import SuffixConfig, TreeConfig
from eyas.drafters.base import DraftContext
from eyas.drafters.lookup.base import HitRates, MatchDrafter, Matches, Trie, match_steps
from eyas.drafters.sessions import MemoryLedger

# Weight of a match relative to those with the next longer match.
MATCH_DECAY = 0.5
# Places that are compared for each one that is taken.
SCANNED_PLACES = 4
# Stands between two texts.
SEPARATOR = -1

# What an empty index counts as: a client may open one for each request, by its cache_salt.
EMPTY_INDEX_TOKENS = 64


class TextIndex:
    """Texts, one after the other, and the places behind each n-gram in them."""

    def __init__(self, ngram: int) -> None:
        self.tokens = array("q")
        self._ngram = ngram
        self._latest: dict[tuple[int, ...], int] = {}
        self._previous = array("q")  # of each place, the place behind the n-gram's occurrence before; 0 for none

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the last text."""
        for token in tokens:
            self.tokens.append(token)
            ngram = tuple(self.tokens[-self._ngram :])
            self._previous.append(self._latest.get(ngram, 0) if len(ngram) == self._ngram else 0)
            if len(ngram) == self._ngram:
                self._latest[ngram] = len(self.tokens)

    def end_text(self) -> None:
        """End the last text: no match reaches beyond."""
        self.extend((SEPARATOR,))

    def places(self, ending: Sequence[int]) -> Iterator[int]:
        """Yield places behind the last n-gram of `ending`, the latest first."""
        place = self._latest.get(tuple(ending[-self._ngram :]), 0)
        while place:
            yield place
            place = self._previous[place - 1]

    def match_length(self, place: int, ending: Sequence[int], most: int) -> int:
        """Return how many tokens before `place` equal the last ones of `ending`, at most `most`."""
        length, most = 0, min(most, place, len(ending))
        while length < most and self.tokens[place - 1 - length] == ending[-1 - length]:
            length += 1
        return length

    def continuation(self, place: int, most: int) -> list[int]:
        """Return at most `most` tokens behind `place`, of the same text."""
        tokens = self.tokens[place : place + most].tolist()
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens


class TenantOutputs:
    """Outputs of each tenant in two indices, an older and a newer one, of `max_tokens` in all."""

    def __init__(self, ngram: int, max_tokens: int) -> None:
        self._ngram, self._max_tokens = ngram, max_tokens
        self._indices: OrderedDict[str, list[TextIndex]] = OrderedDict()
        self.num_tokens = 0  # of all tenants, with ends of texts and what an index takes besides

    def of(self, tenant: str) -> list[TextIndex]:
        """Return the tenant's indices, the newest first."""
        indices = self._indices.get(tenant, [])
        if indices:
            self._indices.move_to_end(tenant)
        return indices[::-1]

    def add(self, tenant: str, output: Sequence[int]) -> None:
        """Keep an output; the end of it where it is too long. One too short for any match is left out."""
        if len(output) <= self._ngram:
            return
        output = output[-(self._max_tokens // 2 - 1) :]
        indices = self._indices.setdefault(tenant, [])
        self._indices.move_to_end(tenant)
        if not indices or len(indices[-1].tokens) + len(output) >= self._max_tokens // 2:
            indices.append(TextIndex(self._ngram))
            self.num_tokens += EMPTY_INDEX_TOKENS
        indices[-1].extend(output)
        indices[-1].end_text()
        self.num_tokens += len(output) + 1
        while self.num_tokens > self._max_tokens:
            oldest = next(iter(self._indices))
            self.num_tokens -= EMPTY_INDEX_TOKENS + len(self._indices[oldest].pop(0).tokens)
            if not self._indices[oldest]:
                del self._indices[oldest]


class SuffixSession:
    """A session's own text, and how often matches of each length were right.

    output: place of its first output token, None inside its prompt. tenant: whose it is.
    """

    def __init__(self, config: SuffixConfig) -> None:
        self.text = TextIndex(config.min_ngram)
        self.rates = HitRates(range(config.min_ngram, config.max_ngram + 1))
        self.output: int | None = None
        self.tenant = ""
        self._guess: tuple[int, int] | None = None  # length of the best match, and the token behind it

    @property
    def size(self) -> int:
        return len(self.text.tokens)

    def extend(self, context: DraftContext) -> None:
        """Append the context's tokens, and count whether the best match foresaw the first one."""
        if self._guess is not None:
            self.rates.count(self._guess[0], self._guess[1] == context.tokens[0])
        self._guess, self.tenant = None, context.tenant_key
        if self.output is None and context.budget.wants_tree:
            self.output = self.size + len(context.tokens) - 1  # the last token is drawn; a prompt's last chunk has it too
        self.text.extend(context.tokens)

    def guessed(self, length: int, token: int) -> None:
        """Note what the best match foresees."""
        self._guess = length, token


class SuffixDrafter(MatchDrafter[SuffixSession]):
    """Matches in the session's text and in its tenant's outputs, the longest first, merged into a tree.

    A node's score is the hit rate of matches of its length in this session, times its share among the continuations.
    """

    def __init__(self, tree: TreeConfig, config: SuffixConfig) -> None:
        super().__init__(MemoryLedger(partial(SuffixSession, config), config.max_cached_tokens, self._keep_output), tree)
        self._config = config
        self.outputs = TenantOutputs(config.min_ngram, config.max_output_tokens)

    def _find(self, memories: Sequence[SuffixSession], depth: int) -> Matches:
        found = [(row, *match) for row, memory in enumerate(memories) for match in self._matches(memory, depth)]
        sessions, matched, ranks = np.array([match[:3] for match in found], np.int64).reshape(-1, 3).T
        counts = np.array([len(following) for *_, following in found], np.int64)
        tokens = np.zeros((len(found), depth), np.int64)
        tokens[np.arange(depth) < counts[:, None]] = [token for *_, following in found for token in following]
        return Matches(sessions, tokens, counts, MATCH_DECAY ** ranks.astype(np.float64), matched)

    def _log_steps(
        self, trie: Trie, matches: Matches, contexts: Sequence[DraftContext], memories: Sequence[SuffixSession]
    ) -> Reals:
        return match_steps(trie, matches, [memory.rates for memory in memories])

    def _keep_output(self, memory: SuffixSession) -> None:
        """Keep a session's output for those that come later. One that begins again is sent all of its tokens; those that it
        has had by then count as its prompt."""
        if memory.output is not None:
            self.outputs.add(memory.tenant, memory.text.tokens[memory.output :])

    def _matches(self, memory: SuffixSession, depth: int) -> list[tuple[int, int, list[int]]]:
        """Return the longest matches of a session: how many tokens match, how many lengths are longer, and what follows."""
        most = self._config.max_matches
        ending = memory.text.tokens[-self._config.max_ngram :]
        found: list[tuple[int, list[int]]] = []
        for index in (memory.text, *self.outputs.of(memory.tenant)):
            for place in islice(index.places(ending), SCANNED_PLACES * most):
                following = index.continuation(place, depth)
                if following:
                    found.append((index.match_length(place, ending, len(ending)), following))
        found = sorted(found, key=lambda match: -match[0])[:most]
        if found:
            memory.guessed(found[0][0], found[0][1][0])
        ranks = {length: rank for rank, length in enumerate(dict.fromkeys(length for length, _ in found))}
        return [(length, ranks[length], following) for length, following in found]
