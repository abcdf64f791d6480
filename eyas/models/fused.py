"""Fused decoder layers: the layers of transformers' Llama-like models with a third of their operations.

transformers' modules stay the definition of a model and keep its weights. `fuse_layers` gives each layer another `forward`
with the same signature: one product for queries, keys and values, one for gate and up, the norm together with the residual
sum before it, and rotary embedding together with the write to the KV cache. On the CPU these are few operations of torch, on
CUDA the kernels of `eyas.models.cuda.layer_kernels`, which have the same signatures as the functions here. On the CPU with
one thread and numba, `CpuDecoder` runs all layers with the kernels of `eyas.models.cpu_kernels`.

Legend: R rows, C hidden width, H query heads, J key-value heads, D head width, I intermediate width, S slots.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.cache.kv_cache import UNSCALED, KVCache, KVScales, store_rows
from eyas.models.attention import attend_layer
from eyas.models.cpu import CpuLayer, CpuProducts, MergedLinearPart, PackedLinear, Product, can_fix
from eyas.models.cpu_decoder import CpuDecoder
from eyas.models.inputs import PackedInputs
from eyas.models.numerics import Float32Head
from eyas.tensors import Floats, runs_compiled

# Activations of the gate by the class that transformers makes of them.
PLAIN_LINEAR = (nn.Linear, Float32Head)
ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh"}


@dataclass(frozen=True)
class LayerKind:
    """What differs between the decoder layers that can be fused.

    adds_one: norms multiply by 1 + weight. has_output_norms: attention and MLP end with a norm. has_softcap: attention
    limits its scores. window_in_config: the sliding window is that of the config, for all layers.
    """

    adds_one: bool = False
    has_output_norms: bool = False
    has_softcap: bool = False
    window_in_config: bool = False


# Sibling layers that are one product, and the name where a family has them as one layer.
QKV = ("q_proj", "k_proj", "v_proj"), "qkv_proj"
GATE_UP = ("gate_proj", "up_proj"), "gate_up_proj"
# Modules in the place of an MLP that stay as they are, between two fused norms.
EXPERTS = ("MixtralSparseMoeBlock", "Qwen3MoeSparseMoeBlock")

# By the class of transformers. A class belongs here if its code is that of `FusedLayer.forward`.
KINDS = {
    "LlamaDecoderLayer": LayerKind(),
    "MistralDecoderLayer": LayerKind(window_in_config=True),
    "MixtralDecoderLayer": LayerKind(window_in_config=True),
    "Phi3DecoderLayer": LayerKind(window_in_config=True),
    "Qwen2DecoderLayer": LayerKind(),
    "Qwen3DecoderLayer": LayerKind(),
    "Qwen3MoeDecoderLayer": LayerKind(),
    "Gemma2DecoderLayer": LayerKind(adds_one=True, has_output_norms=True, has_softcap=True),
    "Gemma3DecoderLayer": LayerKind(adds_one=True, has_output_norms=True),
}


class RMSNorm:
    """A root-mean-square norm over the last dimension. weight: [C], or [H + J, D] with one row for each head."""

    def __init__(self, weight: Tensor, eps: float, adds_one: bool) -> None:
        self.weight, self.eps, self.adds_one = weight.detach(), eps, adds_one

    @cached_property
    def _scaled(self) -> Tensor:
        return (self.weight.float() + self.adds_one) * math.sqrt(self.weight.shape[-1])

    @cached_property
    def factors(self) -> Floats:
        """What rows are multiplied by once they are normed, float32 of the weight's shape."""
        return (self.weight.float() + self.adds_one).contiguous().numpy()

    @cached_property
    def _floor(self) -> Tensor:
        # filled on the device: a graph that is being captured cannot copy a number to it
        return torch.full((), math.sqrt(self.weight.shape[-1] * self.eps), device=self.weight.device)

    @classmethod
    def of(cls, module: Any, adds_one: bool) -> RMSNorm:
        """The norm of a module of transformers."""
        eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        return cls(module.weight, float(eps), adds_one)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., C] in float32, or in a narrower type and rounded where transformers rounds."""
        if x.dtype == torch.float32:
            # x w / sqrt(mean(x^2) + eps), where hypot(|x|, sqrt(C eps)) is sqrt(C) times the root
            root = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)
            return (x * self._scaled).div_(root)
        normed = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        return (normed * (1.0 + self.weight.float())).to(x.dtype) if self.adds_one else self.weight * normed.to(x.dtype)


@dataclass(frozen=True)
class HeadLayout:
    """Heads of this rank. norms: of query and key heads, if the family has them."""

    num_heads: int
    num_kv_heads: int
    width: int
    norms: RMSNorm | None


def add_norm(hidden: Tensor, delta: Tensor, norm: RMSNorm, delta_norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
    """The residual sum and its norm: hidden, delta [1, R, C]; delta_norm is applied to delta first. May overwrite delta."""
    state = hidden + delta_norm(delta) if delta_norm else delta.add_(hidden)
    return state, norm(state)


def rotate_and_store(
    qkv: Tensor,
    heads: HeadLayout,
    rotary: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    scales: KVScales = UNSCALED,
) -> Tensor:
    """Rotate queries and keys of qkv [R, H + 2 J, D], write keys and values [S, J, D] to their slots, return queries.

    rotary: cos, and sin with a negative first half, [R, 1, D] each. scales: of keys and values of 8 bits. Returns [R, H, D].
    """
    num_rotated = heads.num_heads + heads.num_kv_heads
    x = qkv[:, :num_rotated]
    x = heads.norms(x) if heads.norms else x
    cos, sin = rotary
    turned = torch.addcmul(x * cos, x.roll(heads.width // 2, -1), sin)
    store_rows(keys, slots, turned[:, heads.num_heads :], scales.key)
    store_rows(values, slots, qkv[:, num_rotated:], scales.value)
    return turned[:, : heads.num_heads]


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """Activated gates times the values beside them: [..., 2 I] to [..., I]."""
    gates, ups = gate_up.chunk(2, -1)
    return (F.silu(gates) if activation == "silu" else F.gelu(gates, approximate="tanh")).mul_(ups)


@dataclass(eq=False)
class ResidualStream:
    """What a layer leaves for the next one: the hidden states that it returned, and their norm, which the next begins with.

    rotary: cos and signed sin of the pass, by the identity of the cos that transformers made.
    """

    hidden: Tensor | None = None
    normed: Tensor | None = None
    rotary: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def signed(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [1, R, D] as `rotate_and_store` takes them. Layers share the result."""
        found = self.rotary.get(id(cos))
        if found is None:
            half = sin.shape[-1] // 2
            signed = torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], -1)
            found = self.rotary[id(cos)] = cos, cos[0, :, None], signed
        return found[1:]


