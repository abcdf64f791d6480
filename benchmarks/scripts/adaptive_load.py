"""Measures `engine.draft_budget: adaptive` against plain decoding under constant load, on this machine's CPU.

Two engines of one thread take steps in turn, always the one that has had less processor time: so both have the same share of
the machine's slow moments. When a request ends, the next one begins. Writes a dated report:
`python -m benchmarks.scripts.adaptive_load`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track

from eyas.bench.report import Report, Table, number
from eyas.bench.settings import MethodSpec, MethodsSettings, Prompt, load_tasks
from eyas.config import DraftingConfig, EngineConfig, TreeConfig
from eyas.drafters.registry import build_drafter, build_fuser
from eyas.engine.build import assemble_engine
from eyas.engine.engine import Engine
from eyas.models.emulation import Clock
from eyas.models.target import load_target
from eyas.request import Request, SamplingParams

TARGET, HEAD, METHOD = "models/demo/target", "models/demo/eagle3-full", "eagle3"
PROMPTS = "models/demo/prompts.jsonl"
TREE = TreeConfig(24, 5, 8)
MIN_TOKENS = 16


@dataclass(frozen=True)
class Settings:
    """batches: requests at a time. seconds: processor time of each engine. tokens: of an answer, in the mean."""

    batches: tuple[int, ...]
    temperatures: tuple[float, ...]
    seconds: float
    tokens: int


@dataclass(frozen=True)
class Ratio:
    """Tokens per second of processor time, adaptive over plain: of the whole run, and without its first quarter."""

    batch: int
    temperature: float
    whole: float
    settled: float
    steps: int
    steps_with_trees: int
    seconds: tuple[float, float]  # that the plain and the adaptive engine had


class OwnTime(Clock):
    """Processor time of this thread while it works for one engine."""

    def __init__(self) -> None:
        self.spent, self._since = 0.0, 0.0
        self.resume()

    def __call__(self) -> float:
        return self.spent + time.thread_time() - self._since

    def resume(self) -> None:
        """Count from now on."""
        self._since = time.thread_time()

    def pause(self) -> None:
        """Count no more."""
        self.spent, self._since = self(), time.thread_time()


class Side:
    """An engine under constant load."""

    def __init__(self, settings: Settings, batch: int, temperature: float, prompts: Sequence[Prompt], drafts: bool) -> None:
        self.clock, self.num_tokens, self.num_steps, self.num_with_trees = OwnTime(), 0, 0, 0
        self._batch, self._temperature, self._prompts = batch, temperature, prompts
        self._most, self._num_submitted = max(2 * settings.tokens - MIN_TOKENS, MIN_TOKENS), 0
        config = EngineConfig(
            max_kv_tokens=batch * (max(map(len, prompts)) + self._most + TREE.num_draft_tokens),
            max_num_seqs=batch,
            prefix_cache=False,
            draft_budget="adaptive",
        )
        fuser = build_fuser(METHOD, HEAD, TARGET, "float32", "cpu") if drafts else None
        drafter = build_drafter(METHOD, TARGET, HEAD, "float32", "cpu", TREE, DraftingConfig()) if drafts else None
        target = load_target(TARGET, "float32", "cpu", fuser.aux_hidden_state_layers if fuser else ())
        self._engine: Engine = assemble_engine(target, fuser, config, TREE, drafter, clock=self.clock)
        self.clock.pause()
        self.clock.spent = 0.0

    def step(self) -> None:
        """One step, with as many requests as there may be at a time."""
        self.clock.resume()
        load = self._engine.load
        for _ in range(self._batch - load.num_running - load.num_waiting):
            self._submit()
        self.num_tokens += sum([len(chunk.token_ids) for chunk in self._engine.step()])
        self.num_steps += 1
        self.num_with_trees += self._engine.load.tree_nodes > 1
        self.clock.pause()

    def _submit(self) -> None:
        seed = self._num_submitted
        self._num_submitted += 1
        length = random.Random(seed).randint(MIN_TOKENS, self._most)
        sampling = SamplingParams(length, temperature=self._temperature, seed=seed, ignore_eos=True)
        self._engine.submit(Request(f"{seed}", self._prompts[seed % len(self._prompts)], sampling))


def measure(settings: Settings, batch: int, temperature: float, prompts: Sequence[Prompt]) -> Ratio:
    """One batch size and temperature."""
    plain, adaptive = (Side(settings, batch, temperature, prompts, drafts) for drafts in (False, True))
    first = (0, 0.0), (0, 0.0)
    while min(plain.clock.spent, adaptive.clock.spent) < settings.seconds:
        min(plain, adaptive, key=lambda side: side.clock.spent).step()
        if min(plain.clock.spent, adaptive.clock.spent) < settings.seconds / 4:
            first = (plain.num_tokens, plain.clock.spent), (adaptive.num_tokens, adaptive.clock.spent)
    rates = [side.num_tokens / side.clock.spent for side in (plain, adaptive)]
    settled = [
        (side.num_tokens - tokens) / (side.clock.spent - seconds)
        for side, (tokens, seconds) in zip((plain, adaptive), first, strict=True)
    ]
    ratios = rates[1] / rates[0], settled[1] / settled[0]
    spent = plain.clock.spent, adaptive.clock.spent
    return Ratio(batch, temperature, *ratios, adaptive.num_steps, adaptive.num_with_trees, spent)


def table(ratios: Sequence[Ratio]) -> Table:
    """The table of the report."""
    rows = tuple(
        (f"{r.batch}", number(r.temperature), f"{r.whole:.3f}", f"{r.settled:.3f}", f"{r.steps}", f"{r.steps_with_trees}")
        for r in ratios
    )
    note = (
        "Tokens per second of processor time, over those of an engine without a drafter whose steps alternate with these. "
        "later: without the first quarter of the run, in which the first trials are free. Prompts count, and what the "
        "drafter does."
    )
    heads = ("requests at a time", "temperature", "over plain", "later", "steps", "steps with trees")
    return Table("Adaptive trees over plain decoding under constant load", heads, rows, note)


def main(
    batch: Annotated[list[int], typer.Option(help="Requests at a time; may be repeated.")] = [1, 4, 16, 64],  # noqa: B006
    temperature: Annotated[list[float], typer.Option(help="Temperatures; may be repeated.")] = [0.0, 1.0],  # noqa: B006
    seconds: Annotated[float, typer.Option(help="Processor time of each engine in each case.")] = 20.0,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer, in the mean.")] = 64,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Measure every case."""
    torch.set_num_threads(1)
    settings = Settings(tuple(batch), tuple(temperature), seconds, tokens)
    tasks = MethodsSettings(model=TARGET, methods=(MethodSpec(METHOD),), prompts=Path(PROMPTS), num_prompts=20)
    prompts = [task.token_ids for task in load_tasks(tasks)]
    cases = list(product(settings.batches, settings.temperatures))
    found = [measure(settings, *case, prompts) for case in track(cases, description="cases")]
    program = "python -m benchmarks.scripts.adaptive_load"
    Report.here("adaptive-load", program, "cpu", settings, found, [table(found)]).publish(out)


if __name__ == "__main__":
    typer.run(main)
