"""Drafters of every kind at the sizes of Llama 3.1 8B without weights, on the `meta` device, and commits for them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.gpu.measuring import llama_head
from eyas.config import DraftingConfig, DraftModelConfig, MedusaConfig, MethodsConfig, TreeConfig
from eyas.drafters import neural
from eyas.drafters.block import BlockDrafter
from eyas.drafters.draft_model import ModelDrafter
from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.multi_head import MultiHeadDrafter
from eyas.drafters.neural import NeuralDrafter
from eyas.drafters.peagle import PEagleDrafter
from eyas.drafters.trees.growth import StaticTree
from eyas.models.backends.attention_metadata import Tiling
from eyas.models.heads import block, block_layers
from eyas.models.heads.block import BlockHead, serve
from eyas.models.heads.block_config import BlockHeadConfig
from eyas.models.heads.eagle import EagleHead
from eyas.models.heads.eagle_config import EagleHeadConfig, HeadWiring, tensor_shapes
from eyas.models.heads.hydra import HydraHead, HydraMLP
from eyas.models.heads.medusa import MedusaHead
from eyas.models.layers.attention import ATTENTION_NAME, register_attention
from eyas.models.layers.fused import fuse_layers
from eyas.models.layers.numerics import use_float32_head
from eyas.models.parallel.shards import Shard, shard_model
from eyas.models.supported import inspect_architecture
from eyas.models.target import TargetModel
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from tests.support.devices.launches import META

HIDDEN, VOCAB, DRAFT_VOCAB, NUM_HEADS = 4096, 128256, 32000, 4
TREE = TreeConfig(60, 8, 10)
CONFIG = DraftingConfig(max_kv_tokens=40000)
METHODS = (
    "eagle1", "eagle2", "eagle3", "peagle", "dspark", "dspark-rnn", "dflash", "dflash2", "medusa", "medusa-dynamic", "hydra",
    "sps",
)  # fmt: skip

ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def drafter_of(method: str, tree: TreeConfig = TREE, config: DraftingConfig = CONFIG) -> NeuralDrafter[Any]:
    """A drafter whose rounds are those that a GPU captures. What would be captured runs at once."""

    def capture(run: Callable[[], Any]) -> Callable[[], Any]:
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neural, "tiling_on", lambda device, dtype, heads_per_kv, num_kv: Tiling(heads_per_kv, num_kv, 132))
        if method.startswith(("dspark", "dflash")):
            return BlockDrafter(block_head(method), tree, config, capture)
        if method == "peagle":
            return PEagleDrafter(eagle_head(method), tree, config, capture)
        if "eagle" in method:
            plan = StaticTree(MethodsConfig().eagle1.tree_choices, META) if method == "eagle1" else None
            return EagleDrafter(eagle_head(method), tree, config, plan, capture, num_grown_slots=1000)
        if method == "sps":
            return ModelDrafter(llama(2, 2048, 8192, 32), tree, config, DraftModelConfig(), capture)
        shape = MedusaConfig("dynamic") if method.endswith("dynamic") else MedusaConfig()
        return MultiHeadDrafter(multi_head(method.removesuffix("-dynamic")), tree, config, shape, capture)


def llama(num_layers: int, hidden: int = HIDDEN, intermediate: int = 14336, num_heads: int = 32) -> TargetModel:
    """A fused Llama 3 in bfloat16, by default as wide as that of 8B."""
    config: Any = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=num_layers, num_attention_heads=num_heads,
        num_key_value_heads=8, vocab_size=VOCAB, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_parameters=ROPE,
    )  # fmt: skip
    return weightless(config)


def weightless(config: Any, shard: Shard | None = None) -> TargetModel:
    """A fused target in bfloat16, or a rank's part of it."""
    register_attention()
    config._attn_implementation = ATTENTION_NAME
    architecture: Any = AutoModelForCausalLM
    num_layers = config.num_hidden_layers
    with torch.device(META):
        model = architecture.from_config(config, dtype=torch.bfloat16)
        found = inspect_architecture(config)
        if shard is not None:
            shard_model(model, shard, [shape.num_heads for shape in found.kv_shapes])
        target = TargetModel(model, (0, num_layers // 2, num_layers - 1), shard, found)
    use_float32_head(target.model)
    assert fuse_layers(target.model)
    return target


@cache
def eagle_head(method: str) -> EagleHead:
    """A head of one layer; P-EAGLE's has four."""
    config: EagleHeadConfig = llama_head(HIDDEN, 14336, 32)
    if method in ("eagle1", "eagle2"):
        config = replace(config, kind="eagle", draft_vocab_size=VOCAB, wiring=HeadWiring((32,), output="bare"))
    if method == "peagle":
        config = replace(config, kind="peagle", num_layers=4, mask_token_id=5, depth=8)
    shapes = {name: shape for name, shape in tensor_shapes(config).items() if name not in ("d2t", "t2d")}
    made = {name: torch.empty(shape, dtype=torch.bfloat16, device=META) for name, shape in shapes.items()}
    if config.kind == "eagle3":
        del made["fc.weight"]
    embedding = made.pop("embed_tokens.weight", torch.empty(VOCAB, HIDDEN, dtype=torch.bfloat16, device=META))
    lm_head = made.get("lm_head.weight", embedding)
    with torch.device("cpu"):
        head = EagleHead(config, made, embedding, lm_head, 8192)
    return head.to(META)


@cache
def block_head(method: str) -> BlockHead:
    """A head of three layers; DSpark's with a Markov head of rank 256."""
    config = BlockHeadConfig(
        kind="dspark", target_hidden=HIDDEN, hidden=HIDDEN, intermediate=14336, num_heads=32, num_kv_heads=8, head_dim=128,
        rms_norm_eps=1e-6, num_target_layers=32, num_layers=3, vocab_size=VOCAB, draft_vocab_size=VOCAB, block_size=8,
        mask_token_id=2, rotary={"rope_theta": 10000.0, "rope_type": "default"}, max_positions=8192,
        wiring=HeadWiring((2, 16, 29), sample_from_anchor=True), windows=(None, None, None), markov_rank=256,
        markov_kind="rnn" if method == "dspark-rnn" else "vanilla",
    )  # fmt: skip
    if method.startswith("dflash"):
        wiring = HeadWiring((2, 16, 29))
        config = replace(config, kind="dflash", block_size=9, wiring=wiring, markov_rank=0)
    if method == "dflash2":
        config = replace(config, kind="dflash2", conv_kernel=2, selector_rank=256)
    with pytest.MonkeyPatch.context() as patch, torch.device(META):
        for module in (block, block_layers):
            patch.setattr(module, "empty_linear", torch.nn.Linear)
        return serve(BlockHead(config, 8192).to(torch.bfloat16))


@cache
def multi_head(method: str) -> MedusaHead | HydraHead:
    """Four heads of a layer each over the whole vocabulary."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)

    ids = torch.arange(VOCAB, device=META)
    if method == "medusa":
        return MedusaHead(
            [empty(NUM_HEADS, HIDDEN, HIDDEN)], [empty(NUM_HEADS, 1, HIDDEN)], empty(NUM_HEADS, VOCAB, HIDDEN), ids
        )
    heads = [
        HydraMLP([(empty(2 * HIDDEN, (i + 2) * HIDDEN), empty(2 * HIDDEN))], empty(VOCAB, HIDDEN), None)
        for i in range(NUM_HEADS)
    ]
    return HydraHead(heads, empty(VOCAB, HIDDEN), ids)


def commits(drafter: NeuralDrafter[Any], lengths: Sequence[int], count: int) -> list[Commit]:
    """Admitted commits of `count` tokens each, of sessions with prefixes of these lengths."""
    found = []
    for number, length in enumerate(lengths):
        for start, end in ((0, length), (length, length + count)):
            features = torch.empty(end - start - (not start), drafter.needs.feature_size, dtype=torch.bfloat16)
            context = Commit(f"{number}", 0, start, (5,) * (end - start), features, NoiseKey(0), TreeBudget(60, 8))
            assert drafter._admit([context]) == ([None], [0])
        found.append(context)
    return found
