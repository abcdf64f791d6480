"""Results of a verifier and a drafter apart: their efficiency, and where the time goes.

Efficiency (eta) is the rate against free drafting: tokens per second over tau of the freshest trees per verify pass, that is
what a drafter would give whose trees cost nothing and come at once. The freshest trees are those of serial drafting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Literal

from eyas.api.request import VerifyStep
from eyas.bench.report import Spread, Table, number
from eyas.bench.results import first_difference
from eyas.bench.settings import MethodsSettings
from eyas.config import DraftAheadConfig, TreeConfig
from eyas.config.checks import at_least, one_of, require
from eyas.emulation.costs import DeviceCosts, PassKind
from eyas.emulation.device import PassRecord

Mode = Literal["plain", "serial", "ahead"]
MODES: tuple[Mode, ...] = ("plain", "serial", "ahead")
# Share of late passes from which a measurement is not trusted: the emulated devices were not kept.
MAX_LATE = 0.05
DRAFT_KINDS: tuple[PassKind, PassKind] = ("draft_round", "draft_level")


@dataclass(frozen=True, kw_only=True)
class SplitSettings(MethodsSettings):
    """Settings of `python -m benchmarks.split`. methods: the one of the drafter.

    Attributes:
        delays: of each way between verifier and drafter, in verify passes.
        verifier, drafter: cost tables, see DeviceCosts.read.
        scale: all times of both tables are multiplied by it.
        ahead: how the drafter of mode "ahead" grows trees in advance.
        plain_tokens: tokens of each prompt in plain decoding, whose rate is the same at every token; 0 takes max_tokens.
        verifiers: numbers of verifiers that share the draft service, each with a batch of its own.
    """

    draft_model: str
    verifier: str
    drafter: str
    scale: float = 1.0
    batches: tuple[int, ...] = (1,)
    delays: tuple[float, ...] = (0.0,)
    modes: tuple[Mode, ...] = MODES
    ahead: DraftAheadConfig = field(default_factory=lambda: DraftAheadConfig(top_k=64, mode="always"))
    plain_tokens: int = 0
    verifiers: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        super().__post_init__()
        for mode in self.modes:
            one_of(Mode, modes=mode)
        require("serial" in self.modes, "modes must include serial: its trees are what efficiency refers to")
        require(self.scale > 0, f"scale is {self.scale}; it must be above 0")
        require(
            self.plain_tokens not in (1, 2),
            f"plain_tokens is {self.plain_tokens}; timing takes 3 tokens; 0 takes max_tokens",
        )
        at_least(1, batch=min(self.batches, default=0), verifiers=min(self.verifiers, default=0))
        at_least(0, delay=min(self.delays, default=-1), plain_tokens=self.plain_tokens)


@dataclass(frozen=True)
class Decoded:
    """One request. started: time of its first token, ended: of its last, by time.perf_counter. The first came by prefill."""

    tokens: tuple[int, ...]
    steps: tuple[VerifyStep, ...]
    started: float
    ended: float

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        return (len(self.tokens) - 1) / (self.ended - self.started)


@dataclass(frozen=True)
class Shares:
    """Use of two devices over a time.

    Attributes:
        verifier, drafter: busy shares.
        late: share of late passes.
    """

    verifier: float
    drafter: float
    late: float

    @classmethod
    def between(cls, started: float, ended: float, verifier: Sequence[PassRecord], drafter: Sequence[PassRecord]) -> Shares:
        """Count the parts of passes that lie between two times."""
        seconds = max(ended - started, 1e-9)
        busy = [sum(overlap(r, started, ended) for r in records) / seconds for records in (verifier, drafter)]
        inside = [r for r in (*verifier, *drafter) if started <= r.launched <= ended]
        return cls(busy[0], busy[1], sum(r.late for r in inside) / max(len(inside), 1))


def overlap(record: PassRecord, started: float, ended: float) -> float:
    """Return the seconds of a pass between two times."""
    return max(min(record.ended, ended) - max(record.began, started), 0.0)


@dataclass(frozen=True)
class SplitResult:
    """One mode at one temperature, batch and delay, with a number of verifiers.

    Attributes:
        rate: tokens per second of a verifier, the batch times the tokens over the time of all requests, see `rate_of`.
        rates: the same of each group of prompts.
        speedup: of rate over that of plain decoding.
        eta: see the module; None for plain decoding.
        tau: tokens per verify step.
        tau_hit, tau_miss: of trees grown ahead, and of others.
        hit_rate: share of the steps with trees grown ahead.
        prepared: of those without a round trip, as the tree came before the commit.
        step_ms: mean time of a step.
        verify_ms: of that in the target's pass.
        wait_ms: waiting for trees.
        round_trip_ms: from a request for trees to the answer, draft_ms of it in the draft service.
        identical: outputs that equal plain decoding.
    """

    mode: Mode
    temperature: float
    batch: int
    delay: float
    rate: float
    rates: Spread
    tau: float
    shares: Shares
    step_ms: float
    verify_ms: float
    wait_ms: float = 0.0
    round_trip_ms: float = 0.0
    draft_ms: float = 0.0
    hit_rate: float = 0.0
    tau_hit: float = 0.0
    tau_miss: float = 0.0
    rows: float = 1.0
    prepared: float = 0.0
    eta: float | None = None
    speedup: float | None = None
    identical: str = ""
    verifiers: int = 1

    @property
    def host_ms(self) -> float:
        """Return the part of a step that is neither the target's pass nor the wait for trees."""
        return self.step_ms - self.verify_ms - self.wait_ms

    @property
    def wire_ms(self) -> float:
        """Return the part of a round trip that is not in the draft service: the wire, both ways, and the threads at its
        ends.
        """
        return max(self.round_trip_ms - self.draft_ms, 0.0)

    @property
    def is_trusted(self) -> bool:
        """Return whether the emulated devices were kept."""
        return self.shares.late <= MAX_LATE


