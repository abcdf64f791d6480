"""Measures the method `rest`: a datastore of this environment's Python sources, searched with the demo prompts.
Writes a dated report: `python -m benchmarks.scripts.rest_lookup`. No target runs; only the search is timed."""

from __future__ import annotations

import json
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from tokenizers import Tokenizer

from eyas.bench.report import Report, Table, number
from eyas.config import DraftingConfig, RestConfig, TreeConfig
from eyas.drafters.base import LocalDrafter
from eyas.drafters.lookup.datastore import build_datastore, documents_of, open_datastore, vocabulary_digest
from eyas.drafters.lookup.rest import load_rest
from eyas.errors import ConfigError
from eyas.models.checkpoint import Checkpoint
from eyas.progress import progress
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from eyas.text.tokenizer import load_tokenizer

TARGET = "models/demo/target"
PROMPTS = Path("models/demo/prompts.jsonl")
LONGEST = 16
NUM_WARM_UPS = 20


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement.

    Attributes:
        repeats: measured rounds of each case.
        trees: shapes to measure, one after the other.
    """

    num_tokens: int
    repeats: int
    trees: tuple[TreeConfig, ...]
    rest: RestConfig


@dataclass(frozen=True)
class StoreCost:
    """A datastore's size on disk, and the time to build and to open it; opening is the median of several."""

    num_tokens: int
    megabytes: float
    build_seconds: float
    open_ms: float


@dataclass(frozen=True)
class RoundTimes:
    """Percentiles 50, 90 and 99 of the rounds' wall time in ms; cpu: median processor time in ms."""

    num_nodes: int
    num_sessions: int
    temperature: float
    cpu: float
    p50: float
    p90: float
    p99: float


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of the datastore; 6 bytes each.")] = 8_700_000,
    repeats: Annotated[int, typer.Option(help="Measured rounds of each case.")] = 300,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Build a datastore, open it, and search it."""
    torch.set_num_threads(1)
    settings = Settings(tokens, repeats, (TreeConfig(), TreeConfig(60, 8)), RestConfig())
    with tempfile.TemporaryDirectory() as folder:
        store, cases = build(tokens, Path(folder)), []
        for tree in settings.trees:
            drafter = load_rest(folder, Checkpoint(TARGET), tree, settings.rest, DraftingConfig())
            cases += [measure(drafter, tree, n, t, repeats) for n in (1, 8, 32) for t in (0.0, 0.6, 1.0)]
    program = "python -m benchmarks.scripts.rest_lookup"
    Report.here("rest-lookup", program, "cpu", settings, [store, *cases], tables(store, cases)).publish(out)


def build(num_tokens: int, folder: Path) -> StoreCost:
    """Build a datastore of at least `num_tokens`. Raises ConfigError if the environment has too few sources."""
    tokenizer = load_tokenizer(TARGET).tokenizer
    started = time.perf_counter()
    with progress() as shown:
        shown.show("tokenizing", total=num_tokens)
        read: list[list[int]] = []
        num_read = 0
        for document in _sources(tokenizer):
            read.append(document)
            shown.advance(len(document))
            num_read += len(document)
            if num_read >= num_tokens:
                break
        else:
            raise ConfigError(f"this environment has fewer than {num_tokens} tokens of Python sources; ask for less")
    built = build_datastore(read, tokenizer.get_vocab_size(), vocabulary_digest(tokenizer), folder)
    seconds = time.perf_counter() - started
    size = sum(file.stat().st_size for file in folder.iterdir())
    return StoreCost(built, size / 1e6, seconds, float(np.median([_open_ms(folder) for _ in range(9)])))


def measure(drafter: LocalDrafter, tree: TreeConfig, num_sessions: int, temperature: float, repeats: int) -> RoundTimes:
    """Time rounds of fresh sessions at places of the demo prompts."""
    prompts = [json.loads(line)["token_ids"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    places = ((tokens, end) for i in count() for tokens in prompts for end in [LONGEST + i % (len(tokens) - LONGEST)])
    budget, cpu, ms = TreeBudget(tree.num_draft_tokens, tree.num_steps), [], []
    for index in range(NUM_WARM_UPS + repeats):
        contexts = [
            Commit(f"{s}", index, 0, tuple(tokens[end - LONGEST : end]), None, NoiseKey(s, temperature), budget)
            for s, (tokens, end) in zip(range(num_sessions), places, strict=False)
        ]
        started, worked = time.perf_counter(), time.process_time()
        drafter.propose(contexts)
        cpu.append(1e3 * (time.process_time() - worked))
        ms.append(1e3 * (time.perf_counter() - started))
    quantiles = np.percentile(ms[NUM_WARM_UPS:], (50, 90, 99)).tolist()
    return RoundTimes(tree.num_draft_tokens, num_sessions, temperature, float(np.median(cpu[NUM_WARM_UPS:])), *quantiles)


def tables(store: StoreCost, cases: list[RoundTimes]) -> list[Table]:
    """Return the tables of the report."""
    row = (f"{store.num_tokens}", *map(number, (store.megabytes, store.build_seconds, store.open_ms)))
    rows = tuple(
        (f"{c.num_nodes}", f"{c.num_sessions}", f"{c.temperature:g}", *map(number, (c.cpu, c.p50, c.p90, c.p99)))
        for c in cases
    )
    note = (
        "From contexts to trees, ms: every session looks up all ends of its context and merges what it finds. CPU: median "
        "processor time of the one thread; the others are wall time."
    )
    return [
        Table("Datastore", ("tokens", "MB on disk", "build, s", "open, ms"), (row,)),
        Table("Round", ("nodes", "sessions", "temperature", "CPU", "p50", "p90", "p99"), rows, note),
    ]


def _open_ms(folder: Path) -> float:
    started = time.perf_counter()
    open_datastore(folder)
    return 1e3 * (time.perf_counter() - started)


def _sources(tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Documents from installed packages only: the demo prompts are from the standard library."""
    for file in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        yield from documents_of(file, False, tokenizer, Counter())


if __name__ == "__main__":
    typer.run(main)
