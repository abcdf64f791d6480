"""The prefix layer of Hydra's prefix-mlp: one Llama layer over the target's final states, with the target's own sizes.

Legend: R rows, H hidden, d head width.

Hydra heads (Ankner et al. 2024), grounded, mlp and prefix-mlp, in the authors' layout: states and tokens in, logits out.

Legend: R rows, M heads, n residual blocks of each, H target hidden, D draft vocabulary, V target vocabulary.
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
from eyas.models.checkpoint import (
    check_device,
    get_int,
    read_config,
    read_target_config,
    read_tensor,
    read_tensors,
    resolve,
    take,
)
from eyas.models.heads.eagle import Projected
from eyas.models.heads.eagle_loader import EMBEDDING_NAMES
from eyas.models.heads.features import check_target, draft_ids
from eyas.models.target import read_model_config

# As the authors spell it.
PREFIX = "prefix_embeding_layer."


@dataclass(frozen=True)
class PrefixSizes:
    """Those of the target, whose config the layer was made with."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_length: int

    @classmethod
    def of(cls, target: Path) -> PrefixSizes:
        """Raises CheckpointError for a target whose config lacks one of them."""
        config, source = read_target_config(target), target / "config.json"
        hidden, heads = (get_int(config, key, source) for key in ("hidden_size", "num_attention_heads"))
        return cls(
            hidden=hidden,
            intermediate=get_int(config, "intermediate_size", source),
            num_heads=heads,
            num_kv_heads=get_int(config, "num_key_value_heads", source, heads),
            head_dim=get_int(config, "head_dim", source, hidden // heads),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            context_length=get_int(config, "max_position_embeddings", source),
        )


class PrefixLayer(nn.Module):
    """A decoder layer with its norm before and the model's norm behind it. Row i stands at position i."""

    def __init__(self, sizes: PrefixSizes, tensors: Mapping[str, Tensor], target: Path) -> None:
        super().__init__()
        self.sizes = sizes
        layer = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()}
        self.qkv = _frozen(torch.cat([layer[f"self_attn.{p}_proj.weight"] for p in "qkv"]))
        self.out = _frozen(layer["self_attn.o_proj.weight"])
        self.gate_up = _frozen(torch.cat([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]]))
        self.down = _frozen(layer["mlp.down_proj.weight"])
        self.input_norm = _frozen(layer["input_layernorm.weight"])
        self.post_norm = _frozen(layer["post_attention_layernorm.weight"])
        self.norm = _frozen(tensors["norm.weight"])
        self.register_buffer("rotary", _rotary_table(target, sizes.context_length).to(self.out.dtype))
        self.rotary: Tensor

    def project(self, states: Tensor, positions: Tensor) -> Projected:
        """Norm, project and rotate; states [R, H], positions [R]."""
        s = self.sizes
        qkv = F.linear(self._rms(states, self.input_norm), self.qkv).view(-1, s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        rotated = self._rotate(qkv[:, : s.num_heads + s.num_kv_heads], positions)
        return Projected(
            rotated[:, : s.num_heads], rotated[:, s.num_heads :], qkv[:, s.num_heads + s.num_kv_heads :], states
        )

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The rest: attention output [R, heads, d] and residual [R, H] to what the heads are given, [R, H]."""
        state = residual + F.linear(attended.flatten(1), self.out)
        gate, up = F.linear(self._rms(state, self.post_norm), self.gate_up).chunk(2, -1)
        return self._rms(state + F.linear(F.silu(gate) * up, self.down), self.norm)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.sizes.rms_norm_eps).to(x.dtype) * weight

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of x [R, heads, d] at positions [R]."""
        cos, sin = self.rotary[positions][:, :, None].unbind(1)
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin


def prefix_layout(s: PrefixSizes, vocab: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes; the embedding and the frequencies came along in training and are not used."""
    q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    layer = {
        "self_attn.q_proj.weight": (q, s.hidden),
        "self_attn.k_proj.weight": (kv, s.hidden),
        "self_attn.v_proj.weight": (kv, s.hidden),
        "self_attn.o_proj.weight": (s.hidden, q),
        "mlp.gate_proj.weight": (s.intermediate, s.hidden),
        "mlp.up_proj.weight": (s.intermediate, s.hidden),
        "mlp.down_proj.weight": (s.hidden, s.intermediate),
        "input_layernorm.weight": (s.hidden,),
        "post_attention_layernorm.weight": (s.hidden,),
        "self_attn.rotary_emb.inv_freq": (s.head_dim // 2,),
    }
    outside = {"norm.weight": (s.hidden,), "embed_tokens.weight": (vocab, s.hidden)}
    return {f"{PREFIX}layers.0.{name}": shape for name, shape in layer.items()} | {
        f"{PREFIX}{name}": shape for name, shape in outside.items()
    }


PREFIX_OPTIONAL = frozenset({f"{PREFIX}embed_tokens.weight", f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq"})


def _rotary_table(target: Path, length: int) -> Tensor:
    """cos and sin of every position, [length, 2, d], by the target's own rule."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config: Any = read_model_config(target)
    cos, sin = LlamaRotaryEmbedding(config.get_text_config())(torch.zeros(1), torch.arange(length)[None])
    return torch.stack([cos[0], sin[0]], dim=1)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.contiguous(), requires_grad=False)


FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
ARCHITECTURES = ("mlp", "prefix-mlp")


@dataclass(frozen=True)
class HydraConfig:
    """What a Hydra checkpoint's config says. step: how far modules of one kind stand apart in the names; first: the first
    one's number."""

    num_heads: int
    num_layers: int
    prefixed: bool

    @property
    def step(self) -> int:
        return 2 if self.prefixed else 1

    @property
    def first(self) -> int:
        return 1 if self.prefixed else 0


class HydraHead(nn.Module):
    """Head i guesses, from the state behind token t and the embeddings of t + 1 to t + 1 + i, the token at t + 2 + i.

    embedding: the target's, [V, H]. prefix: of prefix-mlp, makes those states of the target's. draft_ids maps draft ids to
    the target's.
    """

    def __init__(
        self, heads: Sequence[nn.Module], embedding: Tensor, draft_ids: Tensor, prefix: PrefixLayer | None = None
    ) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.prefix = prefix
        self.register_buffer("draft_ids", draft_ids)
        self.draft_ids: Tensor

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    @property
    def hidden(self) -> int:
        return self.embedding.shape[1]

    def logits(self, inputs: Tensor, head: int) -> Tensor:
        """Draft logits float32 [..., D] of one head; inputs [..., (head + 2) * H]: the state, then the embeddings."""
        return self.heads[head](inputs).float()  # type: ignore[no-any-return]


class OneHead(nn.Module):
    """A grounded block, which leads from (i + 2) * H to H, further residual blocks, and an output layer."""

    def __init__(self, blocks: Sequence[tuple[Tensor, Tensor]], output: Tensor, bias: Tensor | None) -> None:
        """blocks: weight and bias of each; the first one's are those of its two layers, one above the other."""
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight, _ in blocks)
        self.biases = nn.ParameterList(nn.Parameter(bias, requires_grad=False) for _, bias in blocks)
        self.output = nn.Parameter(output, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        straight, bent = F.linear(x, self.weights[0], self.biases[0]).chunk(2, -1)
        x = straight + F.silu(bent)
        for weight, bias in zip(self.weights[1:], self.biases[1:], strict=True):
            x = x + F.silu(F.linear(x, weight, bias))
        return F.linear(x, self.output, self.bias)


def load_hydra(path_or_id: str, target: str, dtype: str = "float32", device: str = "cpu") -> HydraHead:
    """Load heads strictly, with the target's embedding. Raises CheckpointError for another architecture, and when
    anything is missing, left over or does not fit the target."""
    check_device(dtype, device)
    folder, target_folder = resolve(path_or_id), resolve(target)
    sizes = read_target_config(target_folder)
    hidden, vocab = (get_int(sizes, key, "the target's config") for key in ("hidden_size", "vocab_size"))
    config, tensors = hydra_config(folder), read_tensors(folder, FILES)
    check_target(tensors, hidden, vocab, folder)
    ids = draft_ids(tensors, vocab, folder)
    expected, optional = _layout(config, hidden, vocab, len(ids)), {"input_embed_fn.weight"}
    optional |= {name for name in expected if name.startswith("hydra_lm_head.") and name.endswith(".bias")}
    prefix_sizes = PrefixSizes.of(target_folder) if config.prefixed else None
    if prefix_sizes:
        expected |= prefix_layout(prefix_sizes, vocab)
        optional |= PREFIX_OPTIONAL
    _untie(tensors, config)
    take(tensors, expected, optional, folder)
    shipped = tensors.pop("input_embed_fn.weight", None)
    embedding = read_tensor(target_folder, EMBEDDING_NAMES) if shipped is None else shipped
    cast = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    prefix = PrefixLayer(prefix_sizes, _inside(cast, PREFIX), target_folder) if prefix_sizes else None
    heads = [_head(cast, config, index) for index in range(config.num_heads)]
    return HydraHead(heads, embedding.to(getattr(torch, dtype)), ids, prefix).to(torch.device(device))


def hydra_config(folder: Path) -> HydraConfig:
    """Raises CheckpointError for what is not run here."""
    config, source = read_config(folder), folder / "config.json"
    architecture = config.get("hydra_head_arch", "mlp")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"{source}: hydra_head_arch is {architecture!r}; Eyas runs {' and '.join(ARCHITECTURES)} only")
    _demand(config, "grounded_heads", True, source)
    _demand(config, "hidden_state_offset", 0, source)
    heads, layers = (get_int(config, key, source) for key in ("hydra_num_heads", "hydra_num_layers"))
    return HydraConfig(heads, layers, architecture == "prefix-mlp")


