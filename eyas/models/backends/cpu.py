"""Runs the fused layers of a model by compiled kernels of the CPU, which threads can share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from eyas.arrays import Floats, Ints
from eyas.cache.kv_cache import KVCache
from eyas.config.engine import INT8
from eyas.device.host import num_cores
from eyas.device.placement import runs_compiled
from eyas.device.processor import adds_products_of_bytes
from eyas.errors import install_command
from eyas.kernels.arguments import BLOCK_OUTPUTS, BYTES, HALVES, NOTHING_KEPT, AttentionRule, KeptStates, RowKeys
from eyas.models.backends.packed_weights import (
    MIN_SHARED_ROWS,
    NO_ROWS,
    NO_WEIGHT,
    PackedLinear,
    PackedProduct,
    Product,
    multiplies_tiles,
    packed_weight,
)
from eyas.models.inputs import PackedInputs, Segments

if TYPE_CHECKING:
    from eyas.kernels.cpu.sharing import Helpers
    from eyas.models.layers.fused import FusedLayer
    from eyas.models.layers.norms import HeadLayout, RMSNorm

log = logging.getLogger(__name__)


class CpuDecoder:
    """All layers of a model on the CPU, without transformers' code between them.

    Its methods replace `forward` of transformers' decoder and causal model. Modules' hooks run as if their `forward` were
    called.
    """

    def __init__(self, model: Any, layers: Sequence[FusedLayer]) -> None:
        decoder = model.get_decoder()
        self._decoder, self._layers, self._head = decoder, layers, model.get_output_embeddings()
        self.helpers: Helpers | None = None
        self._tables: dict[str | None, tuple[Floats, Floats]] = {}
        self._softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        types = getattr(decoder.config, "layer_types", None) or [None] * len(layers)
        has_types = isinstance(getattr(decoder.rotary_emb, "rope_type", None), dict)
        found = [kind if has_types else None for kind in types]
        self.rotary_kinds = list(dict.fromkeys(found))
        self._layer_kinds = [self.rotary_kinds.index(kind) for kind in found]

    def forward(
        self, *, input_ids: Tensor, position_ids: Tensor, packed: PackedInputs, kv_cache: KVCache, **others: Any
    ) -> Any:
        """Return what we read of what transformers' decoder returns. Several threads, keys and values of 8 bits, and other
        ways to attend go to its own code. No hooks run where the KV cache keeps the states.
        """
        segments, is_plain = packed.segments, packed.attend is not None or kv_cache.is_narrow or not input_ids.numel()
        if is_plain or not isinstance(segments, Segments) or not runs_compiled(input_ids.device):
            arguments = {"input_ids": input_ids, "position_ids": position_ids, "packed": packed, "kv_cache": kv_cache}
            return type(self._decoder).forward(self._decoder, **arguments, **others)
        from eyas.kernels.cpu import layers as cpu_kernels

        embedded = self._decoder.embed_tokens(input_ids)
        keys = segments.row_keys()
        rows = CpuRows(embedded[0], packed.slots.numpy(), keys)
        rotary = [self.rotary_tables(embedded, keys.positions, kind) for kind in self.rotary_kinds]
        rows.start(cpu_kernels, self._layers[0].input_norm)
        if self.stack is None:
            self._run_apart(cpu_kernels, rows, rotary, kv_cache)
        elif layers := kv_cache.state_layers:
            states = KeptStates(np.array(layers), kv_cache.features.numpy(), rows.slots)
            self.stack.run(rows, rotary, kv_cache, states, self.helpers)
            return SimpleNamespace(last_hidden_state=rows.normed[None])
        else:
            hooked = [index for index, module in enumerate(self._decoder.layers) if module._forward_pre_hooks]
            memory = np.empty((rows.count, len(hooked) * rows.state.shape[1]), np.float32)
            states = KeptStates(np.array(hooked, np.int64), memory, np.arange(rows.count))
            self.stack.run(rows, rotary, kv_cache, states, self.helpers)
            for number, index in enumerate(hooked):
                module = self._decoder.layers[index]
                _run_hooks(module._forward_pre_hooks, module, torch.from_numpy(states.of(number)))
        norm = self._decoder.norm
        _run_hooks(norm._forward_pre_hooks, norm, rows.state)
        _run_hooks(norm._forward_hooks, norm, rows.state, rows.normed)
        return SimpleNamespace(last_hidden_state=rows.normed[None])

    @cached_property
    def stack(self) -> CpuStack | None:
        """The layers as one kernel runs them, so that threads can share them; None where it cannot."""
        return self.make_stack()

    def make_stack(self) -> CpuStack | None:
        """Return the layers as `stack` has them, made of their weights as they are now."""
        return CpuStack.of([layer.cpu_layer for layer in self._layers], self._layer_kinds)

    def _run_apart(self, kernels: Any, rows: CpuRows, rotary: Sequence[tuple[Floats, Floats]], kv_cache: KVCache) -> None:
        """Run the layers one by one, each with the hooks of its module."""
        layers = zip(self._decoder.layers, self._layers, self._layer_kinds, strict=True)
        for index, (module, layer, kind) in enumerate(layers):
            if module._forward_pre_hooks:
                _run_hooks(module._forward_pre_hooks, module, rows.state.clone())
            layer.cpu_layer.run(kernels, rows, rotary[kind], kv_cache, index)

    def share(self, num_threads: int) -> None:
        """Share passes between this number of threads from now on. The first of them is the one that calls."""
        if num_threads == (self.helpers.num_threads if self.helpers else 1):
            return
        from eyas.kernels.cpu.sharing import Helpers

        self.helpers = Helpers(num_threads - 1) if num_threads > 1 else None
        if isinstance(self._head, PackedLinear):
            self._head.product.helpers = self.helpers

    def model_forward(self, *, logits_to_keep: Tensor, **arguments: Any) -> Any:
        """Return what `TargetModel.forward` reads of the output of transformers' causal model."""
        hidden = self._decoder(**arguments).last_hidden_state
        logits = self._head(hidden[:, logits_to_keep])
        return SimpleNamespace(logits=torch.tanh(logits / self._softcap) * self._softcap if self._softcap else logits)

    def rotary_tables(self, embedded: Tensor, positions: Ints, kind: str | None) -> tuple[Floats, Floats]:
        """Return cos and sin [R, D] of layers of a kind, from tables by position. They double for a longer context."""
        length = int(positions.max()) + 1
        tables = self._tables.get(kind)
        if tables is None or len(tables[0]) < length:
            most = max(length, int(self._decoder.config.max_position_embeddings))
            # The tables grow by doubling, so a longer context does not compute them again at each step.
            every = torch.arange(min(1 << (length - 1).bit_length(), most))[None]
            cos, sin = self._decoder.rotary_emb(embedded, every, *([kind] if kind else []))
            tables = self._tables[kind] = cos[0].contiguous().numpy(), sin[0].contiguous().numpy()
        return tables[0][positions], tables[1][positions]


