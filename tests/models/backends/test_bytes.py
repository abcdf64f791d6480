"""Weights of 8 bits on a CPU: rounded as they are loaded, `engine.quantization: int8`, or unpacked from a GGUF file."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from eyas import LLM, SamplingParams
from eyas.cache.kv_cache import KVCache
from eyas.config import EngineConfig
from eyas.config.engine import INT8
from eyas.device.placement import check_int8
from eyas.errors import ConfigError
from eyas.kernels.arguments import BYTES, DOTS, FLOATS
from eyas.models.backends import cpu
from eyas.models.backends.packed_weights import PackedProduct, PackedWeight, in_blocks, pack_weights
from eyas.models.inputs import Segment, pack
from eyas.models.layers.fused import unfuse_layers
from eyas.models.loading import load_target
from eyas.models.target import TargetModel
from tests.support.families import FAMILIES, config_of, write_model
from tests.support.tiers import nightly
from tests.support.tiny import DEMO

pytest.importorskip("numba", reason="numba is not installed")

TARGET, HEAD = str(DEMO / "target"), str(DEMO / "eagle3")
ROUNDS_ROWS = pytest.mark.parametrize("rounds_rows", [True, False], ids=["dots", "floats"], indirect=True)
TOKENS = torch.from_numpy(np.random.default_rng(0).integers(3, 48, 21))
PROMPTS = ["import os\n\ndef main(", "class Queue:\n"]


@pytest.fixture
def rounds_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether rows are rounded too, as on a processor that adds products of bytes."""
    monkeypatch.setattr(cpu, "adds_products_of_bytes", lambda: request.param)
    return bool(request.param)


