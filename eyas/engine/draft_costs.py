"""What verify passes and draft rounds cost, in seconds by size, and how likely nodes of trees are accepted.

Also what a budget of draft trees is, what it is given, and one of the largest trees always.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from eyas.engine.sequence import ScheduledSequence
from eyas.protocol.tree import DraftTree
from eyas.sampling.acceptance import VerifyOutput
from eyas.sampling.packed_trees import PackedTrees, pack_trees

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class TreeSize(NamedTuple):
    """Most nodes of a tree, the root included, and its most levels below the root."""

    nodes: int
    depth: int


NO_TREE = TreeSize(1, 0)


class StepTimes(NamedTuple):
    """Seconds of a step.

    wait: to request its trees and to get them. verify: of the forward pass and of acceptance. between: since the end of the
    step before; None if nothing was to be done then. host: of all else in the step.
    """

    wait: float
    verify: float
    between: float | None = None
    host: float = 0.0


class NextStep(NamedTuple):
    """What else is known of the next step.

    num_prefilling: sequences inside their prompts. num_prompt_rows: that the step computes of these.
    num_context_tokens: cached tokens that its rows attend to, of all sequences together.
    """

    num_prefilling: int = 0
    num_prompt_rows: int = 0
    num_context_tokens: int = 0


DECODE_ONLY = NextStep()


class DraftBudget(Protocol):
    """Chooses sizes of draft trees.

    num_nodes: most nodes of the trees chosen last, the root included; 1 only if no request drafts. tokens_per_s: see
    TreeBudget.
    """

    num_nodes: int
    tokens_per_s: float

    @property
    def takes_prompts(self) -> bool:
        """Return whether prompts are worth sending to a drafter, as trees may follow soon."""
        ...

    def choose(self, decoding: Seq[str], most: int, num_plain: int = 0, step: NextStep = DECODE_ONLY) -> dict[str, TreeSize]:
        """Largest next tree of each request, of at most `most` nodes.

        decoding: requests that can have a tree. num_plain: requests that decode beside them and cannot.
        """
        ...

    def prune(self, trees: Seq[DraftTree], num_plain: int = 0) -> list[DraftTree]:
        """The parts to verify of deterministic trees that came; the same objects if nothing is left out.

        num_plain: requests that decode beside them.
        """
        ...

    def observe(self, batch: Seq[ScheduledSequence], outputs: Seq[VerifyOutput], times: StepTimes) -> None: ...


class FixedDraftBudget:
    """Always the largest trees."""

    num_nodes, tokens_per_s, takes_prompts = 1, 0.0, True

    def choose(self, decoding: Seq[str], most: int, num_plain: int = 0, step: NextStep = DECODE_ONLY) -> dict[str, TreeSize]:
        self.num_nodes = most
        return dict.fromkeys(decoding, TreeSize(most, most))

    def prune(self, trees: Seq[DraftTree], num_plain: int = 0) -> list[DraftTree]:
        return list(trees)

    def observe(self, batch: Seq[ScheduledSequence], outputs: Seq[VerifyOutput], times: StepTimes) -> None: ...


class CostModel:
    """Seconds by size: a table, interpolated between its sizes and extended along its last slope beyond them.

    Seconds never fall with size. A table without sizes is empty: it expects 0 seconds until the first observation, and then
    the same for all sizes.
    """

    # A measurement counts as this multiple of the expected seconds at most: a pause of the machine is not a cost of size.
    MAX_SURPRISE = 3.0
    # Weight of a measurement at sizes far from its own, relative to its own: machines slow down for all sizes together. It
    # is 1 for sizes that were measured at start alone, where nothing else ran.
    FAR_WEIGHT = 0.5
    FIRST_SIZES = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)  # of an empty table, once it is not empty
    LEAST_S = 1e-6
    SPACING = 0.14  # a size whose logarithm is as far from that of all others gets an entry of its own

    def __init__(self, sizes: Seq[float], seconds: Seq[float], rate: float) -> None:
        """sizes: ascending, above 0. rate: weight of a new measurement against what the table holds, in (0, 1]."""
        self.sizes = [float(size) for size in sizes]  # ascending
        self._set(seconds)
        self._at_start = tuple(self.sizes), tuple(self._seconds)
        self._rate = rate
        self._counts: dict[float, int] = {}  # measurements of each size, and one at start
        self._measured: set[float] = set()  # sizes of the table that lie next to one measured since the start
        self._weights: dict[float, list[float]] = {}  # of a measurement of a size, in the seconds of each size of the table

    def at(self, size: npt.ArrayLike) -> Floats:
        """Expected seconds of each size."""
        sizes = np.asarray(size, dtype=np.float64)
        if len(self.sizes) < 2:
            return np.full(sizes.shape, self._seconds[0] if self._seconds else 0.0)
        inside: Floats = np.interp(sizes, self.sizes, self._seconds)
        extended: Floats = inside + self._slope(-2) * np.maximum(sizes - self.sizes[-1], 0.0)
        return extended

    def seconds(self, size: float) -> float:
        """`at` of a single size, in less time."""
        if len(self.sizes) < 2:
            return self._seconds[0] if self._seconds else 0.0
        left = min(max(bisect_right(self.sizes, size) - 1, 0), len(self.sizes) - 2)
        return self._seconds[left] + self._slope(left) * max(size - self.sizes[left], 0.0)

    def observe(self, size: float, seconds: float) -> None:
        """Move the table towards a measurement, by ratios, most near its size."""
        if not self.sizes:
            self.sizes = list(self.FIRST_SIZES)
            self._set([seconds] * len(self.sizes))
            return
        if size not in self._weights and abs(math.log(self._nearest(size) / size)) > self.SPACING:
            at, own_s = bisect_right(self.sizes, size), self.seconds(size)
            self.sizes.insert(at, float(size))
            self._seconds.insert(at, own_s)
            self._weights.clear()
        ratio = min(max(seconds, self.LEAST_S) / self.seconds(size), self.MAX_SURPRISE)
        if size not in self._counts and (nearest := self._nearest(size)) not in self._measured:
            self._measured.add(nearest)
            self._weights.clear()
        self._counts[size] = count = self._counts.get(size, 1) + 1
        self.scale(size, ratio ** max(self._rate, 1 / count))

    def scale(self, size: float, ratio: float) -> None:
        """Multiply the seconds, most near a size."""
        if (weights := self._weights.get(size)) is None:
            near = [float(np.interp(size, self.sizes, unit)) for unit in np.eye(len(self.sizes))]
            far = [self.FAR_WEIGHT if not self._measured or own in self._measured else 1.0 for own in self.sizes]
            weights = self._weights[size] = [own + weight * (1 - own) for own, weight in zip(near, far, strict=True)]
        self._set([own * ratio**weight for own, weight in zip(self._seconds, weights, strict=True)])

    def relax(self, factor: float) -> None:
        """Multiply all seconds, but expect no less than a third of those at the start: a busy machine measures too much."""
        sizes, seconds = self._at_start
        least = np.interp(self.sizes, sizes, seconds) / self.MAX_SURPRISE if sizes else [self.LEAST_S] * len(self.sizes)
        self._set([max(own * factor, min(own, float(bound))) for own, bound in zip(self._seconds, least, strict=True)])

    def _set(self, seconds: Seq[float]) -> None:
        self._seconds = list(itertools.accumulate((max(float(own), self.LEAST_S) for own in seconds), max))

    def _nearest(self, size: float) -> float:
        """The size of the table that is next to `size`, by ratios."""
        return min(self.sizes, key=lambda own: abs(math.log(own / size)))

    def _slope(self, left: int) -> float:
        """Seconds per size between a size of the table and the next one."""
        return (self._seconds[left + 1] - self._seconds[left]) / (self.sizes[left + 1] - self.sizes[left])


class DraftCosts:
    """Seconds to wait for trees: those of a round with one level by number of trees, and of each further level by its rows.

    A level has a row for each drafted node of a tree, but `top_k` at most. A measurement corrects both tables, the more
    uncertain one more (a Kalman filter of their relative errors). So rounds of different depths show what a level costs:
    as much as the first one for EAGLE, next to nothing for one-pass heads.
    """

    # Relative errors: of tables that were measured before, of those that were not, what rounds add, and of a measurement.
    MEASURED, UNKNOWN, DRIFT, NOISE = 0.3, 1.0, 0.02, 0.2
    FIRST_SHARE = 2 / 3  # with less, shallow trees seem to pay before a round has shown what its levels cost
    NUM_FIRST = 6  # measurements of an empty table: their least counts, as a drafter apart loads and connects at first

    def __init__(self, first: CostModel, level: CostModel, top_k: int) -> None:
        self._first, self._level, self._top_k = first, level, top_k
        self._num_first, self._first_size = 0 if first.sizes else self.NUM_FIRST, NO_TREE
        error = (self.MEASURED if first.sizes else self.UNKNOWN) ** 2
        self._spread = error, 0.0, error  # covariance of both errors: of the first table, of both, of the other

    def at(self, num_trees: int, size: TreeSize) -> float:
        """Expected seconds."""
        return sum(self._parts(num_trees, size))

    def observe(self, num_trees: int, size: TreeSize, seconds: float) -> None:
        """Correct the tables by a measurement. Into empty ones it goes in parts, FIRST_SHARE of it for the first level."""
        rows, further = self._rows(num_trees, size), size.depth - 1
        if not self._first.sizes:
            self._first.observe(num_trees, self.FIRST_SHARE * seconds if further else seconds)
            self._level.observe(rows, (1 - self.FIRST_SHARE) * seconds / max(further, 1))
            self._first_size = size
        one, more = self._parts(num_trees, size)
        total = one + more
        self._num_first = max(self._num_first - 1, 0) if size == self._first_size else 0
        if self._num_first:
            if seconds < total:
                self._first.relax(seconds / total)
                self._level.relax(seconds / total)
            return
        error = min(seconds, CostModel.MAX_SURPRISE * total) - total
        a, b, c = self._spread
        a, c = a + self.DRIFT**2, c + self.DRIFT**2
        left, right = a * one + b * more, b * one + c * more
        variance = one * left + more * right + (self.NOISE * total) ** 2
        self._spread = a - left * left / variance, b - left * right / variance, c - right * right / variance
        most = CostModel.MAX_SURPRISE
        self._first.scale(num_trees, min(max(1 + left / variance * error, 1 / most), most))
        if further:
            self._level.scale(rows, min(max(1 + right / variance * error, 1 / most), most))
            one, more = self._parts(num_trees, size)
            if more > further * one:  # no level costs more than the first one
                self._first.scale(num_trees, (one + more) / (1 + further) / one)
                self._level.scale(rows, (one + more) / (1 + further) / (more / further))

    def _parts(self, num_trees: int, size: TreeSize) -> tuple[float, float]:
        """Seconds of the first level, and of all further ones."""
        if not size.depth:
            return 0.0, 0.0
        return self._first.seconds(num_trees), (size.depth - 1) * self._level.seconds(self._rows(num_trees, size))

    def _rows(self, num_trees: int, size: TreeSize) -> int:
        return num_trees * max(min(size.nodes - 1, self._top_k), 1)


class SurvivalModel:
    """How likely a node is accepted: the product, along its path, of how likely nodes are accepted whose parent is.

    The latter is learned by a node's own score, as means over the nodes verified lately, beginning with what scores claim.
    The own score is the log-probability below the parent. That of drafters with a network is calibrated, others only rank.
    Sampled nodes have means of their own: these are accepted by what the target thinks of them relative to the drafter.
    """

    FORGETTING = 0.98  # weight of a step's nodes after the next step with trees
    PRIOR_NODES = 2.0  # nodes of each bin that the prior counts for
    SAMPLED_PRIOR = 0.5
    FEW_NODES = 64
    EDGES = np.concatenate([[-np.inf], np.arange(-8.0, -2.0, 1.0), np.arange(-2.0, -0.2, 0.25), [-0.1, -0.03]])

    def __init__(self) -> None:
        uppers = np.append(self.EDGES[1:], 0.0)
        claimed: Floats = np.exp((np.maximum(self.EDGES, uppers - 1) + uppers) / 2)
        self._prior = np.concatenate([claimed, np.full(len(self.EDGES), self.SAMPLED_PRIOR)])
        self._edges: list[float] = self.EDGES.tolist()
        self._verified, self._accepted = np.zeros(len(self._prior)), np.zeros(len(self._prior))

    def forget(self) -> None:
        """Let earlier trees count a little less, once for each step with trees."""
        self._verified *= self.FORGETTING
        self._accepted *= self.FORGETTING

    def observe(self, trees: Seq[DraftTree], paths: Seq[Seq[int]]) -> None:
        """Count the nodes of verified trees whose parent was accepted. paths: accepted nodes of each, the root first."""
        if sum(map(len, trees)) <= self.FEW_NODES:
            self._observe_few(trees, paths)
            return
        packed, lengths = pack_trees(trees), np.array(list(map(len, paths)), dtype=np.int64)
        accepted = np.zeros(len(packed.batch.tokens), np.bool_)
        accepted[np.repeat(packed.batch.firsts, lengths) + np.fromiter(chain.from_iterable(paths), np.int64)] = True
        numbers, is_counted = self._numbers(trees, packed), accepted[packed.above] & (packed.depths > 0)
        self._verified += np.bincount(numbers[is_counted], minlength=len(self._prior))
        self._accepted += np.bincount(numbers[is_counted & accepted], minlength=len(self._prior))

    def survival(self, trees: Seq[DraftTree]) -> list[Floats]:
        """Probability that each node of each tree is accepted, 1 for the root."""
        means: Floats = (self._accepted + self.PRIOR_NODES * self._prior) / (self._verified + self.PRIOR_NODES)
        ranked = means[: len(self.EDGES)]
        ranked[:] = np.minimum.accumulate(ranked[::-1])[::-1]  # no worse score is likelier
        few = sum(map(len, trees)) <= self.FEW_NODES
        return self._survival_of_few(trees, means.tolist()) if few else self._survival_of_many(trees, means)

    def _observe_few(self, trees: Seq[DraftTree], paths: Seq[Seq[int]]) -> None:
        """Node by node, which takes less time than arrays while there are few nodes."""
        for tree, path in zip(trees, paths, strict=True):
            for node, (number, parent) in enumerate(zip(self._numbers_of(tree), tree.parents, strict=True)):
                if node and parent in path:
                    self._verified[number] += 1
                    self._accepted[number] += node in path

    def _survival_of_few(self, trees: Seq[DraftTree], means: list[float]) -> list[Floats]:
        """As `_observe_few`."""
        survivals = []
        for tree in trees:
            survival = [1.0]
            for number, parent in zip(self._numbers_of(tree)[1:], tree.parents[1:], strict=True):
                survival.append(means[number] * survival[parent])
            survivals.append(np.array(survival))
        return survivals

    def _numbers_of(self, tree: DraftTree) -> list[int]:
        """`_numbers` of one tree."""
        scores, first = tree.log_probs, len(self._edges) - 1 if tree.sampled else -1
        pairs = zip(scores, [scores[parent] for parent in tree.parents], strict=True)
        return [first + bisect_right(self._edges, s - max(above, s) if s > -math.inf else s) for s, above in pairs]

    def _survival_of_many(self, trees: Seq[DraftTree], means: Floats) -> list[Floats]:
        """Level by level, the nodes of all trees at once, one tree behind the other."""
        packed = pack_trees(trees)
        survival: Floats = np.where(packed.depths > 0, means[self._numbers(trees, packed)], 1.0)
        order, levels = np.argsort(packed.depths, kind="stable"), np.cumsum(np.bincount(packed.depths))
        for first, end in itertools.pairwise(levels):
            level = order[first:end]
            survival[level] *= survival[packed.above[level]]
        return np.split(survival, packed.batch.firsts[1:])

    def _numbers(self, trees: Seq[DraftTree], packed: PackedTrees) -> Ints:
        """The number of each node's mean; those of roots mean nothing."""
        scores = packed.batch.log_probs
        own = np.where(scores > -np.inf, scores - np.maximum(scores[packed.above], scores), -np.inf)
        is_sampled = np.repeat([tree.sampled is not None for tree in trees], packed.batch.counts)
        numbers: Ints = np.searchsorted(self.EDGES, own, side="right") - 1 + len(self.EDGES) * is_sampled
        return numbers


