"""Fused decoder layers: the layers of transformers' Llama-like models with a third of their operations.

transformers' modules stay the definition of a model and keep its weights. `fuse_layers` gives each layer another `forward`
with the same signature: one product for queries, keys and values, one for gate and up, the norm together with the residual
sum before it, and rotary embedding together with the write to the KV cache. On the CPU these are few operations of torch, on
CUDA the kernels of `eyas.kernels.cuda.layers`, which have the same signatures. On the CPU with
one thread and numba, `CpuDecoder` runs all layers with the kernels of `eyas.kernels.cpu.layers`.

Legend: R rows, C hidden width, H query heads, J key-value heads, D head width, I intermediate width, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.cache.kv_cache import KVCache
from eyas.device.placement import runs_compiled, runs_triton
from eyas.kernels.arguments import AttentionRule
from eyas.kernels.by_device import fused_kernels
from eyas.models.backends.cpu import CpuDecoder, CpuLayer, CpuProducts
from eyas.models.backends.packed_weights import MergedLinearPart, PackedLinear, Product, has_kernel
from eyas.models.inputs import PackedInputs
from eyas.models.layers.attention import attend_layer, kv_sources
from eyas.models.layers.experts import EXPERT_BLOCKS, ExpertOutputs, RoutedExperts, with_experts
from eyas.models.layers.norms import HeadLayout, RMSNorm
from eyas.models.layers.numerics import Float32Head
from eyas.models.layers.quantised import merge_quantised

# Activations of the gate by the class that transformers makes of them.
PLAIN_LINEAR = (nn.Linear, Float32Head)
ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh"}


@dataclass(frozen=True)
class LayerKind:
    """Differences between the decoder layers that can be fused.

    Attributes:
        adds_one: norms multiply by 1 + weight.
        rounds_once: norms round once, behind the weight.
        has_output_norms: attention and MLP end with a norm.
        has_softcap: attention limits its scores.
        window_in_config: the sliding window is that of the config, for all layers.
        has_cpu_kernels: whether compiled kernels of the CPU know the layer.
    """

    adds_one: bool = False
    has_output_norms: bool = False
    has_softcap: bool = False
    window_in_config: bool = False
    rounds_once: bool = False
    has_cpu_kernels: bool = True


# Sibling layers that are one product, and the name where a family has them as one layer.
QKV = ("q_proj", "k_proj", "v_proj"), "qkv_proj"
GATE_UP = ("gate_proj", "up_proj"), "gate_up_proj"

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
    "Gemma4TextDecoderLayer": LayerKind(rounds_once=True, has_output_norms=True, has_cpu_kernels=False),
}


@dataclass(eq=False)
class ResidualStream:
    """State that a layer leaves for the next one: the hidden states that it returned, and their norm, which the next begins
    with.
    """

    hidden: Tensor | None = None
    normed: Tensor | None = None


@dataclass(frozen=True)
class LayerInput:
    """Input that a layer of Gemma 4 adds after its MLP: an input of each token that only this layer sees, through a gate."""

    gate: Product
    project: Product
    norm: RMSNorm


class FusedLayer:
    """One decoder layer, with the `forward` that replaces the module's. experts: what it has in the place of an MLP.

    is_plain: whether its products are merged ones of plain weights.

    Args:
        kv_source: the layer whose keys and values it reads, most often itself.
    """

    def __init__(self, layer: Any, kind: LayerKind, stream: ResidualStream, kv_source: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        norm_of = partial(RMSNorm.of, adds_one=kind.adds_one, rounds_once=kind.rounds_once)
        self._index, self._stream, self._kv_source = int(attention.layer_idx), stream, kv_source
        self._qkv, self._out = _product_of(attention, *QKV), attention.o_proj
        self.experts = mlp if type(mlp).__name__ in EXPERT_BLOCKS else None
        self._routed: RoutedExperts | None = None
        self.has_cpu_kernels = kind.has_cpu_kernels and self.experts is None
        self.is_plain = _is_plain(attention, *QKV) and (self.experts is not None or _is_plain(mlp, *GATE_UP))
        if self.experts is None:
            self.gate_up_products, self._down = _products_of(mlp, *GATE_UP), mlp.down_proj
            self._activation = ACTIVATIONS[type(_activation_of(mlp)).__name__]
        self._heads = _head_layout(attention, norm_of)
        window = attention.config.sliding_window if kind.window_in_config else getattr(attention, "sliding_window", None)
        softcap = attention.attn_logit_softcapping if kind.has_softcap else None
        self._attention = AttentionRule(attention.scaling, window, softcap)
        has_norms = kind.has_output_norms
        self._out_norm = norm_of(layer.post_attention_layernorm) if has_norms else None
        self._down_norm = norm_of(layer.post_feedforward_layernorm) if has_norms else None
        self._mlp_norm = norm_of(layer.pre_feedforward_layernorm if has_norms else layer.post_attention_layernorm)
        self._mixture = layer if getattr(layer, "enable_moe_block", False) else None
        if self.experts is not None:
            self._routed = RoutedExperts.of_block(mlp, ACTIVATIONS.get(type(_activation_of(mlp.experts)).__name__))
        elif self._mixture is not None:
            self._routed = RoutedExperts.of_layer(layer, self._activation, norm_of)
        self._factor: Tensor | None = getattr(layer, "layer_scalar", None)
        self._input: LayerInput | None = None
        if getattr(layer, "hidden_size_per_layer_input", 0):
            own_norm = norm_of(layer.post_per_layer_input_norm)
            self._input = LayerInput(layer.per_layer_input_gate, layer.per_layer_projection, own_norm)
        self.input_norm = norm_of(layer.input_layernorm)
        self.next_norm = self.input_norm  # of the next layer, or the norm behind the last one

    def forward(
        self,
        hidden_states: Tensor,
        per_layer_input: Tensor | None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        packed: PackedInputs,
        kv_cache: KVCache,
        **_: Any,
    ) -> Tensor:
        """Turn hidden_states [1, R, C] into the next layer's. transformers' model calls it."""
        stream, source = self._stream, self._kv_source
        pools = kv_cache.keys[source], kv_cache.values[source], packed.slots, kv_cache.scales[source]
        # The first layer begins a pass: what another pass left behind is stale.
        if self._index == 0:
            stream.hidden = stream.normed = None
        kernels = fused_kernels(hidden_states, packed.metadata is not None)
        # The layer before normed its output already, if it is the tensor that this layer gets.
        normed = stream.normed if hidden_states is stream.hidden else None
        if normed is None:
            normed = kernels.norm_rows(hidden_states, self.input_norm)
        # qkv [R, H + 2 J, D]: query heads, key heads, value heads.
        qkv = self._qkv(normed).view(hidden_states.shape[1], -1, self._heads.width)
        query = kernels.rotate_and_store(qkv, self._heads, position_embeddings, *pools)
        attended = attend_layer(query, kv_cache, source, packed, self._attention)
        out: Any = self._out(attended.reshape(1, hidden_states.shape[1], -1))
        routed = self._routed if kernels.RUNS_EXPERTS else None
        sum_and_norms = routed.add_norms if routed and routed.norms else kernels.add_norm
        # Residual sum and norm in one go: state = hidden + out, normed = norm(state).
        state, normed, *inputs = sum_and_norms(hidden_states, out, self._mlp_norm, self._out_norm)
        out = self._mlp(state, normed, kernels.gate, routed, inputs)
        delta_norm = self._down_norm
        if self._input is not None:
            state = kernels.add_norm(state, out, self._mlp_norm, delta_norm)[0]  # the norm is not needed
            out = self._input.project(kernels.gate(self._input.gate(state), self._activation, per_layer_input))
            delta_norm = self._input.norm
        # The norm after this layer is the next one's input norm, so it is computed here with the last sum.
        stream.hidden, stream.normed = kernels.add_norm(state, out, self.next_norm, delta_norm, self._factor)
        return stream.hidden

    def _mlp(
        self, state: Tensor, normed: Tensor, gated: Callable[..., Tensor], routed: RoutedExperts | None, inputs: list[Tensor]
    ) -> Tensor | ExpertOutputs:
        """Return the MLP, the experts, or both.

        Args:
            routed: None leaves experts to transformers.
            inputs: of experts beside an MLP.
        """
        if self.experts is not None:
            return routed.run(normed, normed) if routed else self.experts(normed)
        dense: Tensor = self._down(self._gated(normed, gated))
        if self._mixture is None:
            return dense
        return routed.run(inputs[0], inputs[1], dense) if routed else with_experts(self._mixture, state, dense)

    def _gated(self, normed: Tensor, gated: Callable[..., Tensor]) -> Tensor:
        """Return the activated gates times values [1, R, I]; both are freed before the next product."""
        gates, *ups = (product(normed) for product in self.gate_up_products)
        return gated(gates, self._activation, *ups)

    @cached_property
    def cpu_layer(self) -> CpuLayer:
        """The same layer for the kernels of the CPU."""
        gate_up = self.gate_up_products[0] if len(self.gate_up_products) == 1 else joined_product(self.gate_up_products)
        parts = (
            part.product if isinstance(part, PackedLinear) and not _has_hooks(part) else part
            for part in (self._qkv, self._out, gate_up, self._down)
        )
        return CpuLayer(
            CpuProducts.of(*parts),
            self._heads, self._attention, self._activation,
            self._mlp_norm, self.next_norm, self._out_norm, self._down_norm,
        )  # fmt: skip


def fuse_layers(model: Any) -> bool:
    """Fuse all decoder layers of a causal LM, if each is of a known kind. Returns whether they are fused.

    On the CPU weights must be float32 or quantised. Merged weights take the place of the separate ones; where quantised ones
    cannot be merged, their modules compute one after the other.
    """
    decoder = model.get_decoder()
    layers = list(getattr(decoder, "layers", ()))
    on_cpu = model.device.type == "cpu"
    if model.dtype != torch.float32 if on_cpu else not runs_triton(model.device):
        return False
    if not layers or not all(map(_can_fuse, layers)):
        return False
    stream = ResidualStream()
    kinds, sources = [KINDS[type(layer).__name__] for layer in layers], kv_sources(model.config)
    parts = zip(layers, kinds, sources or range(len(layers)), strict=True)
    fused = [FusedLayer(layer, kind, stream, source) for layer, kind, source in parts]
    final = RMSNorm.of(decoder.norm, kinds[0].adds_one, kinds[0].rounds_once)
    # Each layer's last norm is the first one of the next layer; of the last layer, the decoder's.
    for this, next_norm in zip(fused, [*(each.input_norm for each in fused[1:]), final], strict=True):
        this.next_norm = next_norm
    for layer, this in zip(layers, fused, strict=True):
        layer.forward = this.forward
    if on_cpu and all(each.has_cpu_kernels for each in fused):
        compiled = CpuDecoder(model, fused)
        model.forward, decoder.forward = compiled.model_forward, compiled.forward
        if runs_compiled(model.device):
            from eyas.kernels.cpu.layers import compile_kernels

            compile_kernels()
    if not on_cpu:
        from eyas.kernels.cuda.layers import rotary_tables

        decoder.rotary_emb.forward = partial(rotary_tables, decoder.rotary_emb)
    # The last layer has applied this norm already.
    decoder.norm.forward = lambda hidden: stream.normed if hidden is stream.hidden else final(hidden)
    return True


def unfuse_layers(model: Any) -> None:
    """Let transformers' modules compute again what they define."""
    decoder = model.get_decoder()
    for module in (model, decoder, *decoder.layers, decoder.norm, decoder.rotary_emb):
        module.__dict__.pop("forward", None)