def rounded_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [..., K] whose numbers are integers times a scale, the largest of 16 times 127 of them."""
    groups = nn.functional.pad(rows, (0, -rows.shape[-1] % 16)).unflatten(-1, (-1, 16))
    largest = groups.abs().amax(-1, keepdim=True)
    integers = torch.where(largest > 0, groups * (127 / largest), 0).round()
    return (integers * (largest / 127)).flatten(-2)[..., : rows.shape[-1]]


@ROUNDS_ROWS
@pytest.mark.parametrize("sizes", [(300, 70), (48, 16), (512, 4096), (3, 5)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["bare", "biased"])
def test_rows_are_multiplied_by_the_rounded_weight(sizes: tuple[int, int], bias: bool, rounds_rows: bool) -> None:
    torch.manual_seed(0)
    layer, rows = nn.Linear(*sizes, bias=bias), torch.randn(40, sizes[0])
    rows[5] = 0
    weight = layer.weight.detach().clone()
    weight[0] = 0
    layer.weight.data = weight.clone()
    pack_weights(layer, to_bytes=True)
    if rounds_rows:
        layer.product.weight.round_rows()
    groups = nn.functional.pad(weight, (0, -sizes[0] % 16)).view(sizes[1], -1, 16)
    step = (groups.abs().amax(-1, keepdim=True) / 127).expand_as(groups).flatten(1)[:, : sizes[0]]
    assert layer.product.weight.stored == (DOTS if rounds_rows else BYTES)
    assert ((layer.weight - weight).abs() <= step * 0.5001).all()
    multiplied = rounded_rows(rows) if rounds_rows else rows
    expected = nn.functional.linear(
        multiplied, layer.weight, layer.bias if layer.product.bias is None else layer.product.bias
    )
    with torch.inference_mode():
        together = layer(rows)
        assert all(torch.equal(layer(rows[i : i + n]), together[i : i + n]) for i in (0, 7) for n in range(1, 33))
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-4)


def unpacked(kind: str, sizes: tuple[int, int]) -> torch.Tensor:
    """Return a weight as gguf unpacks it: integers times the scale of a group."""
    limit, group = {"Q4_0": (8, 32), "Q5_0": (16, 32), "Q6_K": (32, 16), "Q8_0": (127, 32)}[kind]
    integers = torch.randint(-limit, limit, (sizes[0], sizes[1] // group, group)).float()
    scales = (torch.rand(*integers.shape[:2], 1) / 100).half().float()
    if kind == "Q6_K":
        scales *= torch.randint(-128, 128, scales.shape)
    return (integers * scales).flatten(1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("sizes", [(70, 96), (16, 32), (300, 640)], ids=str)
def test_unpacked_weights_take_a_byte_and_keep_every_bit(kind: str, sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = unpacked(kind, sizes)
    product = PackedProduct(weight)
    rows = torch.randn(20, sizes[1])
    assert product.weight.stored == BYTES
    assert torch.equal(product.weight.dense, weight)
    expected = PackedProduct(weight)
    expected.weight = PackedWeight(in_blocks(weight).contiguous(), *sizes)
    assert expected.weight.stored == FLOATS
    for count in range(1, 21):
        assert torch.equal(product(rows[:count]), expected(rows[:count]))


@pytest.mark.parametrize("odd", [0.01, float("nan"), float("inf")])
def test_weights_without_common_scales_stay_floats(odd: float) -> None:
    torch.manual_seed(0)
    assert PackedWeight.of(torch.randn(70, 48)).stored == FLOATS
    weight = unpacked("Q8_0", (70, 96))
    weight[69, 95] += odd * weight.abs().max()
    packed = PackedWeight.of(weight)
    assert packed.stored == FLOATS
    torch.testing.assert_close(packed.dense, weight, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 1e-40, 3e38])
def test_rows_of_any_size_leave_the_others_as_they_are(odd: float) -> None:
    torch.manual_seed(0)
    product = PackedProduct(torch.randn(70, 48), to_bytes=True)
    product.weight.round_rows()
    rows = torch.randn(20, 48)
    expected = product(rows)
    rows[3, 7] = odd
    found = product(rows)
    assert torch.equal(found[:3], expected[:3])
    assert torch.equal(found[4:], expected[4:])
    assert bool(found[3].isfinite().all()) == (abs(odd) < 1)


def test_a_tied_embedding_reads_the_same_numbers() -> None:
    weight = PackedWeight.rounded(torch.randn(70, 48))
    tokens = torch.tensor([[3, 69], [0, 3]])
    before = weight.dense
    assert torch.equal(weight.take(tokens), before[tokens])
    weight.round_rows()
    weight.round_rows()  # of another engine over the same weights
    assert torch.equal(weight.dense, before)
    assert torch.equal(weight.take(tokens), weight.dense[tokens])
    assert weight.layout.nbytes == 80 * (48 + 3 * 4)


@torch.no_grad()
def logits_of(target: TargetModel) -> torch.Tensor:
    rows = np.arange(len(TOKENS))
    kv_cache = KVCache(len(TOKENS) + 1, target.kv_shapes, 0, target.dtype, target.device)
    segment = Segment(TOKENS.numpy(), rows, rows, np.zeros(0, np.int64), None, rows)
    return target.forward(pack([segment], target.device), kv_cache).logits


@ROUNDS_ROWS
@pytest.mark.parametrize(
    ("name", "stored"), [("llama-3", torch.bfloat16), ("gemma-2", torch.float32), ("qwen-3", torch.bfloat16)]
)
@torch.no_grad()
def test_a_model_computes_with_its_rounded_weights(
    name: str, stored: torch.dtype, rounds_rows: bool, tmp_path: Path
) -> None:
    """transformers' model gives its logits, once its weights are set to the rounded ones, and its rows are rounded."""
    kind, settings = FAMILIES[name]  # no bias of an output projection, which no kernel adds
    folder = write_model(tmp_path, config_of(kind, **settings | {"attention_bias": False}), stored)
    narrow = load_target(folder, "int8", passes="float32")
    cpu.round_rows(narrow.model, INT8, is_exact=True, is_deterministic=False)
    linear = {name: module for name, module in narrow.model.named_modules() if isinstance(module, nn.Linear)}
    assert len(linear) > 4
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = logits_of(narrow)
    exact = model(TOKENS[None]).logits[0]
    model.load_state_dict({f"{name}.weight": module.weight.clone() for name, module in linear.items()}, strict=False)
    for module in model.modules() if rounds_rows else ():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, inputs: (rounded_rows(inputs[0]),))
    expected = model(TOKENS[None]).logits[0]
    # A difference in a last bit may round a number the other way, which later rows see.
    near = ((found - expected).norm(dim=1) < 1e-3 * (found - exact).norm(dim=1)).sum()
    assert near >= (3 if rounds_rows else len(TOKENS)), near
    assert narrow.model.get_decoder().forward.__self__.stack


