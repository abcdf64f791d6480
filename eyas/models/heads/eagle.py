"""The EAGLE-3 head (Li et al. 2025) in its public layout: features and tokens in, features and draft logits out.

Legend: R rows, S sessions, W rows of each, C target hidden, H draft hidden, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.errors import CheckpointError
from eyas.models.checkpoint import check_device, read_target_config, read_tensor, read_tensors, resolve, take
from eyas.models.heads.config import HeadConfig, head_config, layout, whole_number
from eyas.models.heads.features import LinearFuser

EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "embed_tokens.weight",
    "transformer.wte.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)


@dataclass(frozen=True)
class Projected:
    """What a layer needs of its rows: query [R, heads, d], key and value [R, kv heads, d], residual [R, H]."""

    query: Tensor
    key: Tensor
    value: Tensor
    residual: Tensor


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
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (wide * scale).to(x.dtype) * weight

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
    target_config = read_target_config(target_folder)
    config = head_config(folder, target_config)
    tensors = read_tensors(folder)
    own_width = config.hidden != config.target_hidden
    optional = {"d2t", "t2d"} if config.full_vocabulary else set()
    take(tensors, layout(config), optional | (set() if own_width else {"embed_tokens.weight"}), folder)
    if "d2t" in tensors:
        _check_vocabulary(config, tensors, folder)
    shipped = tensors.pop("embed_tokens.weight", None)
    embedding = read_tensor(target_folder, EMBEDDING_NAMES) if shipped is None else shipped
    cast = {name: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for name, t in tensors.items()}
    context_length = whole_number(target_config, "max_position_embeddings", target_folder)
    return Eagle3Head(config, cast, embedding.to(getattr(torch, dtype)), context_length).to(torch.device(device))


def load_fuser(path_or_id: str, target: str, dtype: str = "float32", device: str = "cpu") -> LinearFuser:
    """Load only what runs beside the target: fc and the layers that it taps. Raises CheckpointError."""
    folder = resolve(path_or_id)
    config = head_config(folder, read_target_config(resolve(target)))
    weight = read_tensor(folder, ("fc.weight",))
    take({"fc.weight": weight}, {"fc.weight": layout(config)["fc.weight"]}, set(), folder)
    return LinearFuser(weight.to(getattr(torch, dtype)), config.taps).to(torch.device(device))


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