class FusedLayer:
    """One decoder layer, with the `forward` that replaces the module's. experts: what it has in the place of an MLP."""

    def __init__(self, layer: Any, kind: LayerKind, stream: ResidualStream) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index, self._stream = int(attention.layer_idx), stream
        self._qkv, self._out = _product_of(attention, *QKV), attention.o_proj
        self.experts = mlp if type(mlp).__name__ in EXPERTS else None
        if self.experts is None:
            self._gate_up, self._down = _product_of(mlp, *GATE_UP), mlp.down_proj
            self._activation = ACTIVATIONS[type(_activation_of(mlp)).__name__]
        num_heads, num_kv_heads = _num_heads(attention)
        self._heads = HeadLayout(num_heads, num_kv_heads, attention.head_dim, None)
        if getattr(attention, "q_norm", None) is not None:
            norms = [RMSNorm.of(norm, kind.adds_one) for norm in (attention.q_norm, attention.k_norm)]
            rows = [n.weight.expand(count, -1) for n, count in zip(norms, (num_heads, num_kv_heads), strict=True)]
            norm = RMSNorm(torch.cat(rows), norms[0].eps, kind.adds_one)
            self._heads = HeadLayout(num_heads, num_kv_heads, attention.head_dim, norm)
        window = attention.config.sliding_window if kind.window_in_config else getattr(attention, "sliding_window", None)
        softcap = attention.attn_logit_softcapping if kind.has_softcap else None
        self._attention = attention.scaling, window, softcap
        has_norms = kind.has_output_norms
        self._out_norm = RMSNorm.of(layer.post_attention_layernorm, kind.adds_one) if has_norms else None
        self._down_norm = RMSNorm.of(layer.post_feedforward_layernorm, kind.adds_one) if has_norms else None
        before_mlp = layer.pre_feedforward_layernorm if has_norms else layer.post_attention_layernorm
        self._mlp_norm = RMSNorm.of(before_mlp, kind.adds_one)
        self.input_norm = RMSNorm.of(layer.input_layernorm, kind.adds_one)
        self.next_norm = self.input_norm  # of the next layer, or the norm behind the last one

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        packed: PackedInputs,
        kv_cache: KVCache,
        **_: Any,
    ) -> Tensor:
        """hidden_states [1, R, C] to those of the next layer. transformers' model calls it."""
        stream, index = self._stream, self._index
        pools = kv_cache.keys[index], kv_cache.values[index], packed.slots, kv_cache.scales[index]
        if self._index == 0:
            stream.hidden = stream.normed = None
            stream.rotary.clear()
        kernels = None if packed.metadata is None or hidden_states.device.type == "cpu" else _layer_kernels()
        normed = stream.normed if hidden_states is stream.hidden else None
        normed = self.input_norm(hidden_states) if normed is None else normed
        qkv = self._qkv(normed).view(hidden_states.shape[1], -1, self._heads.width)
        if kernels is None:
            query = rotate_and_store(qkv, self._heads, stream.signed(*position_embeddings), *pools)
        else:
            query = kernels.rotate_and_store(qkv, self._heads, position_embeddings, *pools)
        attended = attend_layer(query, kv_cache, index, packed, *self._attention)
        out = self._out(attended.reshape(1, hidden_states.shape[1], -1))
        sum_and_norm, gated = (add_norm, gate) if kernels is None else (kernels.add_norm, kernels.gate)
        state, normed = sum_and_norm(hidden_states, out, self._mlp_norm, self._out_norm)
        out = self.experts(normed) if self.experts else self._down(gated(self._gate_up(normed), self._activation))
        stream.hidden, stream.normed = sum_and_norm(state, out, self.next_norm, self._down_norm)
        return stream.hidden

    @cached_property
    def cpu_layer(self) -> CpuLayer:
        """The same layer for the kernels of the CPU."""
        parts = (
            part.product if isinstance(part, PackedLinear) and not _has_hooks(part) else part
            for part in (self._qkv, self._out, self._gate_up, self._down)
        )
        return CpuLayer(
            CpuProducts.of(*parts),
            self._heads, *self._attention, self._activation,
            self._mlp_norm, self.next_norm, self._out_norm, self._down_norm,
        )  # fmt: skip


