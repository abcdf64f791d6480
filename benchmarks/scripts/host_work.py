"""Measures the host's work of an engine step between the results of a pass and the start of the next one, part by part.

Writes a dated report: `python -m benchmarks.scripts.host_work`. Every sequence has a tree of 16 nodes, two of them are
accepted, and passes are packed as for a GPU. The pass gives its logits at once; neither it nor the drafter counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer

from eyas.api.request import Chunk, Request, SamplingParams
from eyas.bench.report import Report, Table, number
from eyas.bench.settings import random_prompt
from eyas.cache.kv_cache import KVCache, SlotMemory
from eyas.config import EngineConfig, TreeConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.engine.build import assemble_engine
from eyas.engine.engine import Engine
from eyas.models.backends.attention_metadata import Tiling
from eyas.models.backends.cuda import KernelBackend
from eyas.models.heads.eagle import load_fuser
from eyas.models.inputs import PackedInputs, Segment
from eyas.models.loading import load_target
from eyas.models.target import TargetOutput
from eyas.protocol.tree import DraftTrees
from eyas.sampling import verify

TARGET, HEAD = "models/demo/target", "models/demo/eagle3"
# Of an H100 and Llama 3.1 8B.
TILING = Tiling(heads_per_kv=4, num_kv=8, num_processors=132)
# What the target draws at every node, and what no node with another token is accepted for.
DRAWN, OTHER = 5, 6
PARENTS = (0, 0, 1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4)
ACCEPTED = (1, 2)
# Parts of a step in their order.
PARTS = ("acceptance", "commits", "budget", "request", "trees", "schedule", "rows", "packing")
NUM_WARM_UPS = 10


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement.

    Attributes:
        steps: measured ones of each case.
        context: tokens of a prompt.
        batches: sequences of a step.
    """

    steps: int
    context: int
    batches: tuple[int, ...]


@dataclass(frozen=True)
class HostWork:
    """Processor time of a step in milliseconds: the least and the median of all steps, and the median of each part."""

    num_sequences: int
    least: float
    median: float
    parts: dict[str, float]


class PartClock:
    """Processor time of this thread since the last mark counts for the part that ends. Paused while others work."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._last = 0.0

    def start(self, *_: object) -> None:
        """Results are there: begin a step."""
        self.steps.append(dict.fromkeys(PARTS, 0.0))
        self.resume()

    def resume(self, *_: object) -> None:
        """Count again."""
        self._last = time.thread_time()

    def end(self, part: str) -> None:
        """End a part, and begin the next."""
        now = time.thread_time()
        if self.steps:
            self.steps[-1][part] += now - self._last
        self._last = now


class InstantBackend:
    """Backend that packs as that of a GPU does. A pass takes no time, and DRAWN is the likeliest token of every row."""

    def __init__(self, packing: KernelBackend, num_rows: int) -> None:
        self.pack: Callable[[Sequence[Segment]], PackedInputs] = packing.pack
        self._logits = torch.zeros(num_rows, packing.target.vocab_size)
        self._logits[:, DRAWN] = 1

    def forward(self, packed: PackedInputs, kv_cache: KVCache) -> TargetOutput:
        """Return logits of all rows that ask for them."""
        return TargetOutput(self._logits[: len(packed.logits_indices)], None)


class FixedTrees(LocalDrafter):
    """Trees of one shape, whose nodes ACCEPTED are accepted."""

    needs = DrafterNeeds(features=True)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Return a tree for each session, from arrays, as drafters with a network make them."""
        tokens = [DRAWN if node in ACCEPTED else OTHER + node for node in range(1, len(PARENTS))]
        rows = [tokens, PARENTS[1:], [-0.1 * node for node in range(1, len(PARENTS))]]
        cells = np.broadcast_to(np.array(rows)[:, None], (3, len(contexts), len(tokens)))
        roots, counts = [context.tokens[-1] for context in contexts], np.full(len(contexts), len(tokens))
        return list(DraftTrees.below(roots, *cells, counts))

    def release(self, sessions: Sequence[str]) -> None:
        """Nothing is kept."""


