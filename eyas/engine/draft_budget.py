"""How large the draft trees of the next step may be. No output depends on it.

`AdaptiveDraftBudget` takes the size with the most tokens per second. Let B sequences have trees of up to k nodes and d
levels, let P have none, and let the m likeliest of all drafted nodes be verified. Such a step takes verify(P + B + m) +
draft(B, k, d) seconds and yields P + B + a(m, k, d) tokens. verify and draft are tables of seconds, measured at start and
refined by every step. a is the expected number of accepted nodes. It comes from the trees drafted last, and from how likely
a node with its score is accepted, which is learned from what was verified.

When the next trees are there, the nodes of all sequences compete in the same way, by their own scores.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence as Seq
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from eyas.config import TreeConfig
from eyas.engine.draft_costs import NO_TREE, CostModel, DraftCosts, TreeSize
from eyas.engine.sequence import ScheduledSequence
from eyas.sampling.acceptance import VerifyOutput
from eyas.tree import DraftTree

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
log = logging.getLogger(__name__)


class DraftBudget(Protocol):
    """Chooses sizes of draft trees.

    num_nodes: most nodes of the trees chosen last, the root included. tokens_per_s: see TreeBudget.
    """

    num_nodes: int
    tokens_per_s: float

    def choose(self, decoding: Seq[str], most: int, num_plain: int = 0) -> dict[str, TreeSize]:
        """Largest next tree of each request, of at most `most` nodes.

        decoding: requests that can have a tree. num_plain: requests that decode beside them and cannot.
        """
        ...

    def prune(self, trees: Seq[DraftTree], num_plain: int = 0) -> list[DraftTree]:
        """The parts to verify of deterministic trees that came; the same objects where nothing is left out.

        num_plain: requests that decode beside them.
        """
        ...

    def observe(self, batch: Seq[ScheduledSequence], outputs: Seq[VerifyOutput], wait_s: float, verify_s: float) -> None:
        """Take note of a step. wait_s: seconds to request its trees and to get them. verify_s: from there to its end."""
        ...


class FixedDraftBudget:
    """Always the largest trees."""

    num_nodes, tokens_per_s = 1, 0.0

    def choose(self, decoding: Seq[str], most: int, num_plain: int = 0) -> dict[str, TreeSize]:
        self.num_nodes = most
        return dict.fromkeys(decoding, TreeSize(most, most))

    def prune(self, trees: Seq[DraftTree], num_plain: int = 0) -> list[DraftTree]:
        return list(trees)

    def observe(self, batch: Seq[ScheduledSequence], outputs: Seq[VerifyOutput], wait_s: float, verify_s: float) -> None: ...


class SurvivalModel:
    """How likely a node is accepted: the product, along its path, of how likely nodes are accepted whose parent is.

    The latter is learned by a node's own score, as means over the nodes verified lately, beginning with what scores claim.
    The own score is the log-probability below the parent. That of drafters with a network is calibrated, others only rank.
    """

    FORGETTING = 0.98  # weight of a step's nodes after the next step with trees
    PRIOR_NODES = 8.0  # nodes of each bin that the prior counts for
    EDGES = np.concatenate([[-np.inf], np.arange(-8.0, -2.0, 1.0), np.arange(-2.0, -0.2, 0.25), [-0.1, -0.03]])

    def __init__(self) -> None:
        uppers = np.append(self.EDGES[1:], 0.0)
        self._prior: Floats = np.exp((np.maximum(self.EDGES, uppers - 1) + uppers) / 2)
        self._verified, self._accepted = np.zeros(len(self.EDGES)), np.zeros(len(self.EDGES))

    def forget(self) -> None:
        """Let earlier trees count a little less, once for each step with trees."""
        self._verified *= self.FORGETTING
        self._accepted *= self.FORGETTING

    def observe(self, trees: Seq[DraftTree], paths: Seq[Seq[int]]) -> None:
        """Count the nodes of verified trees whose parent was accepted. paths: accepted nodes of each, the root first."""
        bins, parents, depths = self._columns(trees)
        accepted = np.zeros(len(bins), np.bool_)
        starts = np.cumsum([0, *map(len, trees)])
        accepted[[start + node for start, path in zip(starts, paths, strict=False) for node in path]] = True
        counted = accepted[parents] & (depths > 0)
        np.add.at(self._verified, bins[counted], 1)
        np.add.at(self._accepted, bins[counted & accepted], 1)

    def survival(self, trees: Seq[DraftTree]) -> list[Floats]:
        """Probability that each node of each tree is accepted, 1 for the root."""
        means = (self._accepted + self.PRIOR_NODES * self._prior) / (self._verified + self.PRIOR_NODES)
        means = np.minimum.accumulate(means[::-1])[::-1]  # no worse score is likelier
        bins, parents, depths = self._columns(trees)
        survival: Floats = np.where(depths > 0, means[bins], 1.0)
        for depth in range(1, int(depths.max(initial=0)) + 1):
            level = np.flatnonzero(depths == depth)
            survival[level] *= survival[parents[level]]
        return np.split(survival, np.cumsum([len(tree) for tree in trees])[:-1])

    def _columns(self, trees: Seq[DraftTree]) -> _Columns:
        """The nodes of all trees, one tree behind the other."""
        starts = np.repeat(np.cumsum([0, *map(len, trees)])[:-1], [len(tree) for tree in trees])
        scores = np.fromiter(chain.from_iterable(tree.log_probs for tree in trees), np.float64)
        parents = starts + np.fromiter(chain.from_iterable(tree.parents for tree in trees), np.int64)
        depths = np.fromiter(chain.from_iterable(tree.depths for tree in trees), np.int64)
        own = np.where(scores > -np.inf, scores - np.maximum(scores[parents], scores), -np.inf)
        return _Columns(np.searchsorted(self.EDGES, own, side="right") - 1, parents, depths)


class _Columns(NamedTuple):
    bins: Ints  # of own scores
    parents: Ints  # their places
    depths: Ints


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

    NUM_TREES, MIN_TREES = 32, 8
    FORGETTING = 0.94  # weight of a tree after the next one

    def __init__(self) -> None:
        self._trees: deque[tuple[DraftTree, int]] = deque(maxlen=self.NUM_TREES)

    def observe(self, tree: DraftTree, most: int) -> None:
        """Keep a tree that could have had `most` nodes, before nodes were left out."""
        self._trees.append((tree, most))

    @property
    def num_missing(self) -> int:
        """Trees without which they are too few."""
        return max(self.MIN_TREES - len(self._trees), 0)

    @property
    def known_size(self) -> int:
        """Nodes that enough of the trees could have had."""
        return sorted((nodes for _, nodes in self._trees), reverse=True)[self.MIN_TREES - 1]

    def nodes(self, survival: SurvivalModel, most: int) -> DraftedNodes:
        """The nodes of the trees that could have had `most` nodes."""
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


class AdaptiveDraftBudget:
    """The size with the most tokens per second, for all sequences.

    What trees would be worth is learned from a few sequences, which have the largest ones: in the first steps, and in every
    SCOUT_INTERVAL-th step that drafts. They are as many as are drafted in about the same time as one. If the drafter has to
    catch up with them, they have trees in the next step too: only the second draft in a row says what waiting costs.

    Trees that lost time against plain decoding leave a debt, in seconds. Without trees the debt falls by RETRY_SHARE of the
    time. A debt of several steps stops all drafting until it is paid, or until drafting seems to pay for another number of
    sequences. While no size is worth its cost, scouts are sent whenever there is no debt: a drafter may have become better.
    The first waits for a drafter of unknown cost, COLD_START_S in all, leave no debt: it may have to load and to catch up.
    """

    RETRY_SHARE, COLD_START_S = 0.01, 1.0
    MAX_SCOUTS, SCOUT_INTERVAL, SCOUT_COST = 8, 64, 1.2  # the last: of a round for scouts, relative to one for one sequence
    # What a size must yield, relative to plain decoding: to go on, and to begin, as drafters have to catch up.
    MARGIN, FIRST_MARGIN = 1.04, 1.1
    PLAN_STEPS = 8  # that a choice holds for, if the number of sequences does not change by much
    SPEED_RATE = 0.1  # weight of a step in tokens_per_s
    GOOD_ACCEPTANCE = 0.9  # of a node whose parent is accepted: scouts are sent if that would pay
    BIAS_TREES, MAX_BIAS = 64, 1.5  # trees that decide half of the bias

    def __init__(self, tree: TreeConfig, verify: CostModel, draft: DraftCosts) -> None:
        """tree: the largest one. verify: seconds by rows."""
        self.num_nodes, self.tokens_per_s = 1, 0.0
        self._tree, self._verify, self._draft = tree, verify, draft
        self._survival, self._recent = SurvivalModel(), RecentTrees()
        self._sizes: dict[str, TreeSize] = {}
        self._drafter_is_current, self._prunes = False, True
        self._debt_s, self._is_stopped, self._debt_rows = 0.0, False, 1
        self._free_s = 0.0 if draft.at(1, TreeSize(2, 1)) else self.COLD_START_S
        self._scouts: tuple[str, ...] = ()
        self._num_scouts = self._num_drafted = 0
        self._plan: _Plan | None = None
        self._most, self._bias = 1, 1.0  # the latter: accepted nodes relative to those expected
        self._whole: dict[int, tuple[DraftTree, DraftTree]] = {}  # by identity of a pruned tree

    def choose(self, decoding: Seq[str], most: int, num_plain: int = 0) -> dict[str, TreeSize]:
        most = min(most, self._tree.num_draft_tokens)
        chosen = self._chosen(decoding, most, num_plain) if decoding and most > 1 else {}
        before, self._sizes, self._most = self._sizes, dict.fromkeys(decoding, NO_TREE) | chosen, most
        self.num_nodes = max((size.nodes for size in chosen.values()), default=1)
        # A drafter gets nothing of a sequence without trees, and has to catch up in its next round.
        self._drafter_is_current = all(before.get(name, size).depth for name, size in chosen.items())
        return self._sizes

    def prune(self, trees: Seq[DraftTree], num_plain: int = 0) -> list[DraftTree]:
        if not trees:
            return []
        nodes = np.concatenate([survival[1:] for survival in self._survival.survival(trees)])
        order = np.argsort(-nodes, kind="stable")  # ties go to the earlier node, hence parents before their children
        num_rows, size = num_plain + len(trees), max(self._sizes.values(), default=NO_TREE)
        seconds = self._verify.at(num_rows + np.arange(len(nodes) + 1)) + self._draft.at(len(trees), size)
        num_kept = int(np.argmin(seconds / (num_rows + np.cumsum(np.append(0.0, nodes[order])))))
        is_kept = np.zeros(len(nodes), np.bool_)
        is_kept[order[:num_kept]] = True
        if self._scouts:  # a whole tree shows whether what is left out would be accepted
            is_kept[: trees[0].num_drafted] = True
        parts = np.split(is_kept, np.cumsum([tree.num_drafted for tree in trees])[:-1])
        pruned = [
            tree if part.all() else tree.pruned([0, *(np.flatnonzero(part) + 1).tolist()])
            for tree, part in zip(trees, parts, strict=True)
        ]
        self._whole = {id(part): (part, tree) for part, tree in zip(pruned, trees, strict=True)}
        return pruned

    def observe(self, batch: Seq[ScheduledSequence], outputs: Seq[VerifyOutput], wait_s: float, verify_s: float) -> None:
        if not batch:
            return
        decode_only = all(scheduled.tree is not None for scheduled in batch)
        num_rows = sum(len(scheduled.slots) for scheduled in batch)
        if decode_only:
            self._verify.observe(num_rows, verify_s)
        requested = [size for size in self._sizes.values() if size.depth]
        if not requested:
            self._pay(self.RETRY_SHARE * (wait_s + verify_s))
            return
        draft_s = self._draft.at(len(requested), max(requested))
        if self._drafter_is_current:
            self._draft.observe(len(requested), max(requested), wait_s)
        num_drafted = self._observe_trees(batch, outputs)
        if decode_only:
            num_tokens = sum(len(output.accepted.tokens) for output in outputs if output.accepted)
            speed = num_drafted / max(wait_s + verify_s, 1e-9) / len(requested)
            self.tokens_per_s += self.SPEED_RATE * (speed - self.tokens_per_s) if self.tokens_per_s else speed
            plain_s = float(self._verify.at(len(batch)))
            self._debt_rows = self._debt_rows if self._debt_s else len(batch)
            most_s = (CostModel.MAX_SURPRISE if self._drafter_is_current else 1.0) * draft_s  # it catches up once
            lost_s, known_s = min(wait_s, most_s or wait_s), float(self._verify.at(num_rows))
            free_s = min(lost_s, self._free_s) if self._recent.num_missing else 0.0
            self._free_s -= free_s
            self._pay(plain_s * num_tokens / len(batch) - known_s - lost_s + free_s)
            if self._debt_s > plain_s * (1 + 8 / len(batch) ** 0.5):
                self._is_stopped = True

    def _pay(self, seconds: float) -> None:
        """Lower the debt; negative seconds raise it."""
        self._debt_s = max(self._debt_s - seconds, 0.0)
        self._is_stopped = self._is_stopped and self._debt_s > 0

    def _chosen(self, decoding: Seq[str], most: int, num_plain: int) -> dict[str, TreeSize]:
        """Sizes of the sequences that draft."""
        full, is_known = self._full(most), not self._recent.num_missing
        again = [name for name in self._scouts if name in decoding] if not self._drafter_is_current else []
        self._scouts = ()
        if again:
            return dict.fromkeys(again, full)
        plan = self._planned(len(decoding), most, num_plain) if is_known else None
        if plan and plan.size.depth:
            if self._debt_s and not 2 / 3 < plan.num_rows / self._debt_rows < 1.5:
                self._pay(self._debt_s)  # it says nothing about this load
            if self._is_stopped:
                return {}
            self._num_drafted += 1
            is_capped = plan.size.nodes == plan.known_size < most
            if plan.size == full or self._num_drafted % (self.PLAN_STEPS if is_capped else self.SCOUT_INTERVAL):
                return dict.fromkeys(decoding, plan.size)
        elif self._is_stopped or (is_known and self._debt_s > 0):
            return {}
        else:
            self._draft.relax()
            self._plan = None
            if not self._could_pay(len(decoding), num_plain, full):
                return {}
        self._scouts = self._next_scouts(decoding, full)
        return dict.fromkeys(self._scouts, full)

    def _next_scouts(self, decoding: Seq[str], full: TreeSize) -> tuple[str, ...]:
        """Some sequences, other ones each time."""
        most_s, count = self.SCOUT_COST * self._draft.at(1, full), 1
        while count < min(self.MAX_SCOUTS, len(decoding)) and self._draft.at(count + 1, full) <= most_s:
            count += 1
        first = self._num_scouts % len(decoding)
        self._num_scouts += count
        return tuple([*decoding[first:], *decoding[:first]][:count])

    def _could_pay(self, num_drafting: int, num_plain: int, full: TreeSize) -> bool:
        """Whether chains of a good drafter were worth their cost."""
        num_rows = num_drafting + num_plain
        least = self.MARGIN * num_rows / float(self._verify.at(num_rows))
        for depth in range(1, full.depth + 1):
            tokens = num_rows + num_drafting * sum(self.GOOD_ACCEPTANCE ** (1 + level) for level in range(depth))
            seconds = self._verify.at(num_rows + num_drafting * depth)
            if tokens > least * float(seconds + self._draft.at(num_drafting, TreeSize(depth + 1, depth))):
                return True
        return False

    def _full(self, most: int) -> TreeSize:
        return TreeSize(most, min(self._tree.num_steps, most - 1))

    def _planned(self, num_drafting: int, most: int, num_plain: int) -> _Plan:
        """The best size by the present estimates, at most PLAN_STEPS old."""
        plan, num_rows, known_size = self._plan, num_drafting + num_plain, min(self._recent.known_size, most)
        if plan and plan.known_size == known_size and plan.age < self.PLAN_STEPS and 0.9 < plan.num_rows / num_rows < 1.1:
            self._plan = plan._replace(age=plan.age + 1)
            return plan
        chances, weights, depths, places = self._recent.nodes(self._survival, known_size)
        if not len(chances):  # the drafter found nothing
            return _Plan(NO_TREE, known_size, num_rows, 0.0)
        levels_of = _steps(1, self._tree.num_steps)
        sizes = [TreeSize(nodes, depth) for nodes in _steps(2, known_size) for depth in levels_of if depth < nodes]
        nodes, levels = np.array(sizes).T[:, :, None]
        shares = num_drafting * weights * ((places < nodes) & (depths <= levels))
        rows, accepted = np.cumsum(shares, 1), np.cumsum(shares * chances, 1) * self._bias
        if not self._prunes:
            rows, accepted = rows[:, -1:], accepted[:, -1:]
        draft_s = np.array([[self._draft.at(num_drafting, size)] for size in sizes])
        rates = (num_rows + accepted) / (self._verify.at(num_rows + rows) + draft_s)
        best, plain = np.unravel_index(np.argmax(rates), rates.shape), num_rows / float(self._verify.at(num_rows))
        margin = self.MARGIN if plan and plan.size.depth else self.FIRST_MARGIN
        size = sizes[best[0]] if rates[best] > margin * plain else NO_TREE
        if not plan or bool(plan.size.depth) != bool(size.depth):
            what, ratio = f"trees of {size.nodes} nodes" if size.depth else "no trees", float(rates[best]) / plain
            log.info(
                "%d sequences draft %s: %.2f of plain decoding", num_drafting, what, ratio, extra={"rate_limited": True}
            )
        self._plan = _Plan(size, known_size, num_rows, float(accepted[best]) / num_drafting / self._bias)
        return self._plan

    def _observe_trees(self, batch: Seq[ScheduledSequence], outputs: Seq[VerifyOutput]) -> int:
        """Learn from the trees of a step. Returns the tokens that their sequences have got."""
        self._survival.forget()
        trees, paths, num_tokens, whole = list[DraftTree](), list[tuple[int, ...]](), 0, self._whole
        self._whole = {}
        for scheduled, output in zip(batch, outputs, strict=True):
            size = self._sizes.get(scheduled.sequence.request.id, NO_TREE)
            if size.depth and scheduled.tree is not None and output.accepted is not None:
                trees.append(scheduled.tree)
                paths.append(output.accepted.path)
                num_tokens += len(output.accepted.tokens)
                if size == self._full(self._most):
                    _, tree = whole.get(id(scheduled.tree), (None, scheduled.tree))
                    self._recent.observe(tree, self._most)
        self._prunes = bool(whole) or not any(tree.num_drafted for tree in trees)
        if trees:
            self._survival.observe(trees, paths)
        if trees and self._plan and self._plan.size == max(self._sizes.values()) and self._plan.accepted:
            bias = min((num_tokens / len(trees) - 1) / self._plan.accepted, self.MAX_BIAS)
            self._bias += min(len(trees) / self.BIAS_TREES, 0.3) * (bias - self._bias)
        return num_tokens


class _Plan(NamedTuple):
    """A choice. known_size: most nodes it could have. accepted: nodes expected of a tree. age: steps it was used for."""

    size: TreeSize
    known_size: int
    num_rows: int
    accepted: float
    age: int = 0


def _steps(first: int, last: int) -> list[int]:
    """Sizes worth a comparison from the largest down: all small ones, then about three for each doubling."""
    return sorted({last, *(n for n in (*range(1, 7), 8, 10, 12, 16, 20, 24, 32, 48, 64) if first <= n < last)}, reverse=True)
