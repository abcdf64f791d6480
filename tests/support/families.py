"""Tiny random targets of every supported family, as transformers' own configs."""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GenerationConfig

from tests.support.family_configs import FAMILIES, GEMMA_4_ROPE, LONG, VOCAB, WRAPPED
from tests.support.reference import whole_class

__all__ = ["FAMILIES", "GEMMA_4_ROPE", "LONG", "VOCAB", "config_of", "write_model", "write_wrapped"]


def config_of(model_type: str, **settings: Any) -> Any:
    """A config with 3 layers, 4 query heads, 2 key-value heads and a context of 256."""
    tiny: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.25, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": 2,
    }  # fmt: skip
    return AutoConfig.for_model(model_type, **{**tiny, **copy.deepcopy(settings)})  # Mistral 4 writes into its settings


def write_model(folder: Path, config: Any, dtype: torch.dtype = torch.float32) -> str:
    """Random weights for a config, equal in every run."""
    torch.manual_seed(0)
    model = whole_class(config).from_config(config, dtype=dtype)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=[1, 7], pad_token_id=2)
    model.save_pretrained(folder)
    return str(folder)


def write_wrapped(kind: str, folder: Path) -> str:
    """A model for images with random weights, whose text part is tiny."""
    text, settings, others = WRAPPED[kind]
    path = write_model(folder, AutoConfig.for_model(kind, text_config=config_of(text, **settings).to_dict(), **others))
    if kind == "kimi_k25":  # transformers names the layers as those for images when it writes them
        file = folder / "model.safetensors"
        stored = load_file(file)
        save_file({name.replace("model.blocks.", "model.layers."): tensor for name, tensor in stored.items()}, file)
    return path
