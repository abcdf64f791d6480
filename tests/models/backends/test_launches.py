"""What a GPU would launch and move, counted on the `meta` device. The figures are ratchets: they may only fall."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from eyas.cache.kv_cache import KVShape
from eyas.cache.state_pools import StatePools, StateShape
from eyas.cache.states import StateSizes, StateStep
from eyas.drafters.trees.rows import RowLayout, SlotLevels, SlotRows
from eyas.kernels.arguments import UNSCALED, AttentionRule, Draws
from eyas.kernels.by_device import sample, sampling_kernels
from eyas.models.backends.attention_metadata import FIXED_PART, Tiling, bucket_shape, max_words, view
from eyas.models.backends.cuda import KernelBackend, why_no_kernel
from eyas.models.inputs import PackedInputs, Segment
from eyas.models.layers.attention import attend
from eyas.models.layers.fused import fuse_layers
from eyas.models.layers.recurrent import RecurrentFunctions
from eyas.models.parallel.shards import Shard
from eyas.models.target import TargetModel
from eyas.protocol.commit import NoiseKey
from eyas.sampling.sharded import likely_logits

pytest.importorskip("triton", reason="triton is not installed")

from tests.support.devices.launches import META, Launch, Launches, keys_read, longest_part, recorded
from tests.support.weightless import VOCAB, llama, weightless

BF16 = torch.bfloat16


@cache
def target_pass(num_layers: int, rows: int, fixed_part: int = 0) -> Launches:
    return pass_of(llama(num_layers), rows, fixed_part)


def pass_of(target: TargetModel, rows: int, fixed_part: int = 0) -> Launches:
    """A pass of a target with its heads of each layer."""
    shapes, longest = target.kv_shapes, 8192 if fixed_part else 1 << 30
    tiling = Tiling(target.heads_per_kv, shapes[0].num_heads, 132, longest=longest, fixed_part=fixed_part)
    shape = bucket_shape(rows, 32, tiling)
    keys, values = ([torch.empty(1000, *s[:2], dtype=torch.bfloat16, device=META) for s in shapes] for _ in "kv")
    kv: Any = SimpleNamespace(scales=[UNSCALED] * len(shapes), keys=keys, values=values)
    words = torch.empty(max_words(shape) + 100, dtype=torch.int32, device=META)
    with Launches() as found:
        KernelBackend(target, tiling, 0).forward(view(words, shape, shape.logits), kv)
    return found


def test_a_layer_of_the_target_launches_and_moves_little() -> None:
    """A layer beside its products, and a pass around its layers."""
    two, four = target_pass(2, 64), target_pass(4, 64)
    assert (four.num - two.num) / 2 <= 10, four.by_name - two.by_name
    assert two.num - (four.num - two.num) <= 7, two.by_name
    assert (four.other_bytes - two.other_bytes) / 2 <= 30.5e6, four.bytes_by_name - two.bytes_by_name


@pytest.mark.parametrize("rows", [1, 16, 64, 1024])
def test_deterministic_mode_launches_as_few_kernels(rows: int) -> None:
    """Also where one pass holds 64 sequences; each of them took a pass by itself before."""
    normal, ours = target_pass(2, rows), target_pass(2, rows, FIXED_PART)
    assert ours.num <= normal.num, ours.by_name
    assert target_pass(4, rows, FIXED_PART).num - ours.num <= 2 * 10, "launches of two layers"
    assert not {"mm", "addmm", "linear"} & set(ours.by_name), "products of a library"


def test_draft_attention_reads_each_prefix_at_its_own_length() -> None:
    """64 sessions, one of them far longer: a level reads the keys that are there, and nothing is padded or copied."""
    lengths = [32000, *(1500 + row for row in range(63))]
    layout = RowLayout((10,) * 7, Tiling(4, 8, 132), 131072, torch.device("cpu"))
    starts = np.cumsum([0, *lengths])
    prefixes = [np.arange(start, start + length) for start, length in zip(starts[:-1], lengths, strict=True)]
    words = layout.build_words(prefixes, starts[-1] + np.arange(64 * 70).reshape(64, 70), 64)
    assert len(words) == layout.num_fixed_words(64) + sum(lengths)
    levels, launches = SlotLevels(SlotRows(layout, torch.from_numpy(words), 64)), list[Launch]()
    keys = torch.zeros(1, 8, 128, dtype=torch.bfloat16)
    with recorded(launches.append):
        for level in range(1, 8):
            levels = levels.level(level, *torch.zeros(2, 64, 10, dtype=torch.int64))
            attend(torch.zeros(640, 32, 128, dtype=torch.bfloat16), keys, keys, levels.packed, AttentionRule(1.0))
    parts = [launch for launch in launches if launch.function.__name__ == "_attend_parts"]
    assert [keys_read(launch) for launch in parts] == [sum(lengths) + 64 * 10 * level for level in range(1, 8)]
    assert max(map(longest_part, parts)) <= 32070 // 6, "one program reads much of the longest prefix"


def keys_of_a_plain_step(num_shared: int) -> int:
    """Keys that attention reads for 64 sessions with a prefix of 8,392 tokens, the first `num_shared` in common."""
    system, tiling = np.arange(num_shared), Tiling(4, 8, 132)
    segments = []
    for session in range(64):
        own = 10_000 * (session + 1) + np.arange(8393)
        prefix, one = np.concatenate([system, own[num_shared:-1]]), np.ones(1, dtype=np.int64)
        segments.append(Segment(one, 8392 * one, own[-1:], prefix, None, 0 * one))
    cpu = torch.device("cpu")
    backend = KernelBackend(SimpleNamespace(device=cpu, state_shapes={}), tiling, 0)  # type: ignore[arg-type]
    packed, launches = backend.pack(segments), list[Launch]()
    keys = torch.zeros(1, 8, 128, dtype=torch.bfloat16)
    with recorded(launches.append):
        attend(torch.zeros(64, 32, 128, dtype=torch.bfloat16), keys, keys, packed, AttentionRule(1.0))
    assert len(launches) == 2, "parts, and what combines them"
    return keys_read(launches[0])


def test_a_prefix_that_all_share_is_read_once_for_16_rows() -> None:
    assert keys_of_a_plain_step(0) == 64 * 8393
    assert keys_of_a_plain_step(8192) == 64 * 201 + 4 * 8192


@pytest.mark.parametrize(("rows", "key", "launches", "times_logits"), [
    (1024, NoiseKey(0, 1.0), 3, 1.1),
    (1024, NoiseKey(0, 1.0, top_k=50, top_p=0.9), 3, 1.1),
    (1024, NoiseKey(0), 3, 1.1),
])  # fmt: skip
def test_sampling_launches_and_moves_little(rows: int, key: NoiseKey, launches: int, times_logits: float) -> None:
    """1,024 rows: 64 trees of 16 nodes on 6 levels."""
    draws = Draws([replace(key, seed=seed) for seed in range(rows // 16)], [row % 16 * 6 // 16 for row in range(rows)], 16)
    logits = torch.empty(rows, VOCAB, device=META)
    with torch.inference_mode(), Launches() as found:
        sample(logits, draws)
    assert found.num <= launches, found.by_name
    assert found.other_bytes <= times_logits * logits.nbytes, found.bytes_by_name


def test_a_rank_reads_its_logits_once_to_draw() -> None:
    draws = Draws([NoiseKey(seed, 1.0) for seed in range(64)], [row % 16 for row in range(1024)], 16)
    logits = torch.empty(1024, VOCAB // 4, device=META)
    with torch.inference_mode(), Launches() as found:
        sampling_kernels(logits).race(logits, draws, VOCAB // 4, VOCAB)
    assert found.num <= 3, found.by_name
    assert found.other_bytes <= 1.1 * logits.nbytes, found.bytes_by_name


def test_ranks_search_for_top_p_with_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges included. A level reads the logits once; the first pass finds the largest, the last one writes."""
    exchanges = list[str]()
    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda *args, name=name: exchanges.append(name))
    draws = Draws([NoiseKey(seed, 1.0, top_p=0.9) for seed in range(64)], [row % 16 for row in range(1024)], 16)
    logits = torch.empty(1024, VOCAB // 4, device=META)
    with torch.inference_mode(), Launches() as found:
        likely_logits(logits, draws, 1, 4)
    assert exchanges == ["all_reduce"] * 9 + ["all_gather"]
    assert found.num + len(exchanges) <= 81, found.by_name
    assert found.by_name["_masses_from"] == 9
    assert found.other_bytes <= 11.1 * logits.nbytes, found.bytes_by_name


def test_a_recurrent_layer_launches_few_kernels() -> None:
    """Of a gated delta net the convolution, its activation, the recurrence, and a rounding; by operations of torch 131."""
    rows = np.arange(16)
    steps = [StateStep(1 + 2 * i, 2 + 2 * i, stash=16 * i) for i in range(4)]
    visible = np.tri(16, dtype=np.bool_)
    segments = tuple(Segment(rows, rows, rows, rows[:0], visible, rows, states=step) for step in steps)
    kv: Any = SimpleNamespace(recurrent=StatePools({0: StateShape(32, 128, 128, 1, 8192, 4)}, StateSizes(9, 64), BF16, META))
    metadata: Any = SimpleNamespace()
    ids = torch.zeros(64, dtype=torch.int64, device=META)
    packed = PackedInputs(ids, ids, ids, ids, metadata=metadata, segments=segments)
    layer = RecurrentFunctions(0)
    weight = torch.zeros(8192, 4, dtype=BF16, device=META)
    mixed = torch.zeros(1, 64, 8192, dtype=BF16, device=META)
    gates = torch.zeros(1, 64, 32, device=META)
    betas = gates.to(BF16)
    all_layers = packed.recurrent(9)
    assert all_layers.windows(4) is not all_layers.tables
    with torch.inference_mode(), Launches() as found:
        convolved = layer.convolve(mixed.mT, weight, None, "silu", packed=packed, kv_cache=kv).mT
        heads = [x.unflatten(-1, (-1, 128)) for x in convolved.split([2048, 2048, 4096], -1)]
        layer.delta_rule(*heads, gates, betas, packed=packed, kv_cache=kv)
    assert found.num <= 4, found.by_name


def test_counting_sees_a_launch_and_its_bytes() -> None:
    x = torch.empty(1000, 256, device=META)
    with Launches() as found:
        (x + x).view(-1)[:5].sum()
    assert dict(found.by_name) == {"add": 1, "sum": 1}
    assert found.other_bytes == np.prod((3, 1000, 256, 4)) + 24


SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32064}


