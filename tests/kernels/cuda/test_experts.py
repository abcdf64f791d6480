"""The kernels of experts equal their definition, for experts with many pairs and with none, and rows do not affect others.

Where there is no GPU they run in triton's interpreter.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from eyas.kernels.arguments import Routing
from eyas.models.layers.experts import RoutedExperts

pytest.importorskip("triton", reason="triton is not installed")

from eyas.kernels.cuda import experts as expert_kernels
from tests.support.devices.interpreter import fixed_products

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def experts_of(num_experts: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype, activation: str) -> RoutedExperts:
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(DEVICE, dtype)

    gate_up, down = weight(num_experts, 2 * inner, hidden), weight(num_experts, hidden, inner)
    return RoutedExperts(weight(num_experts, hidden), gate_up, down, top_k, activation)


def routing_of(chosen: Tensor, num_experts: int) -> Routing:
    """Rows that chose these experts [R, K], with no shares."""
    pairs = torch.zeros(num_experts, len(chosen), dtype=torch.int32, device=DEVICE)
    counts = torch.bincount(chosen.flatten(), minlength=num_experts).int()
    for expert, count in enumerate(counts.tolist()):
        pairs[expert, :count] = torch.nonzero(chosen.flatten() == expert).flatten()
    return Routing(torch.empty(chosen.shape, device=DEVICE), pairs, counts)


def choice_of(routing: Routing) -> Tensor:
    """The experts of each row [R, K], of lists that are in the order of rows and complete."""
    chosen = torch.full_like(routing.shares, -1, dtype=torch.int64)
    for expert, count in enumerate(routing.counts.tolist()):
        pairs = routing.pairs[expert, :count].long()
        assert pairs.tolist() == sorted(set(pairs.tolist()))
        assert (chosen.flatten()[pairs] == -1).all()
        chosen.view(-1)[pairs] = expert
    assert (chosen >= 0).all()
    return chosen


def by_definition(x: Tensor, chosen: Tensor, routed: RoutedExperts) -> Tensor:
    """One pair of a row and an expert at a time."""
    out = x.new_empty(*chosen.shape, x.shape[1])
    for row, ids in enumerate(chosen.tolist()):
        for k, expert in enumerate(ids):
            gates, ups = F.linear(x[row].float(), routed.gate_up[expert].float()).to(x.dtype).chunk(2)
            gates = F.silu(gates) if routed.activation == "silu" else F.gelu(gates, approximate="tanh")
            out[row, k] = F.linear((gates * ups).float(), routed.down[expert].float()).to(x.dtype)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("activation", "hidden", "inner"), [("silu", 48, 40), ("gelu_tanh", 72, 96)])
def test_grouped_products_equal_those_of_single_pairs(dtype: torch.dtype, activation: str, hidden: int, inner: int) -> None:
    """70 rows: one expert has all of them, in three tiles, one has a few, and one has none."""
    routed = experts_of(6, 2, hidden, inner, dtype, activation)
    rows = torch.arange(70, device=DEVICE)
    x = torch.randn(70, hidden, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    chosen = torch.stack([torch.full_like(rows, 3), torch.tensor([0, 1, 4, 5], device=DEVICE)[rows % 4]], 1)
    found = expert_kernels.expert_outputs(x, routing_of(chosen, 6), routed)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found, by_definition(x, chosen, routed), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("normalises", "rounds", "has_scales"), [(True, False, False), (False, True, False), (True, False, True)]
)
def test_routing_equals_plain_operations(normalises: bool, rounds: bool, has_scales: bool) -> None:
    dtype = torch.float16 if rounds else torch.float32
    routed = experts_of(5, 3, 16, 16, dtype, "silu")
    scales = torch.linspace(0.5, 2, 5, device=DEVICE) if has_scales else None
    routed = replace(routed, normalises=normalises, rounds_weights=rounds, scales=scales)
    logits = torch.randn(9, 5, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    routing = expert_kernels.route(logits, routed)
    expected, ids = torch.topk(torch.softmax(logits.float(), -1), 3)
    if normalises:
        expected = expected / expected.sum(-1, keepdim=True)
    if scales is not None:
        expected = expected * scales[ids]
    assert choice_of(routing).tolist() == ids.tolist()
    torch.testing.assert_close(routing.shares, expected.to(dtype), rtol=1e-3 if rounds else 1e-5, atol=1e-6)


def test_routing_over_many_tiles_of_rows_and_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_kernels, "ROUTE_TILE", 16 * 4)
    logits = torch.randn(70, 9, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    routing = expert_kernels.route(logits, experts_of(9, 3, 16, 16, torch.float32, "silu"))
    expected, ids = logits.topk(3)
    assert choice_of(routing).tolist() == ids.tolist()
    torch.testing.assert_close(routing.shares, torch.softmax(expected, -1), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_equal_logits_take_the_first_and_nan_takes_no_more() -> None:
    """More pairs would take tiles from rows that are right."""
    logits = torch.zeros(3, 5, device=DEVICE)
    logits[1], logits[2, 0] = float("nan"), float("nan")
    routing = expert_kernels.route(logits, experts_of(5, 3, 16, 16, torch.float32, "silu"))
    assert choice_of(routing).tolist() == [[0, 1, 2], [0, 1, 2], [1, 2, 3]]
    assert routing.shares.isnan().all(1).tolist() == [False, True, True]


def test_a_row_gets_the_same_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        fixed_products(monkeypatch)
    routed = experts_of(4, 2, 48, 40, torch.float32, "silu")
    x = torch.randn(40, 48, generator=torch.Generator().manual_seed(3)).to(DEVICE)

    def outputs_of(rows: Tensor) -> tuple[Tensor, Tensor]:
        routing = expert_kernels.route(F.linear(x, routed.router)[rows], routed)
        return expert_kernels.expert_outputs(x[rows], routing, routed), routing.shares

    whole = outputs_of(torch.arange(40, device=DEVICE))
    for row in range(3):
        alone = outputs_of(torch.tensor([row], device=DEVICE))
        assert all(torch.equal(many[row], one[0]) for many, one in zip(whole, alone, strict=True))


def fp8_block(block_size: tuple[int, int], dtype: torch.dtype, scale_dtype: torch.dtype) -> tuple[Any, RoutedExperts]:
    """A block of Qwen3-MoE with published weights of 8 bits, and its experts with the same numbers as plain weights."""
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=192, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True
    )
    block, generator = Qwen3MoeSparseMoeBlock(config).to(DEVICE, dtype), torch.Generator().manual_seed(4)
    block.gate.weight.data.copy_(torch.randn(block.gate.weight.shape, generator=generator))
    plain, experts = RoutedExperts.of_block(block, "silu"), FP8Experts(config, block_size=block_size).to(DEVICE)
    assert plain is not None
    weights = dict[str, Tensor]()
    for name in ("gate_up", "down"):
        narrow, shape = getattr(experts, f"{name}_proj").data, getattr(experts, f"{name}_proj_scale_inv").shape
        narrow.copy_(torch.randn(narrow.shape, generator=generator))
        scales = (0.1 * torch.rand(shape, generator=generator)).to(DEVICE, scale_dtype)
        setattr(experts, f"{name}_proj_scale_inv", nn.Parameter(scales, requires_grad=False))
        wide = scales.float().repeat_interleave(block_size[0], 1).repeat_interleave(block_size[1], 2)
        weights[name] = (narrow.float() * wide[:, : narrow.shape[1], : narrow.shape[2]]).to(dtype)
    block.experts = experts
    return block, replace(plain, **weights)


@pytest.mark.parametrize(("dtype", "scale_dtype"), [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)])
def test_weights_of_8_bits_give_what_their_numbers_give(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    """192 is a block and a half."""
    block, plain = fp8_block((128, 128), dtype, scale_dtype)
    routed = RoutedExperts.of_block(block, "silu")
    assert routed is not None
    x = torch.randn(20, 192, generator=torch.Generator().manual_seed(5)).to(DEVICE, dtype)
    routing = expert_kernels.route(F.linear(x, plain.router), plain)
    found, expected = (expert_kernels.expert_outputs(x, routing, each) for each in (routed, plain))
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("block_size", "scale_dtype"), [((96, 96), torch.float32), ((128, 128), torch.float8_e8m0fnu)])
def test_experts_with_other_scales_are_left_to_their_module(block_size: tuple[int, int], scale_dtype: torch.dtype) -> None:
    """Kernels took the numbers without their scales."""
    block, _ = fp8_block(block_size, torch.float16, scale_dtype)
    assert RoutedExperts.of_block(block, "silu") is None
