"""Decides whether to draft ahead, by the tokens per second of sessions with it and without."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


@dataclass
class Rate:
    """Tokens per second, from commits. sums: of tokens, of seconds, of their squares and of their products."""

    sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def add(self, tokens: float, seconds: float) -> None:
        """Count a commit."""
        new = tokens, seconds, tokens * tokens, seconds * seconds, tokens * seconds
        self.sums = [old + value for old, value in zip(self.sums, new, strict=True)]

    def fade(self, weight: float) -> None:
        """Let the commits so far count less."""
        self.sums = [weight * old for old in self.sums]

    @property
    def value(self) -> float:
        """The mean rate."""
        return self.sums[0] / self.sums[1] if self.sums[1] else 0.0

    @property
    def error(self) -> float:
        """Standard error of the logarithm of the rate, by the residuals of the ratio."""
        tokens, _, tokens2, seconds2, products = self.sums
        spread = tokens2 - 2 * self.value * products + self.value**2 * seconds2
        return math.sqrt(max(spread, 0.0)) / tokens if tokens else math.inf


class Trial:
    """Switch that turns drafting ahead on or off, by the tokens per second with it and without.

    Blocks of commits alternate between both, the first one without, until one is better by CERTAIN_AT standard errors, or
    for MAX_BLOCKS. What is tried must yield MIN_GAIN as many tokens. Then nothing changes for a pause, which doubles with
    each equal decision. A load that has halved or doubled ends the pause.
    """

    BLOCK, MIN_ROUNDS = 12, 4  # commits of a block: in all, and of each session
    MIN_BLOCKS, MAX_BLOCKS = 4, 60
    MIN_GAIN, CERTAIN_AT = 1.02, 1.5
    FIRST_PAUSE, MAX_PAUSE = 2048, 2**16  # commits
    KEPT = 0.5  # weight of earlier trials in the next one

    def __init__(self) -> None:
        self.is_on = False
        self.block = 1
        self._rates = {False: Rate(), True: Rate()}
        self.seen: set[str] = set()  # sessions with a commit in this block, but not those that have ended
        self._count = self._num_blocks = self.pause = self.load = 0
        self._next_pause = self.FIRST_PAUSE
        self._decided: bool | None = None

    def stamp(self, session: str) -> int:
        """Return the number of the block, for a session whose commit is answered; 0 for its first: it was
        prepared before.
        """
        if self.pause:
            return 0
        is_first = session not in self.seen
        self.seen.add(session)
        return 0 if is_first else self.block

    def release(self, sessions: Iterable[str]) -> None:
        """Go on without sessions that have ended; unknown ones are ignored. A block waits for no commits of theirs."""
        self.seen.difference_update(sessions)

    def fail(self) -> None:
        """Note that drafting ahead has raised an error: it is off for a pause, as it would lose all sessions each time."""
        self._begin_block()
        self._decide(False, "it failed")

    def observe(self, block: int, num_tokens: int, seconds: float, load: int) -> bool:
        """Count what followed an answer with the stamp `block`. Returns whether `is_on` has changed.

        load: sessions now.
        """
        if self.pause and not 0.5 < load / max(self.load, 1) < 2:
            self.pause, self._next_pause = 0, self.FIRST_PAUSE
            self._rates = {False: Rate(), True: Rate()}
        if self.pause:
            self.pause -= 1
            return False
        if block == self.block:
            self._rates[self.is_on].add(num_tokens, seconds)
            self._count += 1
        return self._count >= max(self.BLOCK, self.MIN_ROUNDS * len(self.seen)) and self._end_block(load)

    def _begin_block(self) -> None:
        self._count, self.seen, self.block = 0, set(), self.block + 1

    def _end_block(self, load: int) -> bool:
        """Go on with the other mode, or decide."""
        self._begin_block()
        self.load, self._num_blocks = load, self._num_blocks + 1
        before = self.is_on
        gain = self._rates[True].value / max(self._rates[False].value, 1e-9)
        margin = math.log(gain / self.MIN_GAIN) if gain else 0.0
        is_certain = abs(margin) > self.CERTAIN_AT * math.hypot(self._rates[True].error, self._rates[False].error)
        if (self._num_blocks >= self.MIN_BLOCKS and is_certain) or self._num_blocks >= self.MAX_BLOCKS:
            self._decide(margin > 0, f"{gain:.2f} of the tokens per second without")
        else:
            self.is_on = not before
        return self.is_on != before

    def _decide(self, is_on: bool, reason: str) -> None:
        is_same = is_on == self._decided
        self._next_pause = min(2 * self._next_pause, self.MAX_PAUSE) if is_same else self.FIRST_PAUSE
        self.is_on, self._decided, self.pause, self._num_blocks = is_on, is_on, self._next_pause, 0
        for rate in self._rates.values():
            rate.fade(self.KEPT)
        log.info("drafting ahead is %s: %s", "on" if is_on else "off", reason, extra={"rate_limited": True})
