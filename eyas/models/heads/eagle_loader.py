"""Loads EAGLE heads strictly: folders of head and target in, a head or what runs beside the target out.

Writes EAGLE heads in the layout of their first publication: config and tensors in, a folder that all loaders read out.
"""

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
    get_int,
    read_target_config,
    read_tensor,
    read_tensors,
    resolve,
    take,
    tensor_names,
)
from eyas.models.cpu import lay_out
from eyas.models.heads.eagle import Eagle1Head, Eagle3Head, EagleHead
from eyas.models.heads.eagle_config import (
    EagleHeadConfig,
    HeadWiring,
    Kind,
    canonical,
    fuser_layout,
    head_config,
    layout,
    optional,
)
from eyas.models.heads.features import LinearFuser, NormedFuser

EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "embed_tokens.weight",
    "transformer.wte.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
LM_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")


def load_head(
    path_or_id: str,
    target: str,
    dtype: str = "float32",
    device: str = "cpu",
    kind: Kind = "eagle3",
    wiring: HeadWiring | None = None,
) -> EagleHead:
    """Load a head strictly, with the target's embedding where it has none of its own. wiring: in place of what its config
    says. Raises CheckpointError when anything is missing, left over or of another shape than the two configs say."""
    check_device(dtype, device)
    folder, target_folder = resolve(path_or_id), resolve(target)
    target_config = read_target_config(target_folder)
    config = _reread(head_config(folder, target_config, kind), wiring)
    tensors = _spelled(read_tensors(folder), config)
    take(tensors, layout(config), optional(config), folder)
    if "d2t" in tensors:
        _check_vocabulary(config, tensors, folder)
    shipped = tensors.pop("embed_tokens.weight", None)
    embedding = read_tensor(target_folder, EMBEDDING_NAMES) if shipped is None else shipped
    lm_head = tensors.pop("lm_head.weight", None)
    lm_head = _target_lm_head(target_folder) if lm_head is None else lm_head
    width = getattr(torch, dtype)
    cast = {name: t.to(width) if t.is_floating_point() else t for name, t in tensors.items()}
    context_length = get_int(target_config, "max_position_embeddings", target_folder)
    make = Eagle3Head if kind == "eagle3" else Eagle1Head
    head = make(config, cast, embedding.to(width), lm_head.to(width), context_length).to(torch.device(device))
    lay_out(head)
    return head


def load_fuser(
    path_or_id: str, target: str, dtype: str = "float32", device: str = "cpu", wiring: HeadWiring | None = None
) -> LinearFuser:
    """Load only what of an EAGLE-3 head runs beside the target: fc, the norms before it and the layers that it taps.
    Raises CheckpointError."""
    folder = resolve(path_or_id)
    config = _reread(head_config(folder, read_target_config(resolve(target))), wiring)
    expected = fuser_layout(config)
    files = {canonical(name, "eagle3"): name for name in tensor_names(folder)}
    tensors = {name: read_tensor(folder, (files[name],)) for name in expected if name in files}
    take(tensors, expected, set(), folder)
    cast = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    weight, bias = cast["fc.weight"], cast.get("fc.bias")
    if config.input_norms == "none":
        return LinearFuser(weight, config.aux_hidden_state_layers, bias).to(torch.device(device))
    norms = torch.stack([tensor for name, tensor in cast.items() if not name.startswith("fc.")])
    return NormedFuser(weight, config.aux_hidden_state_layers, bias, norms, config.rms_norm_eps).to(torch.device(device))


def _reread(config: EagleHeadConfig, wiring: HeadWiring | None) -> EagleHeadConfig:
    return replace(config, wiring=wiring) if wiring else config


def _spelled(tensors: Mapping[str, Tensor], config: EagleHeadConfig) -> dict[str, Tensor]:
    """Tensors under their published names; what is not known keeps its own."""
    known = layout(config)
    spelled = {name: canonical(name, config.kind) for name in tensors}
    return {spelled[name] if spelled[name] in known else name: tensor for name, tensor in tensors.items()}


def _target_lm_head(folder: Path) -> Tensor:
    """The target's lm_head, which is its embedding where the two are tied."""
    return read_tensor(folder, (*LM_HEAD_NAMES, *EMBEDDING_NAMES))


def _check_vocabulary(config: EagleHeadConfig, tensors: Mapping[str, Tensor], source: Path) -> None:
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
    take(tensors, layout(config), optional(config), folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings(config), indent=1) + "\n")


def settings(c: EagleHeadConfig) -> dict[str, Any]:
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


def _eagle3(c: EagleHeadConfig) -> dict[str, Any]:
    found = {
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden,
        "eagle_aux_hidden_state_layer_ids": list(c.aux_hidden_state_layers),
        "norm_before_residual": c.wiring.norm_before_residual,
        "norm_before_fc": c.input_norms == "joint",
        "fc_norm": c.input_norms == "each",
        "norm_output": c.wiring.output == "normed",
    }
    return found | ({WIRING_KEY: asdict(c.wiring)} if c.wiring.output == "bare" else {})