class DraftedNodes(NamedTuple):
    """Drafted nodes, the likeliest first.

    chances: to be accepted. weights: of their trees, 1 in all. places: in their trees, 1 for the likeliest drafted node.
    """

    chances: Floats
    weights: Floats
    depths: Ints
    places: Ints


class RecentTrees:
    """The whole trees drafted last, as a sample of what sequences would draft next. The last ones weigh most."""

    NUM_TREES, MIN_TREES = 32, 4
    FORGETTING = 0.94  # weight of a tree after the next one

    def __init__(self) -> None:
        self._trees: deque[tuple[DraftTree, int]] = deque(maxlen=self.NUM_TREES)

    def observe(self, tree: DraftTree, most: int) -> None:
        """Keep a tree that could have had `most` nodes, before nodes were left out."""
        self._trees.append((replace(tree), most))  # without the arrays of the trees that it came with

    @property
    def known_size(self) -> int:
        """Nodes that enough of the trees could have had; 0 while there are too few."""
        sizes = sorted((nodes for _, nodes in self._trees), reverse=True)
        return sizes[self.MIN_TREES - 1] if len(sizes) >= self.MIN_TREES else 0

    def nodes(self, survival: SurvivalModel, most: int) -> DraftedNodes:
        """The nodes of the trees that could have had `most` nodes; at least one tree could."""
        trees = [tree for tree, nodes in self._trees if nodes >= most]
        weights = self.FORGETTING ** np.arange(len(trees) - 1, -1, -1)
        chances = survival.survival(trees)
        places = [np.argsort(np.argsort(-own, kind="stable")) for own in chances]
        of_trees = np.repeat(weights / weights.sum(), [len(tree) for tree in trees])
        depths = np.fromiter(chain.from_iterable(tree.depths for tree in trees), np.int64)
        order = np.argsort(-np.concatenate(chances), kind="stable")
        order = order[depths[order] > 0]
        places_of: Ints = np.concatenate(places)[order]
        return DraftedNodes(np.concatenate(chances)[order], of_trees[order], depths[order], places_of)
