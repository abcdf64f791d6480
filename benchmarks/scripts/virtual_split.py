"""Measures eta of a drafter apart in virtual time: one process, real models and trees, times of passes from tables.

Host work and the wire take no time besides the given delay, and no machine is too busy. So eta is an upper bound of what
`eyas bench split` measures with processes. Writes a dated report: `python -m benchmarks.scripts.virtual_split`.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from eyas.bench.report import Report, Table
from eyas.bench.settings import MethodSpec, MethodsSettings, Prompt, load_tasks
from eyas.config import DraftAheadConfig, DraftAheadMode, DraftingConfig, EngineConfig, TreeConfig
from eyas.config.device_costs import DeviceCosts, flat
from eyas.draft_protocol import Commit, PreparedTree, TreeBudget
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter, Pending, PreparedTrees
from eyas.drafters.draft_ahead import DraftAheadDrafter
from eyas.drafters.neural import NeuralDrafter
from eyas.drafters.on_demand import StepWait
from eyas.drafters.registry import build_drafter, build_fuser, default_method, resolve_tree
from eyas.engine.build import assemble_engine
from eyas.errors import EyasError
from eyas.models.emulation import EmulatedDevice, VirtualClock
from eyas.models.heads.layers import FeatureFuser
from eyas.models.target import load_target
from eyas.request import NoiseKey, Request, SamplingParams
from eyas.tree import DraftTree

NO_TREE = TreeBudget(1, 0)
MAX_UNPREPARED = 32  # as in the client of draft services
MARKOV_SHARE = 1 / 24  # a level of a one-pass head after the first, in passes of the head
LARGE_BATCH = 8
LAYERS = {"dspark": 2.0}  # a pass of the head in levels of EAGLE, as in the report of the services


class VirtualDraftService:
    """Implements Drafter by a drafter on a device of its own, behind a wire, in virtual time."""

    def __init__(self, drafter: LocalDrafter, clock: VirtualClock, own: VirtualClock, delay_s: float) -> None:
        """clock: of the verifier. own: of the drafter. delay_s: of each way."""
        self.needs, self.can_sample = drafter.needs, drafter.can_sample
        self.num_prepared = 0
        self._drafter, self._clock, self._own, self._delay_s = drafter, clock, own, delay_s
        self._trees, self._sent = PreparedTrees(), list[tuple[float, PreparedTree]]()
        self._wait, self._num_unprepared = StepWait(clock), MAX_UNPREPARED

    def can_draft(self, session: str) -> bool:
        """See Drafter."""
        return True

    def release(self, sessions: Sequence[str]) -> None:
        """See Drafter."""
        self._drafter.release(sessions)
        self._trees.drop(sessions)

    def reject(self, sessions: Sequence[str]) -> None:
        """See Drafter."""
        raise AssertionError(f"invalid trees for {sessions}")

    def request(self, contexts: Sequence[DraftContext]) -> Pending:
        """See Drafter."""
        arrival = self._clock() + self._delay_s
        self._draft_ahead(arrival)
        for arrived, prepared in self._sent:
            if arrived <= self._clock():
                self._trees.put(prepared)
        self._sent = [(arrived, prepared) for arrived, prepared in self._sent if arrived > self._clock()]
        local = {context.session: tree for context in contexts if (tree := self._trees.take(context))}
        self.num_prepared += len(local)
        missing = {context.session for context in contexts} - local.keys()
        self._num_unprepared = 0 if local else self._num_unprepared + 1
        sent: list[Commit[torch.Tensor]] = [replace(c, has_tree=c.session in local) for c in contexts]
        lengths = {context.session: len(context.tokens) for context in contexts}
        has_prepared = self._num_unprepared < MAX_UNPREPARED
        is_timed = has_prepared and self._wait.waits(lengths, missing)
        if has_prepared and not is_timed:  # as the client of draft services does
            local |= {c.session: DraftTree.root_only(c.tokens[-1]) for c in contexts if c.session in missing}
            sent = [replace(c, has_tree=True, budget=NO_TREE) if c.session in missing else c for c in sent]
        self._own.now = max(self._own.now, arrival)
        answers = self._drafter.propose(sent)
        is_awaited = any(context.budget.wants_tree and not context.has_tree for context in sent)
        ready = self._own.now + self._delay_s if is_awaited else self._clock()
        if is_timed:
            self._wait.waited(ready - self._clock())

        def collect() -> list[Draft]:
            self._clock.now = max(self._clock.now, ready)
            return [local.get(context.session, answer) for context, answer in zip(contexts, answers, strict=True)]

        return collect

    def _draft_ahead(self, until: float) -> None:
        """What the drafter does between its last answer and the arrival of the next commits."""
        more = True
        while more and self._own.now < until:
            more = self._drafter.draft_ahead()
            self._sent += [(self._own.now + self._delay_s, prepared) for prepared in self._drafter.take_prepared()]
            self._own.now = min(self._own.now + self._drafter.busy_s, until)


@dataclass(frozen=True)
class Cell:
    """One setting. c: time of an EAGLE level, or of a layer's pass, in verify passes. prepared: share of steps without a
    round trip. hits: share of steps with trees grown ahead. tau_hits: tokens of such a step. wait: seconds of a step for
    its tree. So eta is tau over that of serial drafting, over 1 + wait."""

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


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    model: str
    heads: tuple[str, ...]
    costs: tuple[float, ...]
    delays: tuple[float, ...]
    temperatures: tuple[float, ...]
    batches: tuple[int, ...]
    num_prompts: int
    max_tokens: int
    ahead: DraftAheadConfig
    max_ahead: int
    minutes: float
    modes: tuple[str, ...]

    def tokens_of(self, batch: int) -> int:
        """Tokens to decode of each prompt: fewer where the batch itself gives many steps."""
        return self.max_tokens if batch <= LARGE_BATCH else self.max_tokens // 2


class Recorder:
    """Implements Drafter: proposes nothing, and keeps the commits of plain decoding, which any drafter would get."""

    can_sample = False

    def __init__(self, needs: DrafterNeeds) -> None:
        self.needs = needs
        self.commits: dict[str, list[DraftContext]] = {}

    def can_draft(self, session: str) -> bool:
        """See Drafter."""
        return True

    def release(self, sessions: Sequence[str]) -> None:
        """See Drafter."""

    def reject(self, sessions: Sequence[str]) -> None:
        """See Drafter."""

    def request(self, contexts: Sequence[DraftContext]) -> Pending:
        """See Drafter."""
        for context in contexts:
            self.commits.setdefault(context.session, []).append(context)
        return lambda: [DraftTree.root_only(context.tokens[-1]) for context in contexts]


@dataclass(frozen=True)
class Recording:
    """A prompt and the tokens behind it, by plain decoding, with the features of all but the last one."""

    tokens: tuple[int, ...]
    num_prompt: int
    features: torch.Tensor
    noise: NoiseKey

    def commit(self, session: str, start: int, end: int, budget: TreeBudget) -> DraftContext:
        """The commit of the tokens from `start` to `end`."""
        features = self.features[max(start - 1, 0) : end - 1]
        return Commit(session, 0, start, self.tokens[start:end], features, self.noise, budget)

    def num_accepted(self, tree: DraftTree, length: int) -> int:
        """The drafted tokens that the target accepts of a tree below the first `length` tokens."""
        node = 0
        for count, token in enumerate(self.tokens[length:]):
            child = tree.child(node, token)
            if child is None:
                return count
            node = child
        raise AssertionError("the recording is too short")


@dataclass
class Replayed:
    """Decoding of some prompts, without the first step of each: its tree is always on demand.

    seconds: of all requests. num_prepared: trees that were there before the commit.
    """

    num_tokens: int = 0
    seconds: float = 0.0
    num_prepared: int = 0
    accepted: list[int] = field(default_factory=list)
    grown_ahead: list[bool] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Mean tokens of a verify step."""
        return sum(self.accepted) / len(self.accepted) + 1

    @property
    def tau_hits(self) -> float:
        """The same of steps with trees grown ahead; 0 without any."""
        accepted = [count for count, is_hit in zip(self.accepted, self.grown_ahead, strict=True) if is_hit]
        return sum(accepted) / len(accepted) + 1 if accepted else 0.0


