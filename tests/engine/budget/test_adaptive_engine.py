"""An engine with an adaptive budget equals plain decoding and drafts only what pays. A fake backend takes time by rows."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eyas.api.request import Request, SamplingParams
from eyas.cache.kv_cache import KVCache
from eyas.config import AcceptanceRule, DraftingConfig, EngineConfig, TreeConfig
from eyas.drafters.base import Draft, DraftContext, Drafter, DrafterNeeds
from eyas.drafters.draft_head import DraftHead
from eyas.engine.budget.adaptive import AdaptiveDraftBudget
from eyas.engine.budget.base import DECODE_ONLY, DraftBudget, FixedDraftBudget, NextStep
from eyas.engine.budget.costs import CostModel, DraftCosts
from eyas.engine.build import assemble_engine
from eyas.engine.draft_manager import DraftManager
from eyas.engine.engine import Engine
from eyas.engine.runner import ModelRunner
from eyas.engine.scheduler import Scheduler
from eyas.errors import ConfigError
from eyas.models.inputs import PackedInputs, Segment
from eyas.models.loading import load_target
from eyas.models.target import TargetModel, TargetOutput
from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftTree
from tests.support import reference
from tests.support.bad_drafters import KnowingDrafter, RandomDrafter, StatelessDrafter
from tests.support.runs import outputs_of, run
from tests.support.tiers import nightly
from tests.support.tiny import DEMO, shared_target

TREE = TreeConfig(num_draft_tokens=10, num_steps=3, top_k=4)
REQUESTS = [
    Request(f"{i}", (3 + i, 5, 6 + i), SamplingParams(60, temperature=0.8 * (i % 2), seed=i, ignore_eos=True))
    for i in range(4)
]


class CostedBackend:
    """The target's plain passes, on a clock of their own: 1 second and `row` for each row."""

    def __init__(self, target: TargetModel, row: float) -> None:
        self._target = target
        self._row = row
        self.now = 0.0
        self.num_rows = 0

    def clock(self) -> float:
        return self.now

    def seconds(self, num_rows: int) -> float:
        return 1 + self._row * num_rows

    def pack(self, segments: Sequence[Segment]) -> PackedInputs:
        return self._target.pack(segments)

    def forward(self, packed: PackedInputs, kv_cache: KVCache) -> TargetOutput:
        self.now += self.seconds(len(packed.tokens))
        self.num_rows += len(packed.tokens)
        return self._target.forward(packed, kv_cache)


class FirstRequestDrafter(RandomDrafter):
    """Drafts for the first request alone."""

    def can_draft(self, session: str) -> bool:
        return session == REQUESTS[0].id


class SamplingDrafter(RandomDrafter):
    """Serves the rule `rejection` too."""

    can_sample = True


class RecordingBudget(FixedDraftBudget):
    """Records its calls."""

    def __init__(self) -> None:
        self.calls: set[tuple[tuple[str, ...], int]] = set()
        self.steps: list[NextStep] = []

    def choose(
        self, decoding: Sequence[str], most: int, num_plain: int = 0, step: NextStep = DECODE_ONLY
    ) -> dict[str, TreeBudget]:
        self.calls.add((tuple(decoding), num_plain))
        self.steps.append(step)
        return super().choose(decoding, most, num_plain, step)


class PausingBudget(FixedDraftBudget):
    """Lets no request draft while it pauses."""

    pauses = True

    def choose(
        self, decoding: Sequence[str], most: int, num_plain: int = 0, step: NextStep = DECODE_ONLY
    ) -> dict[str, TreeBudget]:
        found = super().choose(decoding, 1 if self.pauses else most, num_plain, step)
        return {} if self.pauses else found


class FeatureDrafter(StatelessDrafter):
    """Root-only trees; keeps the features of each session in order."""

    needs = DrafterNeeds(features=True)

    def __init__(self) -> None:
        self.features: dict[str, list[Tensor]] = {}

    def draft(self, context: DraftContext) -> Draft:
        assert context.features is not None
        self.features.setdefault(context.session, []).append(context.features)
        return DraftTree.root_only(context.tokens[-1])


