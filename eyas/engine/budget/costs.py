"""Seconds of passes and drafts, and chances of nodes to be accepted: what a draft budget weighs."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
import numpy.typing as npt

from eyas.arrays import Reals
from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftTree


class CostModel:
    """Seconds by size: a table that is timed at start, times one factor that follows what is measured in service.

    The table is interpolated between its sizes and extended along its last slope. Its seconds never fall with size. The
    factor is the same for all sizes, as other work slows a machine down for all of them.

    Args:
        sizes: ascending.
    """

    RATE = 0.1  # weight of a measurement; the first ones have more
    MAX_SURPRISE = 3.0  # a measurement counts as this multiple of the expected seconds at most: a pause is no cost of size
    LEAST_S = 1e-7

    def __init__(self, sizes: Seq[float], seconds: Seq[float]) -> None:
        self.sizes, self.factor, self._count = [float(size) for size in sizes], 1.0, 0
        self._seconds = list(itertools.accumulate((max(float(own), self.LEAST_S) for own in seconds), max))
        if len(self.sizes) == 1:
            self.sizes.append(self.sizes[0] + 1)
            self._seconds *= 2
        pairs = itertools.pairwise(zip(self.sizes, self._seconds, strict=True))
        self._slopes = [(after - before) / (end - start) for (start, before), (end, after) in pairs]

    def at(self, size: npt.ArrayLike) -> Reals:
        """Return the expected seconds of each size."""
        sizes = np.asarray(size, dtype=np.float64)
        beyond: Reals = self._slopes[-1] * np.maximum(sizes - self.sizes[-1], 0.0)
        return self.factor * (np.interp(sizes, self.sizes, self._seconds) + beyond)

    def seconds(self, size: float) -> float:
        """Return `at` of a single size, in less time."""
        left = min(max(bisect_right(self.sizes, size) - 1, 0), len(self._slopes) - 1)
        return self.factor * (self._seconds[left] + self._slopes[left] * max(size - self.sizes[left], 0.0))

    def observe(self, size: float, seconds: float) -> None:
        """Move the factor towards a measurement."""
        self._count += 1
        surprise = min(seconds / self.seconds(size), self.MAX_SURPRISE) - 1
        self.factor *= 1 + max(self.RATE, 1 / (self._count + 1)) * surprise


class DraftCosts:
    """Seconds that a step waits for trees: what is expected of their number and levels, times the mean measured at a depth.

    Drafters in this process are timed at start: a first level by number of trees, and a further one by its rows, one for
    each drafted node of a tree, but `top_k` at most. Of others nothing is known before they have answered.

    Args:
        first, level: None for a drafter that was not timed.
        token_s: for each token of a sequence that the drafter has to catch up with; 0 for a drafter that was not timed.
    """

    RATE = 0.2  # weight of a measurement
    LEVEL_SHARE = 0.1  # of the first level in a further one, of a drafter that was not timed
    NUM_FIRST = 6  # of its first measurements the least counts, as it loads and connects meanwhile

    def __init__(self, first: CostModel | None, level: CostModel | None, top_k: int, token_s: float = 0.0) -> None:
        self._first, self._level, self._top_k = first, level, top_k
        self.token_s = token_s
        self._means: dict[int, float] = {}  # by depth, of measured over expected seconds
        self._num_first = 0 if first else self.NUM_FIRST

    def at(self, num_trees: int, nodes: npt.ArrayLike, depths: npt.ArrayLike) -> Reals:
        """Return the expected seconds of sizes that have levels."""
        known = sorted(self._means)
        if not known:
            return self._expected(num_trees, nodes, depths) * bool(self._first)
        means = np.interp(np.asarray(depths), known, [self._means[depth] for depth in known])
        return np.asarray(means * self._expected(num_trees, nodes, depths))

    def observe(self, num_trees: int, size: TreeBudget, seconds: float) -> None:
        """Learn how long a step has waited for trees of one size."""
        ratio, is_new = seconds / float(self._expected(num_trees, *size)), size.max_depth not in self._means
        mean = float(self.at(num_trees, *size) / self._expected(num_trees, *size)) or ratio
        if self._num_first:
            self._num_first -= 1
            self._means[size.max_depth] = ratio if is_new else min(mean, ratio)
        else:
            rate = 1.0 if is_new and not self._first else self.RATE
            self._means[size.max_depth] = mean + rate * (min(ratio, CostModel.MAX_SURPRISE * mean) - mean)

    def _expected(self, num_trees: int, nodes: npt.ArrayLike, depths: npt.ArrayLike) -> Reals:
        further = np.asarray(depths, dtype=np.float64) - 1
        if self._first is None or self._level is None:
            return 1 + self.LEVEL_SHARE * further
        rows = num_trees * np.clip(np.asarray(nodes) - 1, 1, self._top_k)
        return np.asarray(self._first.seconds(num_trees) + further * self._level.at(rows))


class HostCosts:
    """Seconds of a step besides its pass and its draft, without trees and with them.

    The least of the first ones, as a longer one may hide a draft, and then a mean. More sequences are more work. So the two
    means, which may be of other numbers of them, are compared as if all work went by their number: a load that comes or goes
    while all steps have trees is no cost of trees.

    plain_s: of a step without trees; of one with trees before there was any other. more_s: that trees add.
    """

    RATE, NUM_FIRST = 0.1, 6  # weight of a step; first steps, whose least counts

    def __init__(self) -> None:
        self.plain_s = self.more_s = 0.0
        self._means, self._counts = [0.0, 0.0], [0, 0]  # without trees, with trees
        self._loads = [1.0, 1.0]  # mean sequences of a step, without trees and with trees

    def observe(self, has_trees: bool, num_sequences: int, seconds: float) -> None:
        """Learn from a step."""
        mean = self._means[has_trees] or seconds
        self._counts[has_trees] += 1
        load = max(num_sequences, 1.0)
        rate = max(self.RATE, 1 / self._counts[has_trees])
        self._loads[has_trees] += rate * (load - self._loads[has_trees])
        if self._counts[has_trees] <= self.NUM_FIRST:
            self._means[has_trees] = min(seconds, mean)
        else:
            self._means[has_trees] = mean + self.RATE * (min(seconds, CostModel.MAX_SURPRISE * mean) - mean)
        plain_s, trees_s = self._means
        self.plain_s = max(plain_s, min(plain_s * load / self._loads[0], trees_s)) if plain_s else trees_s
        self.more_s = max(trees_s * min(load / self._loads[1], 1.0) - self.plain_s, 0.0)


class SurvivalModel:
    """Chance that a node is accepted: the product, along its path, of how likely nodes are accepted whose parent is.

    The latter is learned by a node's own score, its log-probability below the parent, as means over nodes verified lately.
    Scores of drafters with a network are near the truth, others only rank. So a mean begins with what scores claim, times
    the share of all claims that came true. Sampled nodes have means of their own: these are accepted by what the target
    thinks of them relative to the drafter.
    """

    FORGETTING = 0.98  # weight of a step's nodes after the next step with trees
    PRIOR_NODES = 2.0  # nodes of each bin that the claims count for
    FIRST_CLAIMS, FIRST_TRUE = 4.0, 3.2  # claims and those that came true, before any tree was verified
    SAMPLED_PRIOR = 0.5
    MAX_TREES = 16  # of a step that are learned from
    EDGES = (-math.inf, *range(-8, -2), *(-2 + 0.25 * i for i in range(8)), -0.1, -0.03)

    def __init__(self) -> None:
        edges = np.array(self.EDGES)
        uppers = np.append(edges[1:], 0.0)
        claimed: Reals = np.exp((np.maximum(edges, uppers - 1) + uppers) / 2)
        self._claims = np.concatenate([claimed, np.full(len(edges), self.SAMPLED_PRIOR)])
        self._verified, self._accepted = np.zeros(len(self._claims)), np.zeros(len(self._claims))

    def observe(self, trees: Seq[DraftTree], paths: Seq[Seq[int]]) -> None:
        """Count the nodes of a step's trees whose parent was accepted. paths: accepted nodes of each, the root first."""
        self._verified *= self.FORGETTING
        self._accepted *= self.FORGETTING
        for tree, path in zip(trees[: self.MAX_TREES], paths, strict=False):
            for node, (number, parent) in enumerate(zip(self._numbers(tree), tree.parents, strict=True)):
                if node and parent in path:
                    self._verified[number] += 1
                    self._accepted[number] += node in path

    def survival(self, trees: Seq[DraftTree]) -> list[Reals]:
        """Return the probability that each node of each tree is accepted, 1 for the root."""
        true = (self.FIRST_TRUE + self._accepted.sum()) / (self.FIRST_CLAIMS + self._verified @ self._claims)
        prior = self.PRIOR_NODES * min(float(true), 1.0) * self._claims
        means: Reals = (self._accepted + prior) / (self._verified + self.PRIOR_NODES)
        ranked = means[: len(self.EDGES)]
        ranked[:] = np.minimum.accumulate(ranked[::-1])[::-1]  # no worse score is likelier
        chances, found = means.tolist(), list[Reals]()
        for tree in trees:
            survival = [1.0]
            for number, parent in zip(self._numbers(tree)[1:], tree.parents[1:], strict=True):
                survival.append(chances[number] * survival[parent])
            found.append(np.array(survival))
        return found

    def _numbers(self, tree: DraftTree) -> list[int]:
        """Return the number of each node's mean; the root's means nothing."""
        scores, first = tree.log_probs, len(self.EDGES) - 1 if tree.sampled else -1
        pairs = zip(scores, [scores[parent] for parent in tree.parents], strict=True)
        return [first + bisect_right(self.EDGES, s - max(above, s) if s > -math.inf else s) for s, above in pairs]


