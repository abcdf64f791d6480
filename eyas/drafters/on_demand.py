"""What a tree that is ready is worth against one on demand, measured while a drafter that drafts ahead serves.

A tree on demand knows the true features of all committed tokens, but the verifier waits for it. One that is ready was made
before the commit, and costs nothing. So it is verified as it is if a fresh one would gain less than that wait costs.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from eyas.tree import DraftTree

# What a fresh tree gains before any is measured, as a share of the tokens of a step.
FIRST_GAIN = 0.2
# Trees whose claim is so near to their depth gain less from true features: levels over which the gain fades.
FADING_LEVELS = 2.0
# Of trees that are worth verifying, every 17th is made on demand to measure the gain, and every 7th until there are 16
# measurements.
EXPLORATION, FIRST_EXPLORATION, NUM_FIRST = 17, 7, 16

log = logging.getLogger(__name__)


@dataclass
class Average:
    """A running mean, whose first measurements count alike. weight: how many it is based on."""

    RATE: ClassVar[float] = 0.02

    value: float = 0.0
    weight: int = 0

    def add(self, value: float) -> None:
        """Add a measurement."""
        self.weight += 1
        self.value += max(self.RATE, 1 / self.weight) * (value - self.value)


@dataclass(frozen=True)
class SentTree:
    """A tree that a session has. asked, answered: times of its commit and of the answer.

    has_tree: whether the verifier had it before. is_waiting: whether a tree of the same answer was made on demand.
    claim: what a tree that was ready, and was not sent, claimed to yield; 0 if there was none. block: see Trial.
    """

    tree: DraftTree
    asked: float
    answered: float
    has_tree: bool
    is_waiting: bool
    claim: float
    block: int = 0


@dataclass
class OnDemand:
    """Decides between trees that are ready and trees on demand, for all sessions together.

    clock: seconds. max_tokens: that a step can yield. wait_s: from a commit to its tree on demand. away_s: from there to
    the next commit. step_s: from a commit whose tree was there to the next one; away_s less this is a round trip. grow_s: to
    make a tree from what has run ahead. tokens, interval_s: of all steps. claimed, yielded: tokens of trees that were
    ready. gained: tokens that a tree on demand yielded beyond what one that was ready would have. shares: of the gain that
    true features could bring there.
    """

    clock: Callable[[], float]
    max_tokens: int
    wait_s: Average = field(default_factory=Average)
    away_s: Average = field(default_factory=Average)
    step_s: Average = field(default_factory=Average)
    grow_s: Average = field(default_factory=Average)
    tokens: Average = field(default_factory=Average)
    interval_s: Average = field(default_factory=Average)
    claimed: Average = field(default_factory=Average)
    yielded: Average = field(default_factory=Average)
    gained: Average = field(default_factory=Average)
    shares: Average = field(default_factory=Average)
    num_asked: int = 0

    def committed(self, sent: SentTree, num_tokens: int, now: float) -> None:
        """Take in what a session has committed, and when."""
        self.tokens.add(num_tokens)
        self.interval_s.add(now - sent.asked)
        (self.step_s if sent.has_tree else self.away_s).add(now - sent.answered)
        if sent.tree.grown_ahead:
            self.claimed.add(claim(sent.tree))
            self.yielded.add(num_tokens)
            if not sent.is_waiting and not sent.has_tree:
                self.grow_s.add(sent.answered - sent.asked)
        elif not sent.has_tree:
            self.wait_s.add(sent.answered - sent.asked)
            if sent.claim and (share := self._share(sent.claim)):
                self.gained.add(num_tokens - self._calibrated(sent.claim))
                self.shares.add(share)

    @property
    def rate(self) -> float:
        """Tokens of a session per second."""
        return self.tokens.value / self.interval_s.value if self.interval_s.value else 0.0

    @property
    def round_trip_s(self) -> float:
        """Seconds on the wire, both ways, as far as it is known."""
        return max(self.away_s.value - self.step_s.value, 0.0) if self.away_s.weight and self.step_s.weight else 0.0

    def is_worth(self, claimed: float, is_sent: bool) -> bool:
        """Whether to verify a tree that is ready, by the tokens that it claims. is_sent: before its commit, which then costs
        no round trip.
        """
        saved = self.rate * (self.wait_s.value + is_sent * self.round_trip_s)
        return not self.wait_s.weight or self.known_gain * self._share(claimed) <= saved

    @property
    def known_gain(self) -> float:
        """`gained` for a whole share, beginning with a guess that counts as NUM_FIRST measurements.

        It is a ratio of sums. A mean of ratios would rest on the measurement with the smallest share.
        """
        guess, weight = FIRST_GAIN * self.tokens.value, self.gained.weight
        return (NUM_FIRST * guess + weight * self.gained.value) / (NUM_FIRST + weight * self.shares.value)

    def explores(self) -> bool:
        """Whether to make the next tree on demand although one is ready. Counts the calls."""
        self.num_asked += 1
        return self.num_asked % (EXPLORATION if self.gained.weight >= NUM_FIRST else FIRST_EXPLORATION) == 0

    @property
    def is_worth_growing(self) -> bool:
        """Whether to make trees from what has run ahead, instead of on demand."""
        saved = self.rate * (self.wait_s.value - self.grow_s.value)
        return not self.wait_s.weight or self.known_gain <= saved

    def _calibrated(self, claimed: float) -> float:
        return min(claimed * self.yielded.value / self.claimed.value if self.claimed.value else claimed, self.max_tokens)

    def _share(self, claimed: float) -> float:
        """The share of the gain that true features can still bring."""
        return min(max((self.max_tokens - claimed) / FADING_LEVELS, 0.0), 1.0)


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
    """Decides whether to use something, such as drafting ahead, by the tokens per second with it and without.

    Blocks of commits alternate between both, the first one without, until one is better by CERTAIN_AT standard errors, or
    for MAX_BLOCKS. What is tried must yield MIN_GAIN as many tokens. Then nothing changes for a pause, which doubles with
    each equal decision. A load that has halved or doubled ends the pause. While the drafter is busy nearly all of the
    time, drafting ahead is not tried: what it prepared would come too late.
    """

    BLOCK, MIN_ROUNDS = 12, 4  # commits of a block: in all, and of each session
    MIN_BLOCKS, MAX_BLOCKS = 4, 60
    MIN_GAIN, CERTAIN_AT, MAX_BUSY = 1.02, 1.5, 0.9
    FIRST_PAUSE, MAX_PAUSE = 2048, 2**16  # commits
    KEPT = 0.5  # weight of earlier trials in the next one

    def __init__(self, name: str = "drafting ahead") -> None:
        """name: of what is tried, for the log."""
        self.is_on = False
        self._name = name
        self.block = 1
        self._rates = {False: Rate(), True: Rate()}
        self._seen: set[str] = set()  # sessions with a commit in this block, but not those that have ended
        self._count = self._num_blocks = self._pause = self._load = 0
        self._next_pause = self.FIRST_PAUSE
        self._decided: bool | None = None

    def stamp(self, session: str) -> int:
        """The number of the block, for a session whose commit is answered; 0 for its first: it was prepared before."""
        if self._pause:
            return 0
        is_first = session not in self._seen
        self._seen.add(session)
        return 0 if is_first else self.block

    def release(self, sessions: Iterable[str]) -> None:
        """Go on without sessions that have ended; unknown ones are ignored. A block waits for no commits of theirs."""
        self._seen.difference_update(sessions)

    def fail(self) -> None:
        """Note that drafting ahead has raised an error: it is off for a pause, as it would lose all sessions each time."""
        self._begin_block()
        self._decide(False, "it failed")

    def observe(self, block: int, num_tokens: int, seconds: float, load: int, busy: float) -> bool:
        """Count what followed an answer with the stamp `block`. Returns whether `is_on` has changed.

        load: sessions now. busy: share of the time for which the drafter works.
        """
        if self._pause and not 0.5 < load / max(self._load, 1) < 2:
            self._pause, self._next_pause = 0, self.FIRST_PAUSE
            self._rates = {False: Rate(), True: Rate()}
        if self._pause:
            self._pause -= 1
            return False
        if block == self.block:
            self._rates[self.is_on].add(num_tokens, seconds)
            self._count += 1
        return self._count >= max(self.BLOCK, self.MIN_ROUNDS * len(self._seen)) and self._end_block(load, busy)

    def _begin_block(self) -> None:
        self._count, self._seen, self.block = 0, set(), self.block + 1

    def _end_block(self, load: int, busy: float) -> bool:
        """Go on with the other mode, or decide."""
        self._begin_block()
        self._load, self._num_blocks = load, self._num_blocks + 1
        before = self.is_on
        gain = self._rates[True].value / max(self._rates[False].value, 1e-9)
        margin = math.log(gain / self.MIN_GAIN) if gain else 0.0
        is_certain = abs(margin) > self.CERTAIN_AT * math.hypot(self._rates[True].error, self._rates[False].error)
        if not before and busy > self.MAX_BUSY:
            self._decide(False, "the drafter has no time")
        elif (self._num_blocks >= self.MIN_BLOCKS and is_certain) or self._num_blocks >= self.MAX_BLOCKS:
            self._decide(margin > 0, f"{gain:.2f} of the tokens per second without")
        else:
            self.is_on = not before
        return self.is_on != before

    def _decide(self, is_on: bool, reason: str) -> None:
        is_same = is_on == self._decided
        self._next_pause = min(2 * self._next_pause, self.MAX_PAUSE) if is_same else self.FIRST_PAUSE
        self.is_on, self._decided, self._pause, self._num_blocks = is_on, is_on, self._next_pause, 0
        for rate in self._rates.values():
            rate.fade(self.KEPT)
        log.info("%s is %s: %s", self._name, "on" if is_on else "off", reason, extra={"rate_limited": True})


class RowLimit:
    """Decides how many rows a pass over trees of all sessions runs, by what passes of each size took.

    A device takes as long for some rows as for one, and longer from there on. The size with the most worth per second is
    taken. The one above those that were tried counts as fast as these, and is the largest that may be next. A pass whose
    results are fetched late seems to have taken longer. So no size counts as slower than a larger one, and shorter times
    count at once. Each pass lowers the times of larger sizes a little: they must not rest on measurements of long ago.
    """

    SIZES: ClassVar[tuple[int, ...]] = (64, 96, 128, 160, 192, 256, 384, 512, 768, 1024)
    MIN_GAIN: ClassVar[float] = 1.03  # of a larger size: what arrives meanwhile waits for a long pass
    RATE, MAX_SURPRISE, DECAY = 0.05, 3.0, 0.9995  # of a longer measurement; as a multiple of the known time; of a pass

    def __init__(self) -> None:
        self._seconds = np.full(len(self.SIZES), np.inf)  # inf: not known

    def add(self, rows: int, seconds: float) -> None:
        """Take in how long a pass took. It counts for the largest size that it reached."""
        size = bisect_right(self.SIZES, rows) - 1
        if size >= 0 and seconds > 0:
            known = self._seconds[size]
            longer = self.RATE * (min(seconds, self.MAX_SURPRISE * known) - known) if known < seconds else 0.0
            self._seconds[size] = min(known, seconds) + longer

    def best(self, worth: npt.NDArray[np.float64]) -> int:
        """Most rows of the next pass. worth: of all rows that it could run, the largest first."""
        seconds = np.minimum.accumulate(self._seconds[::-1])[::-1]
        num_known = int(np.isfinite(seconds).sum())
        if not num_known:
            return self.SIZES[0]
        gains, found, best_rate = np.append(0.0, np.cumsum(worth)), 0, 0.0
        for number, size in enumerate(self.SIZES[: num_known + 1]):
            rate = float(gains[min(size, len(worth))]) / float(seconds[min(number, num_known - 1)])
            if rate > self.MIN_GAIN * best_rate:
                found, best_rate = number, rate
        self._seconds[found + 1 :] *= self.DECAY
        return self.SIZES[found]


class StepWait:
    """Decides for a verifier whether a step waits for trees on demand, if other sequences have their trees.

    Waiting costs all sequences of the step time. Without it, those whose trees are missing decode one token plainly, and the
    drafter goes on for them meanwhile. So a wait must yield more than it costs. It also keeps the drafter from growing the
    trees of the others, which no estimate holds: a trial finds whether any waits pay. A single sequence waits: it gained
    nothing from plain steps.
    """

    RETRY = 32  # of steps that would not wait, every 32nd does, so that both sides are measured on

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._tokens, self._interval_s, self._wait_s, self._demanded = Average(), Average(), Average(), Average()
        self._began = 0.0
        self._running: dict[str, bool] = {}  # sessions of the last step: whether it waited for their trees
        self._num_skipped = 0
        self._trial, self._block = Trial("waiting for missing trees"), 0

    def waits(self, lengths: Mapping[str, int], missing: Collection[str]) -> bool:
        """Begin a step. lengths: tokens that sessions bring. missing: those of them whose trees are not there.

        Call `waited` with the seconds if this returns True.
        """
        now, known = self.clock(), self._running.keys() & lengths.keys()
        if known:
            self._interval_s.add(now - self._began)
        if len(known) > 1:
            self._trial.observe(self._block, sum(lengths[session] for session in known), now - self._began, len(known), 0.0)
        for session in known:
            self._tokens.add(lengths[session])
            if self._running[session]:
                self._demanded.add(lengths[session])
        waits = bool(missing) and (len(lengths) == 1 or (self._trial.is_on and self._is_due(len(missing), len(lengths))))
        self._began, self._running = now, {session: waits and session in missing for session in lengths}
        self._block = self._trial.stamp("")
        return waits

    def pause(self) -> None:
        """Note a step that is not asked about: the time up to the next one that is counts for nothing."""
        self._running = {}

    def waited(self, seconds: float) -> None:
        """Note how long the trees took."""
        self._wait_s.add(seconds)

    def _is_due(self, num_missing: int, num_sessions: int) -> bool:
        """Whether trees yield more than all sequences lose while they wait, or that has to be measured."""
        if not self._wait_s.weight or not self._demanded.weight:
            return True
        lost = num_sessions * self._tokens.value * self._wait_s.value / max(self._interval_s.value, 1e-9)
        if num_missing * (self._demanded.value - 1) >= lost:
            return True
        self._num_skipped += 1
        return self._num_skipped % self.RETRY == 0


def claim(tree: DraftTree) -> float:
    """The tokens that a verify step of a tree yields, by its scores."""
    return math.fsum(math.exp(score) for score in tree.log_probs)
