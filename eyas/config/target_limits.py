"""Checks of settings against a target's config.json: context, heads, quantised weights. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.config import EngineConfig
from eyas.config.engine import INT8
from eyas.config.file_values import check_source, check_values, read_json
from eyas.config.gguf_files import local_folder
from eyas.errors import CheckpointError, ConfigError

# Layers whose rows attend to the keys that an indexer chooses.
INDEXED = "indexed_attention"
# Keys of config.json for the number of experts that rows are routed to.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_target(source: str, engine: EngineConfig) -> None:
    """Check a target's config.json, and the engine's settings against it. A GGUF file is unpacked for that, once.

    A hub id passes: its files may not be here yet.

    Raises CheckpointError and ConfigError, as loading the target would.
    """
    check_source(source)
    if (folder := local_folder(source)) is None:
        return
    file = folder / "config.json"
    config = read_json(file)
    check_values(config, file)
    check_quantization(engine.quantization, config, source)
    text = text_settings(config)
    if limit := text.get("max_position_embeddings"):
        check_context(engine.max_model_len, limit, source)
    check_ranks(engine.tensor_parallel_size, text)


def text_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a target's language model, which the config.json of a multimodal checkpoint nests."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def has_experts(config: Mapping[str, Any]) -> bool:
    """Return whether a target routes rows to experts. config: its config.json."""
    text = text_settings(config)
    return any(text.get(name) for name in EXPERT_COUNTS)


def quantisation(config: Any) -> str:
    """Return what the weights of a checkpoint are quantised by, as transformers names it: torchao, fp8, ...; "" if plain.

    config: config.json, or transformers' config.
    """
    found = (
        config.get("quantization_config") if isinstance(config, Mapping) else getattr(config, "quantization_config", None)
    )
    if not found:
        return ""
    method = found.get("quant_method") if isinstance(found, Mapping) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method) or "an unnamed method")


def check_quantization(asked: str, config: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError for weights that are not quantised as `engine.quantization` says; empty takes any."""
    found = quantisation(config)
    if asked == INT8:
        if found or has_experts(config):
            reason = f"are quantised by {found} already" if found else "are partly of experts"
            raise ConfigError(
                f"quantization is 'int8', which rounds plain weights, but the ones of {source!r} {reason}; leave it out"
            )
    elif asked and asked != found:
        raise ConfigError(
            f"quantization is {asked!r}, but the weights of {source!r} are {f'quantised by {found}' if found else 'plain'}; "
            f"take a checkpoint quantised by {asked}, leave it out, or on a CPU set it to int8, which rounds plain weights"
        )


def context_limit(config: Any) -> int:
    """Return the most tokens of a context that a model is served with. config: transformers', of the model.

    With indexers these are no more than the keys that one chooses: up to there it chooses all.
    """
    limit = int(config.get_text_config().max_position_embeddings)
    return min(limit, num_chosen_keys(config) or limit)


def num_chosen_keys(config: Any) -> int:
    """Return how many keys the indexers of a model choose for a row; 0 without any. config: transformers'."""
    text = config.get_text_config()
    return int(text.index_topk) if INDEXED in (getattr(text, "layer_types", None) or ()) else 0


def check_context(max_model_len: int, limit: int, source: str) -> None:
    """Raise ConfigError for a context of more tokens than the model is made for."""
    if max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but {source!r} is made for {limit} tokens (max_position_embeddings in its "
            "config.json); lower it, or leave it out"
        )


def check_ranks(num_ranks: int, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the ranks can split the heads of a target evenly. config: its config.json."""
    heads = int(config.get("num_attention_heads") or num_ranks)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % num_ranks or not can_split_heads(kv_heads, num_ranks):
        raise CheckpointError(
            f"{num_ranks} ranks cannot share {heads} attention heads over {kv_heads} key-value heads evenly; "
            "engine.tensor_parallel_size must divide the attention heads, and divide the key-value heads or be a multiple "
            "of them"
        )


def can_split_heads(num_kv_heads: int, num_ranks: int) -> bool:
    """Return whether each rank gets whole key-value heads, or each head a whole number of ranks."""
    return num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0
