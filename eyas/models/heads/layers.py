"""Parts that draft heads share: a decoder layer of the Llama kind, norms, rotary tables, the draft vocabulary.

Legend: R rows, H draft hidden, X width of the inputs (2 H in an EAGLE-3 head's first layer), d head width, T hidden states
that are collected, C target hidden, D draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from eyas.config.engine import INT8
from eyas.config.file_values import get_setting
from eyas.device.placement import check_e4m3, check_int8
from eyas.errors import CheckpointError
from eyas.kernels.arguments import LayerSlots, Projected
from eyas.kernels.by_device import layer_kernels
from eyas.kernels.plain import layers as plain
from eyas.models.backends.packed_weights import optimize_for_cpu
from eyas.models.layers.norms import HeadLayout

# Weights of 8 bits.
FLOAT8 = torch.float8_e4m3fn
FP8 = "fp8"

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a decoder layer."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float


@dataclass(frozen=True)
class BackboneSizes(LayerSizes):
    """Sizes of a head's decoder layers and of what surrounds them. rotary: RoPE parameters as transformers takes them."""

    num_layers: int
    vocab_size: int
    rotary: Mapping[str, Any]
    max_positions: int


def read_layer_sizes(settings: Mapping[str, Any], source: object) -> LayerSizes:
    """Return the sizes that a config.json states. Raises CheckpointError if it lacks one of them."""
    hidden, intermediate, heads = (
        get_setting(int, settings, key, source) for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    return LayerSizes(
        hidden,
        intermediate,
        heads,
        num_kv_heads=get_setting(int, settings, "num_key_value_heads", source, heads),
        head_dim=get_setting(int, settings, "head_dim", source, hidden // heads),
        rms_norm_eps=get_setting(float, settings, "rms_norm_eps", source, 1e-6),
    )


def backbone_json(sizes: BackboneSizes) -> dict[str, Any]:
    """Return what a config.json says of a head's decoder layers."""
    scaling = dict(sizes.rotary)
    theta = scaling.pop("rope_theta")
    return {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.rms_norm_eps,
        "max_position_embeddings": sizes.max_positions,
        "rope_theta": theta,
        "rope_scaling": scaling if scaling["rope_type"] != "default" else None,
        "vocab_size": sizes.vocab_size,
        "tie_word_embeddings": False,
    }


def layer_shapes(sizes: LayerSizes, width: int) -> Shapes:
    """Return names and shapes of a layer's weights without the norms of its inputs. width: X."""
    q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    return {
        "self_attn.q_proj.weight": (q, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (sizes.hidden, q),
        "mlp.gate_proj.weight": (sizes.intermediate, sizes.hidden),
        "mlp.up_proj.weight": (sizes.intermediate, sizes.hidden),
        "mlp.down_proj.weight": (sizes.hidden, sizes.intermediate),
        "post_attention_layernorm.weight": (sizes.hidden,),
    }


def check_target(source: Path, target: Mapping[str, Any], hidden: int, vocab_size: int) -> None:
    """Raises CheckpointError unless the sizes for which a head was made are those of its target's config.json."""
    for what, key, own in (("hidden size", "hidden_size", hidden), ("vocabulary size", "vocab_size", vocab_size)):
        needed = get_setting(int, target, key, "the target's config.json")
        if own != needed:
            raise CheckpointError(f"{source} was made for a target of {what} {own}, but this target has {needed}")


def check_problems(subject: str, problems: Mapping[str, bool]) -> None:
    """Raises CheckpointError for the first of the problems that is there."""
    for problem, is_there in problems.items():
        if is_there:
            raise CheckpointError(f"{subject}: {problem}")


class DraftLayer(nn.Module):
    """A decoder layer without its attention and its input norm: project, attend elsewhere, finish.

    Args:
        weights: under their published names without the layer's prefix. q, k, v and gate, up are fused.
    """

    def __init__(self, sizes: LayerSizes, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.sizes = sizes
        biases = [weights[name] for p in "qkv" if (name := f"self_attn.{p}_proj.bias") in weights]
        # One product for q, k and v: [(heads + 2 * kv heads) * d, X].
        qkv = torch.cat([weights[f"self_attn.{p}_proj.weight"] for p in "qkv"])
        self.qkv = linear(qkv, torch.cat(biases) if biases else None)
        self.out = linear(weights["self_attn.o_proj.weight"], weights.get("self_attn.o_proj.bias"))
        self.gate_up = linear(torch.cat([weights["mlp.gate_proj.weight"], weights["mlp.up_proj.weight"]]))
        self.down = linear(weights["mlp.down_proj.weight"])
        self.post_norm = frozen(weights["post_attention_layernorm.weight"])
        self.input_norm = frozen(weights["input_layernorm.weight"]) if "input_layernorm.weight" in weights else None
        self.hidden_norm = frozen(weights["hidden_norm.weight"]) if "hidden_norm.weight" in weights else None
        self.heads = HeadLayout(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, norms=None)

    def project(self, inputs: Tensor, residual: Tensor, rotary: Tensor, slots: LayerSlots | None = None) -> Projected:
        """Project inputs [R, X] as attention sees them, residual [R, H], rotary [R, 2, d] of the rows' positions.

        slots: where a kernel may write keys and values at once.
        """
        qkv = self.qkv(inputs).view(-1, self.heads.num_heads + 2 * self.heads.num_kv_heads, self.heads.width)
        return layer_kernels(qkv).project(qkv, self.heads, rotary, residual, slots)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return the rest of the layer: attention output [R, heads, d] and residual [R, H] to the next state [R, H]."""
        kernels, out = layer_kernels(attended), self.out(attended.flatten(1))
        state, normed = kernels.add_rms_norm(residual, out, self.post_norm, self.sizes.rms_norm_eps)
        return state + self.down(kernels.gate(self.gate_up(normed), "silu"))  # type: ignore[no-any-return]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root-mean-square norm over the last dimension, in float32."""
    kernels = layer_kernels(x) if weight.dim() == 1 else plain
    return kernels.rms_norm(x, weight, eps)


def rotary_table(config: Any, length: int) -> Tensor:
    """Return cos and sin of every position, [length, 2, d], for transformers' config of a Llama. Raises KeyError for its
    RoPE.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    return torch.stack([cos[0], sin[0]], dim=1)


def default_rotary_table(theta: float, width: int, length: int) -> Tensor:
    """Return the `rotary_table` of RoPE without scaling, [length, 2, width]. It needs no transformers, whose import takes
    seconds.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.arange(length)[:, None].float() * frequencies
    # RoPE in transformers' layout: dimension i turns with dimension i + d / 2, so cos and sin are doubled.
    both = torch.cat([angles, angles], -1)
    return torch.stack([both.cos(), both.sin()], dim=1)


def write_checkpoint(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n")


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return a linear layer that is not trained: weight [N, K], bias [N]."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = frozen(weight)
    if bias is not None:
        layer.bias = frozen(bias)
    return layer


class Float8Linear(nn.Module):
    """A linear layer whose weight has 8 bits, with a scale for each output. Rows keep their type; sums are in float32.

    Args:
        layer: with the weight to round.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.float()
        # One scale for each output, such that its largest weight becomes the largest number of 8 bits.
        scales = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / torch.finfo(FLOAT8).max
        self.weight, self.scales = frozen((weight / scales[:, None]).to(FLOAT8)), frozen(scales)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N]."""
        return layer_kernels(x).scaled_linear(x, self.weight, self.bias, self.scales)


def quantise_head(head: nn.Module, device: torch.device, quantization: str) -> None:
    """Round the weights of a head's linear layers to 8 bits, as `drafting.quantization` asks for; others stay as they are.

    Raises ConfigError for fp8 on a GPU without such numbers, and for int8 where no kernel multiplies by them.
    """
    if quantization == INT8:
        check_int8(str(device), "drafting.quantization")
    if quantization != FP8:
        optimize_for_cpu(head, to_bytes=quantization == INT8)
        return
    check_e4m3("drafting.quantization is fp8", device, "Leave it empty")
    for parent in list(head.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(parent, name, Float8Linear(layer))


def frozen(tensor: Tensor) -> nn.Parameter:
    """Return a parameter that is not trained."""
    return nn.Parameter(tensor.contiguous(), requires_grad=False)


def under_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def stored_vocabulary(draft_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return how EAGLE and block heads store a draft vocabulary, the target's ids int64 [D]: d2t [D] holds the difference of
    each from its draft id, t2d [V] whether a token is among them.
    """
    ids = draft_ids.cpu()
    is_drafted = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": is_drafted}


def draft_ids_of(tensors: Mapping[str, Tensor], size: int) -> Tensor:
    """Return the target's ids of a draft vocabulary by its d2t, int64 [D]; without one, draft ids are target ids."""
    ids = torch.arange(size)
    return ids + tensors["d2t"].long() if "d2t" in tensors else ids


def check_draft_vocabulary(vocab_size: int, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Raises CheckpointError unless d2t, if it is there, holds offsets to distinct target ids, and t2d marks these."""
    if "d2t" not in tensors:
        return
    ids = draft_ids_of(tensors, len(tensors["d2t"]))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) != len(ids):
        raise CheckpointError(f"{source}: d2t does not map {len(ids)} draft ids to distinct target ids below {vocab_size}")
    marked = tensors.get("t2d")
    if marked is not None and (int(marked.sum()) != len(ids) or not bool(marked[ids].all())):
        raise CheckpointError(f"{source}: t2d does not mark the tokens that d2t maps to")


def take_draft_ids(tensors: dict[str, Tensor], hidden: int, vocab_size: int, source: Path) -> Tensor:
    """Take `token_map` out of `tensors` and cut output layers of the whole vocabulary to it; target ids, int64 [D].

    Raises CheckpointError for output layers of another target, and for a map that does not hold distinct target ids.

    Args:
        hidden, vocab_size: of the target. Without a map draft ids are target ids.
    """
    for output in (tensor for name, tensor in tensors.items() if "lm_head" in name and tensor.dim() == 2):
        rows = vocab_size if "token_map" in tensors else len(output)
        check_target(source, {"hidden_size": hidden, "vocab_size": vocab_size}, output.shape[1], rows)
    token_map = tensors.pop("token_map", None)
    if token_map is None:
        return torch.arange(vocab_size)
    ids = token_map.long()
    is_row = ids.dim() == 1 and len(ids) > 0
    if not is_row or int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) != len(ids):
        raise CheckpointError(f"{source}: token_map does not map draft ids to distinct target ids below {vocab_size}")
    for name, tensor in tensors.items():
        if "lm_head" in name and len(tensor) == vocab_size:
            tensors[name] = tensor[ids]
    return ids
