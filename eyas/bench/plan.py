"""`eyas plan`: throughput, latency and price of verifiers and drafters that are not bought yet, by discrete events.

A verifier runs its sequences in steps: a pass over the trees of all of them, then a request for the next trees. A drafter
serves the verifiers that share it: it takes all requests that wait as one batch. Times of passes come from cost tables. How
many tokens a step accepts is drawn from an acceptance profile, which `eyas bench split` measures.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count, takewhile
from pathlib import Path
from typing import Any, Literal, get_args

from eyas.bench.report import Table, number
from eyas.config.device_costs import DeviceCosts
from eyas.config.loader import above_zero, at_least, one_of, require
from eyas.errors import ConfigError

# local: the drafter runs on the verifier's device, between two passes.
PlannedMode = Literal["plain", "local", "serial", "ahead"]
PERCENTILES = (50, 90, 99)
# Share of the simulated time that does not count: the fleet fills up.
WARM_UP = 0.2
CURVE_BATCHES, CURVE_DELAYS, CURVE_COSTS = (1, 8, 64), (0.0, 0.03, 0.1), (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3)


@dataclass(frozen=True)
class AcceptanceProfile:
    """What a drafter achieves, and what a step costs besides passes.

    fresh: weights of steps that accept 0, 1, 2 ... drafted tokens, with trees drafted on demand. hit, miss: the same while
    drafting ahead, of trees grown in advance and of others. hit_rate: share of the former, measured where a drafter had the
    time to grow the share `grown` of its levels during a pass.
    num_nodes, num_levels, top_k: of trees, the root counted as a node. ahead_top_k: rows of a pass in
    advance; of one-pass heads nodes with a block. one_pass: whether a pass drafts all levels.
    host_ms: of the verifier in each step. wire_ms: of a round trip besides the delay. draft_host_ms: of the drafter in a
    round. hit_ms: until a drafter answers with a tree that it has.
    """

    fresh: tuple[float, ...]
    hit: tuple[float, ...] = ()
    miss: tuple[float, ...] = ()
    hit_rate: float = 0.0
    grown: float = 1.0
    num_nodes: int = 24
    num_levels: int = 5
    top_k: int = 8
    ahead_top_k: int = 16
    host_ms: float = 0.0
    wire_ms: float = 0.0
    draft_host_ms: float = 0.0
    hit_ms: float = 0.0
    one_pass: bool = False

    def __post_init__(self) -> None:
        require(sum(self.fresh) > 0 and min(self.fresh) >= 0, f"fresh is {self.fresh}; it must have a weight above 0")
        at_least(1, num_nodes=self.num_nodes, num_levels=self.num_levels, top_k=self.top_k)
        above_zero(grown=self.grown)
        at_least(0, host_ms=self.host_ms, wire_ms=self.wire_ms, draft_host_ms=self.draft_host_ms, hit_ms=self.hit_ms)

    @property
    def tau(self) -> float:
        """Tokens of a step with a fresh tree, the bonus token included."""
        return 1 + sum(accepted * weight for accepted, weight in enumerate(self.fresh)) / sum(self.fresh)

    def grown_s(self, costs: DeviceCosts, num_sessions: int) -> float:
        """Seconds in which a drafter grows trees of sessions in advance: new tokens, and passes for all levels or one."""
        if self.one_pass:
            rows = num_sessions * (self.num_nodes + self.ahead_top_k * self.num_levels)
            return costs.seconds("draft_extend", num_sessions) + costs.seconds("draft_round", rows)
        levels_s = self.num_levels * costs.seconds("draft_level", num_sessions * self.ahead_top_k)
        return costs.seconds("draft_round", num_sessions) + levels_s

    def with_host(self, scale: float, wire_ms: float | None = None) -> AcceptanceProfile:
        """The same acceptance on hosts whose times are multiplied: 0 for none. wire_ms: of another wire, as it is."""
        times = {name: scale * getattr(self, name) for name in ("host_ms", "wire_ms", "draft_host_ms", "hit_ms")}
        return replace(self, **(times if wire_ms is None else {**times, "wire_ms": wire_ms}))


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes in seconds, and its sizes in tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class FleetSettings:
    """What is simulated.

    verifier, drafter: what their passes cost. local: what those of the drafter cost on the verifier's device.
    mode: see PlannedMode. num_verifiers, num_drafters: verifier i is served by drafter i modulo their number.
    concurrency: sequences that every verifier always has, if there are no arrivals. max_num_seqs: most in a step.
    delay_s: of each way between verifier and drafter. seconds: simulated time.
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
    drafting with these batches, while there are any. busy: shares of time of verifiers and drafters, the latter on demand.
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
    """arrived: time of its arrival. cached: tokens in the KV cache. left: output tokens to come. tree: its weights."""

    arrived: float
    prompt: int
    left: int
    output: int
    cached: int = 0
    first_at: float = 0.0
    tree: tuple[float, ...] = ()

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
    busy_s: float = 0.0
    began_at: float | None = None
    active_s: float = 0.0


