"""The EAGLE-3 head (Li et al. 2025) in its public layout: features and tokens in, features and draft logits out.

Legend: R rows, S sessions, W rows of each, C target hidden, H draft hidden, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.errors import CheckpointError
from eyas.models.checkpoint import check_device, read_config, read_tensor, read_tensors, resolve, take

EMBEDDING_NAMES = ("model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight")


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of an EAGLE-3 head. taps: layers of the target whose inputs it is fed, by the reference's convention."""

    target_hidden: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    taps: tuple[int, ...]

    @property
    def full_vocabulary(self) -> bool:
        """Whether draft ids are target ids, so that no map is needed."""
        return self.draft_vocab_size == self.vocab_size


@dataclass(frozen=True)
class Projected:
    """What a layer needs of its rows: query [R, heads, d], key and value [R, kv heads, d], residual [R, H]."""

    query: Tensor
    key: Tensor
    value: Tensor
    residual: Tensor


class FeatureFuser(nn.Module):
    """The head's fc, which runs beside the target: tapped states [R, T * C] to fused features [R, H]."""

    def __init__(self, weight: Tensor, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.taps = taps

    @property
    def width(self) -> int:
        """Width H of the fused features."""
        return self.weight.shape[0]

    def forward(self, tapped: Tensor) -> Tensor:
        return F.linear(tapped, self.weight)


class Eagle3Head(nn.Module):
    """One decoder layer over pairs (feature i, token i+1). Holds the target's embedding; not its lm_head.

    The state fed on to the next level is the one before `norm`; RoPE has the head's own base, sized for the target's
    context. draft_ids maps draft vocabulary ids to the target's.
    """

    def __init__(self, config: HeadConfig, tensors: Mapping[str, Tensor], embedding: Tensor, context_length: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = _frozen(embedding)
        layer = {name.removeprefix("midlayer."): t for name, t in tensors.items() if name.startswith("midlayer.")}
        self.qkv = _frozen(torch.cat([layer[f"self_attn.{p}_proj.weight"] for p in "qkv"]))
        self.out = _frozen(layer["self_attn.o_proj.weight"])
        self.gate_up = _frozen(torch.cat([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]]))
        self.down = _frozen(layer["mlp.down_proj.weight"])
        self.hidden_norm = _frozen(layer["hidden_norm.weight"])
        self.input_norm = _frozen(layer["input_layernorm.weight"])
        self.post_norm = _frozen(layer["post_attention_layernorm.weight"])
        self.norm = _frozen(tensors["norm.weight"])
        self.lm_head = _frozen(tensors["lm_head.weight"])
        ids = torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_ids", ids + tensors["d2t"] if "d2t" in tensors else ids)
        self.register_buffer("rotary", _rotary_table(config, context_length).to(embedding.dtype))
        self.draft_ids: Tensor
        self.rotary: Tensor

    @property
    def context_length(self) -> int:
        """Positions that the head can rotate."""
        return int(self.rotary.shape[0])

    def project(self, features: Tensor, tokens: Tensor, positions: Tensor) -> Projected:
        """Norm, concatenate (embedding first), project and rotate; features [R, H], tokens and positions [R]."""
        c = self.config
        inputs = torch.cat(
            [self._rms(F.embedding(tokens, self.embedding), self.input_norm), self._rms(features, self.hidden_norm)], -1
        )
        qkv = F.linear(inputs, self.qkv).view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        rotated = self._rotate(qkv[:, : c.num_heads + c.num_kv_heads], positions)
        return Projected(
            rotated[:, : c.num_heads], rotated[:, c.num_heads :], qkv[:, c.num_heads + c.num_kv_heads :], features
        )

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The rest of the layer: attention output [R, heads, d] and residual [R, H] to the next state [R, H]."""
        state = residual + F.linear(attended.flatten(1), self.out)
        gate, up = F.linear(self._rms(state, self.post_norm), self.gate_up).chunk(2, -1)
        return state + F.linear(F.silu(gate) * up, self.down)

    def logits(self, states: Tensor) -> Tensor:
        """Draft logits float32 [..., D] of states [..., H]."""
        return F.linear(self._rms(states, self.norm), self.lm_head).float()

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden,), weight, self.config.rms_norm_eps)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of x [R, heads, d] at positions [R]."""
        cos, sin = self.rotary[positions][:, :, None].unbind(1)
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin


def load_head(path_or_id: str, target: str, dtype: str = "float32", device: str = "cpu") -> Eagle3Head:
    """Load a head strictly, with the target's embedding. Raises CheckpointError when anything is missing, left over or
    of another shape than the two configs say."""
    check_device(dtype, device)
    folder, target_folder = resolve(path_or_id), resolve(target)
    target_config = read_config(target_folder)
    config = head_config(folder, target_config)
    tensors = read_tensors(folder)
    own_width = config.hidden != config.target_hidden
    optional = {"d2t", "t2d"} if config.full_vocabulary else set()
    take(tensors, _layout(config), optional | (set() if own_width else {"embed_tokens.weight"}), folder)
    if "d2t" in tensors:
        _check_vocabulary(config, tensors, folder)
    shipped = tensors.pop("embed_tokens.weight", None)
    embedding = read_tensor(target_folder, EMBEDDING_NAMES) if shipped is None else shipped
    cast = {name: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for name, t in tensors.items()}
    context_length = _number(target_config, "max_position_embeddings", target_folder)
    return Eagle3Head(config, cast, embedding.to(getattr(torch, dtype)), context_length).to(torch.device(device))


def load_fuser(path_or_id: str, target: str, dtype: str = "float32", device: str = "cpu") -> FeatureFuser:
    """Load only what runs beside the target: fc and the layers that it taps. Raises CheckpointError."""
    folder = resolve(path_or_id)
    config = head_config(folder, read_config(resolve(target)))
    weight = read_tensor(folder, ("fc.weight",))
    take({"fc.weight": weight}, {"fc.weight": _layout(config)["fc.weight"]}, set(), folder)
    return FeatureFuser(weight.to(getattr(torch, dtype)), config.taps).to(torch.device(device))


def head_config(folder: Path, target: Mapping[str, Any]) -> HeadConfig:
    """Sizes of the head in `folder`, checked against the target's config.json. Raises CheckpointError."""
    head, source = read_config(folder), folder / "config.json"
    hidden, heads = _number(head, "hidden_size", source), _number(head, "num_attention_heads", source)
    layers, vocab_size = _number(target, "num_hidden_layers", "the target's config"), _number(head, "vocab_size", source)
    config = HeadConfig(
        target_hidden=_number(head, "target_hidden_size", source, hidden),
        hidden=hidden,
        intermediate=_number(head, "intermediate_size", source),
        num_heads=heads,
        num_kv_heads=_number(head, "num_key_value_heads", source, heads),
        head_dim=_number(head, "head_dim", source, hidden // heads),
        vocab_size=vocab_size,
        draft_vocab_size=_number(head, "draft_vocab_size", source, vocab_size),
        rms_norm_eps=_real(head, "rms_norm_eps", 1e-6, source),
        rope_theta=_real(head, "rope_theta", 10000.0, source),
        taps=_taps(head, layers, source),
    )
    for what, mine, its in (
        ("hidden size", config.target_hidden, int(target["hidden_size"])),
        ("vocabulary size", config.vocab_size, int(target["vocab_size"])),
    ):
        if mine != its:
            raise CheckpointError(f"{folder} was made for a target of {what} {mine}, but this target has {its}")
    return config


def _taps(head: Mapping[str, Any], layers: int, source: Path) -> tuple[int, ...]:
    taps = head.get("eagle_aux_hidden_state_layer_ids") or (2, layers // 2, layers - 3)
    if not isinstance(taps, Sequence) or not all(isinstance(tap, int) for tap in taps):
        raise CheckpointError(f"{source}: eagle_aux_hidden_state_layer_ids is {taps!r}; it must be a list of layer numbers")
    return tuple(taps)


def _number(config: Mapping[str, Any], key: str, source: object, default: int | None = None) -> int:
    value = config.get(key) or default
    if not isinstance(value, int):
        raise CheckpointError(f"{source}: {key} is {value!r}; it must be a whole number")
    return value


def _real(config: Mapping[str, Any], key: str, default: float, source: Path) -> float:
    value = config.get(key) or default
    if not isinstance(value, int | float):
        raise CheckpointError(f"{source}: {key} is {value!r}; it must be a number")
    return float(value)


def _layout(c: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the public SafeAILab layout."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return {
        "fc.weight": (c.hidden, len(c.taps) * c.target_hidden),
        "midlayer.hidden_norm.weight": (c.hidden,),
        "midlayer.input_layernorm.weight": (c.hidden,),
        "midlayer.post_attention_layernorm.weight": (c.hidden,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * c.hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * c.hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * c.hidden),
        "midlayer.self_attn.o_proj.weight": (c.hidden, q),
        "midlayer.mlp.gate_proj.weight": (c.intermediate, c.hidden),
        "midlayer.mlp.up_proj.weight": (c.intermediate, c.hidden),
        "midlayer.mlp.down_proj.weight": (c.hidden, c.intermediate),
        "embed_tokens.weight": (c.vocab_size, c.hidden),
        "norm.weight": (c.hidden,),
        "lm_head.weight": (c.draft_vocab_size, c.hidden),
        "d2t": (c.draft_vocab_size,),
        "t2d": (c.vocab_size,),
    }


def _check_vocabulary(config: HeadConfig, tensors: Mapping[str, Tensor], source: Path) -> None:
    ids = torch.arange(config.draft_vocab_size) + tensors["d2t"]
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(set(ids.tolist())) != len(ids):
        raise CheckpointError(
            f"{source}: d2t does not map {len(ids)} draft ids to distinct target ids below {config.vocab_size}"
        )
    marked = tensors.get("t2d")
    if marked is not None and (int(marked.sum()) != len(ids) or not bool(marked[ids].all())):
        raise CheckpointError(f"{source}: t2d does not mark the tokens that d2t maps to")


def _rotary_table(config: HeadConfig, length: int) -> Tensor:
    """cos and sin of every position, [length, 2, d]."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    llama = LlamaConfig(
        hidden_size=config.num_heads * config.head_dim,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )
    cos, sin = LlamaRotaryEmbedding(llama)(torch.zeros(1), torch.arange(length)[None])
    return torch.stack([cos[0], sin[0]], dim=1)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.contiguous(), requires_grad=False)