def _run_hooks(hooks: Mapping[int, Callable[..., object]], module: Any, state: Tensor, *outputs: Tensor) -> None:
    """Call a module's hooks with tensors [R, C] that nothing overwrites."""
    for hook in hooks.values():
        hook(module, (state[None],), *(output[None] for output in outputs))


def round_rows(model: Any, dtype: str, is_exact: bool, is_deterministic: bool) -> None:
    """Have layers round rows as their weights are, where the processor gains by it.

    Rounding enlarges differences in a last bit. So 8-bit weights need passes whose rows do not depend on each other.
    bfloat16 weights need that only in deterministic mode: without it, that dtype never promised equal rows.

    Args:
        dtype: of the weights: INT8 or a dtype of torch.
        is_exact: whether rows of its passes do not depend on each other.
    """
    decoder = _decoder_of(model)
    stored = {INT8: BYTES, "bfloat16": HALVES}.get(dtype)
    may_differ = stored == HALVES and not is_deterministic and runs_compiled(model.device)
    if stored is None or not (may_differ or (is_exact and decoder is not None)):
        return
    round_rows_of(model.modules(), stored)
    if decoder is not None:
        decoder.stack = decoder.make_stack()


def round_rows_of(modules: Iterable[nn.Module], stored: int) -> None:
    """Have layers round rows when they are multiplied by weights that are stored as BYTES or HALVES, see
    `PackedWeight.round_rows`, where the processor gains by it. Those among `modules` that are not packed stay as they are.
    """
    gains = adds_products_of_bytes() if stored == BYTES else multiplies_tiles()
    for weight in filter(None, map(packed_weight, modules)) if gains else ():
        if weight.stored == stored:
            weight.round_rows()


