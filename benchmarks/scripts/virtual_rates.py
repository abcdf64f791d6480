"""Rates of drafting in virtual time that follow from recorded steps: serial, on the verifier's device, in half-batches.

Trees on demand do not depend on time. So one replay of each tree size is enough, and every cost is exact arithmetic on its
passes. The unit of time is a verify pass of few rows.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from eyas.bench.report import Table
from eyas.emulation.costs import GPUS, DeviceCosts, PassCosts, PassKind, roofline

MARKOV_SHARE = 1 / 24  # a level of a one-pass head after the first, in passes of the head
LAYERS = {"dspark": 2.0}  # a pass of the head in levels of EAGLE, as in the report of the services
TARGET, HEAD, BIG_GPU = "llama-3.1-8b", "eagle3-8b", "h100"


@dataclass(frozen=True)
class Cell:
    """One setting.

    Attributes:
        c: time of an EAGLE level, or of a layer's pass, in verify passes.
        prepared: share of steps without a round trip.
        hits: share of steps with trees grown ahead.
        tau_hits: tokens of such a step.
        wait: passes that a step takes besides its own.
        speedup: tokens of a sequence in the time of a pass.
        tree: most nodes and levels, as 24:5.
    """

    head: str
    temperature: float
    batch: int
    c: float
    delay: float
    mode: str
    eta: float = 0.0
    speedup: float = 0.0
    tau: float = 0.0
    hits: float = 0.0
    prepared: float = 0.0
    tau_hits: float = 0.0
    wait: float = 0.0
    num_steps: int = 0
    tree: str = ""


@dataclass(frozen=True)
class Step:
    """A step of serial drafting.

    Attributes:
        running: sequences.
        rows: of its verify pass.
        passes: of the drafter, kinds and rows.
    """

    running: int
    rows: int
    passes: tuple[tuple[PassKind, int], ...]


@dataclass(frozen=True)
class Times:
    """Times of passes. bend: rows up to which a verify pass takes 1, and beyond which it grows with them; 0 for never."""

    drafter: DeviceCosts
    bend: int = 0

    def verify_s(self, rows: int) -> float:
        """Return the time of a verify pass."""
        return max(1.0, rows / self.bend) if self.bend else 1.0

    def draft_s(self, step: Step) -> float:
        """Return the time of all passes of a round."""
        return math.fsum(self.drafter.seconds(kind, rows) for kind, rows in step.passes)


StepTime = Callable[[float, float], float]  # of a step, by the times of its verify pass and of its draft round


@dataclass(frozen=True)
class Trace:
    """Decoding with serial trees of one size. num_tokens: of all sequences, in `steps` together."""

    tree: str
    num_tokens: int
    steps: tuple[Step, ...]

    @property
    def tau(self) -> float:
        """Tokens of a step of one sequence."""
        return self.num_tokens / sum(step.running for step in self.steps)

    def rate(self, times: Times, step_s: StepTime) -> float:
        """Return the tokens of a sequence in the time of a pass."""
        return self.num_tokens / math.fsum(
            step.running * step_s(times.verify_s(step.rows), times.draft_s(step)) for step in self.steps
        )


def free(verify_s: float, draft_s: float) -> float:
    """Return a step with drafts that cost nothing."""
    return verify_s


def serially(delay: float) -> StepTime:
    """Steps that draft between two passes, behind a delay each way. Without one: on the verifier's own device."""
    return lambda verify_s, draft_s: verify_s + draft_s + 2 * delay


def in_halves(delay: float) -> StepTime:
    """Steps of one half of a batch, while the other half, of the same size, does the same at the other device.

    A step of both takes two verify passes and two rounds, each kind on one device. So none is shorter than either, or than
    its own pass, round and delays. Real halves differ, and one sometimes waits for the other: this is their upper bound.
    """
    return lambda verify_s, draft_s: max(2 * verify_s, verify_s + draft_s + 2 * delay, 2 * draft_s)


def best(traces: Iterable[Trace], times: Times, step_s: StepTime) -> tuple[Trace, float]:
    """Return the tree size with the highest rate, and this rate."""
    return max(((trace, trace.rate(times, step_s)) for trace in traces), key=lambda found: found[1])