class RecentTrees:
    """The whole trees drafted last, as a sample of what sequences would draft next. The last ones weigh most.

    known_size: nodes that the largest trees could have had, leaving out few larger ones; 0 without any.
    """

    NUM_TREES, MIN_TREES = 32, 4
    FORGETTING = 0.94  # weight of a tree after the next one
    NUM_CUTS = 16  # numbers of verified nodes that are considered

    def __init__(self) -> None:
        self._trees: deque[tuple[DraftTree, int]] = deque(maxlen=self.NUM_TREES)
        self.known_size = 0

    def observe(self, tree: DraftTree, most: int) -> None:
        """Keep a tree that could have had `most` nodes, before nodes were left out."""
        self._trees.append((tree, most))
        sizes = sorted((nodes for _, nodes in self._trees), reverse=True)
        self.known_size = sizes[min(len(sizes), self.MIN_TREES) - 1]

    def yields(self, survival: SurvivalModel, most: int, sizes: Seq[TreeBudget], cuts: bool) -> tuple[Reals, Reals] | None:
        """Return how many drafted nodes of a tree are verified, and how many of these are accepted, [sizes, cuts].

        Of trees of a size, those nodes are verified that are likelier than one of NUM_CUTS bounds; all without `cuts`.

        Args:
            survival: says how likely nodes are accepted.
            most: nodes that the trees could have had at least; there must be such trees.
            sizes: what they are cut to.
            cuts: whether nodes may be left out.

        Returns:
            None if no tree has a drafted node.
        """
        trees = [tree for tree, nodes in self._trees if nodes >= most]
        weights = self.FORGETTING ** np.arange(len(trees) - 1, -1, -1)
        chances = survival.survival(trees)
        places = np.concatenate([np.argsort(np.argsort(-own, kind="stable")) for own in chances])
        depths = np.fromiter(chain.from_iterable(tree.depths for tree in trees), np.int64)
        of_trees = np.repeat(weights / weights.sum(), [tree.num_nodes for tree in trees])
        chance = np.concatenate(chances)
        order = np.argsort(-chance, kind="stable")
        order = order[depths[order] > 0]
        if not len(order):
            return None
        nodes, levels = np.array(sizes).T[:, :, None]
        shares = of_trees[order] * ((places[order] < nodes) & (depths[order] <= levels))  # [sizes, nodes]
        ends = np.unique(
            np.linspace(0, len(order) - 1, self.NUM_CUTS + 1).astype(np.int64)[1:] if cuts else [len(order) - 1]
        )
        return np.cumsum(shares, 1)[:, ends], np.cumsum(shares * chance[order], 1)[:, ends]
