"""Base of the drafters that look tokens up, and how they merge what they find into trees.

Continuations of a context, found anywhere, become one trie of nodes per session; its best nodes become the draft tree. All
nodes of all sessions are arrays: there is no loop over nodes.
Legend: S sessions, M matches, D depth, K nodes, F families of siblings, C largest family.

    matches [5 6 7], [5 6 8], [9]         5 -- 6 -+- 7
    give one session this trie:    root -+         +- 8
                                         +- 9
    tokens [5 9 6 7 8], parents [-1 -1 0 2 2], families [0 0 1 2 2]
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Generic

import numpy as np
import torch

from eyas.arrays import Ints, Reals
from eyas.config import DraftingConfig, TreeConfig
from eyas.device.transfer import upload
from eyas.drafters.base import Draft, DraftContext, LocalDrafter, allowed_bits, bans_of, limits_of, within
from eyas.drafters.sessions import MemoryLedger, MemoryT
from eyas.kernels.arguments import MIN_TEMPERATURE
from eyas.kernels.noise import exponential_noise_at
from eyas.kernels.plain.trees import first_of_groups
from eyas.kernels.probabilities import filtered_probs, filtering, filters_of
from eyas.protocol.commit import NoiseKey, ResyncRequired, TreeBudget
from eyas.protocol.tree import DraftTree, DraftTrees


class LookupDrafter(LocalDrafter, Generic[MemoryT]):
    """A drafter without a network, which remembers something of each session."""

    def __init__(self, sessions: MemoryLedger[MemoryT], tree: TreeConfig) -> None:
        self._sessions = sessions
        self._tree = tree

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        busy = {context.session for context in contexts}
        drafts: list[Draft] = []
        chosen: list[int] = []
        memories: list[MemoryT] = []
        for i, context in enumerate(contexts):
            found = self._sessions.extend(context, busy)
            drafts.append(found if isinstance(found, ResyncRequired) else DraftTree.root_only(context.tokens[-1]))
            if found is not None and not isinstance(found, ResyncRequired) and context.budget.wants_tree:
                chosen.append(i)
                memories.append(found)
        trees = self._grow([contexts[i] for i in chosen], memories) if chosen else []
        for i, tree in zip(chosen, trees, strict=True):
            drafts[i] = tree
        return drafts

    def release(self, sessions: Sequence[str]) -> None:
        self._sessions.release(sessions)

    @abstractmethod
    def _grow(self, contexts: Sequence[DraftContext], memories: Sequence[MemoryT]) -> Sequence[DraftTree]:
        """Return the trees of contexts that want one."""


@dataclass(frozen=True)
class Matches:
    """Continuations that followed a context elsewhere.

    Attributes:
        sessions: of each match [M]; of one session the best match first.
        tokens: ids from 0 [M, D].
        lengths: how many tokens of a row count, at most D [M].
        weights: of a match in the choice between the children of a node [M].
        matched: how many of the context's last tokens match [M].
    """

    sessions: Ints
    tokens: Ints
    lengths: Ints
    weights: Reals
    matched: Ints


class MatchDrafter(LookupDrafter[MemoryT]):
    """A drafter that merges what followed a context elsewhere into a tree."""

    def _grow(self, contexts: Sequence[DraftContext], memories: Sequence[MemoryT]) -> Sequence[DraftTree]:
        roots = [context.tokens[-1] for context in contexts]
        budgets = [within(context.budget, self._tree) for context in contexts]
        depth = max(budget.max_depth for budget in budgets)
        if depth < 1:
            return DraftTrees.root_only(roots)
        matches = only_allowed(self._find(memories, depth), contexts)
        if not matches.lengths.any():
            return DraftTrees.root_only(roots)
        trie = build_trie(matches)
        steps = self._log_steps(trie, matches, contexts, memories)
        return trie_trees(trie, trie.along_paths(steps), roots, budgets)

    @abstractmethod
    def _find(self, memories: Sequence[MemoryT], depth: int) -> Matches:
        """Return the matches of each session's last tokens, with at most `depth` tokens behind each."""

    @abstractmethod
    def _log_steps(
        self, trie: Trie, matches: Matches, contexts: Sequence[DraftContext], memories: Sequence[MemoryT]
    ) -> Reals:
        """Return the log-score [K] of the step to each node."""


def only_allowed(matches: Matches, contexts: Sequence[DraftContext]) -> Matches:
    """Return the matches up to a token that a grammar does not allow at the first level, or that is banned."""
    if any(context.logit_biases for context in contexts):
        matches = replace(matches, lengths=np.minimum(matches.lengths, _first_banned(matches, contexts)))
    if not any(context.allowed for context in contexts):
        return matches
    first = np.where(matches.lengths > 0, matches.tokens[:, 0], 0)
    kept = allowed_bits(contexts)[matches.sessions, first >> 3] >> (first & 7).astype(np.uint8) & 1
    return replace(matches, lengths=matches.lengths * kept)