def costs(method: str, c: float, knee: int = 0) -> DeviceCosts:
    """Return the costs of the drafter, where a verify pass takes a second. knee: rows from which on its passes grow; 0 for
    never.
    """

    def passes(seconds: float) -> PassCosts:
        return roofline(seconds, seconds / knee, 0.0) if knee else PassCosts((1,), (1000 * seconds,))

    whole = c * LAYERS.get(method, 1.0)
    level = whole * MARKOV_SHARE if method in LAYERS else whole
    return DeviceCosts("virtual", method, "given by hand", {"draft_round": passes(whole), "draft_level": passes(level)})


def cost_of(gpu: str) -> float:
    """c of EAGLE-3 on a GPU, by arithmetic: a draft level of an 8B head over a verify pass of its target on an H100.

    On the H100 itself a level reads 0.374 GB at 0.8 of 3350 GB/s: 0.140 ms, and 6 us for its layer. A pass reads 15 GB at
    the same rate: 5.60 ms, and 32 times 6 us. 0.146 / 5.79 = 0.025.
    """
    level_s = DeviceCosts.read(f"{HEAD}@{gpu}").seconds("draft_level", 1)
    return level_s / DeviceCosts.read(f"{TARGET}@{BIG_GPU}").seconds("verify", 1)


def gpu_of(c: float) -> str:
    """Return the GPU with a preset whose cost of a level is nearest to c."""
    return min(GPUS, key=lambda gpu: abs(math.log(cost_of(gpu) / c)))


def knee_of(gpu: str) -> int:
    """Return the rows from which on passes of an 8B head grow with them on a GPU."""
    return DeviceCosts.read(f"{HEAD}@{gpu}").passes["draft_level"].rows[1]


def verify_bend() -> int:
    """Return the rows from which on a verify pass of an 8B target grows with them on an H100."""
    return DeviceCosts.read(f"{TARGET}@{BIG_GPU}").passes["verify"].rows[1]


def times_of(method: str, c: float, gpu: str, has_bend: bool) -> Times:
    """Passes at a cost c. has_bend: whether they grow with rows, as on `gpu` and on the verifier's."""
    return Times(costs(method, c, knee_of(gpu) if has_bend else 0), verify_bend() if has_bend else 0)


def cell_of(cell: Cell, traces: Sequence[Trace], times: Times) -> Cell:
    """Return a cell of drafting on demand, with the best tree. mode: serial or local; a local drafter has no delay."""
    step_s = serially(0.0 if cell.mode == "local" else cell.delay)
    trace, rate = best(traces, times, step_s)
    free_rate, num_steps = traces[0].rate(times, free), sum(step.running for step in trace.steps)
    wait = trace.tau / rate - trace.tau / trace.rate(times, free)
    return replace(cell, eta=rate / free_rate, speedup=rate, tau=trace.tau, wait=wait, num_steps=num_steps, tree=trace.tree)


def dollar_share(c: float) -> float:
    """Return the verifier's share of the price of a verifier and a drafter with such a cost, by the
    prices of `eyas plan`.
    """
    return GPUS[BIG_GPU].dollars_h / (GPUS[BIG_GPU].dollars_h + GPUS[gpu_of(c)].dollars_h)


def draw(cells: Sequence[Cell], file: Path) -> None:
    """Draw eta over the delay: a row of panels for each batch, a colour for each cost; local has the same cost in all."""
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys((cell.head, cell.temperature) for cell in cells))
    batches = list(dict.fromkeys(cell.batch for cell in cells))
    figure = Figure(figsize=(3.2 * len(columns), 2.6 * len(batches)), layout="constrained")
    panels = figure.subplots(len(batches), len(columns), sharex=True, sharey=True, squeeze=False)
    for (row, batch), (column, (head, t)) in itertools.product(enumerate(batches), enumerate(columns)):
        axes = panels[row, column]
        own = [cell for cell in cells if (cell.head, cell.temperature, cell.batch) == (head, t, batch) and cell.num_steps]
        for number, c in enumerate(dict.fromkeys(cell.c for cell in own)):
            for mode, style in (("serial", "--"), ("ahead", ":"), ("auto", "-"), ("local", "-.")):
                line = [(cell.delay, cell.eta) for cell in own if (cell.c, cell.mode) == (c, mode)]
                x, y = zip(*line, strict=True) if line else ((), ())
                axes.plot(x, y, style, color=f"C{number}", marker=".", label=f"{mode}, c = {c:g}")
        axes.set_title(f"{head}, temperature {t:g}, batch {batch}", fontsize=9)
        axes.set_ylim(0, max(1.2, 1.05 * max(cell.eta for cell in cells)))
    for axes in panels[-1]:
        axes.set_xlabel("delay of each way, verify passes", fontsize=9)
    for axes in panels[:, 0]:
        axes.set_ylabel("eta")
    panels[0, 0].legend(fontsize=7)
    figure.savefig(file)