def priced_engine(
    target: TargetModel, drafter: Drafter, backend: CostedBackend, budget: DraftBudget | None = None
) -> Engine:
    config = EngineConfig(max_kv_tokens=1024, draft_budget="adaptive")
    runner = ModelRunner(target, KVCache(1024, target.kv_shapes, 0, torch.float32, target.device), None, backend)
    draft_manager = DraftManager(drafter, runner, "match")
    scheduler = Scheduler(config, TREE, target.eos_ids)
    if budget is None:
        sizes = (1, 4, 16, 64)
        verify = CostModel(sizes, [backend.seconds(rows) for rows in sizes])
        free = CostModel((1, 32), (0.0, 0.0))
        budget = AdaptiveDraftBudget(TREE, verify, DraftCosts(free, free, TREE.top_k))
    return Engine(scheduler, draft_manager, runner, 256, budget, backend.clock)


@pytest.fixture(scope="module")
def expected(tiny_target: str) -> dict[str, list[int]]:
    return {r.id: reference.generate(tiny_target, list(r.prompt_ids), r.sampling) for r in REQUESTS}


def rows_once_settled(engine: Engine, backend: CostedBackend, expected: dict[str, list[int]]) -> float:
    """Rows per row of plain decoding, after some runs to adapt; all outputs are as expected."""
    for _ in range(2):
        assert outputs_of(run(engine, REQUESTS)) == expected
    before = backend.num_rows
    assert outputs_of(run(engine, REQUESTS)) == expected
    return (backend.num_rows - before) / sum(len(r.prompt_ids) + r.sampling.max_tokens for r in REQUESTS)


@pytest.mark.parametrize(("row", "least", "most"), [(0.0, 1.5, 10.0), (100.0, 0.5, 1.2)])
def test_costly_rows_stop_drafting_and_free_rows_do_not(
    row: float, least: float, most: float, tiny_target: str, expected: dict[str, list[int]]
) -> None:
    target = shared_target(tiny_target)
    drafter = KnowingDrafter({r.id: [*r.prompt_ids, *expected[r.id]] for r in REQUESTS}, 48)
    backend = CostedBackend(target, row)
    assert least < rows_once_settled(priced_engine(target, drafter, backend), backend, expected) < most


def test_useless_drafts_are_no_longer_requested(tiny_target: str, expected: dict[str, list[int]]) -> None:
    target = shared_target(tiny_target)
    backend = CostedBackend(target, 0.1)
    engine = priced_engine(target, RandomDrafter(48), backend)
    assert rows_once_settled(engine, backend, expected) < 1.2
    assert engine.load.tree_nodes == 1


def test_the_budget_sees_requests_without_trees(tiny_target: str, expected: dict[str, list[int]]) -> None:
    target, budget = shared_target(tiny_target), RecordingBudget()
    engine = priced_engine(target, FirstRequestDrafter(48), CostedBackend(target, 1.0), budget)
    assert outputs_of(run(engine, REQUESTS)) == expected
    assert (("0",), 3) in budget.calls
    assert {decoding for decoding, _ in budget.calls} == {("0",), ()}


def test_the_budget_sees_prompts(tiny_target: str) -> None:
    """Of three prompts of 200 tokens the first step computes 512 rows."""
    target, budget = shared_target(tiny_target), RecordingBudget()
    engine = priced_engine(target, RandomDrafter(48), CostedBackend(target, 1.0), budget)
    for name in ("0", "1", "2"):
        engine.submit(Request(name, (3,) * 200, SamplingParams(20, seed=0, ignore_eos=True)))
    engine.step()
    (step,) = budget.steps
    assert (step.num_prefilling, step.num_prompt_rows) == (1, 88)
    engine.step()
    assert budget.steps[-1].num_prompt_rows == 0


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_trees_adapt_on_a_cpu_by_default(acceptance: AcceptanceRule, tiny_target: str) -> None:
    config = EngineConfig(max_kv_tokens=256, max_num_seqs=2, acceptance=acceptance)
    engine = assemble_engine(shared_target(tiny_target), None, config, TREE, SamplingDrafter(48))
    assert isinstance(engine.budget, AdaptiveDraftBudget)