def _first_banned(matches: Matches, contexts: Sequence[DraftContext]) -> Ints:
    """Return the first banned token of each match, or the number of its tokens [M]."""
    depth = matches.tokens.shape[1]
    is_banned_MD = np.zeros((len(matches.sessions), depth + 1), np.bool_)
    is_banned_MD[:, depth] = True
    for session in {session for session, context in enumerate(contexts) if context.logit_biases}:
        rows = np.flatnonzero(matches.sessions == session)
        bans = bans_of(contexts[session])
        for level in range(depth):
            banned = [token for token, num_levels in bans.items() if num_levels > level]
            is_banned_MD[rows, level] = np.isin(matches.tokens[rows, level], banned)
    first: Ints = is_banned_MD.argmax(1)
    return first


@dataclass(frozen=True)
class Trie:
    """Nodes of all sessions [K], level by level, then by session, then by the tokens of their paths, so that siblings (a
    family) stand together.

    Attributes:
        depths: 0 for children of the root.
        parents: nodes of this trie, below 0 for the root.
        tokens: token ids.
        weights: of all matches through a node.
        matches: the best match through it.
        families: of each node [K].
        starts: the first node of each family [F].
    """

    sessions: Ints
    depths: Ints
    parents: Ints
    tokens: Ints
    weights: Reals
    matches: Ints
    families: Ints
    starts: Ints

    def family_sums(self, values: Reals) -> Reals:
        """Return the sum of values [K] over each node's family [K]."""
        return _group_sums(self.families, values)[self.families]

    def log_shares(self) -> Reals:
        """Log of each node's share in the weight of its family [K]."""
        shares: Reals = np.log(self.weights) - np.log(self.family_sums(self.weights))
        return shares

    def along_paths(self, steps: Reals) -> Reals:
        """Return the sums of steps [K] from the root to each node [K]."""
        sums = steps.copy()
        bounds = np.flatnonzero(np.diff(self.depths, prepend=-1, append=-1))
        for start, end in pairwise(bounds[1:]):
            sums[start:end] += sums[self.parents[start:end]]
        return sums


def build_trie(matches: Matches) -> Trie:
    """Merge matches: those of a session that begin alike share nodes."""
    count, depth = matches.tokens.shape
    counted_MD = np.arange(depth) < matches.lengths[:, None]
    tokens_MD = np.where(counted_MD, matches.tokens, -1)
    order = np.lexsort((*tokens_MD.T[::-1], matches.sessions))
    sessions, tokens_MD = matches.sessions[order], tokens_MD[order]
    differs_MD = np.ones((count, depth), np.bool_)
    differs_MD[1:] = tokens_MD[1:] != tokens_MD[:-1]
    differs_MD[1:, 0] |= sessions[1:] != sessions[:-1]
    # in sorted order a row adds nodes from the first token on that differs from the row before
    new_DM = (np.logical_or.accumulate(differs_MD, axis=1) & counted_MD[order]).T
    numbers_DM = np.cumsum(new_DM).reshape(depth, count) - 1
    depths, rows = np.nonzero(new_DM)
    parents = np.where(depths > 0, numbers_DM[depths - 1, rows], -1 - sessions[rows])
    first = np.diff(parents, prepend=parents[:1] - 1) != 0
    levels, through = np.nonzero(counted_MD.T)
    nodes = numbers_DM[levels, np.argsort(order)[through]]
    best = np.empty(len(rows), np.int64)
    best[nodes[::-1]] = through[::-1]  # of several assignments the last one stays, which is the lowest match
    return Trie(
        sessions=sessions[rows],
        depths=depths,
        parents=parents,
        tokens=tokens_MD[rows, depths],
        weights=_group_sums(nodes, matches.weights[through]),
        matches=best,
        families=np.cumsum(first) - 1,
        starts=np.flatnonzero(first),
    )


def _group_sums(groups: Ints, values: Reals) -> Reals:
    return np.bincount(groups, values).astype(np.float64)


# The hit rate of match length n starts at n / (n + 1), as if it had been seen in this many trials.
PRIOR_TRIALS = 4.0


class HitRates:
    """Rates at which the longest match foresaw the next token of a session, one for each of `lengths`."""

    def __init__(self, lengths: range) -> None:
        self.lengths, self._prior = lengths, PRIOR_TRIALS * np.array([n / (n + 1) for n in lengths])
        self.trials = np.zeros(len(lengths))
        self.hits = np.zeros(len(lengths))

    def count(self, length: int, is_right: bool) -> None:
        """Count the guess of a match of `length` tokens."""
        self.trials[length - self.lengths.start] += 1
        self.hits[length - self.lengths.start] += is_right

    def logs(self) -> Reals:
        """Log of the hit rate of each length."""
        return np.log((self.hits + self._prior) / (self.trials + PRIOR_TRIALS))