@dataclass(eq=False)
class _Drafter:
    """queue: verifiers with sequences that need a tree. idle_since: when it had nothing on demand to do."""

    queue: list[tuple[_Verifier, list[_Sequence]]] = field(default_factory=list)
    is_busy: bool = False
    idle_since: float = 0.0
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
                rows += s.profile.num_nodes if sequence.tree else 1
        seconds = s.verifier.seconds("verify", rows, context)
        if now >= self._begin_s:
            verifier.busy_s += seconds
            self._num_steps += 1
            self._batch += len(verifier.running)
            decoding = [sequence for sequence in verifier.running if not sequence.prefilling]
            free_rows = rows + sum(s.profile.num_nodes - 1 for sequence in decoding if not sequence.tree)
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
        grown = self._share_grown(verifier, now, len(wanting)) if s.mode == "ahead" else 0.0
        missed = []
        for sequence in wanting:
            is_hit = bool(sequence.tree) and self._random.random() < profile.hit_rate * min(grown / profile.grown, 1.0)
            other = (profile.miss or profile.fresh) if s.mode == "ahead" else profile.fresh
            sequence.tree = profile.hit if is_hit else other
            if not is_hit:
                missed.append(sequence)
        way = s.delay_s + profile.wire_ms / 2e3
        verifier.asked_at = now
        verifier.ready_at = now + 2 * way + (profile.hit_ms / 1e3 if len(missed) < len(wanting) else 0)
        if missed:
            self._at(now + way, partial(self._draft, verifier.drafter, (verifier, missed)))
        else:
            self._at(verifier.ready_at, partial(self._step, verifier))

    def _share_grown(self, verifier: _Verifier, now: float, num_sessions: int) -> float:
        """How much of its trees a drafter could grow while the verifier verified, 0 to 1: its other work comes first."""
        s, drafter = self._settings, verifier.drafter
        needed = s.profile.grown_s(s.drafter, -(-s.num_verifiers // s.num_drafters) * num_sessions)
        free = 0.0 if drafter.is_busy else now - max(drafter.idle_since, verifier.asked_at)
        return min(free / needed, 1.0) if needed else 1.0

    def _draft(self, drafter: _Drafter, request: tuple[_Verifier, list[_Sequence]] | None, now: float) -> None:
        """Take a request, and serve all that wait as one batch when the drafter is free."""
        if request:
            drafter.queue.append(request)
        if drafter.is_busy or not drafter.queue:
            return
        s, batch = self._settings, drafter.queue
        drafter.queue, drafter.is_busy = [], True
        seconds = self._round_s(s.drafter, sum(len(sequences) for _, sequences in batch)) + s.profile.draft_host_ms / 1e3
        if now >= self._begin_s:
            drafter.busy_s += seconds
        self._at(now + seconds, partial(self._answer, drafter, batch))

    def _answer(self, drafter: _Drafter, batch: Sequence[tuple[_Verifier, list[_Sequence]]], now: float) -> None:
        drafter.is_busy, drafter.idle_since = False, now
        way = self._settings.delay_s + self._settings.profile.wire_ms / 2e3
        for verifier, _ in batch:
            self._at(max(now + way, verifier.ready_at), partial(self._step, verifier))
        self._draft(drafter, None, now)

    def _round_s(self, costs: DeviceCosts, num_sessions: int) -> float:
        """Seconds of a round on demand: its first pass, and the further levels."""
        profile = self._settings.profile
        levels = (profile.num_levels - 1) * costs.seconds("draft_level", num_sessions * profile.top_k)
        return costs.seconds("draft_round", num_sessions * profile.num_levels) + levels


def percentiles(values: Sequence[float]) -> tuple[float, ...]:
    """The values at PERCENTILES; zeros without any."""
    ordered = sorted(values)
    return tuple(ordered[min(len(ordered) * p // 100, len(ordered) - 1)] if ordered else 0.0 for p in PERCENTILES)


def poisson(rate: float, seconds: float, prompt_tokens: int, output_tokens: int, seed: int = 0) -> list[Arrival]:
    """Arrivals at `rate` a second on average; sizes are those given."""
    above_zero(rate=rate)
    source = random.Random(seed)
    moments = accumulate(source.expovariate(rate) for _ in count())
    return [Arrival(moment, prompt_tokens, output_tokens) for moment in takewhile(lambda moment: moment < seconds, moments)]


def read_trace(file: Path) -> list[Arrival]:
    """Arrivals from JSON Lines with at_s, prompt_tokens and output_tokens. Raises ConfigError."""
    try:
        return [Arrival(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError, TypeError) as error:
        reason = f"cannot read arrivals from {file}: {error!r}; give at_s, prompt_tokens and output_tokens"
        raise ConfigError(reason) from error


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
            results[mode] = FleetSimulation(own, arrivals).run()
    return results


def best_ratio(settings: FleetSettings, arrivals: Sequence[Arrival] | None = None) -> tuple[int, FleetResult]:
    """The number of drafters with the least dollars per token, of powers of two up to one per verifier; and its result."""
    sizes = sorted({min(2**power, settings.num_verifiers) for power in range(settings.num_verifiers.bit_length() + 1)})
    found = {size: FleetSimulation(replace(settings, num_drafters=size), arrivals).run() for size in sizes}
    best = min(found, key=lambda size: found[size].dollars or float("inf"))
    return best, found[best]


def load_profile(file: Path, temperature: float) -> AcceptanceProfile:
    """The profile in a JSON file, or that of a temperature in a report of `eyas bench split`. Raises ConfigError."""
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
        data = data["results"]["profiles"][f"{temperature:g}"] if "results" in data else data
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        return AcceptanceProfile(**fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"cannot read a profile for temperature {temperature:g} from {file}: {error!r}") from error


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
        raise ConfigError("the curves need matplotlib; install it with: pip install 'eyas[bench]'") from error
    verifier, local = DeviceCosts.read("llama-3.1-8b@h100"), DeviceCosts.read("eagle3-8b@h100")
    pass_s, level_s = verifier.seconds("verify", 1), local.seconds("draft_level", 1)
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, len(CURVE_BATCHES), sharey=True, squeeze=False)
    for axes, batch in zip(panels[0], CURVE_BATCHES, strict=True):
        base = FleetSettings(
            verifier, local, local, profile, "local", concurrency=batch, max_num_seqs=batch, seconds=1000 * pass_s
        )
        beside = FleetSimulation(base).run().tokens_per_s
        for delay in CURVE_DELAYS:
            rates = []
            for c in CURVE_COSTS:
                apart = replace(base, drafter=local.scaled(c * pass_s / level_s), delay_s=delay * pass_s)
                modes: tuple[PlannedMode, ...] = ("serial", "ahead") if profile.hit else ("serial",)
                rates.append(max(FleetSimulation(replace(apart, mode=mode)).run().tokens_per_s for mode in modes) / beside)
            axes.plot(CURVE_COSTS, rates, marker="o", markersize=3, label=f"delay {delay:g}")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_title(f"batch {batch}", fontsize=9)
        axes.set_xlabel("c: a level, in verify passes")
        axes.set_xscale("log")
    figure.axes[0].set_ylabel("rate, over drafting on the verifier's GPU")
    figure.axes[-1].legend(fontsize=7, title="delay of each way, in passes", title_fontsize=7)
    figure.savefig(path, dpi=130)