def build(num_sequences: int, context: int, steps: int) -> Engine:
    """Return an engine whose sequences all decode with trees."""
    fuser = load_fuser(HEAD, TARGET, "float32")
    target = load_target(TARGET, "float32", "cpu", fuser.aux_hidden_state_layers)
    num_slots = num_sequences * (context + 4 * steps + 100)
    config = EngineConfig(
        max_kv_tokens=num_slots, max_num_seqs=num_sequences, max_prefill_tokens=num_sequences * context,
        prefix_cache=False, draft_budget="fixed",
    )  # fmt: skip
    engine = assemble_engine(target, fuser, config, TreeConfig(len(PARENTS), 3, 5), FixedTrees())
    memory = SlotMemory(num_sequences, num_slots // num_sequences, target.device)
    packing = KernelBackend(target, TILING, num_slots, memory)
    engine.runner.backend = InstantBackend(packing, num_sequences * max(len(PARENTS), context))
    keep_features(engine)
    return engine


def keep_features(engine: Engine) -> None:
    """Fuse the states of each pass in the pass, as on a GPU."""
    runner = engine.runner
    assert runner._fuser is not None
    runner.kv_cache.features = runner.kv_cache.features.new_zeros(runner.kv_cache.scratch + 1, runner._fuser.width)
    runner.kv_cache.state_layers = ()


@contextmanager
def marked(engine: Engine, clock: PartClock) -> Iterator[None]:
    """Mark the ends of the parts of every step inside the context."""
    runner, drafting, scheduler = engine.runner, engine.draft_manager, engine.scheduler
    ends = partial(partial, clock.end)
    replaced: list[tuple[Any, str, Any]] = []

    def wrap(part: Any, name: str, before: Callable[[], object], after: Callable[[], object]) -> None:
        inner = getattr(part, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            before()
            result = inner(*args, **kwargs)
            after()
            return result

        setattr(part, name, outer)
        replaced.append((part, name, inner))

    wrap(verify, "download", lambda: None, clock.start)
    wrap(scheduler, "commit", ends("acceptance"), ends("commits"))
    wrap(drafting, "request", ends("budget"), ends("request"))
    wrap(drafting, "collect", clock.resume, ends("trees"))
    wrap(drafting._drafter, "propose", ends("trees"), clock.resume)
    wrap(runner.backend, "pack", ends("rows"), ends("packing"))
    wrap(scheduler, "schedule", lambda: None, ends("schedule"))
    try:
        yield
    finally:
        for part, name, inner in replaced:
            setattr(part, name, inner)


def measure(num_sequences: int, context: int, steps: int) -> HostWork:
    """Run steps in which all sequences decode."""
    engine, clock = build(num_sequences, context, NUM_WARM_UPS + steps), PartClock()
    sampling = SamplingParams(max_tokens=3 * (NUM_WARM_UPS + steps + 5), temperature=0.0, seed=0, ignore_eos=True)
    for index in range(num_sequences):
        engine.submit(Request(f"{index}", random_prompt(engine.vocab_size, context, seed=index), sampling))
    chunks: Sequence[Chunk] = ()
    with marked(engine, clock):
        for _ in range(NUM_WARM_UPS + steps + 1):
            chunks = engine.step(partial(list, chunks))  # read under the pass, as AsyncEngine reads them
    assert engine.report.num_rows == num_sequences * len(PARENTS), "all decode with trees"
    measured = clock.steps[NUM_WARM_UPS:-1]  # the last one has not ended
    totals = [1e3 * sum(step.values()) for step in measured]
    parts = {part: 1e3 * median(step[part] for step in measured) for part in PARTS}
    return HostWork(num_sequences, min(totals), median(totals), parts)


def table(found: Sequence[HostWork]) -> Table:
    """Return the table of the report."""
    rows = tuple(
        (f"{each.num_sequences}", number(each.least), number(each.median), *map(number, each.parts.values()))
        for each in found
    )
    note = (
        "Milliseconds of processor time of the engine's thread from the results of a pass to the start of the next one. "
        f"Every sequence has a tree of {len(PARENTS)} nodes, and {len(ACCEPTED)} of them are accepted. Passes are packed "
        "as for a GPU. Pass, sampling and drafter do not count. acceptance: accepted paths from the drawn tokens. commits: "
        "tokens and slots of sequences. budget: sizes of trees. request: commits and features for the drafter. trees: "
        "checks of those that came. rows: segments. Parts are medians."
    )
    return Table("Host work of a step", ("sequences", "least", "median", *PARTS), rows, note)


def main(
    steps: Annotated[int, typer.Option(help="Measured steps of each case.")] = 200,
    context: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 130,
    batch: Annotated[list[int], typer.Option(help="Sequences of a step; may be repeated.")] = [1, 16, 64],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Measure every case."""
    torch.set_num_threads(1)
    settings = Settings(steps, context, tuple(batch))
    found = [measure(num, context, steps) for num in settings.batches]
    program = "python -m benchmarks.scripts.host_work"
    Report.here("host-work", program, "cpu", settings, found, [table(found)]).publish(out)


if __name__ == "__main__":
    typer.run(main)