def _layer_kernels() -> Any:
    from eyas.models.cuda import layer_kernels

    return layer_kernels


def fuse_layers(model: Any) -> bool:
    """Fuse all decoder layers of a causal LM, if each is of a known kind with plain weights. Returns whether they are fused.

    On the CPU weights must be float32. The merged weights take the place of the separate ones.
    """
    decoder = model.get_decoder()
    layers = list(getattr(decoder, "layers", ()))
    on_cpu = model.device.type == "cpu"
    if model.dtype != torch.float32 if on_cpu else importlib.util.find_spec("triton") is None:
        return False
    if not layers or not all(map(_can_fuse, layers)):
        return False
    stream = ResidualStream()
    fused = [FusedLayer(layer, KINDS[type(layer).__name__], stream) for layer in layers]
    final = RMSNorm.of(decoder.norm, KINDS[type(layers[0]).__name__].adds_one)
    for this, next_norm in zip(fused, [*(each.input_norm for each in fused[1:]), final], strict=True):
        this.next_norm = next_norm
    for layer, this in zip(layers, fused, strict=True):
        layer.forward = this.forward
    if on_cpu and not any(each.experts for each in fused):
        compiled = CpuDecoder(model, fused)
        model.forward, decoder.forward = compiled.model_forward, compiled.forward
        if runs_compiled(model.device):
            from eyas.models.cpu_kernels import compile_kernels

            compile_kernels()
    decoder.norm.forward = lambda hidden: stream.normed if hidden is stream.hidden else final(hidden)
    return True


