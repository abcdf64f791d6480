"""How many nodes the trees of the next step may have: seconds of a step's stages in, a number out. Knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np

from eyas.engine.acceptance.match import Accepted
from eyas.engine.budget.cost import Line
from eyas.engine.budget.gain import Gains
from eyas.engine.sequence import Work

# The first steps do what is done once only, and tell nothing of the later ones.
WARM_UP_STEPS = 4
# Choices from those that are made to learn to the next: twice the largest trees, then none, and so on.
PROBE_INTERVAL = 32


class TreeBudget(Protocol):
    """Is told what each stage of a step took, as it ends. Whatever it chooses, no output depends on it."""

    num_nodes: int

    def drafted(self, seconds: float) -> None:
        """The drafts are there, after so long a wait."""
        ...

    def verified(self, works: Seq[Work], accepted: Seq[Accepted | None], seconds: float) -> None:
        """The step is done, so long after the drafts were there; what was accepted of each work's tree."""
        ...

    def choose(self, num_decoding: int, most: int) -> int:
        """Most nodes, the root included, of the next step's trees, of which so many are asked for; up to `most`. It is kept
        in `num_nodes`."""
        ...


class FixedBudget:
    """Always the largest trees."""

    num_nodes = 1

    def drafted(self, seconds: float) -> None: ...

    def verified(self, works: Seq[Work], accepted: Seq[Accepted | None], seconds: float) -> None: ...

    def choose(self, num_decoding: int, most: int) -> int:
        self.num_nodes = most
        return most


class AdaptiveBudget:
    """The size with the most tokens a second, by what steps have cost and nodes have gained of late.

    With B sequences and trees of k nodes a step takes verify(B * rows(k)) + wait(B) seconds, the latter if k > 1, and gives
    B * tokens(k) tokens; verify and wait are straight lines, verify fitted to steps without prompt rows, wait to drafters
    that were asked the time before too, and rows and tokens are means by rank. Choices now and then that only serve to learn
    keep all of them known.
    """

    def __init__(self, most_nodes: int) -> None:
        """most_nodes: of any tree, the root included."""
        self.num_nodes = most_nodes
        self._verify, self._wait = Line(0.99), Line(0.9)
        self._gains = Gains(most_nodes)
        self._num_asked = 0
        self._caught_up = False
        self._num_steps = 0
        self._num_choices = 0

    def drafted(self, seconds: float) -> None:
        asked = self._num_asked > 0 and self.num_nodes > 1
        if asked and self._caught_up and self._num_steps >= WARM_UP_STEPS:
            self._wait.add(self._num_asked, seconds)
        self._caught_up = asked

    def verified(self, works: Seq[Work], accepted: Seq[Accepted | None], seconds: float) -> None:
        self._num_steps += 1
        if self._num_steps > WARM_UP_STEPS and all(work.tree is not None for work in works):
            self._verify.add(sum(len(work.slots) for work in works), seconds)
        for work, outcome in zip(works, accepted, strict=True):
            if work.tree is not None and outcome is not None and self.num_nodes > 1:
                self._gains.add(self.num_nodes, work.tree, outcome.path)

    def choose(self, num_decoding: int, most: int) -> int:
        self._num_asked = num_decoding
        if num_decoding:
            self.num_nodes = self._next(num_decoding, most) if most > 1 else 1
        return self.num_nodes

    def _next(self, num_decoding: int, most: int) -> int:
        turn = self._num_choices % (2 * PROBE_INTERVAL)
        self._num_choices += 1
        if not self._knows(most):
            return 1 if turn % 4 == 3 else most
        if turn < 2:
            return most
        return 1 if turn == PROBE_INTERVAL else self._best(num_decoding, most)

    def _knows(self, most: int) -> bool:
        return self._verify.sloped and not self._wait.empty and self._gains.known(most)

    def _best(self, num_decoding: int, most: int) -> int:
        """The smallest of the sizes that give the most tokens a second."""
        rows = num_decoding * self._gains.rows(most)
        seconds = np.array([self._verify.at(size) for size in rows])
        seconds[1:] += self._wait.at(num_decoding)
        return 1 + int(np.argmax(self._gains.tokens(most) / seconds))
