"""Measures drafting with the default draft budget against plain decoding under constant load, on this machine's CPU.

Two engines of one thread take steps in turn, always the one that has had less processor time: so both have the same share of
the machine's slow moments. When a request ends, the next one begins. Writes a dated report:
`python -m benchmarks.scripts.adaptive_load --method prompt_lookup --method dspark=models/demo/dspark`.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer

from eyas.api.request import Request, SamplingParams
from eyas.bench.report import Report, Table, number
from eyas.bench.settings import MethodSpec, MethodsSettings, Prompt, load_tasks
from eyas.config import DraftingConfig, EngineConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.emulation.device import Clock
from eyas.engine.build import assemble_engine
from eyas.engine.engine import Engine
from eyas.models.loading import load_target
from eyas.models.placement import resolve_placement
from eyas.models.target import TargetModel
from eyas.progress import progress

MODEL, PROMPTS = "models/demo/target", Path("models/demo/prompts.jsonl")
METHODS = ["prompt_lookup", "dspark=models/demo/dspark", "eagle3=models/demo/eagle3-full", "medusa=models/demo/medusa"]
NUM_PROMPTS, MIN_TOKENS = 20, 16


@dataclass(frozen=True)
class Settings:
    """A run's settings.

    Attributes:
        seconds: processor time of each engine in each case.
        tokens: of an answer, in the mean.
        load: processes that wanted to run on the machine when the run began.
    """

    model: str
    seconds: float
    tokens: int
    load: float = 0.0


@dataclass(frozen=True)
class Ratio:
    """Tokens per second of processor time, with drafts over without: of the whole run, and without its first quarter.

    Attributes:
        seconds: that the engines without and with drafts had.
        num_same: requests that both have decoded to the end, to the same tokens.
    """

    method: str
    batch: int
    temperature: float
    whole: float
    settled: float
    steps: int
    steps_with_trees: int
    seconds: tuple[float, float]
    num_same: int


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
    """An engine under constant load. outputs: tokens of each request.

    Args:
        case: requests at a time, and temperature.
        target: shared, unless a drafter needs features: hooks on its layers would be moved in each step.
        spec: how it drafts, if it does.
    """

    def __init__(
        self,
        settings: Settings,
        case: tuple[int, float],
        prompts: Sequence[Prompt],
        target: TargetModel,
        spec: MethodSpec | None,
    ) -> None:
        self.clock, self.num_tokens, self.num_steps, self.num_with_trees = OwnTime(), 0, 0, 0
        self.outputs: dict[str, list[int]] = {}
        self.ended = set[str]()
        self._batch, self._temperature = case
        self._prompts, self._most, self._num_submitted = prompts, max(2 * settings.tokens - MIN_TOKENS, MIN_TOKENS), 0
        tree, fuser, drafter = TreeConfig(), None, None
        config = EngineConfig(
            max_kv_tokens=self._batch * (max(map(len, prompts)) + self._most + tree.num_draft_tokens),
            max_num_seqs=self._batch,
            prefix_cache=False,
        )
        if spec:
            place = f"{target.dtype}".removeprefix("torch."), "cpu"
            head = DraftHead(spec.draft_model, spec.name)
            tree = head.resolve_tree(tree)
            fuser = head.build_fuser(settings.model, *place)
            drafter = head.build_drafter(settings.model, *place, tree, DraftingConfig())
            if fuser:
                target = load_target(settings.model, *place, fuser.aux_hidden_state_layers)
        self._engine: Engine = assemble_engine(target, fuser, config, tree, drafter, clock=self.clock)
        kv_cache = self._engine.runner.kv_cache
        for pool in (*kv_cache.keys, *kv_cache.values, kv_cache.features):
            pool.zero_()  # memory takes time when it is first touched, and features are in one engine alone
        self.clock.pause()
        self.clock.spent = 0.0

    def step(self) -> None:
        """One step, with as many requests as there may be at a time."""
        self.clock.resume()
        load = self._engine.load
        for _ in range(self._batch - load.num_running - load.num_waiting):
            self._submit()
        for chunk in self._engine.step():
            self.outputs[chunk.request_id] += chunk.token_ids
            self.num_tokens += len(chunk.token_ids)
            if chunk.finish_reason:
                self.ended.add(chunk.request_id)
        self.num_steps += 1
        self.num_with_trees += self._engine.load.tree_nodes > 1
        self.clock.pause()

    def _submit(self) -> None:
        seed = self._num_submitted
        self._num_submitted += 1
        length = random.Random(seed).randint(MIN_TOKENS, self._most)
        sampling = SamplingParams(length, temperature=self._temperature, seed=seed, ignore_eos=True)
        self.outputs[f"{seed}"] = []
        self._engine.submit(Request(f"{seed}", self._prompts[seed % len(self._prompts)], sampling))


def measure(
    settings: Settings, spec: MethodSpec, case: tuple[int, float], prompts: Sequence[Prompt], target: TargetModel
) -> Ratio:
    """Measure one method with a number of requests at a time, at a temperature."""
    plain, drafting = (Side(settings, case, prompts, target, own) for own in (None, spec))
    first = (0, 0.0), (0, 0.0)
    while min(plain.clock.spent, drafting.clock.spent) < settings.seconds:
        min(plain, drafting, key=lambda side: side.clock.spent).step()
        if min(plain.clock.spent, drafting.clock.spent) < settings.seconds / 4:
            first = (plain.num_tokens, plain.clock.spent), (drafting.num_tokens, drafting.clock.spent)
    rates = [side.num_tokens / side.clock.spent for side in (plain, drafting)]
    settled = [
        (side.num_tokens - tokens) / (side.clock.spent - seconds)
        for side, (tokens, seconds) in zip((plain, drafting), first, strict=True)
    ]
    ratios = rates[1] / rates[0], settled[1] / settled[0]
    both = plain.ended & drafting.ended
    assert all(plain.outputs[name] == drafting.outputs[name] for name in both), "drafts never change tokens"
    spent = plain.clock.spent, drafting.clock.spent
    return Ratio(spec.name, *case, *ratios, drafting.num_steps, drafting.num_with_trees, spent, len(both))


def table(ratios: Sequence[Ratio]) -> Table:
    """Return the table of the report."""
    rows = tuple(
        (f"`{r.method}`", f"{r.batch}", number(r.temperature), f"{r.whole:.3f}", f"{r.settled:.3f}", f"{r.steps}",
         f"{r.steps_with_trees}", f"{r.num_same}")
        for r in ratios
    )  # fmt: skip
    note = (
        "Tokens per second of processor time, over those of an engine without a drafter whose steps alternate with these. "
        "later: without the first quarter of the run, in which the budget tries trees most often. Prompts and what the "
        "drafter does count, but not the first touch of the KV cache's memory. same: requests that both engines have ended, "
        "with the same tokens."
    )
    heads = ("method", "requests at a time", "temperature", "over plain", "later", "steps", "steps with trees", "same")
    return Table("Drafting over plain decoding under constant load", heads, rows, note)


def main(
    model: Annotated[str, typer.Option(help="Folder of the target.")] = MODEL,
    method: Annotated[list[str], typer.Option(help="NAME or NAME=DRAFT_MODEL; may be repeated.")] = METHODS,
    prompts: Annotated[Path, typer.Option(help="JSON Lines with token_ids or text.")] = PROMPTS,
    batch: Annotated[list[int], typer.Option(help="Requests at a time; may be repeated.")] = [1, 8, 16],  # noqa: B006
    temperature: Annotated[list[float], typer.Option(help="Temperatures; may be repeated.")] = [0.0, 0.8, 1.0],  # noqa: B006
    seconds: Annotated[float, typer.Option(help="Processor time of each engine in each case.")] = 10.0,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer, in the mean.")] = 64,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Measure every case."""
    torch.set_num_threads(1)
    settings = Settings(model, seconds, tokens, os.getloadavg()[0])
    specs = tuple(map(MethodSpec.parse, method))
    tasks = load_tasks(MethodsSettings(model=model, methods=specs, prompts=prompts, num_prompts=NUM_PROMPTS))
    device, dtype = resolve_placement("cpu", "auto", model)
    target = load_target(model, dtype, device)
    cases = list(product(specs, product(batch, temperature)))
    token_ids = [task.token_ids for task in tasks]
    with progress() as shown:
        found = [measure(settings, *case, token_ids, target) for case in shown.track(cases, "cases")]
    program = "python -m benchmarks.scripts.adaptive_load"
    Report.here("adaptive-load", program, "cpu", settings, found, [table(found)]).publish(out)


if __name__ == "__main__":
    typer.run(main)
