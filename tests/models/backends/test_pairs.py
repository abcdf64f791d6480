"""Weights of bfloat16 on a CPU with matrix units, by rows that are rounded to it.

Vectors multiply as the units do. So all of this runs on processors without units, too; with them, both are compared.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from eyas import LLM, SamplingParams
from eyas.cache.kv_cache import KVCache
from eyas.config import EngineConfig
from eyas.kernels.arguments import HALVES, PAIRS
from eyas.models.backends import cpu
from eyas.models.backends.packed_weights import PackedProduct, PackedWeight, has_fbgemm, packed_weight, runs_kernel
from eyas.models.inputs import Segment, pack
from eyas.models.layers.fused import unfuse_layers
from eyas.models.loading import load_target
from eyas.models.target import TargetModel
from tests.support.families import FAMILIES, config_of, write_model
from tests.support.tiny import DEMO

pytestmark = pytest.mark.skipif(
    not (runs_kernel(torch.float16) and has_fbgemm()), reason="kernels need numba, and a processor that converts float16"
)

TARGET, HEAD = str(DEMO / "target"), str(DEMO / "eagle3")
TOKENS = torch.from_numpy(np.random.default_rng(0).integers(3, 48, 21))


@pytest.fixture(autouse=True)
def round_rows_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round rows on every processor."""
    monkeypatch.setattr(cpu, "multiplies_tiles", lambda: True)


def paired(sizes: tuple[int, int]) -> tuple[PackedProduct, torch.Tensor, torch.Tensor]:
    """Return a product whose weight is stored as pairs, the weight [N, K] and the bias."""
    torch.manual_seed(0)
    weight = torch.randn(*sizes).bfloat16()
    bias = torch.randn(sizes[0])
    product = PackedProduct(weight, bias)
    product.weight.round_rows()
    return product, weight.float(), bias


@pytest.mark.parametrize("sizes", [(70, 96), (16, 32), (640, 2048), (2048, 320)], ids=str)
def test_rounded_rows_are_multiplied_alike_in_any_pass(sizes: tuple[int, int]) -> None:
    product, weight, bias = paired(sizes)
    assert product.weight.stored == PAIRS
    rows = torch.randn(70, sizes[1])
    rows[5] = 0
    expected = nn.functional.linear(rows.bfloat16().double(), weight.double(), bias.double()).float()
    together = product(rows)
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    for first in (0, 7, 33):
        assert all(torch.equal(product(rows[first : first + n]), together[first : first + n]) for n in range(1, 38))
    assert product(rows[:0]).shape == (0, sizes[0])


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 1e37, 3.4e38])
def test_rows_of_any_size_leave_the_others_as_they_are(odd: float) -> None:
    product, *_ = paired((48, 64))
    for count in (2, 20):  # vectors, and units where there are some
        rows = torch.randn(count, 64)
        expected = product(rows)
        rows[1, 7] = odd
        found = product(rows)
        assert torch.equal(found[:1], expected[:1])
        assert torch.equal(found[2:], expected[2:])
        assert bool(found[1].isfinite().all()) == (odd == 1e37)


def test_pairs_hold_the_numbers_of_the_halves() -> None:
    weight = (torch.randn(70, 96) * 1e-6).bfloat16()  # float16 holds it times a power of two
    packed = PackedWeight.of(weight)
    tokens = torch.tensor([[3, 69], [0, 3]])
    assert packed.stored == HALVES
    assert packed.scale > 1
    memory = packed.layout.data_ptr()
    packed.round_rows()
    assert packed.layout.data_ptr() == memory
    assert torch.equal(packed.dense, weight.float())
    assert torch.equal(packed.take(tokens), weight.float()[tokens])


def test_a_library_multiplies_by_pairs_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    product = PackedProduct((torch.randn(70, 96) * 1e-6).bfloat16())
    product.weight.round_rows()
    rows = torch.randn(5, 96).bfloat16().float()
    expected = product(rows)
    monkeypatch.setattr("eyas.models.backends.packed_weights.runs_compiled", lambda device: False)
    torch.testing.assert_close(product(rows), expected, rtol=1e-4, atol=1e-10)