def is_batch_invariant(model: Any) -> bool:
    """Return whether a row can get the same bits in any pass.

    On the CPU that holds for fused layers that the compiled kernels run. On CUDA it holds for fused layers with plain
    weights, if a KernelBackend has parts at fixed positions.
    """
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if model.device.type != "cpu":
        layers = list(getattr(model.get_decoder(), "layers", ()))
        fused = [vars(layer)["forward"].__self__ for layer in layers if "forward" in vars(layer)]
        is_plain = bool(fused) and len(fused) == len(layers) and all(each.is_plain for each in fused)
        return is_plain and all(type(each) in PLAIN_LINEAR and type(each.weight) is nn.Parameter for each in linear)
    runs_here = isinstance(getattr(model.get_decoder().forward, "__self__", None), CpuDecoder)
    return runs_here and runs_compiled(model.device) and all(map(has_kernel, linear))


def _can_fuse(layer: Any) -> bool:
    attention: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    if type(layer).__name__ not in KINDS or not _can_multiply(attention, *QKV) or _rotates_in_part(attention.config):
        return False
    if type(mlp).__name__ in EXPERT_BLOCKS:
        return True
    return type(_activation_of(mlp)).__name__ in ACTIVATIONS and _can_multiply(mlp, *GATE_UP)


