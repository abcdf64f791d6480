"""How large the trees of the next step may be: seconds of a step's stages in, nodes by request out. Knows no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np

from eyas.engine.acceptance.match import Accepted
from eyas.engine.budget.cost import Line
from eyas.engine.budget.gain import Floats, Gains
from eyas.engine.budget.lessons import Lessons
from eyas.engine.sequence import Work

# The first steps do what is done once only, and tell nothing of the later ones.
WARM_UP_STEPS = 4


class TreeBudget(Protocol):
    """Is told what each stage of a step took, as it ends. Whatever it chooses, no output depends on it.

    num_nodes: the usual size, the root included.
    """

    num_nodes: int

    def drafted(self, seconds: float) -> None:
        """The drafts are there, after so long a wait."""
        ...

    def verified(self, works: Seq[Work], accepted: Seq[Accepted | None], seconds: float) -> None:
        """The step is done, so long after the drafts were there; what was accepted of each work's tree."""
        ...

    def choose(self, decoding: Seq[str], most: int, num_plain: int = 0) -> dict[str, int]:
        """Most nodes, the root included, of the next step's tree of each request that could have one; up to `most`.
        num_plain: requests that decode beside them and can have none."""
        ...


class FixedBudget:
    """Always the largest trees."""

    num_nodes = 1

    def drafted(self, seconds: float) -> None: ...

    def verified(self, works: Seq[Work], accepted: Seq[Accepted | None], seconds: float) -> None: ...

    def choose(self, decoding: Seq[str], most: int, num_plain: int = 0) -> dict[str, int]:
        self.num_nodes = most
        return dict.fromkeys(decoding, most)


class AdaptiveBudget:
    """The size with the most tokens a second, by what steps have cost and nodes have gained of late.

    With B sequences that can have trees, of k nodes, and P that cannot, a step takes verify(P + B * rows(k)) + wait(B)
    seconds, the latter if k > 1, and gives P + B * tokens(k) tokens; verify and wait are straight lines, verify fitted to
    steps without prompt rows, wait to drafters that were not left behind, and rows and tokens are means by rank. A few
    requests now and then have trees that only serve to learn, so that all of it stays known.
    """

    def __init__(self, most_nodes: int) -> None:
        """most_nodes: of any tree, the root included."""
        self.num_nodes = 1
        self._verify, self._wait = Line(0.99), Line(0.9)
        self._gains = Gains(most_nodes)
        self._lessons = Lessons()
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

    def verified(self, works: Seq[Work], accepted: Seq[Accepted | None], seconds: float) -> None:
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
