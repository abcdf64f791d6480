"""Loads EAGLE heads strictly, and writes them in the layout of their first publication, which all loaders read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas.errors import CheckpointError
from eyas.models.checkpoint import (
    WIRING_KEY,
    check_device,
    check_tensors,
    get_int,
    read_embedding,
    read_lm_head,
    read_target_config,
    read_tensor,
    read_tensors,
    resolve,
    tensor_names,
)
from eyas.models.cpu import optimize_for_cpu
from eyas.models.heads.eagle import Eagle1Head, Eagle3Head, EagleHead
from eyas.models.heads.eagle_config import (
    EagleHeadConfig,
    HeadWiring,
    Kind,
    canonical_name,
    fuser_shapes,
    optional_tensors,
    read_head_config,
    tensor_shapes,
)
from eyas.models.heads.layers import LinearFuser, NormedFuser


def load_head(
    path_or_id: str,
    target: str,
    dtype: str = "float32",
    device: str = "cpu",
    kind: Kind = "eagle3",
    wiring: HeadWiring | None = None,
) -> EagleHead:
    """Load a head, with the target's embedding and lm_head where it has none of its own.

    wiring: replaces what its config says. Raises CheckpointError for tensors that are missing, left over or of another shape
    than the two configs imply.
    """
    check_device(dtype, device)
    folder, target_folder = resolve(path_or_id), resolve(target)
    target_config = read_target_config(target_folder)
    config = _read_config(folder, target_config, kind, wiring)
    expected = tensor_shapes(config)
    tensors = {_known_name(name, kind, expected): tensor for name, tensor in read_tensors(folder).items()}
    check_tensors(tensors, expected, optional_tensors(config), folder)
    if "d2t" in tensors:
        _check_draft_vocabulary(config, tensors, folder)
    embedding, lm_head = tensors.pop("embed_tokens.weight", None), tensors.pop("lm_head.weight", None)
    embedding = read_embedding(target_folder) if embedding is None else embedding
    lm_head = read_lm_head(target_folder) if lm_head is None else lm_head
    to = getattr(torch, dtype)
    cast = {name: tensor.to(to) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    max_model_len = get_int(target_config, "max_position_embeddings", target_folder)
    make = Eagle3Head if kind == "eagle3" else Eagle1Head
    head = make(config, cast, embedding.to(to), lm_head.to(to), max_model_len).to(torch.device(device))
    optimize_for_cpu(head)
    return head


def load_fuser(
    path_or_id: str, target: str, dtype: str = "float32", device: str = "cpu", wiring: HeadWiring | None = None
) -> LinearFuser:
    """Load only the part of an EAGLE-3 head that runs beside the target: fc and the norms before it.

    Raises CheckpointError.
    """
    folder = resolve(path_or_id)
    config = _read_config(folder, read_target_config(resolve(target)), "eagle3", wiring)
    expected = fuser_shapes(config)
    files = {canonical_name(name, "eagle3"): name for name in tensor_names(folder)}
    tensors = {name: read_tensor(folder, (files[name],)) for name in expected if name in files}
    check_tensors(tensors, expected, (), folder)
    cast = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    weight, bias, layers = cast["fc.weight"], cast.get("fc.bias"), config.aux_hidden_state_layers
    if config.input_norms == "none":
        return LinearFuser(weight, layers, bias).to(torch.device(device))
    norms = torch.stack([tensor for name, tensor in cast.items() if not name.startswith("fc.")])
    return NormedFuser(weight, layers, bias, norms, config.rms_norm_eps).to(torch.device(device))


def _read_config(folder: Path, target: Mapping[str, Any], kind: Kind, wiring: HeadWiring | None) -> EagleHeadConfig:
    config = read_head_config(folder, target, kind)
    return replace(config, wiring=wiring) if wiring else config


def _known_name(name: str, kind: Kind, known: Mapping[str, object]) -> str:
    """The canonical name of a tensor; an unknown tensor keeps its own name, for the error message."""
    canonical = canonical_name(name, kind)
    return canonical if canonical in known else name


def _check_draft_vocabulary(config: EagleHeadConfig, tensors: Mapping[str, Tensor], source: Path) -> None:
    ids = torch.arange(config.draft_vocab_size) + tensors["d2t"]
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(set(ids.tolist())) != len(ids):
        raise CheckpointError(
            f"{source}: d2t does not map {len(ids)} draft ids to distinct target ids below {config.vocab_size}"
        )
    marked = tensors.get("t2d")
    if marked is not None and (int(marked.sum()) != len(ids) or not bool(marked[ids].all())):
        raise CheckpointError(f"{source}: t2d does not mark the tokens that d2t maps to")


def write_head(folder: Path, config: EagleHeadConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors. Raises CheckpointError for tensors that `config` does not imply."""
    check_tensors(tensors, tensor_shapes(config), optional_tensors(config), folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json(config), indent=1) + "\n")


def config_json(c: EagleHeadConfig) -> dict[str, Any]:
    """The head's config.json. A wiring that no published key can express goes under Eyas's own key."""
    rotary = dict(c.rotary)
    settings = {
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
    if c.kind == "eagle":
        return settings | {"bias": c.fc_bias}
    settings |= {
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden,
        "eagle_aux_hidden_state_layer_ids": list(c.aux_hidden_state_layers),
        "norm_before_residual": c.wiring.norm_before_residual,
        "norm_before_fc": c.input_norms == "joint",
        "fc_norm": c.input_norms == "each",
        "norm_output": c.wiring.output == "normed",
    }
    return settings | ({WIRING_KEY: asdict(c.wiring)} if c.wiring.output == "bare" else {})