def result(
    mode: Mode,
    temperature: float,
    batch: int,
    delay: float,
    groups: Sequence[Sequence[Decoded]],
    shares: Shares,
    verify_s: float,
    verifiers: int = 1,
) -> SplitResult:
    """Summarise the groups of prompts of one mode. verify_s: of a pass with as many rows as theirs."""
    requests = [request for group in groups for request in group]
    steps = [step for request in requests for step in request.steps]
    details = [step.details for step in steps if step.details]
    answered = [each for each in details if each.round_trip_ms]
    hits = [step for step in steps if step.grown_ahead]
    misses = [step for step in steps if step.drafted and not step.grown_ahead]
    ready = [step for step in hits if step.details and not step.details.round_trip_ms]
    return SplitResult(
        mode=mode,
        temperature=temperature,
        batch=batch,
        delay=delay,
        rate=rate_of(requests, batch),
        rates=Spread.of([rate_of(group, batch) for group in groups]),
        tau=_tau(steps),
        shares=shares,
        step_ms=1e3 * sum(r.ended - r.started for r in requests) / max(len(steps), 1),
        verify_ms=1e3 * verify_s,
        wait_ms=_mean(each.wait_ms for each in details),
        round_trip_ms=_mean(each.round_trip_ms for each in answered),
        draft_ms=_mean(each.draft_ms for each in answered),
        hit_rate=len(hits) / len(steps) if steps else 0.0,
        tau_hit=_tau(hits),
        tau_miss=_tau(misses),
        rows=_mean(each.num_rows for each in details),
        prepared=len(ready) / len(steps) if steps else 0.0,
        verifiers=verifiers,
    )


def rate_of(requests: Sequence[Decoded], batch: int) -> float:
    """Return the tokens per second of `batch` requests at once: pooled over time as tau is over steps, so that eta is
    unbiased.

    A mean of the requests' own rates would be above it: quick requests would count as much as slow ones, which last longer.
    """
    tokens = sum(len(request.tokens) - 1 for request in requests)
    return batch * tokens / sum(request.ended - request.started for request in requests)


def _tau(steps: Sequence[VerifyStep]) -> float:
    return fmean(step.accepted + 1 for step in steps) if steps else 0.0


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0


def agreement(groups: Sequence[Sequence[Decoded]], plain: Sequence[Sequence[Decoded]]) -> str:
    """Return how many outputs equal plain decoding, as far as both go."""
    pairs = [pair for own, other in zip(groups, plain, strict=True) for pair in zip(own, other, strict=True)]
    lengths = [min(len(one.tokens), len(other.tokens)) for one, other in pairs]
    equal = [first_difference(a.tokens, b.tokens) >= length for (a, b), length in zip(pairs, lengths, strict=True)]
    return f"{sum(equal)} of {len(equal)}"


@dataclass(frozen=True)
class SplitResults:
    """Everything that was measured.

    Attributes:
        verifier, drafter: the cost tables, scaled.
        tree: what the drafter drafts at most.
    """

    results: tuple[SplitResult, ...]
    verifier: DeviceCosts
    drafter: DeviceCosts
    tree: TreeConfig

    @property
    def pass_s(self) -> float:
        """Seconds of a verify pass of one row, the unit of delays."""
        return self.verifier.seconds("verify", 1)

    def tables(self) -> list[Table]:
        """Return the tables of the report."""
        shared = [_shared(self)] if any(r.verifiers > 1 for r in self.results) else []
        return [_speed(self), _step(self), *shared]


COLUMNS = ("temperature", "batch", "delay", "verifiers", "mode")


def _cell(result: SplitResult) -> tuple[str, ...]:
    return f"{result.temperature:g}", f"{result.batch}", f"{result.delay:g}", f"{result.verifiers}", result.mode


