"""`eyas check equality`: equal outputs pass, near ties are explained, anything else is a failure."""

import pytest
import torch
from typer.testing import CliRunner

from eyas.bench.equality import DivergenceExplainer, ReplayDrafter, compare
from eyas.bench.offline import BenchParts, engine_contenders
from eyas.bench.settings import OfflineSettings
from eyas.cache.kv_cache import KVCache
from eyas.cli.main import app
from eyas.config import EngineConfig, TreeConfig
from eyas.kernels.arguments import Draws, KVScales
from eyas.kernels.by_device import sample
from eyas.models.inputs import PackedInputs
from eyas.models.loading import load_target
from eyas.models.target import TargetModel, TargetOutput
from eyas.progress import Progress
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from tests.support.reference import load_reference

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "max_tokens": 24,
    "batches": (8,),
    "tree": TreeConfig(num_draft_tokens=9, num_steps=4, top_k=4),
    "draft_budget": "fixed",
}
PROMPT = (5, 9, 11)


def settings_for(target: str, temperature: float = 0.0, **changes: object) -> OfflineSettings:
    return OfflineSettings(target, temperatures=(temperature,), **{**SETTINGS, **changes})  # type: ignore[arg-type]


def test_replayed_trees_are_accepted_as_deep_as_they_are(tiny_target: str) -> None:
    result = compare(settings_for(tiny_target), EngineConfig(), Progress())
    assert result.holds
    assert [c.divergence for c in result.comparisons] == [None] * 8
    assert result.stats.acceptance_length > 4
    assert result.stats.num_drafted > result.stats.num_accepted


@pytest.mark.parametrize(
    ("options", "num_prompts"),
    [
        (["--num-prompts", "3"], 3),
        (["--temperature", "0.8"], 8),
        (["--deterministic"], 8),
        (["--dtype", "bfloat16", "--deterministic"], 8),
    ],
)
def test_the_command_finds_a_target_equal(options: list[str], num_prompts: int, tiny_target: str, tiny_head: str) -> None:
    base = ["check", "equality", "--model", tiny_target, "--draft-model", tiny_head, "--max-tokens", "8"]
    ran = CliRunner().invoke(app, [*base, *options])
    assert ran.exit_code == 0, ran.output
    assert f"{num_prompts} of {num_prompts} equal, 0 explained by rounding, 0 not explained" in ran.output


def test_both_engines_take_the_scales_of_the_checkpoint(tiny_target: str) -> None:
    target = load_target(tiny_target)
    target.kv_scales = [KVScales(0.5, 2.0)] * len(target.kv_shapes)
    parts = BenchParts(target, None, ReplayDrafter(target.vocab_size))
    config = EngineConfig(max_kv_tokens=64, kv_cache_dtype="fp8")
    engines = [contender.engine for contender in engine_contenders(settings_for(tiny_target), parts, config).values()]
    assert [engine.runner.kv_cache.scales for engine in engines] == [target.kv_scales] * 2


def test_a_target_whose_output_depends_on_its_trees_fails(tiny_target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TargetModel.forward

    def wrong(self: TargetModel, packed: PackedInputs, kv_cache: KVCache) -> TargetOutput:
        out = forward(self, packed, kv_cache)
        bump = 5.0 * (torch.arange(48) == 7) * (len(out.logits) > 8)
        return TargetOutput(out.logits + bump, out.aux_hidden_states)

    monkeypatch.setattr(TargetModel, "forward", wrong)
    ran = CliRunner().invoke(app, ["check", "equality", "--model", tiny_target, "--max-tokens", "12"])
    assert ran.exit_code == 1, ran.output
    assert "DIFFERS" in ran.output


def test_a_missing_checkpoint_is_a_usage_error_not_a_difference() -> None:
    ran = CliRunner().invoke(app, ["check", "equality", "--model", "./nowhere"])
    assert ran.exit_code == 2
    assert "no checkpoint folder" in ran.output


@torch.inference_mode()
def logits_after(folder: str, tokens: tuple[int, ...]) -> torch.Tensor:
    return load_reference(folder)(input_ids=torch.tensor([tokens])).logits[0, -1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_difference_is_measured_where_it_happens(temperature: float, tiny_target: str) -> None:
    """The token that the engine draws scores highest, and the first difference is explained."""
    logits = logits_after(tiny_target, (*PROMPT, 20, 21))
    (drawn,) = sample(logits[None], Draws([NoiseKey(3, temperature)], [5])).tolist()
    other = (drawn + 1) % 48
    found = DivergenceExplainer(settings_for(tiny_target, temperature)).divergence(
        PROMPT, 3, (20, 21, drawn, 1), (20, 21, other, 2)
    )
    assert found is not None
    assert (found.position, found.plain, found.speculative) == (2, drawn, other)
    assert found.token_gap >= found.top_gap > 0
    assert not found.explained
    if temperature == 0:
        assert found.top_gap == pytest.approx(float(logits.topk(2).values.diff().abs()), rel=1e-4)
        assert found.token_gap == pytest.approx(float(logits[drawn] - logits[other]), rel=1e-4)


def test_tokens_within_the_rounding_of_the_dtype_are_explained(tiny_target: str) -> None:
    logits = logits_after(tiny_target, PROMPT)
    best, second = logits.topk(2).indices.tolist()
    gap = float(logits[best] - logits[second])
    for dtype in ("float32", "bfloat16"):
        found = DivergenceExplainer(settings_for(tiny_target, dtype=dtype)).divergence(PROMPT, 0, (best,), (second,))
        assert found is not None
        assert found.margin == pytest.approx(
            2 * torch.finfo(getattr(torch, dtype)).eps * float(logits.abs().max()), rel=1e-4
        )
        assert found.explained == (gap <= found.margin)


def test_a_replayed_tree_fits_any_budget() -> None:
    drafter = ReplayDrafter(48)
    drafter.set_outputs({"a": tuple(range(10, 40))})
    for nodes in range(1, 12):
        for depth in range(5):
            commit = Commit("a", 0, 0, tuple(range(10, 14)), None, NoiseKey(0), TreeBudget(nodes, depth))
            (tree,) = drafter.propose([commit])
            tree.validate(13, 48, nodes, depth)
            assert tree.depth == min(depth, (nodes - 1) // 2)