def _decoder_of(model: Any) -> CpuDecoder | None:
    """Return the decoder of a model that kernels of the CPU run; None for another one."""
    found = getattr(model.get_decoder().forward, "__self__", None)
    return found if isinstance(found, CpuDecoder) and runs_compiled(model.device) else None


def share_layers(model: Any, num_threads: int, is_narrow: bool = False) -> None:
    """Have threads share the layers and the output head of passes that kernels of the CPU run; others stay as they are.

    At most as many threads as cores: one without a core would delay the others. What is not shared is logged. is_narrow:
    whether keys and values have 8 bits.
    """
    decoder = _decoder_of(model)
    most = num_cores()
    if decoder is not None:
        decoder.share(min(num_threads, most))
    if num_threads > 1 and (reason := _why_not_shared(decoder, is_narrow, model.device)):
        log.warning("engine.layer_threads is %d, but one thread runs this model's layers: %s", num_threads, reason)
    elif num_threads > most:
        log.warning("engine.layer_threads is %d, but this process may use %d cores; set it to that", num_threads, most)


def _why_not_shared(decoder: CpuDecoder | None, is_narrow: bool, device: torch.device) -> str:
    """Return why no threads share the layers of a decoder that kernels run, or of another one (None); empty if they do."""
    if decoder is None and runs_compiled(device):
        return "they are not fused or have experts, so no kernel of the CPU runs them"
    if decoder is None:
        return (
            "kernels of the CPU need device cpu, dtype float32, threads 1 "
            f"(torch has {torch.get_num_threads()}) and numba ({install_command('cpu')})"
        )
    if is_narrow:
        return "engine.kv_cache_dtype keeps keys and values in 8 bits, which no kernel of the CPU reads; set it to auto"
    odd = f"they differ in shape, or have more biases, or numbers of outputs that are no multiple of {BLOCK_OUTPUTS}"
    return "" if decoder.stack else odd


class CpuStack:
    """Layers of one shape, which one kernel runs. `CpuLayer.run` of each computes the same.

    Args:
        layers: see `of`.
    """

    def __init__(self, layers: Sequence[CpuLayer], kinds: Sequence[int]) -> None:
        from eyas.kernels.cpu.layers import NO_WINDOW, LayerStack

        first, heads = layers[0], layers[0].heads
        # they own the memory that the stack names
        self._products = [[product.packed for product in layer.products if product.packed] for layer in layers]
        biases = [own[0].bias for own in self._products]
        norms = [(layer.mlp_norm, layer.next_norm, layer.out_norm, layer.down_norm, layer.heads.norms) for layer in layers]
        factors = [[norm.factors if norm else NO_WEIGHT for norm in own[:4]] for own in norms]
        head_norms = [own[4].factors if own[4] else NO_ROWS for own in norms]
        self._kinds = np.array(kinds)
        self._sizes = heads.num_heads, heads.num_kv_heads, heads.width, self._products[0][3].weight.num_inputs
        # One array of each kind over all layers M, so that the kernel takes a handful of arguments.
        self.stack = LayerStack(
            weights=np.array([[product.weight.layout.data_ptr() for product in own] for own in self._products]),
            stored=np.array([[product.weight.stored for product in own] for own in self._products]),
            scales=np.array([[product.by for product in layer.products] for layer in layers]),
            biases=np.stack([NO_WEIGHT if bias is None else bias.numpy() for bias in biases]),
            norms=np.stack([np.stack(own[:2]) for own in factors]),
            delta_norms=np.stack([np.stack(own[2:]) for own in factors]),
            head_norms=np.stack(head_norms).astype(np.float32, copy=False),
            eps=np.array([[norm.eps if norm else 0.0 for norm in own] for own in norms]),
            windows=np.array([layer.attention.window or NO_WINDOW for layer in layers]),
            sizes=np.array(self._sizes),
            scaling=first.attention.scaling,
            softcap=first.attention.softcap or 0.0,
            is_silu=first.activation == "silu",
        )

    @classmethod
    def of(cls, layers: Sequence[CpuLayer], kinds: Sequence[int] = ()) -> CpuStack | None:
        """Return the layers, if their shapes and kinds of norms are the same and their weights are in blocks; else None.

        kinds: which of the rotary tables given to `run` each layer takes, by default the first one.
        """
        is_alike = len({layer.shape for layer in layers}) == 1 and all(layer.can_stack for layer in layers)
        return cls(layers, kinds or [0] * len(layers)) if is_alike else None

    def run(
        self,
        rows: CpuRows,
        rotary: Sequence[tuple[Floats, Floats]],
        kv: KVCache,
        kept: KeptStates | None = None,
        helpers: Helpers | None = None,
    ) -> None:
        """Advance `rows` through all layers.

        Args:
            rotary: tables of cos and sin [R, D].
            kept: where states before some layers go.
            helpers: threads that share the layers of MIN_SHARED_ROWS rows and more; the result is the same, bit for bit.
        """
        from eyas.kernels.cpu.layers import NUM_COUNTERS, run_layers

        cos, sin = (np.stack(tables) if len(tables) > 1 else tables[0][None] for tables in zip(*rotary, strict=True))
        num_heads, num_kv, width, inner = self._sizes
        # qkv and attention's output, gates and ups with the gated ones, and what is added: see `run_layers`.
        memory = np.empty(rows.count * (2 * (num_heads + num_kv) * width + 3 * inner + rows.state.shape[1]), np.float32)
        arguments = (
            self.stack, rows.state.numpy(), rows.normed.numpy(), rows.inputs.numpy(), cos, sin, self._kinds, kv.addresses,
            kv.scratch + 1, rows.slots, rows.keys, kept or NOTHING_KEPT, memory,
        )  # fmt: skip
        tickets = np.zeros(NUM_COUNTERS * len(self._kinds), np.int64)
        if helpers and rows.count >= MIN_SHARED_ROWS:
            helpers.run(run_layers, *arguments, tickets=tickets)
        else:
            run_layers(*arguments, tickets, 1)
        rows.inputs = rows.normed


