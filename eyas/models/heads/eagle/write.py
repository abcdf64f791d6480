"""Writes EAGLE heads in the layout of their first publication: config and tensors in, a folder that all loaders read out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from eyas.models.checkpoint import RECORD, take
from eyas.models.heads.eagle.config import HeadConfig
from eyas.models.heads.eagle.layout import layout, optional


def write_head(folder: Path, config: HeadConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors. Raises CheckpointError for tensors that `config` does not imply."""
    take(tensors, layout(config), optional(config), folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings(config), indent=1) + "\n")


def settings(c: HeadConfig) -> dict[str, Any]:
    """The head's config.json. What only Eyas has a word for stands in its own record."""
    rotary = dict(c.rotary)
    found = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": c.hidden,
        "intermediate_size": c.intermediate,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_positions,
        "rope_theta": rotary.pop("rope_theta"),
        "rope_scaling": rotary if rotary["rope_type"] != "default" else None,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": c.qkv_bias,
    }
    return found | (_eagle3(c) if c.kind == "eagle3" else {"bias": c.fc_bias})


def _eagle3(c: HeadConfig) -> dict[str, Any]:
    found = {
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden,
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
        "norm_before_residual": c.reading.norm_before_residual,
        "norm_before_fc": c.input_norms == "joint",
        "fc_norm": c.input_norms == "each",
        "norm_output": c.reading.output == "normed",
    }
    return found | ({RECORD: asdict(c.reading)} if c.reading.output == "bare" else {})
