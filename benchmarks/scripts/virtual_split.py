"""Measures eta of a drafter apart in virtual time: one process, real models and trees, times of passes from tables.

Host work and the wire take no time besides the given delay, and no machine is too busy. So eta is an upper bound of what
`python -m benchmarks.split` measures with processes. Writes a dated report: `python -m benchmarks.scripts.virtual_split`.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer

from benchmarks.scripts.virtual_rates import (
    BIG_GPU,
    LAYERS,
    Cell,
    Halves,
    Step,
    Times,
    Trace,
    cell_of,
    cost_of,
    draw,
    free,
    gpu_of,
    halves_table,
    local_table,
    table,
    times_of,
)
from eyas.api.request import Request, SamplingParams
from eyas.bench.report import Report
from eyas.bench.settings import MethodSpec, MethodsSettings, Prompt, load_tasks
from eyas.config import DraftAheadConfig, DraftAheadMode, DraftingConfig, EngineConfig, TreeConfig
from eyas.drafters.ahead.drafter import DraftAheadDrafter
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter, Pending, PreparedTrees
from eyas.drafters.draft_head import DraftHead
from eyas.drafters.neural import NeuralDrafter
from eyas.emulation.costs import DeviceCosts, PassKind
from eyas.emulation.device import EmulatedDevice, VirtualClock
from eyas.engine.build import assemble_engine
from eyas.errors import EyasError
from eyas.models.heads.fusers import FeatureFuser
from eyas.models.loading import load_target
from eyas.progress import Progress, progress
from eyas.protocol.commit import NO_TREE, Commit, NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree, PreparedTree

T = TypeVar("T")
WAITED_SHARE, MAX_UNPREPARED = 0.5, 32  # as in the client of draft services
LARGE_BATCH = 8
# Trees of drafting on demand: most nodes and levels; 0 takes the head's own levels. The best one counts.
TREES = ("24:0", "24:3", "24:7", "24:9")
# The same where passes grow with rows.
SMALL_TREES = ("2:1", "3:2", "4:2", "4:3", "6:3", "8:4", "12:4", "24:5")
MODES = ("serial", "ahead", "auto", "local")


class VirtualDraftService:
    """Drafter by a drafter on a device of its own, behind a wire, in virtual time.

    Args:
        clock: of the verifier.
        own: of the drafter.
        delay_s: of each way.
    """

    def __init__(self, drafter: LocalDrafter, clock: VirtualClock, own: VirtualClock, delay_s: float) -> None:
        self.needs, self.can_sample = drafter.needs, drafter.can_sample
        self.num_prepared = 0
        self._drafter, self._clock, self._own, self._delay_s = drafter, clock, own, delay_s
        self._trees, self._sent = PreparedTrees(), list[tuple[float, PreparedTree]]()
        self._num_missed = dict[str, int]()

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
        sent: list[Commit[torch.Tensor]] = [c._replace(has_tree=c.session in local) for c in contexts]
        waits = len(missing) >= WAITED_SHARE * len(contexts)
        self._num_missed |= dict.fromkeys(local, 0)
        for i, c in enumerate(contexts):  # as the client of draft services does
            if c.session in missing:
                missed = self._num_missed.get(c.session, 0)
                self._num_missed[c.session] = missed = 0 if waits else (missed + 1) % MAX_UNPREPARED
                if missed:
                    local[c.session] = DraftTree.root_only(c.tokens[-1])
                    sent[i] = c._replace(has_tree=True, budget=NO_TREE)
        self._own.now = max(self._own.now, arrival)
        answers = self._drafter.propose(sent)
        is_awaited = any(context.budget.wants_tree and not context.has_tree for context in sent)
        ready = self._own.now + self._delay_s if is_awaited else self._clock()

        def collect() -> list[Draft]:
            self._clock.now = max(self._clock.now, ready)
            return [local.get(context.session, answer) for context, answer in zip(contexts, answers, strict=True)]

        return collect

    def _draft_ahead(self, until: float) -> None:
        """Run the passes of the drafter between its last answer and the arrival of the next commits."""
        more = True
        while more and self._own.now < until:
            more = self._drafter.draft_ahead()
            self._sent += [(self._own.now + self._delay_s, prepared) for prepared in self._drafter.take_prepared()]
            self._own.now = min(self._own.now + self._drafter.busy_s, until)


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement."""

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
    trees: tuple[str, ...] = ("24:0",)
    ahead_trees: tuple[str, ...] = ("24:0",)
    local_c: float = 0.025
    roofline: bool = False
    halves: tuple[int, ...] = ()

    @property
    def max_levels(self) -> int:
        """Most levels of a tree that is not the head's own."""
        return max(int(name.partition(":")[2] or 0) for name in (*self.trees, *self.ahead_trees, *SMALL_TREES))

    def tokens_of(self, batch: int) -> int:
        """Return tokens to decode of each prompt: fewer where the batch itself gives many steps."""
        return self.max_tokens if batch <= LARGE_BATCH else self.max_tokens // 2