class CpuRows:
    """Rows on their way through the layers.

    state, normed: the residual stream and its norm, [R, C]. count: R.

    Args:
        inputs: what the next attention reads, [R, X]; by default the norm.
        slots: where keys and values belong, int64 [R]; empty if they are not kept.
        keys: RowKeys of the rows.
    """

    def __init__(self, state: Tensor, slots: Ints, keys: RowKeys, inputs: Tensor | None = None) -> None:
        self.state, self.normed, self.slots = state, torch.empty_like(state), slots
        self.inputs = self.normed if inputs is None else inputs
        self.keys = keys
        self._state, self._normed = state.numpy(), self.normed.numpy()
        self.count = len(self._state)
        self._buffers: dict[int, tuple[Tensor, Floats]] = {}

    def buffer(self, width: int) -> tuple[Tensor, Floats]:
        """Return the memory [R, width] that all layers share, as a tensor and as an array. The next call overwrites it."""
        if width not in self._buffers:
            tensor = torch.empty(self.count, width)
            self._buffers[width] = tensor, tensor.numpy()
        return self._buffers[width]

    def start(self, kernels: Any, norm: RMSNorm) -> None:
        """Norm the embeddings."""
        kernels.norm(self._state, norm.factors, norm.eps, self._normed)

    def add(self, kernels: Any, delta: Tensor, by: float, delta_norm: RMSNorm | None, norm: RMSNorm) -> None:
        """Add what a sublayer gave, times `by`, and norm the sum."""
        weight, eps = (delta_norm.factors, delta_norm.eps) if delta_norm else (NO_WEIGHT, 0.0)
        kernels.add_norm(self._state, delta.numpy(), by, weight, eps, norm.factors, norm.eps, self._normed)


class CpuProduct(NamedTuple):
    """A product, and what to multiply its output by. packed: the product, if its weight is in blocks."""

    multiply: Product
    by: float
    packed: PackedProduct | None = None

    @classmethod
    def of(cls, product: Product) -> CpuProduct:
        """Return the product, whose scale is left to the kernel behind it."""
        if not isinstance(product, PackedProduct):
            return cls(product, 1.0)
        return cls(product.scaled, 1 / product.scale, product if product.weight.in_blocks else None)