# Heads of a published Gemma 4: wide ones in the layers of full attention, whose values are the keys.
WIDE = {
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "num_global_key_value_heads": 2,
    "global_head_dim": 512, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "hidden_size": 2816, "intermediate_size": 2112, "vocab_size": 32064,
}  # fmt: skip
GEMMA_4 = {"global_head_dim": 128, "num_global_key_value_heads": 8, "num_kv_shared_layers": 0}
GEMMA_4_EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
OWN_INPUTS = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 1000}


@pytest.mark.parametrize(("family", "most", "settings"), [
    ("phi3", 10, {}), ("mixtral", 11, {}), ("qwen3_moe", 11, {}),
    ("gemma4_text", 10, {**GEMMA_4, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}),
    ("gemma4_text", 14, {**GEMMA_4, **OWN_INPUTS}),
    ("gemma4_text", 14, {**GEMMA_4, **GEMMA_4_EXPERTS, "hidden_size_per_layer_input": 0}),
])  # fmt: skip
def test_a_layer_of_other_families_launches_few_kernels(family: str, most: int, settings: dict[str, Any]) -> None:
    """Four are of the experts: the router's product, routing, and two products. The sums around take their norms."""
    configs = [AutoConfig.for_model(family, **SIZES | settings, num_hidden_layers=n, pad_token_id=0) for n in (2, 4)]
    two, four = (pass_of(weightless(config), 64) for config in configs)
    assert (four.num - two.num) / 2 <= most, four.by_name - two.by_name