def table(cells: Sequence[tuple[Cell, ...]]) -> Table:
    """Return the table of the report."""
    rows = []
    for serial, ahead, auto, local in cells:
        where = serial.head, f"{serial.temperature:g}", f"{serial.batch}", f"{serial.c:g}", f"{serial.delay:g}"
        ready = [
            (*(f"{x:.2f}" for x in (cell.tau, cell.tau_hits, cell.hits, cell.prepared, cell.wait)), f"{cell.eta:.3f}")
            if cell.num_steps
            else ("-",) * 6
            for cell in (ahead, auto)
        ]
        (*of_ahead, eta), (_, _, hits_auto, *_, eta_auto) = ready
        found = f"{serial.eta:.3f}", eta, eta_auto, f"{local.eta:.3f}", f"{serial.tau:.2f}", *of_ahead, hits_auto
        rows.append((*where, *found, f"{serial.num_steps}, {ahead.num_steps}, {auto.num_steps}"))
    note = (
        "eta: rate over that of free drafting, which is tau of the first tree, fresh, in a verify pass. Serial drafting and "
        "local, which drafts on the verifier's GPU, have the best tree. c: an EAGLE level in verify passes; a one-pass head "
        "takes 2 c and its further levels a 24th of that each. hits: share of steps with trees grown ahead, tau hits: of "
        "these; prepared: share of steps that waited for nothing, as the tree was there before the commit; wait: passes "
        "that a step waits for its tree on average. auto: hits of the automatic mode. The first step of a request does not "
        "count. steps: of serial, ahead and auto; few at batch 1. -: not measured. Passes take as long for many rows as for "
        "one, unless the command says roofline."
    )
    columns = ("head", "temperature", "batch", "c", "delay", "eta serial", "eta ahead", "eta auto", "local")
    more = "tau serial", "tau ahead", "tau hits", "hits", "prepared", "wait", "auto", "steps"
    return Table("Efficiency in virtual time", (*columns, *more), tuple(rows), note)


def apart_and_local(cells: Sequence[Cell]) -> tuple[Cell, Cell]:
    """Return, of the cells of a setting by mode, the fastest drafter apart, and the local one."""
    local = next(cell for cell in cells if cell.mode == "local")
    return max((cell for cell in cells if cell.mode != "local"), key=lambda cell: cell.speedup), local


def local_table(cells: Sequence[Sequence[Cell]], local_c: float) -> Table:
    """Apart over local. cells: those of a setting, by mode; one of them is local."""
    rows = []
    for own in cells:
        apart, local = apart_and_local(own)
        ratio = apart.speedup / local.speedup
        rows.append((
            local.head, f"{local.temperature:g}", f"{local.batch}", f"{apart.c:g}", f"{apart.delay:g}",
            f"{local.speedup:.3f} ({local.tree})", f"{apart.speedup:.3f} ({apart.mode}, {apart.tree})", f"{ratio:.3f}",
            gpu_of(apart.c), f"{ratio * dollar_share(apart.c):.3f}",
        ))  # fmt: skip
    note = (
        "Tokens of a sequence in the time of a verify pass, with the best tree (nodes:levels). local: the drafter on the "
        f"verifier's own GPU, between two passes, without a delay, at {local_c:.3f} passes for a level. apart: the best "
        "other mode. per GPU: apart over local, for one verifier's GPU. per dollar: the same by the prices of both, with "
        f"one drafter for each verifier; ${GPUS[BIG_GPU].dollars_h:.2f} an hour for the verifier, the drafter's of the GPU "
        "whose cost of a level is nearest to c."
    )
    columns = ("head", "temperature", "batch", "c", "delay", "local", "apart", "per GPU", "drafter", "per dollar")
    return Table("Apart over drafting on the verifier's GPU", columns, tuple(rows), note)


