"""Straight lines through measured times: sizes and seconds in, expected seconds out. Knows no steps and no drafts.

What draft nodes have been worth: trees and accepted paths in, expected tokens and rows of smaller trees out.

A node's rank is its place in its tree by score, the root's 0: a drafter with a smaller budget leaves out the last ranks.

Which requests have trees that only serve to learn: what such steps lose in, sizes by request out. Knows no costs.

How large the trees of the next step may be: seconds of a step's stages in, nodes by request out. Knows no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eyas.engine.sequence import ScheduledSequence
from eyas.sampling.acceptance import Accepted
from eyas.tree import DraftTree

# An observation counts as this multiple of what was expected at most: a pause of the machine is no cost of rows.
MOST_SURPRISE = 3.0
# Spread of sizes, as a share of their mean, from which on a slope can be told.
_LEAST_SPREAD = 0.01
_LEAST_SECONDS = 1e-9


class CostModel:
    """Least squares of seconds against size, exponentially forgotten; while sizes hardly differ the slope stays what it was.
    Neither slope nor intercept is below 0."""

    def __init__(self, forgetting: float) -> None:
        """forgetting: what an observation still weighs after the next one."""
        self._forgetting = forgetting
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._slope: float | None = None

    def add(self, size: float, seconds: float) -> None:
        """Count an observation."""
        if self._weight > 1:
            seconds = min(seconds, MOST_SURPRISE * self.at(size))
        observed = (1.0, size, seconds, size * size, size * seconds)
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        self._weight, self._x, self._y, self._xx, self._xy = (
            self._forgetting * total + new for total, new in zip(sums, observed, strict=True)
        )
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x**2
        if variance > (_LEAST_SPREAD * mean_x) ** 2:
            self._slope = max((self._xy / self._weight - mean_x * mean_y) / variance, 0.0)

    @property
    def empty(self) -> bool:
        """Whether nothing was observed yet."""
        return self._weight == 0

    @property
    def sloped(self) -> bool:
        """Whether sizes have ever differed enough to tell how seconds grow with them."""
        return self._slope is not None

    def at(self, size: float) -> float:
        """Expected seconds; their mean where sizes have hardly differed yet, 0 before the first observation."""
        if self.empty:
            return 0.0
        mean_x, mean_y, slope = self._x / self._weight, self._y / self._weight, self._slope or 0.0
        if slope * mean_x > mean_y:
            return max(self._xy / self._xx * size, _LEAST_SECONDS)
        return max(mean_y + slope * (size - mean_x), _LEAST_SECONDS)


# What a tree still weighs after the next one that was asked for as large, and how many make a mean.
FORGETTING = 0.98
FEWEST_TREES = 8

Floats = npt.NDArray[np.float64]


class AcceptanceModel:
    """Counts by rank, exponentially forgotten: how often a node was asked for, came, and was accepted."""

    def __init__(self, most_nodes: int) -> None:
        self._asked: Floats = np.zeros(most_nodes)
        self._came: Floats = np.zeros(most_nodes)
        self._accepted: Floats = np.zeros(most_nodes)

    def add(self, num_asked: int, tree: DraftTree, path: Sequence[int]) -> None:
        """Count a tree that was asked for with `num_asked` nodes, and the nodes of it that were accepted, the root first."""
        for counts in (self._asked, self._came, self._accepted):
            counts[:num_asked] *= FORGETTING
        self._asked[:num_asked] += 1
        self._came[: len(tree)] += 1
        if len(path) > 1:
            ranks = np.argsort(np.argsort(-np.array(tree.log_probs), kind="stable"))
            self._accepted[ranks[list(path)]] += 1

    def known(self, most: int) -> int:
        """The largest size, up to `most`, of which enough trees have been asked for; 1 if there is none."""
        return max(int(np.count_nonzero(self._asked[:most] >= FEWEST_TREES)), 1)

    def tokens(self, nodes: int) -> Floats:
        """Expected tokens of a verify step, bonus included, with trees of 1 up to `nodes` nodes; all must be known."""
        return 1 + np.cumsum(np.append(0.0, self._accepted[1:nodes] / self._asked[1:nodes]))

    def rows(self, nodes: int) -> Floats:
        """Expected nodes of trees for which 1 up to `nodes` were asked: a drafter may have less to say."""
        return 1 + np.cumsum(np.append(0.0, self._came[1:nodes] / self._asked[1:nodes]))


# Lessons, steps that serve to learn, one after the other: how many in 32 requests, rounded up, get the largest trees, while
# the others have what they would have. The first brings drafters up to date; beyond 16 requests the next two tell what one
# more costs, among fewer nothing but trees for all of them does; in the last nobody has a tree.
LEARNERS = (2, 2, 1, 0)
OF_REQUESTS = 32
# Of all time, what lessons may lose once everything is known.
LEARNING_SHARE = 0.03


class Exploration:
    """A round of lessons now and then: the more the last one lost, the later comes the next."""

    def __init__(self) -> None:
        self._next = len(LEARNERS)
        self._now = self._counted = False
        self._lost = self._spent = 0.0  # seconds: by the last round that was counted, and since the last one began

    def sizes(self, decoding: Seq[str], most: int, known: bool) -> dict[str, int]:
        """Sizes of the next step's trees that serve to learn, none if it is not time for that; the same requests are asked
        each time. known: whether all sizes up to `most` have been tried."""
        lessons = self._sizes(decoding, most, known)
        self._now = bool(lessons)
        return lessons

    def account(self, seconds: float, worth: float) -> None:
        """Of a step without prompt rows: how long it took, and how long its tokens would have taken otherwise."""
        if self._now:
            self._lost = (self._lost if self._counted else 0.0) + max(seconds - worth, 0.0)
            self._counted = True
        else:
            self._spent += seconds

    def _sizes(self, decoding: Seq[str], most: int, known: bool) -> dict[str, int]:
        if not decoding:
            return {}
        if self._next == len(LEARNERS):
            if most == 1 or (known and self._spent * LEARNING_SHARE <= self._lost):
                return {}
            self._next, self._counted, self._spent = 0, False, 0.0
        share = LEARNERS[self._next]
        self._next += 1
        learners = decoding[: -(-len(decoding) * share // OF_REQUESTS)]
        return dict.fromkeys(learners, most) if share else dict.fromkeys(decoding, 1)


# The first steps do what is done once only, and tell nothing of the later ones.
WARM_UP_STEPS = 4


class DraftBudget(Protocol):
    """Is told what each stage of a step took, as it ends. Whatever it chooses, no output depends on it.

    num_nodes: the usual size, the root included.
    """

    num_nodes: int

    def drafted(self, seconds: float) -> None:
        """The drafts are there, after so long a wait."""
        ...

    def verified(self, works: Seq[ScheduledSequence], accepted: Seq[Accepted | None], seconds: float) -> None:
        """The step is done, so long after the drafts were there; what was accepted of each work's tree."""
        ...

    def choose(self, decoding: Seq[str], most: int, num_plain: int = 0) -> dict[str, int]:
        """Most nodes, the root included, of the next step's tree of each request that could have one; up to `most`.
        num_plain: requests that decode beside them and can have none."""
        ...


