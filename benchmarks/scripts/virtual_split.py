"""Measures eta of a drafter apart in virtual time: one process, real models and trees, times of passes from tables.

Host work and the wire take no time besides the given delay, and no machine is too busy. So eta is an upper bound of what
`eyas bench split` measures with processes. Writes a dated report: `python -m benchmarks.scripts.virtual_split`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from eyas.bench.report import Report, Table
from eyas.bench.settings import MethodSpec, MethodsSettings, Prompt, groups, load_tasks
from eyas.config import DraftAheadConfig, DraftingConfig, EngineConfig, TreeConfig
from eyas.config.device_costs import DeviceCosts, flat
from eyas.draft_protocol import Commit
from eyas.drafters.base import Draft, DraftContext, LocalDrafter, Pending, PreparedTree, PreparedTrees
from eyas.drafters.draft_ahead import DraftAheadDrafter
from eyas.drafters.neural import NeuralDrafter
from eyas.drafters.registry import build_drafter, build_fuser, default_method, resolve_tree
from eyas.engine.build import assemble_engine
from eyas.errors import EyasError
from eyas.models.emulation import EmulatedDevice, VirtualClock
from eyas.models.heads.layers import FeatureFuser
from eyas.models.target import TargetModel, load_target
from eyas.request import Request, VerifyStep

MARKOV_SHARE = 1 / 24  # a level of a one-pass head after the first, in passes of the head
LAYERS = {"dspark": 2.0}  # a pass of the head in levels of EAGLE, as in the report of the services


class VirtualDraftService:
    """Implements Drafter by a drafter on a device of its own, behind a wire, in virtual time."""

    def __init__(self, drafter: LocalDrafter, clock: VirtualClock, own: VirtualClock, delay_s: float) -> None:
        """clock: of the verifier. own: of the drafter. delay_s: of each way."""
        self.needs, self.can_sample = drafter.needs, drafter.can_sample
        self.num_prepared = 0
        self._drafter, self._clock, self._own, self._delay_s = drafter, clock, own, delay_s
        self._trees, self._sent = PreparedTrees(), list[tuple[float, PreparedTree]]()

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
        self._own.now = max(self._own.now, arrival)
        sent: list[Commit[torch.Tensor]] = [replace(c, has_tree=c.session in local) for c in contexts]
        answers = self._drafter.propose(sent)
        is_awaited = any(context.budget.wants_tree and not context.has_tree for context in sent)
        ready = self._own.now + self._delay_s if is_awaited else self._clock()

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
    round trip. hits: share of steps with trees grown ahead."""

    head: str
    temperature: float
    batch: int
    c: float
    delay: float
    mode: str
    eta: float
    speedup: float
    tau: float
    hits: float
    prepared: float
    num_steps: int


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