def draw_apart(cells: Sequence[Sequence[Cell]], file: Path) -> None:
    """Draw the better of serial drafting and drafting ahead, over local, by batches and temperatures.

    cells: as for `local_table`, of one head.
    """
    from matplotlib.figure import Figure

    rates: dict[tuple[float, int, float], list[tuple[float, float]]] = {}
    for own in cells:
        apart, local = apart_and_local(own)
        rates.setdefault((apart.temperature, apart.batch, apart.delay), []).append((apart.c, apart.speedup / local.speedup))
    temperatures, batches = sorted({t for t, _, _ in rates}), sorted({batch for _, batch, _ in rates})
    figure = Figure(figsize=(3.6 * len(batches), 2.8 * len(temperatures)), layout="constrained")
    panels = figure.subplots(len(temperatures), len(batches), sharex=True, sharey=True, squeeze=False)
    for (t, batch, delay), line in sorted(rates.items()):
        axes = panels[temperatures.index(t), batches.index(batch)]
        axes.plot(*zip(*sorted(line), strict=True), marker="o", markersize=3, label=f"delay {delay:g}")
        axes.set_title(f"{batch} sequence{'s' if batch > 1 else ''}, temperature {t:g}", fontsize=9)
    costs_of = sorted({c for line in rates.values() for c, _ in line})
    for axes in panels.flat:
        axes.set_xscale("log")
        axes.set_xticks(costs_of, [f"{c:g}" for c in costs_of])
        axes.minorticks_off()
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_ylim(0, 1.2)
    for axes in panels[-1]:
        axes.set_xlabel("c: a level, in verify passes", fontsize=9)
    for axes in panels[:, 0]:
        axes.set_ylabel("apart over local", fontsize=9)
    panels[0, 0].legend(fontsize=7, title="delay of each way, in passes", title_fontsize=7, loc="lower left")
    figure.savefig(file, dpi=110)


@dataclass(frozen=True)
class Halves:
    """Half-batches beside whole ones, at one setting; rates with the best trees, and these trees."""

    head: str
    temperature: float
    batch: int
    c: float
    delay: float
    plain: float
    local: tuple[str, float]
    whole: tuple[str, float]
    halves: tuple[str, float]

    @classmethod
    def of(cls, where: Cell, method: str, whole: Sequence[Trace], half: Sequence[Trace], local_c: float) -> Halves:
        """Return the cell of half-batches.

        Args:
            whole, half: traces of batches of all and of half of the sequences. Passes grow with rows.
        """
        times, local = (
            times_of(method, c, gpu, has_bend=True) for c, gpu in ((where.c, gpu_of(where.c)), (local_c, BIG_GPU))
        )
        found = [
            best(whole, local, serially(0.0)),
            best(whole, times, serially(where.delay)),
            best(half, times, in_halves(where.delay)),
        ]
        rates = [(trace.tree, rate) for trace, rate in found]
        plain = 1 / times.verify_s(where.batch)
        return cls(where.head, where.temperature, where.batch, where.c, where.delay, plain, *rates)


def halves_table(found: Sequence[Halves]) -> Table:
    """Half-batches over the best of the others."""
    rows = tuple(
        (
            h.head, f"{h.temperature:g}", f"{h.batch}", f"{h.c:g}", f"{h.delay:g}", f"{h.plain:.3f}",
            *(f"{rate:.3f} ({tree})" for tree, rate in (h.local, h.whole, h.halves)),
            f"{h.halves[1] / h.whole[1]:.2f}", f"{h.halves[1] / max(h.local[1], h.plain):.2f}",
        )
        for h in found
    )  # fmt: skip
    note = (
        f"Tokens of a sequence in the time of a verify pass of few rows. A verify pass grows with its rows beyond "
        f"{verify_bend()}, and one of the drafter beyond {knee_of('l40s')} (L40S) or {knee_of(BIG_GPU)} (H100). whole: "
        "serial drafting apart for the whole batch. halves: two half-batches alternate between drafter and verifier. It is "
        "an upper bound."
    )
    columns = ("head", "temperature", "batch", "c", "delay", "plain", "local", "whole", "halves")
    return Table("Half-batches", (*columns, "over whole", "over local"), rows, note)


def main(
    report: Annotated[list[Path], typer.Argument(help="JSON files of virtual_split, with --roofline.")],
    out: Annotated[Path, typer.Option(help="Picture to draw.")] = Path("docs/pictures/split-pays.png"),
) -> None:
    """Draw a drafter apart beside one on the verifier's own GPU, from reports."""
    found = [json.loads(file.read_text(encoding="utf-8"))["results"][0] for file in report]
    draw_apart([[Cell(**cell) for cell in own] for own in itertools.chain(*found)], out)


if __name__ == "__main__":
    typer.run(main)
