"""An engine whose budget adapts says what plain decoding says, and drafts no more than pays. Time passes by rows."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from eyas.cache.kv_cache import KVCache
from eyas.config import EngineConfig, TreeConfig
from eyas.drafters.base import Drafter
from eyas.engine.build import assemble_engine
from eyas.engine.draft_budget import AdaptiveDraftBudget, DraftBudget, FixedDraftBudget
from eyas.engine.draft_manager import DraftManager
from eyas.engine.engine import Engine
from eyas.engine.runner import ModelRunner
from eyas.engine.scheduler import Scheduler
from eyas.errors import ConfigError
from eyas.models.attention import KVTensors
from eyas.models.inputs import PackedInputs, Segment
from eyas.models.target import TargetModel, TargetOutput, load_target
from eyas.request import Request, SamplingParams
from tests import reference
from tests.engine.drafters import KnowingDrafter, RandomDrafter

TREE = TreeConfig(num_draft_tokens=10, num_steps=3, top_k=4)
REQUESTS = [
    Request(f"{i}", (3 + i, 5, 6 + i), SamplingParams(90, temperature=0.8 * (i % 2), seed=i, ignore_eos=True))
    for i in range(4)
]


class PricedPasses:
    """The target's plain passes, on a clock of their own."""

    def __init__(self, target: TargetModel, row: float) -> None:
        self._target = target
        self._row = row
        self.now = 0.0
        self.num_rows = 0

    def clock(self) -> float:
        return self.now

    def pack(self, segments: Sequence[Segment]) -> PackedInputs:
        return self._target.pack(segments)

    def forward(self, packed: PackedInputs, pools: KVTensors) -> TargetOutput:
        self.now += 1 + self._row * len(packed.tokens)
        self.num_rows += len(packed.tokens)
        return self._target.forward(packed, pools)


class HardOfHearing(RandomDrafter):
    """Drafts for the first request alone."""

    def can_draft(self, session: str) -> bool:
        return session == REQUESTS[0].id


class Notes(FixedDraftBudget):
    """Keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: set[tuple[tuple[str, ...], int]] = set()

    def choose(self, decoding: Sequence[str], most: int, num_plain: int = 0) -> dict[str, int]:
        self.asked.add((tuple(decoding), num_plain))
        return super().choose(decoding, most, num_plain)


def priced_engine(target: TargetModel, drafter: Drafter, passes: PricedPasses, budget: DraftBudget | None = None) -> Engine:
    config = EngineConfig(max_kv_tokens=1024, draft_budget="adaptive")
    runner = ModelRunner(target, KVCache(1024, target.kv_shapes, 0, torch.float32, target.device), None, passes)
    drafting = DraftManager(drafter, runner, "match")
    scheduler = Scheduler(config, TREE, target.eos_ids)
    return Engine(scheduler, drafting, runner, 256, budget or AdaptiveDraftBudget(TREE.num_draft_tokens), passes.clock)


@pytest.fixture(scope="module")
def expected(tiny_target: str) -> dict[str, list[int]]:
    return {r.id: reference.generate(tiny_target, list(r.prompt_ids), r.sampling) for r in REQUESTS}


def run(engine: Engine) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {request.id: [] for request in REQUESTS}
    for request in REQUESTS:
        engine.submit(request)
    while engine.has_work:
        for chunk in engine.step():
            said[chunk.request_id] += chunk.token_ids
        engine.check()
    return said


def rows_once_settled(engine: Engine, passes: PricedPasses, expected: dict[str, list[int]]) -> float:
    """Rows per row of plain decoding, after some runs to learn from; all outputs are as expected."""
    for _ in range(3):
        assert run(engine) == expected
    before = passes.num_rows
    assert run(engine) == expected
    return (passes.num_rows - before) / sum(len(r.prompt_ids) + r.sampling.max_tokens for r in REQUESTS)


@pytest.mark.parametrize(("row", "least", "most"), [(0.0, 1.5, 10.0), (100.0, 0.5, 1.2)])
def test_costly_rows_stop_drafting_and_free_rows_do_not(
    row: float, least: float, most: float, tiny_target: str, expected: dict[str, list[int]]
) -> None:
    target = load_target(tiny_target)
    drafter = KnowingDrafter({r.id: [*r.prompt_ids, *expected[r.id]] for r in REQUESTS}, 48)
    passes = PricedPasses(target, row)
    assert least < rows_once_settled(priced_engine(target, drafter, passes), passes, expected) < most


def test_useless_drafts_are_no_longer_requested(tiny_target: str, expected: dict[str, list[int]]) -> None:
    target = load_target(tiny_target)
    passes = PricedPasses(target, 0.1)
    engine = priced_engine(target, RandomDrafter(48), passes)
    assert rows_once_settled(engine, passes, expected) < 1.2
    assert engine.load.tree_nodes == 1


def test_the_budget_sees_requests_without_trees(tiny_target: str, expected: dict[str, list[int]]) -> None:
    target, notes = load_target(tiny_target), Notes()
    assert run(priced_engine(target, HardOfHearing(48), PricedPasses(target, 1.0), notes)) == expected
    assert (("0",), 3) in notes.asked
    assert {decoding for decoding, _ in notes.asked} == {("0",), ()}


def test_the_setting_makes_the_budget_adapt(tiny_target: str, expected: dict[str, list[int]]) -> None:
    config = EngineConfig(max_kv_tokens=1024, draft_budget="adaptive")
    engine = assemble_engine(load_target(tiny_target), None, config, TREE, RandomDrafter(48))
    assert isinstance(engine._budget, AdaptiveDraftBudget)
    assert run(engine) == expected
    with pytest.raises(ConfigError, match="budget is 'on'; it must be one of fixed, adaptive"):
        replace(config, draft_budget="on")  # type: ignore[arg-type]