@pytest.mark.parametrize(
    ("kv_cache_dtype", "rounds_rows"),
    [("auto", True), nightly("auto", False), nightly("fp8_e5m2", True), nightly("fp8_e5m2", False)],
    indirect=["rounds_rows"],
)
def test_drafts_do_not_change_the_tokens(kv_cache_dtype: str, rounds_rows: bool) -> None:
    engine = EngineConfig(
        max_kv_tokens=512, quantization="int8", draft_budget="fixed", kv_cache_dtype=cast(Any, kv_cache_dtype)
    )
    plain, drafted = (LLM(TARGET, engine=engine, draft_model=head, validate_head="never") for head in ("", HEAD))
    params = [SamplingParams(max_tokens=24, temperature=t, seed=3, ignore_eos=True) for t in (0, 0.8)]
    expected, found = ([r.outputs[0] for r in llm.generate(PROMPTS, params)] for llm in (plain, drafted))
    assert [one.token_ids for one in expected] == [one.token_ids for one in found]
    assert all(one.stats.acceptance_length > 1.3 for one in found)


def test_rows_that_other_code_computes_are_not_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another shape of a pass changes a last bit of them there, and rounding would make it a hundredth."""
    monkeypatch.setattr(cpu, "adds_products_of_bytes", lambda: True)
    kind, settings = FAMILIES["llama-3"]
    target = load_target(write_model(tmp_path, config_of(kind, **settings), torch.float32), "int8", passes="float32")
    unfuse_layers(target.model)
    cpu.round_rows(target.model, INT8, is_exact=True, is_deterministic=False)
    assert target.model.lm_head.product.weight.stored == BYTES


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "are quantised by fp8 already"),
        ({"num_local_experts": 4}, "are partly of experts"),
    ],
)
def test_weights_that_cannot_be_rounded_are_named(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    kind, settings = FAMILIES["llama-3"]
    folder = Path(write_model(tmp_path, config_of(kind, **settings), torch.float32))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    (folder / "tokenizer.json").write_bytes((DEMO / "target" / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match=f"'int8', which rounds plain weights, but the ones of .* {reason}"):
        LLM(str(folder), quantization="int8")


@pytest.mark.parametrize(
    ("device", "threads", "reason"),
    [
        ("cuda:0", 1, "device is cuda:0; on a GPU, serve a checkpoint that is quantised"),
        ("cpu", 3, "torch has 3 threads; set OMP_NUM_THREADS=1"),
    ],
)
def test_places_without_such_kernels_are_refused(
    device: str, threads: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with pytest.raises(ConfigError, match=f"compiled kernels of a CPU: {reason}"):
        check_int8(device)


def test_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="quantization is 'int8'; it needs tensor_parallel_size 1"):
        EngineConfig(quantization="int8", tensor_parallel_size=2)


def test_the_weights_take_five_eighths_of_half_weights() -> None:
    sizes = [
        sum(each.nbytes for each in (*target.model.parameters(), *target.model.buffers()))
        for target in (load_target(TARGET, "int8", passes="float32"), load_target(TARGET, "float32"))
    ]
    assert sizes[0] < 0.68 * sizes[1], "an integer and a sixteenth of a scale take 10 bits, half weights 16"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("whole", [False, True])
def test_weights_that_are_not_finite_are_not_rounded_away(value: float, whole: bool) -> None:
    """Loading names them, as it does with floats."""
    weight = torch.full((32, 64), value)
    if not whole:
        weight = torch.randn(32, 64)
        weight[3, 17] = value
    for packed in (PackedWeight.of(weight), PackedWeight.rounded(weight)):
        torch.testing.assert_close(packed.dense, weight, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1e-45, 3e-43, 1e-38, 3.4e38])
def test_weights_of_any_size_are_kept_or_rounded_to_the_nearest(size: float) -> None:
    torch.manual_seed(1)
    weight = (torch.rand(32, 64) * 2 - 1) * size
    torch.testing.assert_close(PackedWeight.of(weight).dense, weight, rtol=0, atol=0)
    rounded = PackedWeight.rounded(weight).dense
    assert torch.isfinite(rounded).all()
    assert ((rounded.double() - weight.double()).abs() <= max(size / 127, 1.2e-38)).all()


def test_no_rows_of_a_weight_of_bytes_are_none() -> None:
    packed = PackedWeight.rounded(torch.randn(32, 64))
    for _ in range(2):
        assert packed.take(torch.zeros(0, dtype=torch.int64)).shape == (0, 64)
        packed.round_rows()
