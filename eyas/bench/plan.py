"""`eyas plan`: throughput, latency and price of verifiers and drafters that are not bought yet, by discrete events.

A verifier runs its sequences in steps: a pass over the trees of all of them, then a request for the next trees. A drafter
serves the verifiers that share it: it takes all requests that wait as one batch. Drafting ahead, it works for the next steps
while no verifier waits; a sequence whose tree came before its commit waits for nothing. Cost tables give times of passes.
How many tokens a step accepts is drawn from an acceptance profile, which `eyas bench split` measures.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import log
from pathlib import Path
from typing import Literal, get_args

from eyas.bench.report import Table, number
from eyas.bench.settings import AcceptanceProfile, Arrival, mean_tokens
from eyas.config import DraftAheadConfig
from eyas.config.checks import above_zero, at_least, one_of
from eyas.emulation.costs import DeviceCosts
from eyas.errors import MissingPackage

# local: the drafter runs on the verifier's device, between two passes.
PlannedMode = Literal["plain", "local", "serial", "ahead"]
PERCENTILES = (50, 90, 99)
# Share of the simulated time that does not count: the fleet fills up.
WARM_UP = 0.2
MAX_AHEAD_LEVELS = DraftAheadConfig.num_steps  # of trees that grow ahead, as in drafters
NO_DRAFTS = (1.0,)  # weights of a sequence that does not wait for its tree
CURVE_BATCHES, CURVE_DELAYS, CURVE_COSTS = (1, 8, 64), (0.0, 0.03, 0.1), (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3)


@dataclass(frozen=True)
class FleetSettings:
    """What is simulated.

    verifier, drafter: what their passes cost. local: what those of the drafter cost on the verifier's device.
    mode: see PlannedMode. num_verifiers, num_drafters: verifier i is served by drafter i modulo their number.
    concurrency: sequences that every verifier always has, if there are no arrivals. max_num_seqs: most in a step.
    delay_s: of each way between verifier and drafter. seconds: simulated time. waits: whether steps wait for missing trees
    that are worth it.
    verifier_price, drafter_price: dollars an hour of each, 0 if unknown.
    """

    verifier: DeviceCosts
    drafter: DeviceCosts
    local: DeviceCosts
    profile: AcceptanceProfile
    mode: PlannedMode = "serial"
    num_verifiers: int = 1
    num_drafters: int = 1
    concurrency: int = 1
    max_num_seqs: int = 64
    max_prefill_tokens: int = 2048
    prompt_tokens: int = 512
    output_tokens: int = 256
    delay_s: float = 0.0
    waits: bool = True
    seconds: float = 60.0
    verifier_price: float = 0.0
    drafter_price: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        one_of(PlannedMode, mode=self.mode)
        at_least(1, num_verifiers=self.num_verifiers, num_drafters=self.num_drafters, max_num_seqs=self.max_num_seqs)
        at_least(1, concurrency=self.concurrency, output_tokens=self.output_tokens, prompt_tokens=self.prompt_tokens)
        above_zero(seconds=self.seconds, max_prefill_tokens=self.max_prefill_tokens)
        at_least(0, delay_s=self.delay_s, verifier_price=self.verifier_price, drafter_price=self.drafter_price)

    @property
    def price(self) -> float:
        """Dollars an hour of the fleet."""
        drafters = self.num_drafters if self.mode in ("serial", "ahead") else 0
        return self.num_verifiers * self.verifier_price + drafters * self.drafter_price


@dataclass(frozen=True)
class FleetResult:
    """What a fleet does. Percentiles are by PERCENTILES.

    first_token_s: from arrival to the first token. token_s: of the time per token after it. eta: rate over that of free
    drafting with these batches, while there are any. busy: shares of time of verifiers and drafters, passes ahead included.
    dollars: per million output tokens.
    """

    mode: PlannedMode
    tokens_per_s: float
    eta: float
    first_token_s: tuple[float, ...]
    token_s: tuple[float, ...]
    verifier_busy: float
    drafter_busy: float
    mean_batch: float
    dollars: float


@dataclass(eq=False)
class _Sequence:
    """arrived: time of its arrival. cached: tokens in the KV cache. left: output tokens to come. tree: its weights.

    num_levels: of the tree that the drafter grows ahead, below the last commit. is_new: whether it was made on demand.
    reach: levels that the rows of the profile grow towards this outcome. missing: those that fewer rows do not.
    """

    arrived: float
    prompt: int
    left: int
    output: int
    cached: int = 0
    first_at: float = 0.0
    tree: tuple[float, ...] = ()
    num_levels: float = MAX_AHEAD_LEVELS
    reach: float = 0.0
    missing: float = 0.0
    is_new: bool = False

    @property
    def prefilling(self) -> bool:
        return self.cached < self.prompt


@dataclass(eq=False)
class _Verifier:
    drafter: _Drafter
    running: list[_Sequence] = field(default_factory=list)
    waiting: deque[_Sequence] = field(default_factory=deque)
    is_idle: bool = True
    ready_at: float = 0.0
    asked_at: float = 0.0
    answered_s: float = 0.0  # of its drafter, when it asked last
    busy_s: float = 0.0
    began_at: float | None = None
    active_s: float = 0.0


_Asked = tuple[_Verifier, int, int]


@dataclass(eq=False)
class _Drafter:
    """queue: verifiers with the numbers of their misses and of hits to answer. answered_s: time that all answers took."""

    queue: list[_Asked] = field(default_factory=list)
    is_busy: bool = False
    answered_s: float = 0.0
    busy_s: float = 0.0


class FleetSimulation:
    """One run of a fleet; `run` gives its result. The same settings give the same result."""

    def __init__(self, settings: FleetSettings, arrivals: Sequence[Arrival] | None = None) -> None:
        """arrivals: in any order; without them every verifier always has `concurrency` sequences."""
        self._settings = settings
        self._is_closed = arrivals is None
        self._random = random.Random(settings.seed)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._drafters = drafters = [_Drafter() for _ in range(settings.num_drafters)]
        self._verifiers = [_Verifier(drafters[i % len(drafters)]) for i in range(settings.num_verifiers)]
        self._begin_s = WARM_UP * settings.seconds if self._is_closed else 0.0
        self._num_tokens = self._num_steps = 0
        self._free_tokens = self._free_s = self._batch = 0.0
        self._first: list[float] = []
        self._per_token: list[float] = []
        for arrival in arrivals or ():
            self._at(arrival.at_s, partial(self._arrive, arrival))
        for verifier in self._verifiers if self._is_closed else ():
            verifier.waiting += [self._next_sequence(0.0) for _ in range(settings.concurrency)]
            self._at(self._random.random() * settings.verifier.seconds("verify", 1), partial(self._step, verifier))

    def run(self) -> FleetResult:
        """Simulate all of the time."""
        while self._events and self._events[0][0] <= self._settings.seconds:
            now, _, event = heapq.heappop(self._events)
            event(now)
        s, seconds = self._settings, self._settings.seconds - self._begin_s
        rate, active_s = self._num_tokens / seconds, sum(verifier.active_s for verifier in self._verifiers)
        return FleetResult(
            mode=s.mode,
            tokens_per_s=rate,
            eta=self._num_tokens * self._free_s / self._free_tokens / active_s if self._free_tokens else 0.0,
            first_token_s=percentiles(self._first),
            token_s=percentiles(self._per_token),
            verifier_busy=sum(v.busy_s for v in self._verifiers) / seconds / len(self._verifiers),
            drafter_busy=sum(d.busy_s for d in self._drafters) / seconds / len(self._drafters),
            mean_batch=self._batch / max(self._num_steps, 1),
            dollars=1e6 * s.price / 3600 / rate if rate else 0.0,
        )

    def _at(self, moment: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), event))

    def _next_sequence(self, now: float) -> _Sequence:
        """Of a closed loop: prompts are cached already, and the first sequences are somewhere in their output."""
        s = self._settings
        left = s.output_tokens if now else self._random.randint(1, s.output_tokens)
        tree = () if s.mode == "plain" else s.profile.fresh
        return _Sequence(now, s.prompt_tokens, left, s.output_tokens, cached=s.prompt_tokens, first_at=now, tree=tree)

    def _arrive(self, arrival: Arrival, now: float) -> None:
        verifier = min(self._verifiers, key=lambda v: len(v.running) + len(v.waiting))
        verifier.waiting.append(_Sequence(now, arrival.prompt_tokens, arrival.output_tokens, arrival.output_tokens))
        if verifier.is_idle:
            self._step(verifier, now)

    def _step(self, verifier: _Verifier, now: float) -> None:
        """Begin a verify pass over all running sequences."""
        s = self._settings
        while verifier.waiting and len(verifier.running) < s.max_num_seqs:
            verifier.running.append(verifier.waiting.popleft())
        if verifier.began_at is not None and now >= self._begin_s:
            verifier.active_s += now - verifier.began_at
        verifier.is_idle = not verifier.running
        verifier.began_at = None if verifier.is_idle else now
        if verifier.is_idle:
            return
        room, rows, context = s.max_prefill_tokens, 0, 0
        filled: list[tuple[_Sequence, int]] = []
        for sequence in verifier.running:
            context += sequence.cached
            if sequence.prefilling:
                size = min(sequence.prompt - sequence.cached, room)
                room -= size
                filled.append((sequence, size))
                rows += size
            else:
                rows += s.profile.num_nodes if len(sequence.tree) > 1 else 1
        seconds = s.verifier.seconds("verify", rows, context)
        if now >= self._begin_s:
            verifier.busy_s += seconds
            self._num_steps += 1
            self._batch += len(verifier.running)
            decoding = [sequence for sequence in verifier.running if not sequence.prefilling]
            free_rows = rows + sum(s.profile.num_nodes - 1 for sequence in decoding if len(sequence.tree) < 2)
            if s.mode != "plain":
                self._free_tokens += len(decoding) * s.profile.tau
                self._free_s += s.verifier.seconds("verify", free_rows, context)
        self._at(now + seconds + s.profile.host_ms / 1e3, partial(self._end_step, verifier, filled))

    def _end_step(self, verifier: _Verifier, filled: Sequence[tuple[_Sequence, int]], now: float) -> None:
        """Emit tokens and ask for the next trees."""
        prefilled = {id(sequence) for sequence, _ in filled}
        for sequence, size in filled:
            sequence.cached += size
            if not sequence.prefilling:
                sequence.first_at = now
                self._emit(sequence, 1, now)
                self._first.append(now - sequence.arrived)
        for sequence in verifier.running:
            if id(sequence) not in prefilled:
                weights = sequence.tree
                accepted = self._random.choices(range(len(weights)), weights)[0] if weights else 0
                if self._settings.mode == "ahead" and self._settings.profile.grows_on:
                    levels = max(sequence.reach, accepted) - sequence.missing + self._random.random()
                    accepted = max(min(accepted, int(levels), int(sequence.num_levels)), 0)
                    sequence.num_levels -= accepted + 1
                self._emit(sequence, min(accepted + 1, sequence.left), now)
        ended = [sequence for sequence in verifier.running if not sequence.left]
        verifier.running = [sequence for sequence in verifier.running if sequence.left]
        for sequence in ended:
            if sequence.output > 1 and now >= self._begin_s and sequence.first_at:
                self._per_token.append((now - sequence.first_at) / (sequence.output - 1))
            if self._is_closed:
                verifier.waiting.append(self._next_sequence(now))
        self._ask(verifier, now)

    def _emit(self, sequence: _Sequence, num_tokens: int, now: float) -> None:
        sequence.left -= num_tokens
        sequence.cached += num_tokens
        if now >= self._begin_s:
            self._num_tokens += num_tokens

    def _ask(self, verifier: _Verifier, now: float) -> None:
        """Have trees drafted; the next step begins when all are there."""
        s, profile = self._settings, self._settings.profile
        wanting = [sequence for sequence in verifier.running if not sequence.prefilling]
        if s.mode == "plain" or not wanting:
            self._step(verifier, now)
            return
        if s.mode == "local":
            seconds = self._round_s(s.local, len(wanting))
            for sequence in wanting:
                sequence.tree = profile.fresh
            if now >= self._begin_s:
                verifier.busy_s += seconds
            self._at(now + seconds, partial(self._step, verifier))
            return
        for sequence in wanting if s.mode == "serial" else ():
            sequence.tree = profile.fresh
        num_hits, num_misses = (0, len(wanting)) if s.mode == "serial" else self._use_ahead(verifier, wanting, now)
        if not num_hits and not num_misses:
            verifier.asked_at, verifier.answered_s = now, verifier.drafter.answered_s
            self._step(verifier, now)
            return
        way, verifier.answered_s = s.delay_s + profile.wire_ms / 2e3, verifier.drafter.answered_s
        verifier.asked_at, verifier.ready_at = now, now + 2 * way + (profile.hit_ms / 1e3 if num_hits else 0)
        if num_misses or profile.hit_rounds:
            self._at(now + way, partial(self._draft, verifier.drafter, (verifier, num_misses, num_hits)))
        else:
            self._at(verifier.ready_at, partial(self._step, verifier))

    def _use_ahead(self, verifier: _Verifier, wanting: Sequence[_Sequence], now: float) -> tuple[int, int]:
        """Give each sequence the tree that it gets while drafting ahead. Returns how many hits and misses it waits for.

        Sequences without a prepared tree decode a token plainly where waiting costs the others more than it yields.
        """
        profile, s = self._settings.profile, self._settings
        num_sessions = -(-s.num_verifiers // s.num_drafters) * len(wanting)
        grown, gained = self._grow(verifier, now, num_sessions)
        foreseen = partial(profile.foreseen, s.drafter, grown, num_sessions=num_sessions)
        for_grown, for_new = foreseen(num_passes=gained), foreseen(num_passes=gained + profile.num_levels)
        is_shorter = profile.grows_on and grown < profile.grown  # than where it was measured
        hits, misses = list[_Sequence](), list[_Sequence]()
        for sequence in wanting:
            known = for_new if sequence.is_new else for_grown
            drawn, left = self._random.random(), sequence.num_levels + gained if is_shorter else MAX_AHEAD_LEVELS
            is_hit = bool(sequence.tree) and left >= 1 and drawn < known.hits
            sequence.tree = profile.hit if is_hit else profile.miss or profile.fresh
            sequence.num_levels = min(left if is_hit else profile.num_levels, MAX_AHEAD_LEVELS)
            sequence.is_new, sequence.missing = not is_hit, known.missing_levels if is_hit else 0.0
            if sequence.missing:
                reach = 1 + mean_tokens(profile.hit) * log((1 - drawn) / (1 - known.hits))
                sequence.reach = reach + sequence.missing
            if not is_hit or drawn >= known.prepared:
                (hits if is_hit else misses).append(sequence)
        has_some = for_grown.prepared and len(wanting) > len(hits) + len(misses) > 0
        if has_some and not (s.waits and self._pays(verifier, hits, misses, now)):
            for sequence in (*hits, *misses):
                sequence.tree = NO_DRAFTS
            for sequence in misses:
                sequence.is_new, sequence.num_levels = False, 0.0
            return 0, 0
        return len(hits), len(misses)

    def _pays(self, verifier: _Verifier, hits: Sequence[_Sequence], misses: Sequence[_Sequence], now: float) -> bool:
        """Whether trees to wait for yield more than all sequences lose meanwhile, as clients of draft services decide."""
        s, profile = self._settings, self._settings.profile
        wait_s = 2 * s.delay_s + profile.wire_ms / 1e3 + self._answer_s(s.drafter, len(misses), len(hits))
        lost = len(verifier.running) * mean_tokens(profile.hit) * wait_s / max(now - verifier.asked_at, 1e-9)
        return sum(mean_tokens(sequence.tree) - 1 for sequence in (*hits, *misses)) >= lost

    def _grow(self, verifier: _Verifier, now: float, num_sessions: int) -> tuple[float, float]:
        """What a drafter could grow ahead while the verifier verified: the share of its levels, 0 to 1, and levels.

        Its other work comes first.
        """
        s, drafter = self._settings, verifier.drafter
        needed = s.profile.grown_s(s.drafter, num_sessions)
        free = max(now - verifier.asked_at - (drafter.answered_s - verifier.answered_s), 0.0)
        if now >= self._begin_s:
            drafter.busy_s += min(free, needed) / -(-s.num_verifiers // s.num_drafters)
        level_s = s.profile.ahead_level_s(s.drafter, num_sessions)
        return min(free / needed, 1.0) if needed else 1.0, free / level_s if level_s else MAX_AHEAD_LEVELS

    def _draft(self, drafter: _Drafter, request: _Asked | None, now: float) -> None:
        """Take a request, and serve all that wait as one batch when the drafter is free."""
        if request:
            drafter.queue.append(request)
        if drafter.is_busy or not drafter.queue:
            return
        s, batch = self._settings, drafter.queue
        drafter.queue, drafter.is_busy = [], True
        seconds = self._answer_s(s.drafter, sum(misses for _, misses, _ in batch), sum(hits for _, _, hits in batch))
        drafter.answered_s += seconds
        if now >= self._begin_s:
            drafter.busy_s += seconds
        self._at(now + seconds, partial(self._answer, drafter, batch))

    def _answer(self, drafter: _Drafter, batch: Sequence[_Asked], now: float) -> None:
        drafter.is_busy = False
        way = self._settings.delay_s + self._settings.profile.wire_ms / 2e3
        for verifier, _, _ in batch:
            self._at(max(now + way, verifier.ready_at), partial(self._step, verifier))
        self._draft(drafter, None, now)

    def _answer_s(self, costs: DeviceCosts, num_misses: int, num_hits: int) -> float:
        """Seconds that a drafter takes to answer sequences without a tree, and those with one that was not sent."""
        profile, is_ahead = self._settings.profile, self._settings.mode == "ahead"
        seconds = (profile.miss_rounds if is_ahead else 1.0) * self._round_s(costs, num_misses) if num_misses else 0.0
        if num_hits:
            seconds = max(seconds, profile.hit_rounds * self._round_s(costs, num_hits))
        return seconds + (profile.draft_host_ms / 1e3 if num_misses else 0.0)

    def _round_s(self, costs: DeviceCosts, num_sessions: int) -> float:
        """Seconds of a round on demand: its first pass, and the further levels."""
        profile = self._settings.profile
        levels = (profile.num_levels - 1) * costs.seconds("draft_level", num_sessions * profile.top_k)
        return costs.seconds("draft_round", num_sessions * profile.num_levels) + levels


def percentiles(values: Sequence[float]) -> tuple[float, ...]:
    """The values at PERCENTILES; zeros without any."""
    ordered = sorted(values)
    return tuple(ordered[min(len(ordered) * p // 100, len(ordered) - 1)] if ordered else 0.0 for p in PERCENTILES)


def simulate(settings: FleetSettings, arrivals: Sequence[Arrival] | None = None) -> FleetResult:
    """Run a fleet. Drafting ahead, the better of steps that wait for missing trees and of such that never do: verifiers
    find it by a trial."""
    found = FleetSimulation(settings, arrivals).run()
    if settings.mode == "ahead" and settings.profile.prepared:  # without prepared trees every step waits
        never = FleetSimulation(replace(settings, waits=False), arrivals).run()
        found = max(found, never, key=lambda result: result.tokens_per_s)
    return found


def every_mode(
    settings: FleetSettings, arrivals: Sequence[Arrival] | None, find_ratio: bool = False
) -> dict[str, FleetResult]:
    """The fleet in every mode. find_ratio: with the best number of drafters."""
    results = {}
    for mode in get_args(PlannedMode):
        own = replace(settings, mode=mode)
        if mode == "ahead" and not own.profile.hit:
            continue
        if find_ratio and mode in ("serial", "ahead"):
            num_drafters, found = best_ratio(own, arrivals)
            results[f"{mode}, {own.num_verifiers} : {num_drafters}"] = found
        else:
            results[mode] = simulate(own, arrivals)
    return results


def best_ratio(settings: FleetSettings, arrivals: Sequence[Arrival] | None = None) -> tuple[int, FleetResult]:
    """The number of drafters with the least dollars per token, of powers of two up to one per verifier; and its result."""
    sizes = sorted({min(2**power, settings.num_verifiers) for power in range(settings.num_verifiers.bit_length() + 1)})
    found = {size: simulate(replace(settings, num_drafters=size), arrivals) for size in sizes}
    best = min(found, key=lambda size: found[size].dollars or float("inf"))
    return best, found[best]


def table_of(results: Mapping[str, FleetResult], settings: FleetSettings) -> Table:
    """A row for each result. The keys say what differs."""
    rows = tuple(
        (
            name,
            number(r.tokens_per_s),
            f"{r.eta:.2f}" if r.eta else "",
            f"{r.mean_batch:.1f}",
            " / ".join(number(1e3 * s) for s in r.first_token_s),
            " / ".join(number(1e3 * s) for s in r.token_s),
            f"{r.verifier_busy:.0%} / {r.drafter_busy:.0%}",
            f"{r.dollars:.3f}" if r.dollars else "",
        )
        for name, r in results.items()
    )
    note = (
        "Output tokens per second of the fleet. eta: over free drafting. Times in ms at the percentiles "
        f"{' / '.join(map(str, PERCENTILES))}: from arrival to the first token, and per token after it. $: dollars per "
        f"million output tokens, at ${settings.verifier_price:.2f} an hour for a verifier and "
        f"${settings.drafter_price:.2f} for a drafter."
    )
    columns = ("fleet", "tokens/s", "eta", "batch", "first token", "per token", "busy", "$")
    return Table("Plan", columns, rows, note)


def draw_curves(profile: AcceptanceProfile, path: Path) -> None:
    """Draw how drafting apart compares with drafting on the verifier's GPU, by cost of a level c, delay and batch.

    The better of serial and ahead, for an 8B target on an H100 with a drafter each. Raises ConfigError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage("the drawing of the curves", "matplotlib", "bench") from error
    verifier, local = DeviceCosts.read("llama-3.1-8b@h100"), DeviceCosts.read("eagle3-8b@h100")
    pass_s, level_s = verifier.seconds("verify", 1), local.seconds("draft_level", 1)
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, len(CURVE_BATCHES), sharey=True, squeeze=False)
    for axes, batch in zip(panels[0], CURVE_BATCHES, strict=True):
        base = FleetSettings(
            verifier, local, local, profile, "local", concurrency=batch, max_num_seqs=batch, seconds=1000 * pass_s
        )
        beside = simulate(base).tokens_per_s
        for delay in CURVE_DELAYS:
            rates = []
            for c in CURVE_COSTS:
                apart = replace(base, drafter=local.scaled(c * pass_s / level_s), delay_s=delay * pass_s)
                modes: tuple[PlannedMode, ...] = ("serial", "ahead") if profile.hit else ("serial",)
                rates.append(max(simulate(replace(apart, mode=mode)).tokens_per_s for mode in modes) / beside)
            axes.plot(CURVE_COSTS, rates, marker="o", markersize=3, label=f"delay {delay:g}")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_title(f"batch {batch}", fontsize=9)
        axes.set_xlabel("c: a level, in verify passes")
        axes.set_xscale("log")
    figure.axes[0].set_ylabel("rate, over drafting on the verifier's GPU")
    figure.axes[-1].legend(fontsize=7, title="delay of each way, in passes", title_fontsize=7)
    figure.savefig(path, dpi=130)
