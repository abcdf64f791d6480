"""Times verify passes and draft rounds at start, so that the adaptive draft budget knows their costs before any request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from eyas.config import EngineConfig, TreeConfig
from eyas.draft_protocol import Commit, TreeBudget
from eyas.drafters.base import DraftContext, Drafter, LocalDrafter
from eyas.engine.draft_budget import CostModel
from eyas.engine.runner import ModelRunner
from eyas.models.inputs import Segment
from eyas.request import NoiseKey
from eyas.sampling.sampler import Draw, sample

# Seconds after which no larger size is timed: the table goes on along its last slope.
TIME_LIMIT_S = 0.2
PREFIX_TOKENS = 64
GREEDY = NoiseKey(seed=0)


def measure_verify(runner: ModelRunner, engine: EngineConfig, tree: TreeConfig) -> CostModel:
    """Seconds of a verify pass and its draws by number of rows. Rows are written to the scratch slot, so that none leaks."""
    nodes, num_slots = tree.num_draft_tokens, runner.kv_cache.scratch
    prefix = np.arange(max(min(PREFIX_TOKENS, num_slots, runner.target.max_model_len - nodes), 0))

    def segment(num_rows: int) -> Segment:
        rows = np.arange(num_rows)
        return Segment(rows * 0, len(prefix) + rows, np.full(num_rows, num_slots), prefix, None, rows)

    def rounds(num_rows: int) -> Iterator[Callable[[], object]]:
        segments = [segment(min(nodes, num_rows - start)) for start in range(0, num_rows, nodes)]
        draws = [Draw(GREEDY, 0)] * num_rows
        while True:
            yield lambda: sample(runner.forward(segments), draws).tolist()

    return _measure(rounds, min(engine.max_verify_tokens, engine.max_num_seqs * nodes), rate=0.1)


def measure_drafting(drafter: Drafter, runner: ModelRunner, engine: EngineConfig, tree: TreeConfig) -> CostModel:
    """Seconds of a draft round by number of trees; an empty table for a drafter in another process."""
    if not isinstance(drafter, LocalDrafter):
        return CostModel((), (), rate=0.5)
    budget = TreeBudget(tree.num_draft_tokens, tree.num_steps)

    def context(session: int, epoch: int, start: int, num_tokens: int) -> DraftContext:
        slots = np.arange(num_tokens if start else num_tokens - 1) % runner.kv_cache.scratch
        features = runner.features(slots) if drafter.needs.features else None
        return Commit(f"warm-up {session}", epoch, start, (0,) * num_tokens, features, GREEDY, budget)

    def rounds(num_trees: int) -> Iterator[Callable[[], object]]:
        start, num_tokens = 0, 4
        while True:
            contexts = [context(session, num_trees, start, num_tokens) for session in range(num_trees)]
            yield drafter.request(contexts)
            start, num_tokens = start + num_tokens, 2

    try:
        return _measure(rounds, engine.max_num_seqs, rate=0.5)
    finally:
        drafter.release([f"warm-up {session}" for session in range(engine.max_num_seqs)])


def _measure(rounds: Callable[[int], Iterator[Callable[[], object]]], largest: int, rate: float) -> CostModel:
    """Time sizes 1, 4, 16 and so on up to `largest`: one round that does not count, then the faster of two."""
    sizes: list[int] = []
    seconds: list[float] = []
    began, size = time.perf_counter(), 1
    while len(sizes) < 2 or time.perf_counter() - began < TIME_LIMIT_S:
        works = rounds(size)
        next(works)()
        sizes.append(size)
        seconds.append(min(_seconds(next(works)), _seconds(next(works))))
        if size == largest:
            break
        size = min(4 * size, largest)
    return CostModel(sizes, seconds, rate)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