def _rotates_in_part(config: Any) -> bool:
    return bool((getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0) != 1.0)


def _activation_of(mlp: Any) -> Any:
    return getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)


def _can_multiply(module: Any, names: Sequence[str], merged_name: str) -> bool:
    """Return whether outputs are those of this rank alone. A layer that is merged in the checkpoint exchanges its own."""
    return hasattr(module, merged_name) or not any(map(_has_hooks, _parts_of(module, names)))


def _parts_of(module: Any, names: Sequence[str]) -> list[Any]:
    """Return the sibling layers that a module has: some of Gemma 4 have no values, or queries alone."""
    return [part for name in names if (part := getattr(module, name, None)) is not None]


def _is_plain(module: Any, names: Sequence[str], merged_name: str) -> bool:
    """Return whether weights are plain ones that the same product can read in any pass."""
    merged = getattr(module, merged_name, None)
    return _can_merge(_parts_of(module, names)) if merged is None else _can_merge([merged])


def _products_of(module: Any, names: Sequence[str], merged_name: str) -> list[Product]:
    """Return what computes layers of a module: one product, or one for each where weights cannot be merged.

    A layer that is merged in the checkpoint is called, with its sums over ranks.
    """
    merged: Product | None = getattr(module, merged_name, None)
    if merged is not None:
        return [merged]
    parts = _parts_of(module, names)
    if _can_merge(parts):
        return [merged_product(parts)]
    quantised = merge_quantised(parts)
    return parts if quantised is None else [quantised]