class VirtualSplit:
    """Decodes prompts with one head. A verify pass takes a second, whatever its rows."""

    def __init__(self, settings: Settings, head: str, prompts: Sequence[Prompt]) -> None:
        self.settings, self.head, self._prompts = settings, head, prompts
        self.method = default_method("", head)
        fuser = build_fuser(self.method, head, settings.model, "float32", "cpu")
        assert fuser is not None
        self._fuser: FeatureFuser = fuser
        self._target = load_target(settings.model, "float32", "cpu", fuser.aux_hidden_state_layers)
        self._tree = resolve_tree(TreeConfig(), self.method, head)

    def cell(self, temperature: float, batch: int, c: float, delay: float, mode: str, free: float) -> Cell:
        """Decode all prompts. free: tau of serial drafting; 0 takes that of this run."""
        tokens, seconds, num_prepared, steps = 0, 0.0, 0, list[VerifyStep]()
        for group in groups(self._prompts, batch, 1):
            found = self._decode(group, temperature, c, delay, mode)
            tokens, seconds = tokens + found[0], seconds + found[1]
            num_prepared += found[3]
            steps += found[2]
        rate, tau = batch * tokens / seconds, sum(step.accepted + 1 for step in steps) / len(steps)
        hits = sum(step.grown_ahead for step in steps) / len(steps)
        name = Path(self.head).name
        return Cell(
            name, temperature, batch, c, delay, mode, rate / batch / (free or tau), rate / batch, tau, hits,
            num_prepared / len(steps), len(steps),
        )  # fmt: skip

    def _decode(
        self, group: Sequence[Prompt], temperature: float, c: float, delay: float, mode: str
    ) -> tuple[int, float, list[VerifyStep], int]:
        """Tokens after the first ones, seconds of all requests for them, verify steps, and trees that were prepared."""
        s, clock, own = self.settings, VirtualClock(), VirtualClock()
        ahead = s.ahead if mode == "ahead" else DraftAheadConfig()
        config = DraftingConfig(draft_ahead=ahead)
        drafter = build_drafter(self.method, s.model, self.head, "float32", "cpu", self._tree, config)
        inner = drafter._drafter if isinstance(drafter, DraftAheadDrafter) else drafter
        assert isinstance(inner, NeuralDrafter)
        inner.emulate(EmulatedDevice(costs(self.method, c), own))
        service = VirtualDraftService(drafter, clock, own, delay)
        longest = max(map(len, group)) + s.max_tokens + self._tree.num_draft_tokens
        engine_config = EngineConfig(
            max_kv_tokens=len(group) * longest, max_num_seqs=len(group), prefix_cache=False, emulated_device="1000ms"
        )
        target = TargetModel(self._target.model, self._fuser.aux_hidden_state_layers)
        engine = assemble_engine(target, self._fuser, engine_config, self._tree, service, clock=clock)
        sampling = MethodsSettings(
            model=s.model, methods=(MethodSpec(self.method),), prompts=Path(), max_tokens=s.max_tokens
        ).sampling(temperature)
        for index, prompt in enumerate(group):
            engine.submit(Request(f"{index}", prompt, replace(sampling, seed=index)))
        first, last, count, steps = dict[str, float](), dict[str, float](), 0, list[VerifyStep]()
        while engine.has_work:
            for chunk in engine.step():
                count += len(chunk.token_ids) - (chunk.request_id not in first)
                first.setdefault(chunk.request_id, clock())
                last[chunk.request_id] = clock()
                steps += [chunk.verify_step] if chunk.verify_step else []
        return count, sum(last[name] - first[name] for name in last), steps, service.num_prepared


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
    delay: Annotated[list[float], typer.Option(help="Of each way, in verify passes; may be repeated.")] = [0.0, 0.03, 0.1],  # noqa: B006
    temperature: Annotated[list[float], typer.Option(help="May be repeated.")] = [0.0, 1.0],  # noqa: B006
    batch: Annotated[list[int], typer.Option(help="May be repeated.")] = [1],  # noqa: B006
    num_prompts: Annotated[int, typer.Option(help="Prompts to decode.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Of each prompt.")] = 40,
    ahead_top_k: Annotated[int, typer.Option(help="Rows of a session in a pass ahead.")] = 64,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Measure serial drafting and drafting ahead at every cost, delay, temperature and batch."""
    ahead = DraftAheadConfig(top_k=ahead_top_k)
    axes = tuple(head), tuple(c), tuple(delay), tuple(temperature), tuple(batch)
    settings = Settings(model, *axes, num_prompts, max_tokens, ahead)
    tasks = MethodsSettings(model=model, methods=(MethodSpec("eagle3"),), prompts=prompts, num_prompts=num_prompts)
    try:
        loaded = [task.token_ids for task in load_tasks(tasks)]
        with Progress(console=Console(stderr=True), refresh_per_second=1) as progress:
            cells = measure(settings, loaded, progress)
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    Report.here(
        "virtual-split", "python -m benchmarks.scripts.virtual_split", "cpu", settings, cells, [table(cells)]
    ).publish(out)


def measure(settings: Settings, prompts: Sequence[Prompt], progress: Progress) -> list[Cell]:
    """All cells; trees of serial drafting do not depend on time, so that their tau is that of free drafting."""
    s, cells = settings, list[Cell]()
    kinds = [(head, t, b) for head in s.heads for t in s.temperatures for b in s.batches]
    for head, t, b in progress.track(kinds, description="heads, temperatures and batches"):
        split = VirtualSplit(s, head, prompts)
        for c in s.costs:
            for delay in s.delays:
                serial = split.cell(t, b, c, delay, "serial", 0.0)
                cells += [serial, split.cell(t, b, c, delay, "ahead", serial.tau)]
    return cells


def table(cells: Sequence[Cell]) -> Table:
    """The table of the report."""
    rows = []
    for serial, ahead in zip(cells[::2], cells[1::2], strict=True):
        where = serial.head, f"{serial.temperature:g}", f"{serial.batch}", f"{serial.c:g}", f"{serial.delay:g}"
        found = f"{serial.eta:.2f}", f"{ahead.eta:.2f}", f"{serial.tau:.2f}", f"{ahead.tau:.2f}"
        rows.append((*where, *found, f"{ahead.hits:.2f}", f"{ahead.prepared:.2f}", f"{serial.num_steps}, {ahead.num_steps}"))
    note = (
        "eta: rate over that of free drafting, which is tau of serial drafting in one verify pass. c: an EAGLE level in "
        "verify passes; a one-pass head takes 2 c and its further levels a 24th of that each. hits: share of steps with "
        "trees grown ahead; prepared: share of steps that waited for nothing, as the tree was there before the commit. "
        "steps: of each mode, few, so that a difference of 0.02 is noise."
    )
    columns = ("head", "temperature", "batch", "c", "delay", "eta serial", "eta ahead", "tau serial", "tau ahead")
    return Table("Efficiency in virtual time", (*columns, "hits", "prepared", "steps"), tuple(rows), note)


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
