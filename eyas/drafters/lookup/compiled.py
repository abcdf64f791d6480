"""Prompt lookup by compiled kernels: it drafts the trees of `prompt_lookup` in less time."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial

import numpy as np

from eyas.arrays import Reals
from eyas.config import PromptLookupConfig, TreeConfig
from eyas.drafters.base import DraftContext, bans_of, within
from eyas.drafters.lookup.base import PRIOR_TRIALS, LookupDrafter
from eyas.drafters.lookup.prompt_lookup import MATCH_DECAY
from eyas.drafters.sessions import MemoryLedger
from eyas.kernels.cpu.lookups import (
    NO_BANS,
    NO_BITS,
    NO_IDS,
    Bans,
    Ngrams,
    compile_kernels,
    extend_ngrams,
    grow_tree,
    move_entries,
)
from eyas.protocol.tree import DraftTree, DraftTrees

FIRST_ROOM = 16  # tokens of a new index


class CompiledIndex:
    """`NgramIndex` by kernels. With 6 lengths it takes 200 to 400 bytes a token."""

    def __init__(self, config: PromptLookupConfig) -> None:
        lengths = np.arange(config.min_ngram, config.max_ngram + 1)
        prior: Reals = PRIOR_TRIALS * lengths / (lengths + 1.0)
        weights: Reals = MATCH_DECAY ** np.arange(float(config.max_matches))
        rates = np.full(len(lengths), PRIOR_TRIALS), np.zeros(len(lengths)), prior
        self.size = 0
        rest = *rates, weights, config.min_ngram, secrets.randbits(62)
        self.ngrams = Ngrams(NO_IDS, np.zeros((0, len(lengths)), np.int64), NO_IDS, *rest)
        self._move(FIRST_ROOM)

    def extend(self, context: DraftContext) -> None:
        """Append the context's tokens, and count for each whether the longest match before it predicted it."""
        size = self.size + len(context.tokens)
        if size > len(self.ngrams.text):
            self._move(1 << (size - 1).bit_length())
        extend_ngrams(self.ngrams, self.size, np.array(context.tokens, np.int64))
        self.size = size

    def _move(self, room: int) -> None:
        """Move to arrays with room for more tokens. Half of the table stays free."""
        old, count = self.ngrams, self.ngrams.previous.shape[1]
        text, previous = np.zeros(room, np.int64), np.zeros((room, count), np.int64)
        text[: self.size], previous[: self.size] = old.text[: self.size], old.previous[: self.size]
        table = np.zeros(1 << (2 * room * count - 1).bit_length(), np.int64)
        self.ngrams = old._replace(text=text, previous=previous, table=table)
        move_entries(self.ngrams, old.table)


class CompiledPromptLookup(LookupDrafter[CompiledIndex]):
    """`PromptLookupDrafter` by kernels. It drafts the same trees."""

    def __init__(self, tree: TreeConfig, config: PromptLookupConfig) -> None:
        super().__init__(MemoryLedger(partial(CompiledIndex, config), config.max_cached_tokens), tree)

    def warm_up(self) -> None:
        compile_kernels()

    def _grow(self, contexts: Sequence[DraftContext], memories: Sequence[CompiledIndex]) -> Sequence[DraftTree]:
        budgets = [within(context.budget, self._tree) for context in contexts]
        roots, most = [context.tokens[-1] for context in contexts], max(budget.max_nodes for budget in budgets) - 1
        tokens, parents = np.zeros((2, len(contexts), most), np.int64)
        scores, counts = np.zeros((len(contexts), most)), np.zeros(len(contexts), np.int64)
        for i, (context, index, budget) in enumerate(zip(contexts, memories, budgets, strict=True)):
            inputs = index.ngrams, index.size, kernel_bans(context), budget.max_nodes - 1, budget.max_depth
            counts[i] = grow_tree(*inputs, tokens[i], parents[i], scores[i])
        return DraftTrees.below(roots, tokens, parents, scores, counts)


def kernel_bans(context: DraftContext) -> Bans:
    """Return what the target cannot draw."""
    bans = bans_of(context)
    tokens, ends = np.array(list(bans.items()), np.int64).T.copy() if bans else NO_BANS
    bits = np.frombuffer(context.allowed, np.uint8).copy() if context.allowed else NO_BITS
    return Bans(tokens, ends, bits)