def _product_of(module: Any, names: Sequence[str], merged_name: str) -> Product:
    """Return the layers as one function."""
    products = _products_of(module, names, merged_name)
    return products[0] if len(products) == 1 else joined_product(products)


def joined_product(products: Sequence[Product]) -> Product:
    """Return one function whose output is that of all, side by side."""
    return lambda rows: torch.cat([product(rows) for product in products], -1)


def _head_layout(attention: Any, norm_of: Callable[[Any], RMSNorm]) -> HeadLayout:
    """Return the heads of this rank, and their norms with one row for each head."""
    num_heads, num_kv_heads = _num_heads(attention)
    if getattr(attention, "q_norm", None) is None:
        return HeadLayout(num_heads, num_kv_heads, attention.head_dim, None)
    query = norm_of(attention.q_norm)
    # One factor for each row of qkv: [H, D] of the query norm, [J, D] of the key norm, zeros for values.
    rows = [query.weight.expand(num_heads, -1)]
    if num_kv_heads:
        rows.append(norm_of(attention.k_norm).weight.expand(num_kv_heads, -1))
        if getattr(attention, "v_norm", None) is not None:  # without a weight
            rows.append(torch.zeros_like(rows[-1]))
    norms = RMSNorm(torch.cat(rows), query.eps, query.adds_one)
    return HeadLayout(num_heads, num_kv_heads, attention.head_dim, norms)


def _num_heads(attention: Any) -> tuple[int, int]:
    """Return the query and key-value heads of this rank; each rank gathers all of a layer that is
    merged in the checkpoint.
    """
    if hasattr(attention, QKV[1]):
        return attention.config.num_attention_heads, attention.config.num_key_value_heads
    parts = _parts_of(attention, QKV[0][:2])
    num_heads, num_kv_heads = (*(_num_outputs(part) // attention.head_dim for part in parts), 0)[:2]
    return num_heads, num_kv_heads


def _has_hooks(module: Any) -> bool:
    """Return whether calling the module does more than its `forward`, such as a sum over ranks."""
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
    """Return one product for sibling layers. Their weights become views of the merged one."""
    if isinstance(parts[0], MergedLinearPart):
        return parts[0].merged.product
    # [Nq + Nk + Nv, K]: one product reads the input once. The parts' own weights become views of it.
    weight = torch.cat([part.weight for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    for part, rows in zip(parts, torch.split(weight, [len(part.weight) for part in parts]), strict=True):
        part.weight = nn.Parameter(rows, requires_grad=False)
    return partial(F.linear, weight=weight, bias=bias)


def _num_outputs(part: Any) -> int:
    if isinstance(part, MergedLinearPart):
        return int(part.merged.sizes[part.index])
    weight = getattr(part, "weight", None)  # some quantised layers have packed words alone
    return int(part.out_features if weight is None else weight.shape[0])