def test_the_setting_makes_the_budget_adapt(tiny_target: str, expected: dict[str, list[int]]) -> None:
    config = EngineConfig(max_kv_tokens=1024, draft_budget="adaptive")
    engine = assemble_engine(shared_target(tiny_target), None, config, TREE, RandomDrafter(48))
    assert isinstance(engine.budget, AdaptiveDraftBudget)
    assert outputs_of(run(engine, REQUESTS)) == expected
    with pytest.raises(ConfigError, match="budget is 'on'; it must be one of auto, fixed, adaptive"):
        replace(config, draft_budget="on")  # type: ignore[arg-type]


def test_states_are_fused_for_those_who_draft_alone(
    tiny_target: str, tiny_head: str, expected: dict[str, list[int]]
) -> None:
    """No request drafts for five steps: no prompt is sent, and nothing is fused. Later the drafter gets all features."""
    fuser = DraftHead(tiny_head, "eagle3").build_fuser(tiny_target, "float32", "cpu")
    assert fuser is not None
    target = shared_target(tiny_target, fuser.aux_hidden_state_layers)
    drafter, budget = FeatureDrafter(), PausingBudget()
    engine = assemble_engine(target, fuser, EngineConfig(max_kv_tokens=512, draft_budget="fixed"), TREE, drafter)
    engine.budget = budget
    fused: list[int] = []
    fuser.register_forward_hook(lambda module, args, output: fused.append(len(output)))
    for request in REQUESTS:
        engine.submit(request)
    for _ in range(5):
        engine.step()
    assert (fused, drafter.features) == ([], {})
    budget.pauses = False
    while engine.has_work:
        engine.step()
    features = torch.cat(drafter.features["1"])
    assert 50 < len(features) == sum(fused) // len(REQUESTS), "each once"
    tokens = torch.tensor([[*REQUESTS[1].prompt_ids, *expected["1"]]])
    with torch.inference_mode():
        model = reference.load_reference(tiny_target)
        found = model(tokens[:, : len(features)], output_hidden_states=True).hidden_states
    states = torch.cat([found[layer][0] for layer in fuser.aux_hidden_state_layers], -1)
    torch.testing.assert_close(features, fuser(states), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["eagle3", "prompt_lookup", nightly("lookahead")])
def test_the_warm_up_is_short_and_leaves_nothing_behind(method: str) -> None:
    target, head, tree = load_target(str(DEMO / "target"), aux_hidden_state_layers=(2, 4, 5)), "", TreeConfig(num_steps=5)
    if method == "eagle3":
        head = str(DEMO / "eagle3")
    fuser = DraftHead(head, method).build_fuser(str(DEMO / "target"), "float32", "cpu")
    target.set_aux_hidden_state_layers(fuser.aux_hidden_state_layers if fuser else ())
    drafter = DraftHead(head, method).build_drafter(str(DEMO / "target"), "float32", "cpu", tree, DraftingConfig())
    released: list[str] = []
    release = drafter.release
    drafter.release = lambda sessions: (released.extend(sessions), release(sessions))[1]  # type: ignore[method-assign]
    config = EngineConfig(max_kv_tokens=512, max_num_seqs=8, draft_budget="adaptive")
    engine = assemble_engine(target, fuser, config, tree, drafter)
    engine.check()
    assert engine.load.free_kv_tokens == 512
    assert len(released) == 8
    verify = engine.budget._verify  # type: ignore[attr-defined]
    assert 0 < verify.at(1) <= verify.at(1024)
    assert 2 <= len(verify.sizes) <= 12, "sizes 1, 4, 16, 32 and so on, as long as the time limit allows"