class Recorder:
    """Drafter that proposes nothing, and keeps the commits of plain decoding, which any drafter would get."""

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
        """Return the commit of the tokens from `start` to `end`."""
        features = self.features[max(start - 1, 0) : end - 1]
        return Commit(session, 0, start, self.tokens[start:end], features, self.noise, budget)

    def num_accepted(self, tree: DraftTree, length: int) -> int:
        """Return the drafted tokens that the target accepts of a tree below the first `length` tokens."""
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

    Attributes:
        seconds: of all requests.
        num_prepared: trees that were there before the commit.
    """

    num_tokens: int = 0
    seconds: float = 0.0
    num_prepared: int = 0
    accepted: list[int] = field(default_factory=list)
    grown_ahead: list[bool] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def trace(self, tree: str) -> Trace:
        """Return the steps, for any times."""
        return Trace(tree, self.num_tokens, tuple(self.steps))

    @property
    def tau(self) -> float:
        """Mean tokens of a verify step."""
        return sum(self.accepted) / len(self.accepted) + 1

    @property
    def tau_hits(self) -> float:
        """The same of steps with trees grown ahead; 0 without any."""
        accepted = [count for count, is_hit in zip(self.accepted, self.grown_ahead, strict=True) if is_hit]
        return sum(accepted) / len(accepted) + 1 if accepted else 0.0


class RecordedDevice(EmulatedDevice):
    """An emulated device that notes its passes: kinds and rows, since they were last taken."""

    def __init__(self, costs: DeviceCosts, clock: VirtualClock) -> None:
        super().__init__(costs, clock)
        self._passes: list[tuple[PassKind, int]] = []

    def run(self, kind: PassKind, rows: int, context: int, work: Callable[[], T]) -> T:
        """See EmulatedDevice."""
        self._passes.append((kind, rows))
        return super().run(kind, rows, context, work)

    def take(self) -> tuple[tuple[PassKind, int], ...]:
        """Return the passes since the last call."""
        passes, self._passes = tuple(self._passes), []
        return passes


class VirtualSplit:
    """Decoding of prompts with one head. The unit of time is a verify pass of few rows.

    The output of the target does not depend on drafts. So it is decoded once, plainly, and each cell replays it.
    """

    def __init__(self, settings: Settings, head: str, prompts: Sequence[Prompt]) -> None:
        self.settings, self.name, self._prompts = settings, Path(head).name, prompts
        self._head = DraftHead(head)
        self.method = self._head.method
        fuser = self._head.build_fuser(settings.model, "float32", "cpu")
        assert fuser is not None
        self._fuser: FeatureFuser = fuser
        self._tree = self._head.resolve_tree(TreeConfig())

    def tree(self, name: str) -> TreeConfig:
        """Return the tree of a name such as 24:5, most nodes and levels."""
        if not name:
            return self._tree
        num_nodes, _, num_levels = name.partition(":")
        tree = self._head.resolve_tree(TreeConfig(int(num_nodes), int(num_levels or 0)))
        return replace(tree, num_steps=min(tree.num_steps, self._tree.num_steps)) if self.method in LAYERS else tree

    def trees(self, names: Sequence[str]) -> dict[str, TreeConfig]:
        """Return trees by their resolved names, each once."""
        return {f"{tree.num_draft_tokens}:{tree.num_steps}": tree for tree in map(self.tree, names)}

    def record(self, temperature: float, count: int) -> list[Recording]:
        """`count` requests, plainly decoded."""
        s, config = self.settings, DraftingConfig()
        drafter = self._head.build_drafter(s.model, "float32", "cpu", self._tree, config)
        recorder, num_tokens = Recorder(drafter.needs), s.max_tokens + s.max_levels + self._tree.num_steps + 4
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

    def times(self, c: float, gpu: str = "") -> Times:
        """Passes at a cost; they grow with rows, as on a GPU, if that is set."""
        return times_of(self.method, c, gpu or gpu_of(c), self.settings.roofline)

    def cell(self, recordings: Sequence[Recording], cell: Cell, free_rate: float) -> Cell:
        """Decode all recordings. free_rate: of free drafting; 0 takes that of this run."""
        found = self._run(recordings, cell)
        rate, num_steps = found.num_tokens / found.seconds, len(found.accepted)
        alone = found.tau / (found.trace("").rate(self.times(cell.c), free))
        return replace(
            cell, eta=rate / (free_rate or found.tau / alone), speedup=rate, tau=found.tau, num_steps=num_steps,
            hits=sum(found.grown_ahead) / num_steps, prepared=found.num_prepared / num_steps,
            tau_hits=found.tau_hits, wait=found.seconds / num_steps - alone,
        )  # fmt: skip

    def trace(self, recordings: Sequence[Recording], temperature: float, batch: int, tree: str) -> Trace:
        """Return the steps of serial drafting with a tree, for any times."""
        return self._run(recordings, Cell(self.name, temperature, batch, 1.0, 0.0, "serial", tree=tree)).trace(tree)

    def _run(self, recordings: Sequence[Recording], cell: Cell) -> Replayed:
        found, clock, tree, times = Replayed(), VirtualClock(), self.tree(cell.tree), self.times(cell.c)
        device = RecordedDevice(times.drafter, VirtualClock())
        service = self._service(cell, clock, device)
        budget = TreeBudget(tree.num_draft_tokens, tree.num_steps)
        for start in range(0, len(recordings), cell.batch):
            self._replay(recordings[start : start + cell.batch], budget, service, device, clock, times, found)
        return found

    def _service(self, cell: Cell, clock: VirtualClock, device: RecordedDevice) -> VirtualDraftService:
        s, own = self.settings, device.clock
        assert isinstance(own, VirtualClock)
        mode: DraftAheadMode = "never" if cell.mode == "serial" else "auto" if cell.mode == "auto" else "always"
        config = DraftingConfig(draft_ahead=replace(s.ahead, mode=mode), emulated_device="1ms")
        tree = self.tree(cell.tree)
        drafter = self._head.build_drafter(s.model, "float32", "cpu", tree, config, has_idle_time=True)
        inner = drafter.drafter if isinstance(drafter, DraftAheadDrafter) else drafter
        assert isinstance(inner, NeuralDrafter)
        inner.device = device
        return VirtualDraftService(drafter, clock, own, cell.delay)

    def _replay(
        self,
        group: Sequence[Recording],
        budget: TreeBudget,
        service: VirtualDraftService,
        device: RecordedDevice,
        clock: VirtualClock,
        times: Times,
        found: Replayed,
    ) -> None:
        """Decode requests that begin together, some tokens behind the first tree of each."""
        began, lengths = 0.0, [recording.num_prompt + 1 for recording in group]
        starts, running, first = [0] * len(group), list(range(len(group))), list[int]()
        while running:
            num_prepared, num_rows = service.num_prepared, 0
            contexts = [group[i].commit(f"{i}", starts[i], lengths[i], budget) for i in running]
            device.take()
            for i, tree in zip(running, service.request(contexts)(), strict=True):
                assert isinstance(tree, DraftTree)
                accepted, num_rows = group[i].num_accepted(tree, lengths[i]), num_rows + len(tree.tokens)
                starts[i], lengths[i] = lengths[i], lengths[i] + accepted + 1
                if first:
                    found.accepted.append(accepted)
                    found.grown_ahead.append(tree.grown_ahead)
            clock.now += times.verify_s(num_rows)
            if not first:
                began, first = clock.now, list(lengths)
                continue
            found.steps.append(Step(len(running), num_rows, device.take()))
            found.num_prepared += service.num_prepared - num_prepared
            ended = [i for i in running if lengths[i] - group[i].num_prompt > self.settings.tokens_of(len(group))]
            found.num_tokens += sum(lengths[i] - first[i] for i in ended)
            found.seconds += len(ended) * (clock.now - began)
            service.release([f"{i}" for i in ended])
            running = [i for i in running if i not in ended]


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
    tree: Annotated[list[str], typer.Option(help="NODES:LEVELS on demand; the best counts. Repeatable.")] = list(TREES),  # noqa: B006
    ahead_tree: Annotated[list[str], typer.Option(help="The same of drafting ahead.")] = ["24:0"],  # noqa: B006
    local_c: Annotated[float, typer.Option(help="Cost of a level on the verifier's GPU; 0: by arithmetic.")] = 0.0,
    roofline: Annotated[bool, typer.Option(help="Passes grow with rows, as on GPUs.")] = False,
    halves: Annotated[list[int], typer.Option(help="Batches to compare with two halves. Repeatable.")] = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Measure drafting on demand, ahead and by choice at every cost, delay, temperature and batch, and beside them drafting
    on the verifier's own GPU."""
    ahead = DraftAheadConfig(top_k=ahead_top_k)
    axes = tuple(head), tuple(c), tuple(delay), tuple(temperature), tuple(batch)
    trees = tuple(tree), tuple(ahead_tree), local_c or cost_of(BIG_GPU), roofline, tuple(halves)
    settings = Settings(model, *axes, num_prompts, max_tokens, ahead, max_ahead, minutes, tuple(mode), *trees)
    tasks = MethodsSettings(model=model, methods=(MethodSpec("eagle3"),), prompts=prompts, num_prompts=num_prompts)
    try:
        loaded = [task.token_ids for task in load_tasks(tasks)]
        with progress() as shown:
            cells, halved = measure(settings, loaded, shown)
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    command = "python -m benchmarks.scripts.virtual_split"
    tables = [table(cells), local_table(cells, settings.local_c), *([halves_table(halved)] if halved else [])]
    page = Report.here("virtual-split", command, "cpu", settings, (cells, halved), tables).publish(out)
    draw(list(itertools.chain(*cells)), page.with_suffix(".png"))