def match_steps(trie: Trie, matches: Matches, rates: Sequence[HitRates]) -> Reals:
    """Return the log-score [K] of the step to each node. Below a match, every right token makes the match longer by one.

    rates: of each session.
    """
    log_rates = np.stack([own.logs() for own in rates])
    places = matches.matched - rates[0].lengths.start
    lengths = np.minimum(places[trie.matches] + trie.depths, log_rates.shape[1] - 1)
    steps: Reals = trie.log_shares() + log_rates[trie.sessions, lengths]
    return steps


def trie_trees(trie: Trie, scores: Reals, roots: Sequence[int], budgets: Sequence[TreeBudget]) -> DraftTrees:
    """Return each session's best `max_nodes - 1` nodes within `max_depth`, by cumulative scores [K] in float32.

    Ties go to the shallower node, then to the lower tokens. As scores never grow along a path, a selected node's parent is
    selected too. The counterpart of `eyas.drafters.trees.growth.select_nodes` on the host.
    """
    limits, depths = limits_of(budgets)
    rounded = scores.astype(np.float32)
    places = np.flatnonzero((trie.depths < depths[trie.sessions]) & np.isfinite(rounded))
    chosen = places[first_of_groups(trie.sessions[places], limits, -rounded[places])]
    chosen = chosen[np.lexsort((chosen, trie.sessions[chosen]))]
    sessions = trie.sessions[chosen]
    ends = np.searchsorted(sessions, np.arange(len(roots) + 1))
    # Node numbers within each session, from 1: the place among the session's chosen nodes. The last, 0, is of the root.
    numbers = np.zeros(len(scores) + 1, np.int64)
    numbers[chosen] = np.arange(len(chosen)) - ends[sessions] + 1
    above = np.maximum(trie.parents[chosen], -1)
    assert ((above < 0) | (numbers[above] > 0)).all(), "a node was chosen without its parent"
    nodes = np.zeros((3, len(roots), int(np.diff(ends).max(initial=0))))
    nodes[:, sessions, numbers[chosen] - 1] = trie.tokens[chosen], numbers[above], rounded[chosen]
    return DraftTrees.below(roots, nodes[0], nodes[1], nodes[2], np.diff(ends))


def perturbed_log_shares(trie: Trie, contexts: Sequence[DraftContext], config: DraftingConfig) -> Reals:
    """Return log-shares [K] of nodes among their siblings, perturbed by the noise of the target's draw.

    The noise of `eyas.drafters.trees.scoring`, over the nodes that were found, all levels at once. Shares stay plain for
    sessions at temperature 0, and without shared noise.
    """
    plain, keys = trie.log_shares(), [context.noise for context in contexts]
    shared_S = np.array([config.shared_noise and key.temperature > 0 for key in keys])
    if not shared_S.any():
        return plain
    seeds = np.array([key.seed for key in keys], np.uint64).view(np.int64)[trie.sessions]
    positions = np.array([context.committed_length for context in contexts])[trie.sessions] + trie.depths
    tokens = torch.from_numpy(trie.tokens)[:, None]
    noise = exponential_noise_at(torch.from_numpy(seeds), torch.from_numpy(positions), tokens)[:, 0].double().numpy()
    scaled = _log_probs(trie, keys) - np.log(noise)
    highest = np.maximum.reduceat(scaled, trie.starts)
    sums = np.add.reduceat(np.exp(scaled - highest[trie.families]), trie.starts)
    perturbed = scaled - (highest + np.log(sums))[trie.families]
    return np.where(shared_S[trie.sessions], perturbed, plain)


def _log_probs(trie: Trie, keys: Sequence[NoiseKey]) -> Reals:
    """Return log-weights [K] under each session's temperature and filters, up to a constant of each family."""
    if all(key.top_k == 0 and key.top_p >= 1 and key.min_p == 0 for key in keys):
        temperatures = np.array([max(key.temperature, MIN_TEMPERATURE) for key in keys])
        tempered: Reals = np.log(trie.weights) / temperatures[trie.sessions]
        return tempered
    columns = np.arange(len(trie.tokens)) - trie.starts[trie.families]
    logits_FC = np.full((len(trie.starts), int(columns.max()) + 1), -np.inf, np.float32)
    logits_FC[trie.families, columns] = np.log(trie.weights)
    keys_F = [keys[session] for session in trie.sessions[trie.starts]]
    cpu = torch.device("cpu")
    probs_FC = filtered_probs(torch.from_numpy(logits_FC), filters_of(keys_F, cpu), upload(filtering(keys_F), cpu))
    log_probs: Reals = probs_FC.log().double().numpy()[trie.families, columns]
    return log_probs
