"""Tiny random targets of every supported family, as transformers' own configs."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

VOCAB = 48
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [3.0, 4.0, 6.0, 8.0],
}
LOCAL = {"sliding_window": 12}
MIXED = {**LOCAL, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts_per_tok": 2}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


SCALED = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
GEMMA_4_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
GEMMA_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}

# name: (model type, settings beside the tiny ones)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("llama", {"num_key_value_heads": 4}),
    "llama-3": ("llama", {**SCALED, "attention_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "rope-linear": ("llama", rope("linear", factor=4.0)),
    "rope-yarn": ("llama", YARN),
    "rope-dynamic": ("llama", rope("dynamic", factor=4.0)),
    "mistral": ("mistral", {**LOCAL, "head_dim": 16}),
    "qwen-2": ("qwen2", {**LOCAL, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen-3": ("qwen3", {"head_dim": 16}),
    "phi-3": ("phi3", LOCAL),
    "gemma-2": ("gemma2", {**MIXED, "head_dim": 16, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0,
                           "final_logit_softcapping": 3.0}),
    "gemma-3": ("gemma3_text", {**MIXED, **GEMMA_ROPE, "head_dim": 16}),
    "gemma-4": ("gemma4_text", {**MIXED, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1,
                                "attention_k_eq_v": False, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
                                "vocab_size_per_layer_input": VOCAB}),
    "gemma-4-e2b": ("gemma4_text", {**LOCAL, **GEMMA_4_ROPE, "head_dim": 8, "global_head_dim": 16,
                                    "num_global_key_value_heads": 1, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
                                    "layer_types": ["sliding_attention", "full_attention"] * 3, "use_double_wide_mlp": True,
                                    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}),
    "qwen-3-moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32}),
    "hunyuan-moe": ("hunyuan_v1_moe", {"head_dim": 8, "num_experts": 4, "moe_topk": 2}),
    "gpt-2": ("gpt2", {"n_positions": 256}),
    "mixtral": ("mixtral", {**EXPERTS, "num_local_experts": 4}),
}  # fmt: skip


def config_of(model_type: str, **settings: Any) -> Any:
    """A config with 3 layers, 4 query heads, 2 key-value heads and a context of 256."""
    tiny: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.25, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": 2,
    }  # fmt: skip
    return AutoConfig.for_model(model_type, **{**tiny, **settings})


def write_model(folder: Path, config: Any, dtype: torch.dtype = torch.float32) -> str:
    """Random weights for a config, equal in every run."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=[1, 7], pad_token_id=2)
    model.save_pretrained(folder)
    return str(folder)