@pytest.mark.parametrize(
    "weight", [torch.ones(32, 48).bfloat16(), torch.full((32, 64), 1.001).half(), torch.ones(0, 64).bfloat16()],
    ids=["a step and a half", "no bfloat16 numbers", "empty"],
)  # fmt: skip
def test_other_weights_stay_halves(weight: torch.Tensor) -> None:
    packed = PackedWeight.of(weight)
    packed.round_rows()
    assert packed.stored == HALVES
    assert torch.equal(packed.dense, weight.float())


def loaded(tmp_path: Path, name: str = "llama-3") -> tuple[TargetModel, str]:
    """Return a target with weights of bfloat16, and its folder. Layers have whole steps."""
    kind, settings = FAMILIES[name]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "attention_bias": False}
    folder = write_model(tmp_path, config_of(kind, **settings | sizes), torch.bfloat16)
    return load_target(folder, "bfloat16", passes="float32"), folder


def stored_kinds(target: TargetModel) -> set[int]:
    """Return how the weights of linear layers are stored."""
    return {weight.stored for module in target.model.modules() if (weight := packed_weight(module))}


@pytest.mark.parametrize("name", ["llama-3", "gemma-2", "qwen-3"])
@torch.no_grad()
def test_a_model_computes_with_rounded_rows(name: str, tmp_path: Path) -> None:
    """transformers' model in float32 gives its logits, once its linear layers round their rows."""
    target, folder = loaded(tmp_path, name)
    cpu.round_rows(target.model, target.weight_dtype, is_exact=True, is_deterministic=True)
    assert stored_kinds(target) == {PAIRS}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    exact = model(TOKENS[None]).logits[0]
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, inputs: (inputs[0].bfloat16().float(),))
    expected = model(TOKENS[None]).logits[0]
    rows = np.arange(len(TOKENS))
    kv_cache = KVCache(len(TOKENS) + 1, target.kv_shapes, 0, target.dtype, target.device)
    segment = Segment(TOKENS.numpy(), rows, rows, np.zeros(0, np.int64), None, rows)
    found = target.forward(pack([segment], target.device), kv_cache).logits
    # A difference in a last bit may round a number the other way, which later rows see.
    near = ((found - expected).norm(dim=1) < 0.1 * (found - exact).norm(dim=1)).sum()
    assert near >= 3, near


@pytest.mark.parametrize(("is_deterministic", "kinds"), [(False, {PAIRS}), (True, {HALVES})])
def test_other_code_rounds_rows_unless_they_must_be_equal(is_deterministic: bool, kinds: set[int], tmp_path: Path) -> None:
    target, _ = loaded(tmp_path)
    unfuse_layers(target.model)
    cpu.round_rows(target.model, target.weight_dtype, False, is_deterministic)
    assert stored_kinds(target) == kinds


@pytest.mark.parametrize("settings", [{}, {"layer_threads": 2}, {"deterministic": True}], ids=str)
def test_drafts_do_not_change_the_tokens(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.models.placement.multiplies_tiles", lambda: True)
    engine = EngineConfig(max_kv_tokens=512, draft_budget="fixed", **settings)
    same: dict[str, Any] = {"engine": engine, "dtype": "bfloat16", "validate_head": "never"}
    plain, drafted = (LLM(TARGET, draft_model=head, **same) for head in ("", HEAD))
    assert stored_kinds(plain.llm_engine.runner.target) == {PAIRS}
    prompts = ["import os\n\ndef main(", "class Queue:\n", "def test_a("]
    params = [SamplingParams(max_tokens=24, temperature=t, seed=3, ignore_eos=True) for t in (0, 0.8, 1.3)]
    expected, found = ([r.outputs[0] for r in llm.generate(prompts, params)] for llm in (plain, drafted))
    assert [one.token_ids for one in expected] == [one.token_ids for one in found]
    assert all(one.stats.acceptance_length > 1.3 for one in found[:2])
