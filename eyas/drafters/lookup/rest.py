"""Retrieval (REST, He et al. 2024): trees of what followed a context's last tokens in a corpus.

Legend: S sessions, K lengths of the context's end, the longest first, M matches, D depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from eyas.arrays import Ints, Reals
from eyas.config import DraftingConfig, RestConfig, TreeConfig
from eyas.config.file_values import get_setting
from eyas.drafters.base import DraftContext
from eyas.drafters.lookup.base import MatchDrafter, Matches, Trie, perturbed_log_shares
from eyas.drafters.lookup.datastore import Datastore, Ranges, open_datastore, vocabulary_digest
from eyas.drafters.sessions import MemoryLedger
from eyas.errors import CheckpointError, ConfigError
from eyas.models.checkpoint import Checkpoint
from eyas.text.tokenizer import load_tokenizer

# Weight of a match that is shorter than the longest, relative to the next longer length.
MATCH_DECAY = 0.25
# The corpus is not the text: frequent continuations hold there too, rare ones less often than their frequency says.
FREQUENCY_POWER = 2.0


class _ContextEnd:
    """The last `max_ngram` tokens of one session; empty from a token on that the datastore does not know."""

    size = 1

    def __init__(self, store: Datastore, max_ngram: int) -> None:
        self._store = store
        self._max_ngram = max_ngram
        self.tokens: list[int] = []

    def extend(self, context: DraftContext) -> None:
        new = context.tokens[-self._max_ngram :]
        unknown = [i for i, token in enumerate(new) if token >= self._store.vocab_size]
        tokens = [*new[unknown[-1] + 1 :]] if unknown else [*self.tokens, *new]
        self.tokens = tokens[-self._max_ngram :]


class RestDrafter(MatchDrafter[_ContextEnd]):
    """Matches in the corpus, the longest first, merged into a tree. A node's score is its frequency among them."""

    def __init__(self, store: Datastore, tree: TreeConfig, config: RestConfig, drafting: DraftingConfig) -> None:
        super().__init__(MemoryLedger(partial(_ContextEnd, store, config.max_ngram), config.max_sessions), tree)
        self._store = store
        self._config = config
        self._drafting = drafting

    def _find(self, memories: Sequence[_ContextEnd], depth: int) -> Matches:
        """Search all lengths of all sessions' ends at once.

        Takes at most `max_matches` of each session, evenly spaced among the suffixes that match.
        """
        ends = [end.tokens for end in memories]
        max_ngram = self._config.max_ngram
        wanted_K = np.arange(max_ngram, self._config.min_ngram - 1, -1)
        known_S = np.array([len(end) for end in ends])
        padded = np.zeros((len(ends), max_ngram), np.int64)
        padded[np.arange(max_ngram) >= max_ngram - known_S[:, None]] = np.concatenate(ends)
        columns = (max_ngram - wanted_K)[:, None] + np.arange(max_ngram)
        queries = padded[:, np.minimum(columns, max_ngram - 1)]
        possible_SK = wanted_K <= known_S[:, None]
        queries[~possible_SK] = 0
        lengths = np.broadcast_to(wanted_K, possible_SK.shape)
        ranges = self._store.search(queries.reshape(-1, max_ngram), lengths.reshape(-1))
        return self._take(ranges, wanted_K, possible_SK, depth)

    def _take(self, ranges: Ranges, wanted_K: Ints, possible_SK: np.ndarray, depth: int) -> Matches:
        counts_SK = np.where(possible_SK, (ranges.last - ranges.first).reshape(possible_SK.shape), 0)
        longer_SK = np.concatenate([np.zeros((len(counts_SK), 1), np.int64), counts_SK[:, :-1]], 1)
        counts_SK = np.where(counts_SK > longer_SK, counts_SK, 0)  # a shorter end with no more matches adds nothing
        before_SK = counts_SK.cumsum(1) - counts_SK
        taken = np.clip(self._config.max_matches - before_SK, 0, counts_SK).reshape(-1)
        cells = np.repeat(np.arange(len(taken)), taken)
        order = np.arange(len(cells)) - (taken.cumsum() - taken)[cells]
        numbers = ranges.first[cells] + order * counts_SK.reshape(-1)[cells] // taken[cells]
        num_longer = ((counts_SK > 0).cumsum(1) - 1).reshape(-1)[cells]
        tokens = self._store.continuations(numbers, wanted_K[cells % len(wanted_K)], depth)
        lengths = (tokens != self._store.vocab_size).sum(1)
        matched = wanted_K[cells % len(wanted_K)]
        return Matches(cells // len(wanted_K), tokens, lengths, MATCH_DECAY ** num_longer.astype(np.float64), matched)

    def _log_steps(
        self, trie: Trie, matches: Matches, contexts: Sequence[DraftContext], memories: Sequence[_ContextEnd]
    ) -> Reals:
        """Sharpen shares, and discount them where few matches disagree much."""
        distinct, evidence = trie.family_sums(np.ones(len(trie.tokens))), trie.family_sums(trie.weights)
        shares = perturbed_log_shares(trie, contexts, self._drafting)
        steps: Reals = FREQUENCY_POWER * shares + np.log(evidence / (evidence + distinct))
        return steps


def load_rest(
    source: str, target: Checkpoint, tree: TreeConfig, config: RestConfig, drafting: DraftingConfig
) -> RestDrafter:
    """Open a datastore for a target. Raises ConfigError for none, CheckpointError for one of another vocabulary."""
    if not source:
        raise ConfigError("drafter 'rest' needs a datastore; set methods.rest.datastore to what eyas datastore build wrote")
    store = open_datastore(Path(source))
    vocab_size = get_setting(int, target.text_config, "vocab_size", target.path)
    if store.vocab_size > vocab_size:
        raise CheckpointError(
            f"datastore {source} has a vocabulary of {store.vocab_size}, target {target} one of {vocab_size}; "
            "build it with the target's tokenizer"
        )
    if store.vocabulary != vocabulary_digest(load_tokenizer(target.path).tokenizer):
        raise CheckpointError(
            f"datastore {source} was written with another tokenizer than that of {target}; build it with the target's"
        )
    return RestDrafter(store, tree, config, drafting)