def unfuse_layers(model: Any) -> None:
    """Let transformers' modules compute again what they define."""
    decoder = model.get_decoder()
    for module in (model, decoder, *decoder.layers, decoder.norm):
        module.__dict__.pop("forward", None)


def is_batch_invariant(model: Any) -> bool:
    """Whether a row can get the same bits in any pass.

    On the CPU that holds in segments of up to MAX_KERNEL_ROWS rows, for fused layers that the compiled kernels run, once
    `fix_products` has been called. On CUDA it holds for fused layers with plain weights, if a KernelBackend has parts at
    fixed positions.
    """
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if model.device.type != "cpu":
        layers = list(getattr(model.get_decoder(), "layers", ()))
        is_fused = bool(layers) and all("forward" in vars(layer) for layer in layers)
        return is_fused and all(type(each) in PLAIN_LINEAR and type(each.weight) is nn.Parameter for each in linear)
    runs_here = isinstance(getattr(model.get_decoder().forward, "__self__", None), CpuDecoder)
    return runs_here and runs_compiled(model.device) and all(map(can_fix, linear))


def _can_fuse(layer: Any) -> bool:
    attention: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    if type(layer).__name__ not in KINDS or not _can_multiply(attention, *QKV) or _rotates_in_part(attention.config):
        return False
    if type(mlp).__name__ in EXPERTS:
        return True
    return type(_activation_of(mlp)).__name__ in ACTIVATIONS and _can_multiply(mlp, *GATE_UP)


def _rotates_in_part(config: Any) -> bool:
    return bool((getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0) != 1.0)


def _activation_of(mlp: Any) -> Any:
    return getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)


def _can_multiply(module: Any, names: Sequence[str], merged_name: str) -> bool:
    """Whether `_product_of` can make one product."""
    merged = getattr(module, merged_name, None)
    if merged is None:
        return _can_merge([getattr(module, name) for name in names])
    return isinstance(merged, PackedLinear) or (type(merged) is nn.Linear and type(merged.weight) is nn.Parameter)


def _product_of(module: Any, names: Sequence[str], merged_name: str) -> Product:
    """One product for layers of a module. A layer that is merged in the checkpoint is called, with its sums over ranks."""
    merged: Product | None = getattr(module, merged_name, None)
    return merged or merged_product([getattr(module, name) for name in names])


def _num_heads(attention: Any) -> tuple[int, int]:
    """Query and key-value heads of this rank; each rank gathers all of a layer that is merged in the checkpoint."""
    if hasattr(attention, QKV[1]):
        return attention.config.num_attention_heads, attention.config.num_key_value_heads
    return _num_outputs(attention.q_proj) // attention.head_dim, _num_outputs(attention.k_proj) // attention.head_dim


def _has_hooks(module: Any) -> bool:
    """Whether calling the module does more than its `forward`, such as a sum over ranks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _can_merge(parts: Sequence[Any]) -> bool:
    if any(map(_has_hooks, parts)):
        return False
    if all(isinstance(part, MergedLinearPart) for part in parts):
        return True
    plain = all(type(part) is nn.Linear and type(part.weight) is nn.Parameter for part in parts)
    return plain and len({part.bias is None for part in parts}) == 1


@torch.no_grad()
def merged_product(parts: Sequence[Any]) -> Product:
    """One product for sibling layers. Their weights become views of the merged one."""
    if isinstance(parts[0], MergedLinearPart):
        return parts[0].merged.product
    weight = torch.cat([part.weight for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    for part, rows in zip(parts, torch.split(weight, [len(part.weight) for part in parts]), strict=True):
        part.weight = nn.Parameter(rows, requires_grad=False)
    return partial(F.linear, weight=weight, bias=bias)


def _num_outputs(part: Any) -> int:
    return int(part.merged.sizes[part.index] if isinstance(part, MergedLinearPart) else part.weight.shape[0])