class FixedDraftBudget:
    """Always the largest trees."""

    num_nodes = 1

    def drafted(self, seconds: float) -> None: ...

    def verified(self, works: Seq[ScheduledSequence], accepted: Seq[Accepted | None], seconds: float) -> None: ...

    def choose(self, decoding: Seq[str], most: int, num_plain: int = 0) -> dict[str, int]:
        self.num_nodes = most
        return dict.fromkeys(decoding, most)


class AdaptiveDraftBudget:
    """The size with the most tokens a second, by what steps have cost and nodes have gained of late.

    With B sequences that can have trees, of k nodes, and P that cannot, a step takes verify(P + B * rows(k)) + wait(B)
    seconds, the latter if k > 1, and gives P + B * tokens(k) tokens; verify and wait are straight lines, verify fitted to
    steps without prompt rows, wait to drafters that were not left behind, and rows and tokens are means by rank. A few
    requests now and then have trees that only serve to learn, so that all of it stays known.
    """

    def __init__(self, most_nodes: int) -> None:
        """most_nodes: of any tree, the root included."""
        self.num_nodes = 1
        self._verify, self._wait = CostModel(0.99), CostModel(0.9)
        self._gains = AcceptanceModel(most_nodes)
        self._lessons = Exploration()
        self._sizes: dict[str, int] = {}
        self._up_to_date = False
        self._num_steps = 0
        self._waited = 0.0
        self._price = math.inf  # seconds a token in a step that is no lesson

    def drafted(self, seconds: float) -> None:
        self._waited = seconds
        num_asked = sum(size > 1 for size in self._sizes.values())
        if num_asked and self._up_to_date and self._num_steps >= WARM_UP_STEPS:
            self._wait.add(num_asked, seconds)

    def verified(self, works: Seq[ScheduledSequence], accepted: Seq[Accepted | None], seconds: float) -> None:
        self._num_steps += 1
        if all(work.tree is not None for work in works):
            num_tokens = sum(len(outcome.tokens) for outcome in accepted if outcome)
            self._lessons.account(self._waited + seconds, num_tokens * self._price)
            if self._num_steps > WARM_UP_STEPS:
                self._verify.add(sum(len(work.slots) for work in works), seconds)
        for work, outcome in zip(works, accepted, strict=True):
            size = self._sizes.get(work.sequence.request.id, 1)
            if work.tree is not None and outcome is not None and size > 1:
                self._gains.add(size, work.tree, outcome.path)

    def choose(self, decoding: Seq[str], most: int, num_plain: int = 0) -> dict[str, int]:
        priced = self._verify.sloped and not self._wait.empty
        known = self._gains.known(most) if priced else 1
        if decoding:
            prices = self._prices(len(decoding), num_plain, known)
            self.num_nodes = 1 + int(np.argmin(prices))
            self._price = float(prices.min()) if known == most else math.inf
        lessons = self._lessons.sizes(decoding, most, known == most)
        before, self._sizes = self._sizes, dict.fromkeys(decoding, self.num_nodes) | lessons
        self._up_to_date = all(before.get(name, size) > 1 for name, size in self._sizes.items() if size > 1)
        return self._sizes

    def _prices(self, num_decoding: int, num_plain: int, most: int) -> Floats:
        """Seconds a token with trees of 1 up to `most` nodes."""
        rows = num_plain + num_decoding * self._gains.rows(most)
        seconds = np.array([self._verify.at(size) for size in rows])
        seconds[1:] += self._wait.at(num_decoding)
        prices: Floats = seconds / (num_plain + num_decoding * self._gains.tokens(most))
        return prices
