"""What a GPU would launch and move, counted on the `meta` device. The figures are ratchets: they may only fall."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from benchmarks.gpu.measuring import llama_head
from eyas.cache.kv_cache import UNSCALED
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters import neural
from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.scoring import ScorerKind
from eyas.drafters.tree_rows import RowLayout, SlotLevels, SlotRows
from eyas.models.attention import ATTENTION_NAME, attend, register_attention
from eyas.models.cuda.backend import KernelBackend
from eyas.models.cuda.metadata import FIXED_PART, Tiling, bucket_shape, max_words, view
from eyas.models.fused import fuse_layers
from eyas.models.heads.eagle import EagleHead
from eyas.models.heads.eagle_config import tensor_shapes
from eyas.models.inputs import Segment
from eyas.models.numerics import use_float32_head
from eyas.models.target import TargetModel
from eyas.request import NoiseKey
from eyas.sampling.sampler import Draw, best_of_races, race, sample

pytest.importorskip("triton", reason="triton is not installed")

from tests.launches import META, Launch, Launches, keys_read, longest_part, recorded

VOCAB = 128256
ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def llama_8b(num_layers: int) -> TargetModel:
    """Llama 3.1 8B in bfloat16 without weights, with as many layers."""
    config: Any = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=num_layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=VOCAB, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_parameters=ROPE,
    )  # fmt: skip
    return weightless(config)


def weightless(config: Any) -> TargetModel:
    """A fused target in bfloat16 without weights."""
    register_attention()
    config._attn_implementation = ATTENTION_NAME
    architecture: Any = AutoModelForCausalLM
    num_layers = config.num_hidden_layers
    with torch.device(META):
        target = TargetModel(architecture.from_config(config, dtype=torch.bfloat16), (0, num_layers // 2, num_layers - 1))
    use_float32_head(target.model)
    assert fuse_layers(target.model)
    return target


@cache
def target_pass(num_layers: int, rows: int, fixed_part: int = 0) -> Launches:
    return pass_of(llama_8b(num_layers), rows, fixed_part)


def pass_of(target: TargetModel, rows: int, fixed_part: int = 0) -> Launches:
    """A pass of a target whose layers have 8 key-value heads of width 128."""
    num_layers, heads_per_kv = target.config.num_hidden_layers, target.config.num_attention_heads // 8
    tiling = Tiling(heads_per_kv, 8, 132, longest=8192 if fixed_part else 1 << 30, fixed_part=fixed_part)
    shape = bucket_shape(rows, 32, tiling)
    kv: Any = SimpleNamespace(
        scales=[UNSCALED] * num_layers,
        **{name: [torch.empty(1000, 8, 128, dtype=torch.bfloat16, device=META)] * num_layers for name in ("keys", "values")},
    )
    words = torch.empty(max_words(shape) + 100, dtype=torch.int32, device=META)
    with Launches() as found:
        KernelBackend(target, tiling, 0).forward(view(words, shape, shape.logits), kv)
    return found


def test_a_layer_of_the_target_launches_few_kernels() -> None:
    two, four = target_pass(2, 64), target_pass(4, 64)
    assert (four.num - two.num) / 2 <= 10, four.by_name - two.by_name


def test_deterministic_mode_launches_as_few_kernels() -> None:
    """Also where one pass holds 64 sequences; each of them took a pass by itself before."""
    normal, ours = target_pass(2, 64), target_pass(2, 64, FIXED_PART)
    assert ours.num <= normal.num, ours.by_name
    assert not {"mm", "addmm", "linear"} & set(ours.by_name), "products of a library"


def test_a_target_pass_launches_little_around_its_layers() -> None:
    two, four = target_pass(2, 64), target_pass(4, 64)
    assert two.num - (four.num - two.num) <= 23, two.by_name


def test_a_target_layer_moves_little_beside_its_products() -> None:
    two, four = target_pass(2, 64), target_pass(4, 64)
    assert (four.other_bytes - two.other_bytes) / 2 <= 30.5e6, four.bytes_by_name - two.bytes_by_name


@cache
def eagle_head() -> EagleHead:
    """An EAGLE-3 head of an 8B target without weights."""
    config = llama_head(4096, 14336, 32)
    made = {
        name: torch.empty(shape, dtype=torch.bfloat16, device=META)
        for name, shape in tensor_shapes(config).items()
        if name not in ("fc.weight", "d2t", "t2d")
    }
    with torch.device("cpu"):
        head = EagleHead(config, made, made.pop("embed_tokens.weight"), made["lm_head.weight"], 8192)
    return head.to(META)


def draft_round(sessions: int, kind: ScorerKind, num_levels: int = 8) -> Launches:
    """A captured round of levels of width 10, of 8 that there are, behind prefixes of any length."""
    tree, config = TreeConfig(60, 8, 10), DraftingConfig(max_kv_tokens=20000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neural, "tiling_on", lambda device, dtype, heads_per_kv, num_kv: Tiling(heads_per_kv, num_kv, 132))
        drafter = EagleDrafter(eagle_head(), tree, config, capture=lambda run: run)
    assert drafter._graphs is not None
    with torch.inference_mode(), Launches() as found:
        drafter._graphs.rounds[kind].stages(sessions).run(num_levels)
    return found


@pytest.mark.parametrize(("kind", "most"), [("plain", 180), ("noised", 181), ("filtered", 196)])
def test_a_draft_round_launches_few_kernels(kind: ScorerKind, most: int) -> None:
    found = draft_round(1, kind)
    assert found.num <= most, found.by_name


def test_a_round_of_small_trees_launches_fewer_levels() -> None:
    counts = [draft_round(1, "plain", num_levels).num for num_levels in (1, 2, 4, 8)]
    assert all(count <= most for count, most in zip(counts, (46, 64, 103, 180), strict=True)), counts


@pytest.mark.parametrize(("kind", "most"), [("plain", 1.55e9), ("filtered", 2.01e9)])
def test_draft_rounds_of_many_sessions_move_few_bytes(kind: ScorerKind, most: float) -> None:
    found = draft_round(64, kind)
    assert found.other_bytes <= most, found.bytes_by_name


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
            levels = levels.level(level, torch.zeros(64, 10, dtype=torch.int64))
            attend(torch.zeros(640, 32, 128, dtype=torch.bfloat16), keys, keys, levels.packed, 1.0)
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
    backend = KernelBackend(SimpleNamespace(device=cpu), tiling, 0)  # type: ignore[arg-type]
    packed, launches = backend.pack(segments), list[Launch]()
    keys = torch.zeros(1, 8, 128, dtype=torch.bfloat16)
    with recorded(launches.append):
        attend(torch.zeros(64, 32, 128, dtype=torch.bfloat16), keys, keys, packed, 1.0)
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
    draws = [Draw(replace(key, seed=row // 16), row % 16 * 6 // 16) for row in range(rows)]
    logits = torch.empty(rows, VOCAB, device=META)
    with torch.inference_mode(), Launches() as found:
        sample(logits, draws)
    assert found.num <= launches, found.by_name
    assert found.other_bytes <= times_logits * logits.nbytes, found.bytes_by_name


def test_a_rank_reads_its_logits_once_to_draw() -> None:
    draws = [Draw(NoiseKey(row // 16, 1.0), row % 16) for row in range(1024)]
    logits = torch.empty(1024, VOCAB // 4, device=META)
    with torch.inference_mode(), Launches() as found:
        race(logits, draws, VOCAB // 4, VOCAB)
    assert found.num <= 3, found.by_name
    assert found.other_bytes <= 1.1 * logits.nbytes, found.bytes_by_name
    with torch.inference_mode(), Launches() as merged:
        best_of_races(torch.empty(4, 3, 1024, dtype=torch.int32, device=META), draws, VOCAB)
    assert merged.num <= 3, merged.by_name


def test_counting_sees_a_launch_and_its_bytes() -> None:
    x = torch.empty(1000, 256, device=META)
    with Launches() as found:
        (x + x).view(-1)[:5].sum()
    assert dict(found.by_name) == {"add": 1, "sum": 1}
    assert found.other_bytes == np.prod((3, 1000, 256, 4)) + 24


SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32064}


@pytest.mark.parametrize(("family", "most"), [("phi3", 10), ("mixtral", 30), ("qwen3_moe", 27)])
def test_a_layer_of_other_families_launches_few_kernels(family: str, most: int) -> None:
    """Of Mixtral's and Qwen3-MoE's launches 7 are around the experts; the others are in transformers' module."""
    configs = [AutoConfig.for_model(family, **SIZES, num_hidden_layers=count, pad_token_id=0) for count in (2, 4)]
    two, four = (pass_of(weightless(config), 64) for config in configs)
    assert (four.num - two.num) / 2 <= most, four.by_name - two.by_name