class VirtualSplit:
    """Decodes prompts with one head. A verify pass takes a second, whatever its rows.

    The output of the target does not depend on drafts. So it is decoded once, plainly, and each cell replays it.
    """

    def __init__(self, settings: Settings, head: str, prompts: Sequence[Prompt]) -> None:
        self.settings, self.head, self.name, self._prompts = settings, head, Path(head).name, prompts
        self.method = default_method("", head)
        fuser = build_fuser(self.method, head, settings.model, "float32", "cpu")
        assert fuser is not None
        self._fuser: FeatureFuser = fuser
        self._tree = resolve_tree(TreeConfig(), self.method, head)

    def record(self, temperature: float, count: int) -> list[Recording]:
        """`count` requests, plainly decoded."""
        s, config = self.settings, DraftingConfig()
        drafter = build_drafter(self.method, s.model, self.head, "float32", "cpu", self._tree, config)
        recorder, num_tokens = Recorder(drafter.needs), s.max_tokens + self._tree.num_steps + 4
        prompts = [self._prompts[index % len(self._prompts)] for index in range(count)]
        num_slots = sum(map(len, prompts)) + count * num_tokens
        engine_config = EngineConfig(max_kv_tokens=num_slots, max_num_seqs=count, prefix_cache=False, draft_budget="fixed")
        target = load_target(s.model, "float32", "cpu", self._fuser.aux_hidden_state_layers)
        engine = assemble_engine(target, self._fuser, engine_config, self._tree, recorder)
        sampling = SamplingParams(num_tokens, temperature, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            engine.submit(Request(f"{index}", prompt, replace(sampling, seed=index)))
        while engine.has_work:
            engine.step()
        found = list[Recording]()
        for index, prompt in enumerate(prompts):
            commits = recorder.commits[f"{index}"]
            tokens = tuple(token for commit in commits for token in commit.tokens)
            features = torch.cat([commit.features for commit in commits if commit.features is not None])
            found.append(Recording(tokens, len(prompt), features, commits[0].noise))
        return found

    def cell(self, recordings: Sequence[Recording], cell: Cell, free: float) -> Cell:
        """Decode all recordings. free: tau of serial drafting; 0 takes that of this run."""
        found, clock = Replayed(), VirtualClock()
        service = self._service(cell, clock)
        for start in range(0, len(recordings), cell.batch):
            self._replay(recordings[start : start + cell.batch], service, clock, found)
        rate, num_steps = found.num_tokens / found.seconds, len(found.accepted)
        return replace(
            cell, eta=rate / (free or found.tau), speedup=rate, tau=found.tau, num_steps=num_steps,
            hits=sum(found.grown_ahead) / num_steps, prepared=found.num_prepared / num_steps,
            tau_hits=found.tau_hits, wait=found.seconds / num_steps - 1,
        )  # fmt: skip

    def serial(self, cell: Cell) -> Cell:
        """A cell of serial drafting with other times: each of its steps takes all passes and a round trip."""
        times, num_levels = costs(self.method, cell.c), self._tree.num_steps - 1
        step_s = 1 + 2 * cell.delay + times.seconds("draft_round", 1) + num_levels * times.seconds("draft_level", 1)
        return replace(cell, eta=1 / step_s, speedup=cell.tau / step_s, wait=step_s - 1)

    def _service(self, cell: Cell, clock: VirtualClock) -> VirtualDraftService:
        s, own = self.settings, VirtualClock()
        mode: DraftAheadMode = "never" if cell.mode == "serial" else "auto" if cell.mode == "auto" else "always"
        config = DraftingConfig(draft_ahead=replace(s.ahead, mode=mode))
        args = self.method, s.model, self.head, "float32", "cpu", self._tree, config
        drafter = build_drafter(*args, has_idle_time=True)
        inner = drafter._drafter if isinstance(drafter, DraftAheadDrafter) else drafter
        assert isinstance(inner, NeuralDrafter)
        inner.emulate(EmulatedDevice(costs(self.method, cell.c), own))
        return VirtualDraftService(drafter, clock, own, cell.delay)

    def _replay(
        self, group: Sequence[Recording], service: VirtualDraftService, clock: VirtualClock, found: Replayed
    ) -> None:
        """Decode requests that begin together, some tokens behind the first tree of each."""
        began, lengths = 0.0, [recording.num_prompt + 1 for recording in group]
        starts, budget = [0] * len(group), TreeBudget(self._tree.num_draft_tokens, self._tree.num_steps)
        running, first = list(range(len(group))), list[int]()
        while running:
            num_prepared = service.num_prepared
            contexts = [group[i].commit(f"{i}", starts[i], lengths[i], budget) for i in running]
            for i, tree in zip(running, service.request(contexts)(), strict=True):
                assert isinstance(tree, DraftTree)
                accepted = group[i].num_accepted(tree, lengths[i])
                starts[i], lengths[i] = lengths[i], lengths[i] + accepted + 1
                if first:
                    found.accepted.append(accepted)
                    found.grown_ahead.append(tree.grown_ahead)
            clock.now += 1.0
            if not first:
                began, first = clock.now, list(lengths)
                continue
            found.num_prepared += service.num_prepared - num_prepared
            ended = [i for i in running if lengths[i] - group[i].num_prompt > self.settings.tokens_of(len(group))]
            found.num_tokens += sum(lengths[i] - first[i] for i in ended)
            found.seconds += len(ended) * (clock.now - began)
            service.release([f"{i}" for i in ended])
            running = [i for i in running if i not in ended]


def costs(method: str, c: float) -> DeviceCosts:
    """Of the drafter, where a verify pass takes a second."""
    if method not in LAYERS:
        return flat("virtual", draft_round=1000 * c, draft_level=1000 * c)
    whole = 1000 * c * LAYERS[method]
    return flat("virtual", draft_round=whole, draft_level=whole * MARKOV_SHARE)


def main(
    model: Annotated[str, typer.Option(help="Target.")] = "models/demo/target",
    head: Annotated[list[str], typer.Option(help="Draft head; may be repeated.")] = [  # noqa: B006
        "models/demo/eagle3-full",
        "models/demo/dspark",
    ],
    prompts: Annotated[Path, typer.Option(help="JSON Lines.")] = Path("models/demo/prompts.jsonl"),
    c: Annotated[list[float], typer.Option(help="Cost of a level in verify passes; may be repeated.")] = [0.03, 0.1, 0.27],  # noqa: B006
    delay: Annotated[list[float], typer.Option(help="Of each way, in verify passes. Repeatable.")] = [0.0, 0.01, 0.03, 0.1],  # noqa: B006
    temperature: Annotated[list[float], typer.Option(help="May be repeated.")] = [0.0, 1.0],  # noqa: B006
    batch: Annotated[list[int], typer.Option(help="May be repeated.")] = [1, 8, 64],  # noqa: B006
    num_prompts: Annotated[int, typer.Option(help="Prompts to decode.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Of each prompt.")] = 40,
    ahead_top_k: Annotated[int, typer.Option(help="Rows of a session in a pass ahead.")] = 128,
    max_ahead: Annotated[int, typer.Option(help="Largest batch that drafts ahead; larger ones draft serially.")] = 64,
    minutes: Annotated[float, typer.Option(help="Cells that have not begun by then are left out.")] = 90.0,
    mode: Annotated[list[str], typer.Option(help="ahead, auto; may be repeated.")] = ["ahead", "auto"],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Measure serial drafting, drafting ahead and choosing between them at every cost, delay, temperature and batch.

    Serial trees do not depend on time: they are made once for each head, temperature and batch.
    """
    ahead = DraftAheadConfig(top_k=ahead_top_k)
    axes = tuple(head), tuple(c), tuple(delay), tuple(temperature), tuple(batch)
    settings = Settings(model, *axes, num_prompts, max_tokens, ahead, max_ahead, minutes, tuple(mode))
    tasks = MethodsSettings(model=model, methods=(MethodSpec("eagle3"),), prompts=prompts, num_prompts=num_prompts)
    try:
        loaded = [task.token_ids for task in load_tasks(tasks)]
        with Progress(console=Console(stderr=True), refresh_per_second=1) as progress:
            cells = measure(settings, loaded, progress)
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    command = "python -m benchmarks.scripts.virtual_split"
    page = Report.here("virtual-split", command, "cpu", settings, cells, [table(cells)]).publish(out)
    draw(cells, page.with_suffix(".png"))


def measure(settings: Settings, prompts: Sequence[Prompt], progress: Progress) -> list[Cell]:
    """All cells, small batches first; trees of serial drafting do not depend on time, so their tau is that of free drafting.

    Cells that time did not suffice for have no steps.
    """
    s, cells, deadline = settings, list[Cell](), time.monotonic() + 60 * settings.minutes
    splits = {head: VirtualSplit(s, head, prompts) for head in s.heads}
    axes = list(itertools.product(s.heads, s.temperatures))
    recorded = {
        (head, t): splits[head].record(t, max(len(prompts), *s.batches))
        for head, t in progress.track(axes, description="plain decoding")
    }
    for batch, (head, t) in itertools.product(s.batches, axes):
        split, own = splits[head], recorded[head, t][: max(len(prompts), batch)]
        plain = split.cell(own, Cell(split.name, t, batch, s.costs[0], s.delays[0], "serial"), 0.0)
        kinds = list(itertools.product(s.costs, s.delays))
        for c, delay in progress.track(kinds, description=f"batch {batch}, {split.name}, temperature {t:g}"):
            serial = split.serial(replace(plain, c=c, delay=delay))
            cells.append(serial)
            for mode in ("ahead", "auto"):
                cell = replace(serial, mode=mode)
                if batch <= s.max_ahead:
                    empty = Cell(split.name, t, batch, c, delay, mode)
                    is_due = mode in s.modes and time.monotonic() < deadline
                    cell = split.cell(own, empty, serial.tau) if is_due else empty
                cells.append(cell)
    return cells


def draw(cells: Sequence[Cell], file: Path) -> None:
    """Draw eta over the delay: a row of panels for each batch, a colour for each cost."""
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys((cell.head, cell.temperature) for cell in cells))
    batches = list(dict.fromkeys(cell.batch for cell in cells))
    figure = Figure(figsize=(3.2 * len(columns), 2.6 * len(batches)), layout="constrained")
    panels = figure.subplots(len(batches), len(columns), sharex=True, sharey=True, squeeze=False)
    for (row, batch), (column, (head, t)) in itertools.product(enumerate(batches), enumerate(columns)):
        axes = panels[row, column]
        own = [cell for cell in cells if (cell.head, cell.temperature, cell.batch) == (head, t, batch) and cell.num_steps]
        for number, c in enumerate(dict.fromkeys(cell.c for cell in own)):
            for mode, style in (("serial", "--"), ("ahead", ":"), ("auto", "-")):
                line = [(cell.delay, cell.eta) for cell in own if (cell.c, cell.mode) == (c, mode)]
                x, y = zip(*line, strict=True) if line else ((), ())
                axes.plot(x, y, style, color=f"C{number}", marker=".", label=f"{mode}, c = {c:g}")
        axes.set_title(f"{head}, temperature {t:g}, batch {batch}", fontsize=9)
        axes.set_ylim(0, 1)
    for axes in panels[-1]:
        axes.set_xlabel("delay of each way, verify passes", fontsize=9)
    for axes in panels[:, 0]:
        axes.set_ylabel("eta")
    panels[0, 0].legend(fontsize=7)
    figure.savefig(file)


def table(cells: Sequence[Cell]) -> Table:
    """The table of the report."""
    rows = []
    for serial, ahead, auto in zip(cells[::3], cells[1::3], cells[2::3], strict=True):
        where = serial.head, f"{serial.temperature:g}", f"{serial.batch}", f"{serial.c:g}", f"{serial.delay:g}"
        ready = [
            (*(f"{x:.2f}" for x in (cell.tau, cell.tau_hits, cell.hits, cell.prepared, cell.wait)), f"{cell.eta:.3f}")
            if cell.num_steps
            else ("-",) * 6
            for cell in (ahead, auto)
        ]
        (*of_ahead, eta), (_, _, hits_auto, *_, eta_auto) = ready
        found = f"{serial.eta:.3f}", eta, eta_auto, f"{serial.tau:.2f}", *of_ahead, hits_auto
        rows.append((*where, *found, f"{serial.num_steps}, {ahead.num_steps}, {auto.num_steps}"))
    note = (
        "eta: rate over that of free drafting, which is tau of serial drafting in one verify pass. c: an EAGLE level in "
        "verify passes; a one-pass head takes 2 c and its further levels a 24th of that each. hits: share of steps with "
        "trees grown ahead, tau hits: of these; prepared: share of steps that waited for nothing, as the tree was there "
        "before the commit; wait: passes that a step waits for its tree on average, so eta is tau over that of serial "
        "drafting, over 1 + wait. "
        "auto: hits of the automatic mode. The first step of a request does not count. A pass takes as long for many "
        "sessions as for one. steps: of each mode; few at batch 1. -: not measured."
    )
    columns = ("head", "temperature", "batch", "c", "delay", "eta serial", "eta ahead", "eta auto")
    more = "tau serial", "tau ahead", "tau hits", "hits", "prepared", "wait", "auto", "steps"
    return Table("Efficiency in virtual time", (*columns, *more), tuple(rows), note)


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