class CpuProducts(NamedTuple):
    """The products of a layer."""

    qkv: CpuProduct
    out: CpuProduct
    gate_up: CpuProduct
    down: CpuProduct

    @classmethod
    def of(cls, qkv: Product, out: Product, gate_up: Product, down: Product) -> CpuProducts:
        """Return the products with their scales apart.

        Args:
            out, down: may be modules.
        """
        return cls(*map(CpuProduct.of, (qkv, out, gate_up, down)))


@dataclass(frozen=True, eq=False)
class CpuLayer:
    """A decoder layer as `eyas.kernels.cpu.layers` computes it; the order is that of `FusedLayer.forward`.

    Attributes:
        out_norm, down_norm: of what attention and MLP give; None for none.
    """

    products: CpuProducts
    heads: HeadLayout
    attention: AttentionRule
    activation: str
    mlp_norm: RMSNorm
    next_norm: RMSNorm
    out_norm: RMSNorm | None = None
    down_norm: RMSNorm | None = None

    @property
    def shape(self) -> tuple[object, ...]:
        """Return what layers of a CpuStack have in common."""
        products = [product.packed for product in self.products]
        sizes = tuple(packed and len(packed.weight.layout) for packed in products)
        biases = tuple(packed is not None and packed.bias is not None for packed in products)
        norms = self.heads.norms is None, self.out_norm is None, self.down_norm is None
        heads = self.heads.num_heads, self.heads.num_kv_heads, self.heads.width
        return sizes, biases, norms, heads, self.attention._replace(window=None), self.activation

    @property
    def can_stack(self) -> bool:
        """Return whether the layer may be one of a CpuStack: weights in blocks, and no bias but that of the
        first product.
        """
        packed = [product.packed for product in self.products]
        is_biased = any(product is not None and product.bias is not None for product in packed[1:])
        return all(product and product.weight.fills_blocks for product in packed) and not is_biased

    def run(self, kernels: Any, rows: CpuRows, rotary: tuple[Floats, Floats], kv: KVCache, index: int) -> None:
        """Advance `rows` through this layer.

        Args:
            rotary: cos and sin [R, D].
            index: of the layer in the KV cache.
        """
        self.finish(kernels, rows, self.project(kernels, rows, rotary, kv, index), kv, index)

    def project(self, kernels: Any, rows: CpuRows, rotary: tuple[Floats, Floats], kv: KVCache, index: int) -> Floats:
        """Return the rotated queries, keys and values of the rows, [R, H + 2 J, D]; keys and values go to the rows' slots,
        too.
        """
        product, heads, num_kv = self.products.qkv, self.heads, self.heads.num_kv_heads
        qkv: Floats = product.multiply(rows.inputs).numpy().reshape(rows.count, -1, heads.width)
        factors, eps = (heads.norms.factors, heads.norms.eps) if heads.norms else (NO_ROWS, 0.0)
        kernels.rotate(qkv, product.by, num_kv, *rotary, factors, eps)
        if len(rows.slots):
            kernels.store(qkv, heads.num_heads, num_kv, *kv.arrays[index], rows.slots)
        return qkv

    def finish(self, kernels: Any, rows: CpuRows, qkv: Floats, kv: KVCache, index: int) -> None:
        """Advance `rows` by the layer behind its projections, see `project`."""
        _, out, gate_up, down = self.products
        heads, rule, count = self.heads, self.attention, rows.count
        attended, into = rows.buffer(heads.num_heads * heads.width)
        kernels.attend(
            qkv, heads.num_kv_heads, *kv.arrays[index], *rows.keys,
            rule.scaling, rule.window or kernels.NO_WINDOW, rule.softcap or 0.0, 0, heads.num_kv_heads,
            into.reshape(count, -1, heads.width),
        )  # fmt: skip
        rows.add(kernels, out.multiply(attended), out.by, self.out_norm, self.mlp_norm)
        gates_ups = gate_up.multiply(rows.normed).numpy()
        gated, into = rows.buffer(gates_ups.shape[1] // 2)
        kernels.gate(gates_ups, gate_up.by, self.activation == "silu", into)
        rows.add(kernels, down.multiply(gated), down.by, self.down_norm, self.next_norm)
        rows.inputs = rows.normed
