"""A draft budget for a target with experts: rows cost the experts that they are the first to need."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from eyas.api.request import Request, SamplingParams
from eyas.cache.kv_cache import KVCache
from eyas.config import EngineConfig, TreeConfig
from eyas.drafters.base import DraftContext
from eyas.emulation.device import VirtualClock
from eyas.engine.budget import measuring
from eyas.engine.budget.measuring import measure_verify
from eyas.engine.build import assemble_engine
from eyas.engine.runner import ModelRunner
from eyas.models.loading import load_target
from eyas.models.target import TargetModel
from eyas.protocol.tree import DraftTree
from tests.support.bad_drafters import StatelessDrafter
from tests.support.families import config_of, write_model
from tests.support.runs import outputs_of, run
from tests.support.tiers import nightly

VOCAB, TREE = 512, TreeConfig(8, 7, 1)
# Seconds of a pass, of each expert that it reads, and of each row.
PASS_S, EXPERT_S, ROW_S = 1e-3, 2.5e-4, 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    config = config_of("qwen3_moe", **sizes, vocab_size=VOCAB, hidden_size=32, initializer_range=0.5)
    return write_model(tmp_path_factory.mktemp("experts"), config, torch.float32)


@pytest.fixture
def clocked(folder: str) -> tuple[TargetModel, VirtualClock]:
    """A target, and a clock that each pass advances by the experts that it reads."""
    target, clock = load_target(folder), VirtualClock()
    gates = [module for name, module in target.model.named_modules() if name.endswith("mlp.gate")]

    def count(gate: Any, inputs: tuple[torch.Tensor], output: Any) -> None:
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])
        best = torch.topk(rows @ gate.weight.T, 2).indices
        seconds = EXPERT_S * best.unique().numel() + PASS_S + ROW_S * len(rows)
        clock.sleep(seconds / len(gates))

    for gate in gates:
        gate.register_forward_hook(count)
    return target, clock


def table_of(target: TargetModel, clock: VirtualClock) -> Any:
    engine = EngineConfig(max_kv_tokens=600, max_num_seqs=8)
    cache = KVCache(600, target.kv_shapes, 0, target.dtype, target.device)
    return measure_verify(ModelRunner(target, cache, None), engine, TREE, clock)


def expected_seconds(rows: int) -> float:
    """Rows that are routed at random: Cascade, arXiv 2506.20675."""
    return PASS_S + ROW_S * rows + EXPERT_S * 32 * (1 - (1 - 2 / 32) ** rows)


def test_rows_are_timed_with_tokens_for_different_experts(clocked: tuple[TargetModel, VirtualClock]) -> None:
    table = table_of(*clocked)
    for rows in (1, 2, 4, 8, 12, 16, 32, 64):
        assert table.seconds(rows) == pytest.approx(expected_seconds(rows), rel=0.3)


def test_equal_tokens_would_share_their_experts(
    clocked: tuple[TargetModel, VirtualClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "different_tokens", lambda vocab_size, count: np.full(count, 3))
    assert table_of(*clocked).seconds(16) < 0.5 * expected_seconds(16)


class UnsureDrafter(StatelessDrafter):
    """Drafts chains whose tokens are right with one probability each."""

    def __init__(self, outcomes: dict[str, list[int]], right: float) -> None:
        self._outcomes, self._right, self._rng = outcomes, right, np.random.default_rng(0)

    def draft(self, context: DraftContext) -> DraftTree | None:
        if not context.budget.wants_tree:
            return None
        right = self._outcomes.get(context.session, [])[context.committed_length :][: context.budget.max_nodes - 1]
        drafted = [token if self._rng.random() < self._right else int(self._rng.integers(3, VOCAB)) for token in right]
        scores = np.log(self._right) * np.arange(len(drafted) + 1)
        parents = (0, *range(len(drafted)))
        return DraftTree.of((context.tokens[-1], *drafted), parents, tuple(scores.tolist()))


def rate_of(target: TargetModel, clock: VirtualClock, right: float | None, batch: int, num_tokens: int = 160) -> float:
    """Return tokens per second of a batch; without drafter if `right` is None."""
    params = SamplingParams(num_tokens, temperature=1.0, ignore_eos=True)
    requests = [Request(f"{i}", (3 + i, 5, 6 + i), replace(params, seed=i)) for i in range(batch)]
    config = EngineConfig(max_kv_tokens=2000, max_num_seqs=batch)
    plain = outputs_of(run(assemble_engine(target, None, config, TREE, None, clock=clock), requests))
    outcomes = {request.id: [*request.prompt_ids, *plain[request.id]] for request in requests}
    drafter = None if right is None else UnsureDrafter(outcomes, right)
    engine = assemble_engine(target, None, config, TREE, drafter, clock=clock)
    began = clock()
    assert outputs_of(run(engine, requests)) == plain
    return batch * num_tokens / (clock() - began)


@pytest.mark.parametrize(("batch", "right", "least"), [(1, 0.3, 0.98), nightly(2, 0.6, 0.98), nightly(4, 0.95, 1.5)])
def test_drafting_never_loses_on_experts(
    batch: int, right: float, least: float, clocked: tuple[TargetModel, VirtualClock]
) -> None:
    plain, drafted = (rate_of(*clocked, each, batch) for each in (None, right))
    assert drafted >= least * plain
