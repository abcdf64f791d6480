"""Every style in the tensor-parallel plans of common families gives the whole model's logits."""

from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from eyas.cache.kv_cache import KVCache
from eyas.errors import CheckpointError
from eyas.models.inputs import Segment, pack
from eyas.models.loading import load_target
from eyas.models.parallel.shards import Shard, shard_model
from eyas.models.parallel.workers import RankInfo, Worker, start_workers
from eyas.models.target import TargetModel
from tests.models.layers.test_fused import is_fused

SIZES = {
    "vocab_size": 49, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2}
FAMILIES: dict[str, PreTrainedConfig] = {
    "biases": Qwen2Config(**SIZES),
    "norms of heads": Qwen3Config(**SIZES),
    "tied and soft-capped": Gemma2Config(**SIZES, sliding_window=4),
    "one head of keys": Qwen2Config(**{**SIZES, "num_key_value_heads": 1}),
    "fused projections": Phi3Config(**SIZES),
    "experts": MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4),
    "experts beside dense layers": Qwen3MoeConfig(
        **SIZES, **EXPERTS, num_experts=4, moe_intermediate_size=16, decoder_sparse_step=2
    ),
}


# Their weights are exact in float16, so FBGEMM multiplies by them.
IN_BFLOAT16 = {"norms of heads", "one head of keys"}
QUANTISED = ("8-bit integers", "8-bit floats", "4-bit integers")


def logits_of(target: TargetModel) -> Tensor:
    segment = Segment(np.arange(5, 14), np.arange(9), np.arange(9), np.arange(0), None, np.arange(9))
    kv_cache = KVCache(16, target.kv_shapes, 0, target.dtype, target.device)
    logits = target.forward(pack([segment], target.device), kv_cache).logits
    return target.shared_vocabulary.collect([segment], logits).logits if target.shared_vocabulary else logits


def num_weights(target: TargetModel) -> int:
    """Weights of the layers, which the ranks share; every rank holds the embeddings."""
    held = chain(target.model.named_parameters(), target.model.named_buffers())
    return sum(weight.numel() for name, weight in held if ".layers." in name)


def follow(folders: list[str], info: RankInfo) -> None:
    worker = Worker(info)
    for folder in folders:
        logits_of(load_target(folder, shard=Shard(info.rank, info.size)))
    list(worker.commands())
    worker.close()


@pytest.mark.filterwarnings("ignore")  # torchao's own
def test_sharded_families_equal_the_whole_model(tmp_path: Path) -> None:
    folders = []
    for name, config in FAMILIES.items():
        torch.manual_seed(1)
        folders.append(str(tmp_path / name))
        dtype = torch.bfloat16 if name in IN_BFLOAT16 else torch.float32
        AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folders[-1])
    folders += [write_quantised(kind, folders[0], tmp_path) for kind in QUANTISED if find_spec("torchao")]
    ranks = start_workers(RankInfo(0, 2, "cpu"), partial(follow, folders))
    try:
        for folder in folders:
            whole, shared = load_target(folder), load_target(folder, shard=Shard(0, 2))
            torch.testing.assert_close(logits_of(shared), logits_of(whole), atol=1e-5, rtol=1e-5, msg=folder)
            assert is_fused(shared), folder
            assert is_fused(whole), folder
            assert num_weights(shared) < 0.75 * num_weights(whole), folder
            if Path(folder).name in QUANTISED:
                ours, theirs = (model.model.model.layers[0].mlp.up_proj.weight.data for model in (shared, whole))
                assert type(ours) is type(theirs) is not Tensor, "a rank's part is as quantised as the whole"
    finally:
        ranks.close()


def write_quantised(kind: str, plain: str, tmp_path: Path) -> str:
    """A checkpoint with quantised linear layers."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup
    from transformers import TorchAoConfig

    schemes = {
        "8-bit integers": Int8WeightOnlyConfig(version=2),
        "8-bit floats": Float8WeightOnlyConfig(),
        "4-bit integers": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16)),
    }
    scheme: Any = TorchAoConfig(schemes[kind])
    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, quantization_config=scheme)
    model.save_pretrained(tmp_path / kind)
    return str(tmp_path / kind)


def test_a_plan_with_an_unknown_style_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["biases"])
    model.tp_plan = {"lm_head": "sequence_parallel"}
    with pytest.raises(CheckpointError, match="sequence_parallel"):
        shard_model(model, Shard(0, 2), [2, 2])