def measure(
    settings: Settings, prompts: Sequence[Prompt], progress: Progress
) -> tuple[list[tuple[Cell, ...]], list[Halves]]:
    """Return the cells of each setting, by MODES, small batches first; and half-batches.

    Trees on demand do not depend on time: they are made once for each head, temperature, batch and size. Cells that time did
    not suffice for have no steps.
    """
    s, cells, halved, deadline = settings, list[tuple[Cell, ...]](), list[Halves](), time.monotonic() + 60 * settings.minutes
    splits = {head: VirtualSplit(s, head, prompts) for head in s.heads}
    axes = list(itertools.product(s.heads, s.temperatures))
    recorded = {
        (head, t): splits[head].record(t, max(len(prompts), *s.batches, *s.halves))
        for head, t in progress.track(axes, "plain decoding")
    }
    for batch, (head, t) in itertools.product(s.batches, axes):
        split, own = splits[head], recorded[head, t][: max(len(prompts), batch)]
        traces = [split.trace(own, t, batch, name) for name in split.trees(s.trees)]
        kinds = list(itertools.product(s.costs, s.delays))
        for c, delay in progress.track(kinds, f"batch {batch}, {split.name}, temperature {t:g}"):
            where = Cell(split.name, t, batch, c, delay, "serial")
            serial, free_rate = cell_of(where, traces, split.times(c)), traces[0].rate(split.times(c), free)
            local = cell_of(replace(where, mode="local"), traces, split.times(s.local_c, BIG_GPU))
            found = []
            for mode in ("ahead", "auto"):
                tried = [replace(where, mode=mode, tree=name) for name in split.trees(s.ahead_trees)]
                is_due = mode in s.modes and batch <= s.max_ahead and time.monotonic() < deadline
                done = [split.cell(own, cell, free_rate) for cell in tried] if is_due else tried[:1]
                found.append(max(done, key=lambda cell: cell.speedup))
            cells.append((serial, *found, local))
    for batch, (head, t) in progress.track(list(itertools.product(s.halves, axes)), "half-batches"):
        split, own = splits[head], recorded[head, t][:batch]
        whole, half = (
            [split.trace(own, t, size, name) for name in split.trees(SMALL_TREES)] for size in (batch, batch // 2)
        )
        for c, delay in itertools.product(s.costs, s.delays):
            where = Cell(split.name, t, batch, c, delay, "halves")
            halved.append(Halves.of(where, split.method, whole, half, s.local_c))
    return cells, halved


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