def _speed(found: SplitResults) -> Table:
    rows = tuple(
        (
            *_cell(r),
            f"{number(r.rate)} ({number(r.rates.low)}-{number(r.rates.high)})" + ("" if r.is_trusted else " (late)"),
            f"{r.speedup:.2f}" if r.speedup else "",
            f"{r.eta:.2f}" if r.eta else "",
            f"{r.tau:.2f}",
            f"{r.hit_rate:.2f} / {r.prepared:.2f}" if r.mode == "ahead" else "",
            f"{r.tau_hit:.2f} / {r.tau_miss:.2f}" if r.mode == "ahead" else "",
            f"{r.shares.verifier:.0%} / {r.shares.drafter:.0%}",
            r.identical,
        )
        for r in found.results
    )
    first, level = (number(1e3 * found.drafter.seconds(kind, 1)) for kind in DRAFT_KINDS)
    note = (
        f"Emulated, for one row: a verify pass {number(1e3 * found.pass_s)} ms, the first pass of a draft round {first} ms, "
        f"each further level {level} ms. tokens/s: of all prompts, and the range of the groups decoded at once. eta: rate "
        "over that of free drafting, which is tau of serial drafting in one verify pass. delay: of each way, in verify "
        "passes. hits: shares of steps with trees grown ahead, and of steps without a round trip. busy: shares of time of "
        f"verifier and drafter. A rate with (late): over {MAX_LATE:.0%} of the passes took longer here than on the emulated "
        "device."
    )
    columns = ("tokens/s", "speedup", "eta", "tau", "hits / prepared", "tau hit / miss", "busy", "as plain")
    return Table("Efficiency", (*COLUMNS, *columns), rows, note)


def _step(found: SplitResults) -> Table:
    rows = tuple(
        (*_cell(r), *map(number, (r.step_ms, r.verify_ms, r.wait_ms, r.host_ms, r.round_trip_ms, r.draft_ms, r.wire_ms)))
        for r in found.results
    )
    note = (
        "Mean ms. step = pass + wait + host: the target's pass, the wait for trees, and all else that the verifier does. "
        "round trip = draft + wire: the draft service's own time, and the wire with the threads at its ends. A round trip "
        "begins when the verifier sends what it has committed; the wait is shorter by what the verifier does meanwhile."
    )
    columns = ("step", "pass", "wait", "host", "round trip", "draft", "wire")
    return Table("Where the time goes", (*COLUMNS, *columns), rows, note)


def round_s(drafter: DeviceCosts, levels: int, top_k: int, batch: int) -> float:
    """Return the seconds of a round of serial drafting for a batch, without host work."""
    first, level = (partial(drafter.seconds, kind) for kind in DRAFT_KINDS)
    return first(batch * levels) + (levels - 1) * level(batch * top_k)


def most_verifiers(verify_s: float, drafted_s: float) -> float:
    """Return the closed form of one drafter's verifiers at an equal time per token: 1 + t_v / (gamma t_d).

    Args:
        verify_s: t_v, of a verify pass.
        drafted_s: gamma t_d, of a round. A step takes both, one after the other; the drafter is busy for drafted_s of it.
            So it serves that many verifiers in turn, without batches and without a wait.
    """
    return 1 + verify_s / drafted_s


def _shared(found: SplitResults) -> Table:
    """Return what each number of verifiers makes of the time per token."""
    rows, alone = [], dict[tuple[str, ...], SplitResult]()
    for r in (r for r in found.results if r.mode != "plain"):
        first = alone.setdefault((*_cell(r)[:3], r.mode), r)
        drafted_s = round_s(found.drafter, found.tree.num_steps, found.tree.top_k, r.batch)
        most = f"{most_verifiers(1e-3 * first.verify_ms, drafted_s):.1f}" if r.mode == "serial" else ""
        times = 1e3 * r.batch / r.rate, first.rate / r.rate, r.wait_ms
        rows.append((*_cell(r), *map(number, times), f"{r.shares.drafter:.0%}", most))
    note = (
        "ms of a sequence for each token; the same over that with the fewest verifiers; the wait for trees of a step; the "
        "share of time in which the drafter is busy. Every verifier decodes every prompt, beginning with another one. "
        "Closed form: 1 + t_v / (gamma t_d) verifiers at an equal time per token, if the drafter serves one after the other "
        "and none comes while it is busy."
    )
    columns = ("ms/token", "over alone", "wait", "busy", "closed form")
    return Table("One drafter for many verifiers", (*COLUMNS, *columns), tuple(rows), note)


def with_references(results: Sequence[SplitResult]) -> list[SplitResult]:
    """Return the results with eta and speedup, against serial trees and plain decoding of the same temperature, batch and
    delay.
    """
    found = {(r.temperature, r.batch, r.delay, r.verifiers, r.mode): r for r in results}
    compared = []
    for r in results:
        plain, serial = (found.get((r.temperature, r.batch, r.delay, r.verifiers, mode)) for mode in ("plain", "serial"))
        free = r.batch * serial.tau / (1e-3 * r.verify_ms) if serial else 0.0
        eta = r.rate / free if r.mode != "plain" and free else None
        compared.append(replace(r, eta=eta, speedup=r.rate / plain.rate if plain else None))
    return compared