def _demand(config: Mapping[str, Any], key: str, value: object, source: Path) -> None:
    if config.get(key, value) != value:
        raise CheckpointError(f"{source}: {key} is {config[key]!r}; Eyas runs Hydra heads with {value!r} only")


def _layout(c: HydraConfig, hidden: int, vocab: int, draft_vocab: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all but the prefix layer."""
    shapes: dict[str, tuple[int, ...]] = {"input_embed_fn.weight": (vocab, hidden)}
    for head in range(c.num_heads):
        for layer in range(c.num_layers):
            width = (head + 2) * hidden if layer == 0 else hidden
            for part in ("linear", "res_connection") if layer == 0 else ("linear",):
                name = f"{_block(c, head, layer)}.{part}"
                shapes |= {f"{name}.weight": (hidden, width), f"{name}.bias": (hidden,)}
        shapes |= {f"{_output(c, head)}.weight": (draft_vocab, hidden), f"{_output(c, head)}.bias": (draft_vocab,)}
    return shapes


def _block(c: HydraConfig, head: int, layer: int) -> str:
    return f"hydra_mlp.{head}.{c.first + c.step * layer}"


def _output(c: HydraConfig, head: int) -> str:
    return f"hydra_lm_head.{head}" + (f".{c.first}" if c.prefixed else "")


def _untie(tensors: dict[str, Tensor], c: HydraConfig) -> None:
    """Blocks behind a head's first are one instance, repeated, of which a safetensors file may keep one only."""
    for head in range(c.num_heads):
        for layer in range(2, c.num_layers):
            for part in ("linear.weight", "linear.bias"):
                second = tensors.get(f"{_block(c, head, 1)}.{part}")
                if second is not None:
                    tensors.setdefault(f"{_block(c, head, layer)}.{part}", second)


def _head(tensors: Mapping[str, Tensor], c: HydraConfig, head: int) -> OneHead:
    first = _inside(tensors, f"{_block(c, head, 0)}.")
    grounded = [torch.cat([first[f"{part}.{kind}"] for part in ("res_connection", "linear")]) for kind in ("weight", "bias")]
    blocks = [(grounded[0], grounded[1])]
    for layer in range(1, c.num_layers):
        block = _inside(tensors, f"{_block(c, head, layer)}.")
        blocks.append((block["linear.weight"], block["linear.bias"]))
    output = _output(c, head)
    return OneHead(blocks, tensors[f"{output}.weight"], tensors.get(f"{output}.bias"))


def _inside(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