@pytest.mark.parametrize(("family", "most", "num_sums", "settings"), [
    ("mixtral", 12, 2, {}), ("qwen3_moe", 12, 2, {}),
    ("gemma4_text", 15, 3, {**GEMMA_4, **GEMMA_4_EXPERTS, "hidden_size_per_layer_input": 0}),
])  # fmt: skip
def test_a_rank_launches_one_kernel_more_for_its_experts(
    family: str, most: int, num_sums: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part of their sum. Sums over ranks are those behind attention, experts, and an MLP."""
    sums, found = list[Any](), list[Launches]()
    monkeypatch.setattr("torch.distributed.all_reduce", lambda output: sums.append(output.shape))
    for num_layers in (2, 4):
        config = AutoConfig.for_model(family, **SIZES | settings, num_hidden_layers=num_layers, pad_token_id=0)
        found.append(pass_of(weightless(config, Shard(1, 2)), 64))
    two, four = found
    assert (four.num - two.num) / 2 <= most, four.by_name - two.by_name
    assert len(sums) == (2 + 4) * num_sums


def test_wide_layers_of_gemma_4_are_fused() -> None:
    """Layers of full attention have heads 512 wide. All four have the launches of a Llama layer."""
    kinds = ["sliding_attention", "full_attention"]
    configs = [
        AutoConfig.for_model("gemma4_text", **WIDE, layer_types=kinds * n, num_hidden_layers=2 * n, pad_token_id=0)
        for n in (1, 2)
    ]
    targets = [weightless(config) for config in configs]
    assert {shape for target in targets for shape in target.kv_shapes} == {KVShape(8, 256, 256), KVShape(2, 512, 512)}
    assert not any(map(why_no_kernel, targets))
    two, four = (pass_of(target, 64) for target in targets)
    assert (four.num - two.num) / 2 <= 10, four.by_name - two.by_name


def test_layers_that_share_keys_launch_no_more() -> None:
    settings = {**GEMMA_4, **OWN_INPUTS, "layer_types": ["sliding_attention", "full_attention"] * 3}
    configs = [
        AutoConfig.for_model(
            "gemma4_text", **SIZES | settings | {"num_kv_shared_layers": n}, num_hidden_layers=6, pad_token_id=0
        )
        for n in (0, 4)
    ]
    own, shared = (pass_of(weightless(config), 64) for config in configs)
    assert shared.num <= own.num, shared.by_name - own.by_name


class OpaqueLinear(nn.Linear):
    """A quantised layer that takes one launch."""


@pytest.mark.parametrize(("names", "most"), [(("o_proj", "down_proj"), 10), (("proj",), 14)])
def test_a_layer_of_quantised_weights_launches_few_kernels(
    names: tuple[str, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 14 products are seven, as weights cannot be merged, and queries, keys and values are copied side by side."""

    def fuse(model: Any) -> bool:
        for name, module in model.named_modules():
            if name.endswith(names):
                module.__class__ = OpaqueLinear
        return fuse_layers(model)

    monkeypatch.setattr("tests.support.weightless.fuse_layers", fuse)
    two, four = (pass_of(llama(count), 64) for count in (2, 4))
    assert (four.num - two.num) / 2 <= most, four.by_name - two.by_name


def test_experts_of_8_bits_launch_as_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published blocks with scales. transformers' module takes 20 launches beside its products."""

    def fuse(model: Any) -> bool:
        for module in model.modules():
            if isinstance(module, Qwen3MoeSparseMoeBlock):
                with META:
                    module.experts = FP8Experts(model.config, block_size=(128, 128))
        return fuse_layers(model)

    monkeypatch.setattr("tests.support.weightless.fuse_layers", fuse)
    configs = [AutoConfig.for_model("qwen3_moe", **SIZES, num_hidden_layers=n, pad_token_id=0) for n in (2, 4)]
    two, four = (pass_of(weightless(config), 64) for config in configs)
    assert (four.num - two.num) / 2 <= 11, four.by_name - two.by_name
