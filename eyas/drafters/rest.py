"""Retrieval (REST, He et al. 2024): context ends in, trees of what followed them in a corpus out.

Legend: S sessions, K lengths of the context's end, the longest first, M matches, D depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from eyas.config import DraftingConfig, RestConfig, TreeConfig
from eyas.datastore.build import vocabulary_digest
from eyas.datastore.store import Datastore, Ranges, open_datastore
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.drafters.lookup_trees import Floats, Frequencies, Ints, Matches, Trie, merge, select
from eyas.drafters.scoring import noise_scale
from eyas.drafters.sessions import Sessions
from eyas.errors import CheckpointError, ConfigError
from eyas.models.checkpoint import read_target_config, resolve
from eyas.tokenizer import load_tokenizer
from eyas.tree import DraftTree

# Weight of a match that is shorter than the longest, relative to the next longer kind.
FADING = 0.25
# The corpus is not the text: what most of its places say mostly holds there too, what few say less often than they say it.
MISTRUST = 2.0


@dataclass(frozen=True)
class _Found:
    """Suffixes [M] of the datastore, the session and the length of each match, and how many longer kinds came before it."""

    sessions: Ints
    numbers: Ints
    lengths: Ints
    kinds: Ints


class _End:
    """The last tokens of one session, as many as are ever looked for."""

    size = 1

    def __init__(self, store: Datastore, longest: int) -> None:
        self._store = store
        self._longest = longest
        self.tokens: list[int] = []

    def take(self, context: DraftContext) -> None:
        for token in context.tokens[-self._longest :]:
            known = token < self._store.vocab_size
            self.tokens = [*self.tokens, token][-self._longest :] if known else []


class RestDrafter(LocalDrafter):
    """Places where the context's last tokens stand in a corpus, the longest match first, merged into a tree. A node's score
    is its frequency among them. Not safe for use from several threads."""

    def __init__(self, store: Datastore, tree: TreeConfig, config: RestConfig, eagle: DraftingConfig) -> None:
        self._store = store
        self._tree = tree
        self._config = config
        self._eagle = eagle
        self._scale = noise_scale(eagle)
        self._sessions = Sessions(partial(_End, store, config.max_ngram), config.max_sessions)

    @property
    def needs(self) -> DrafterNeeds:
        return DrafterNeeds()

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self._scale.learn(contexts)
        return self._sessions.answer(contexts, self._grow)

    def release(self, sessions: Sequence[str]) -> None:
        self._scale.forget(sessions)
        self._sessions.release(sessions)

    def _grow(self, contexts: Sequence[DraftContext], ends: Sequence[_End]) -> list[DraftTree]:
        roots = [context.tokens[-1] for context in contexts]
        depth = min(self._tree.num_steps, max(context.budget.max_depth for context in contexts))
        found = self._look_up([end.tokens for end in ends])
        tokens = self._store.continuations(found.numbers, found.lengths, depth)
        lengths = (tokens != self._store.vocab_size).sum(1)
        if not lengths.any():
            return [DraftTree.root_only(root) for root in roots]
        matches = Matches(found.sessions, tokens, lengths, FADING ** found.kinds.astype(np.float64))
        trie = merge(matches)
        steps = _steps(trie, Frequencies(contexts, self._eagle, self._scale).log_shares(trie))
        budgets = [replace(c.budget, max_nodes=min(c.budget.max_nodes, self._tree.num_draft_tokens)) for c in contexts]
        return select(trie, trie.along_paths(steps), roots, budgets)

    def _look_up(self, ends: Sequence[Sequence[int]]) -> _Found:
        """All lengths of all sessions in one search; `num_matches` of each session at most, spread over their suffixes."""
        asked = np.arange(self._config.max_ngram, self._config.min_ngram - 1, -1)
        have = np.array([len(end) for end in ends])
        padded = np.zeros((len(ends), self._config.max_ngram), np.int64)
        padded[np.arange(self._config.max_ngram) >= self._config.max_ngram - have[:, None]] = np.concatenate(ends)
        columns = (self._config.max_ngram - asked)[:, None] + np.arange(self._config.max_ngram)
        queries = padded[:, np.minimum(columns, self._config.max_ngram - 1)]
        possible = asked <= have[:, None]
        queries[~possible] = 0
        lengths = np.broadcast_to(asked, possible.shape)
        ranges = self._store.search(queries.reshape(-1, self._config.max_ngram), lengths.reshape(-1))
        return self._spread(ranges, asked, possible)

    def _spread(self, ranges: Ranges, asked: Ints, possible: np.ndarray) -> _Found:
        counts_SK = np.where(possible, (ranges.last - ranges.first).reshape(possible.shape), 0)
        longer_SK = np.concatenate([np.zeros((len(counts_SK), 1), np.int64), counts_SK[:, :-1]], 1)
        counts_SK = np.where(counts_SK > longer_SK, counts_SK, 0)  # a shorter end that finds no more says nothing new
        before_SK = counts_SK.cumsum(1) - counts_SK
        taken = np.clip(self._config.max_matches - before_SK, 0, counts_SK).reshape(-1)
        cells = np.repeat(np.arange(len(taken)), taken)
        order = np.arange(len(cells)) - (taken.cumsum() - taken)[cells]
        numbers = ranges.first[cells] + order * counts_SK.reshape(-1)[cells] // taken[cells]
        kinds = ((counts_SK > 0).cumsum(1) - 1).reshape(-1)[cells]
        return _Found(cells // len(asked), numbers, asked[cells % len(asked)], kinds)


def _steps(trie: Trie, log_shares: Floats) -> Floats:
    """Shares, times how far they are to be trusted: the more matches, and the less they disagree."""
    distinct, evidence = trie.total(np.ones(len(trie.tokens))), trie.total(trie.weights)
    steps: Floats = MISTRUST * log_shares + np.log(evidence / (evidence + distinct))
    return steps


def load_rest(source: str, target: str, tree: TreeConfig, config: RestConfig, eagle: DraftingConfig) -> RestDrafter:
    """Open a datastore for a target. Raises ConfigError for none, CheckpointError for one of another vocabulary."""
    if not source:
        raise ConfigError("drafter 'rest' needs a datastore; set methods.rest.datastore to what eyas datastore build wrote")
    store = open_datastore(Path(source))
    vocab_size = int(read_target_config(resolve(target))["vocab_size"])
    if store.vocab_size > vocab_size:
        raise CheckpointError(
            f"datastore {source} has a vocabulary of {store.vocab_size}, target {target} one of {vocab_size}; "
            "build it with the target's tokenizer"
        )
    if store.vocabulary != vocabulary_digest(load_tokenizer(target).tokenizer):
        raise CheckpointError(
            f"datastore {source} was written with another tokenizer than that of {target}; build it with the target's"
        )
    return RestDrafter(store, tree, config, eagle)
