"""Keeps account of what draft trees gain over plain decoding."""

from __future__ import annotations

import sys


class GainAccount:
    """Says whether trees pay, by what they have gained and lost in plain steps, and when to try them again.

    Trees stop once they have lost more than a few plain steps, whatever was expected of them. After a loss plain steps
    follow, twice as many after each loss in a row, and enough for what trees have lost, beyond what they had gained before,
    to be about TRY_SHARE of the time.

    is_apart: whether the drafter works elsewhere.

    Attributes:
        is_on: whether trees pay.
        pause: plain steps until the next try.
        num_cold: tries left in which a drafter elsewhere may load and connect: they lose a plain step each at most.
    """

    TRY_SHARE, FIRST_PAUSE = 0.01, 200  # the latter: steps that may follow a first try with a drafter in this process
    MAX_FAILED, NUM_COLD = 9, 2  # tries that double the pause; tries of a drafter elsewhere that may be cold
    MAX_CREDIT = 32.0  # plain steps of earlier gains that tries may lose: a service gains for days

    def __init__(self, is_apart: bool) -> None:
        self.is_on = False
        self.pause = 0
        self.num_cold = self.NUM_COLD if is_apart else 0
        self._is_apart = is_apart
        self._num_failed = self._load = 0  # losses in a row; sequences at the last one
        self._credit = self._balance = 0.0  # gained and not spent on tries; gained since they began, or in a try
        self._is_tried = False  # whether the last step was a try, after which they may begin in a pause

    def begin_step(self, load: int) -> bool:
        """Begin a step. Returns whether it may have trees. load: its sequences; another load is another question."""
        if not self.is_on and self._load and not 2 / 3 < load / self._load < 1.5:
            self.pause, self._load, self._balance = 0, load, 0.0
        is_tried, self._is_tried = self._is_tried, False
        return is_tried or not self.pause

    def rest(self) -> None:
        """Count a plain step."""
        self.pause = max(self.pause - 1, 0)

    def start(self) -> None:
        """Begin to have trees in all steps."""
        self.is_on, self._balance, self.pause = True, 0.0, 0

    def stop(self, load: int) -> None:
        """Have no trees until the next try."""
        self.is_on, self._balance = False, 0.0
        self._wait(load)

    def forget(self) -> None:
        """Let what trees have gained so far pay for no losses."""
        self._credit = 0.0

    def add(self, gain: float, late: float, count: int, load: int, is_judged: bool) -> None:
        """Add what trees have gained in a step. Stops them, or begins a pause after a try, by the sum.

        Args:
            gain: plain steps; below 0 if they have lost.
            late: plain steps that the drafter took to catch up.
            count: sequences that had trees.
            load: all sequences.
            is_judged: whether a try shows what trees would take in the long run.
        """
        gain = max(gain, -1.0) if self.num_cold else gain
        self.num_cold = max(self.num_cold - 1, 0)
        self._balance += gain
        self._credit = min(self._credit + gain - late, self.MAX_CREDIT)
        if self.is_on:
            most = 1 + 3 / count  # plain steps that trees may lose: what single sequences get varies more
            if self._balance >= most:
                self._balance, self._num_failed = most, -1
            elif self._balance <= -most:
                self.stop(load)
        elif is_judged:
            self._is_tried = True
            if self._balance <= 0:
                self._wait(load)
            else:
                self._num_failed = -1
            self._balance = 0.0

    def _wait(self, load: int) -> None:
        """Decode plainly until what was lost and not gained before is a small share of the time."""
        self._num_failed, self._load = min(self._num_failed + 1, self.MAX_FAILED), load
        most = sys.maxsize if self._is_apart else self.FIRST_PAUSE * 2**self._num_failed
        self.pause = max(2**self._num_failed, min(round(-self._credit / self.TRY_SHARE), most))
        self._credit = max(self._credit, 0.0)
