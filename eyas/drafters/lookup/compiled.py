"""Prompt lookup by compiled kernels: it drafts the trees of `prompt_lookup` in less time."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial

import numpy as np

from eyas.arrays import Bools, Reals
from eyas.config import PromptLookupConfig, TreeConfig
from eyas.drafters.base import DraftContext, Path, bans_of, within
from eyas.drafters.lookup.base import MAX_CONTINUED, PRIOR_TRIALS, LookupDrafter
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
        super().__init__(MemoryLedger(partial(CompiledIndex, config), config.max_cached_tokens))
        self._tree = tree

    def warm_up(self) -> None:
        compile_kernels()

    def continue_trees(self, contexts: Sequence[DraftContext], trees: Sequence[DraftTree]) -> list[DraftTree]:
        sessions = [self._sessions.get(context.session) for context in contexts]
        indices = {i: session.memory for i, session in enumerate(sessions) if session and session.memory}
        if not indices:
            return list(trees)
        nodes, budgets = DraftTrees.of(trees), [within(context.budget, self._tree) for context in contexts]
        room = int(nodes.counts.max()) + MAX_CONTINUED * max(budget.max_nodes for budget in budgets)
        forest, is_filled = _Forest(len(trees), room), np.arange(room) < nodes.counts[:, None]
        forest.tokens[is_filled], forest.parents[is_filled] = nodes.tokens, nodes.parents
        forest.scores[is_filled], forest.counts[:] = nodes.log_probs, nodes.counts
        leaves = np.zeros(MAX_CONTINUED, np.int64)
        for i, index in indices.items():
            if forest.counts[i] > 1:
                limits = budgets[i].max_nodes - 1, budgets[i].max_depth, contexts[i].budget.max_depth
                inputs = index.ngrams, index.size, kernel_bans(contexts[i], has_root=False), NO_IDS, leaves, *limits
                forest.grow(i, *inputs)
        grown = forest.trees(nodes.grown_ahead)
        return [new if len(new) > len(old) else old for old, new in zip(trees, grown, strict=True)]

    def _grow(
        self, contexts: Sequence[DraftContext], memories: Sequence[CompiledIndex], paths: Sequence[Path]
    ) -> Sequence[DraftTree]:
        budgets = [within(context.budget, self._tree) for context in contexts]
        forest = _Forest(len(contexts), max(budget.max_nodes for budget in budgets))
        forest.tokens[:, 0] = [context.tokens[-1] for context in contexts]
        for i, (context, index, path, budget) in enumerate(zip(contexts, memories, paths, budgets, strict=True)):
            inputs = index.ngrams, index.size, kernel_bans(context), np.array(path, np.int64), np.zeros(1, np.int64)
            forest.grow(i, *inputs, budget.max_nodes - 1, budget.max_depth, budget.max_depth)
        return forest.trees(np.zeros(len(contexts), np.bool_))


class _Forest:
    """The nodes of several trees, a tree in each row [S, K]. counts: of each tree [S]."""

    def __init__(self, num_trees: int, room: int) -> None:
        self.tokens, self.parents = np.zeros((2, num_trees, room), np.int64)
        self.scores, self.counts = np.zeros((num_trees, room)), np.ones(num_trees, np.int64)

    def grow(self, i: int, *inputs: object) -> None:
        """Grow one tree. inputs: of `grow_tree`."""
        self.counts[i] = grow_tree(*inputs, self.tokens[i], self.parents[i], self.scores[i], self.counts[i])

    def trees(self, grown_ahead: Bools) -> DraftTrees:
        """Return the nodes that are filled. grown_ahead: of each tree [S]."""
        is_filled = np.arange(self.tokens.shape[1]) < self.counts[:, None]
        return DraftTrees(self.counts, self.tokens[is_filled], self.parents[is_filled], self.scores[is_filled], grown_ahead)


def kernel_bans(context: DraftContext, has_root: bool = True) -> Bans:
    """Return what the target cannot draw. has_root: whether the next token is among what is looked up."""
    bans = bans_of(context)
    tokens, ends = np.array(list(bans.items()), np.int64).T.copy() if bans else NO_BANS
    bits = np.frombuffer(context.allowed, np.uint8).copy() if context.allowed and has_root else NO_BITS
    return Bans(tokens, ends, bits)
