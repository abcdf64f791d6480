"""Faster forward passes on the CPU: packed linear layers, and decoder layers that run as kernels.

Weights of a bfloat16 or float16 checkpoint are kept in half the bytes and multiplied in float32 all the same, others as
float32, both by kernels of our own (docs/decisions/0038-compiled-cpu.md). Without numba, and with several threads, libraries
multiply: for 8 to 64 rows oneDNN takes a half to a third of MKL's time, but on Intel's processors MKL is the faster
(docs/decisions/0024-packed-weights.md). Legend: R rows, K inputs, N outputs.
"""

from __future__ import annotations

import math
import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.cache.kv_cache import KVCache
from eyas.models.attention import attend_slots
from eyas.models.inputs import PackedInputs
from eyas.process import has_numba, keep_freed_memory
from eyas.tensors import Floats, Ints, runs_compiled, to_huge_pages

if TYPE_CHECKING:
    from eyas.models.cpu_products import Helpers
    from eyas.models.fused import HeadLayout, RMSNorm

Product = Callable[[Tensor], Tensor]

# Rows that the packed layout is made for; it serves any number.
PACKED_ROWS = 8
# Outputs in a block of a float16 layout.
BLOCK_OUTPUTS = 16
# Exponent of the largest weight of a float16 layout; float16 reaches 2**16.
HALF_EXPONENT = 15
# Rows from which on threads share a pass. One row's takes as long as the last token's way to the client, on another core.
MIN_SHARED_ROWS = 4
# Layers that transformers calls one after the other on the same rows.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

PROCESSORS = Path("/proc/cpuinfo")


def optimize_for_cpu(model: nn.Module) -> None:
    """Pack the model's linear layers and move its weights to huge pages. Weights on other devices stay as they are."""
    pack_weights(model)
    to_huge_pages([*model.parameters(), *model.buffers()])
    if any(tensor.device.type == "cpu" for tensor in model.parameters()):
        keep_freed_memory()


def pack_weights(model: nn.Module) -> None:
    """Pack every plain float32 linear layer on the CPU for what multiplies fastest, see `PackedWeight`. Others stay as they
    are. Without MKL and oneDNN nothing changes.
    """
    backend = torch.backends.mkl if _is_intel() else torch.backends.mkldnn
    if not backend.is_available():
        return
    for module in model.modules():
        for names in SIBLINGS:
            siblings: list[Any] = [getattr(module, name, None) for name in names]
            if all(_can_pack(sibling) for sibling in siblings) and len({s.weight.shape[1] for s in siblings}) == 1:
                _merge(siblings)
    for module in model.modules():
        if _can_pack(module):
            _pack(module)


def has_kernel(module: nn.Module) -> bool:
    """Whether kernels multiply by a packed layer's weight. Then a row's result does not depend on the other rows."""
    if isinstance(module, MergedLinearPart):
        return module.merged.product.weight.in_blocks
    return isinstance(module, PackedLinear) and module.product.weight.in_blocks


class PackedLinear(nn.Linear):
    """A linear layer whose weight is kept in a packed layout only."""

    product: PackedProduct

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """As [N, K], for a model that reads the layer's weight; often a copy."""
        return self.product.weight.dense

    def forward(self, rows: Tensor) -> Tensor:
        """rows [..., K] to [..., N]."""
        return self.product(rows)


@dataclass(eq=False)
class MergedLinear:
    """Sibling layers computed in one product: rows [..., K] times all weights, one below the other. sizes: N of each.

    rows, parts: input and outputs of the current pass; the first sibling computes them, the last drops them.
    """

    product: PackedProduct
    sizes: list[int]
    rows: Tensor | None = None
    parts: Sequence[Tensor] = ()


class MergedLinearPart(nn.Linear):
    """One of the layers of a MergedLinear."""

    merged: MergedLinear
    index: int

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """As [N, K]; often a copy."""
        return torch.split(self.merged.product.weight.dense, self.merged.sizes)[self.index]

    def forward(self, rows: Tensor) -> Tensor:
        """rows [..., K] to [..., N]."""
        merged = self.merged
        if rows is not merged.rows:
            merged.rows, merged.parts = rows, torch.split(merged.product(rows), merged.sizes, -1)
        part = merged.parts[self.index]
        if self.index == len(merged.sizes) - 1:
            merged.rows, merged.parts = None, ()
        return part


def _can_pack(module: Any) -> bool:
    weight = module.weight if type(module) is nn.Linear else None
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype == torch.float32


@torch.no_grad()
def _merge(siblings: Sequence[Any]) -> None:
    biases = [sibling.bias for sibling in siblings if sibling.bias is not None]
    if len(biases) not in (0, len(siblings)):
        return
    product = PackedProduct(torch.cat([sibling.weight for sibling in siblings]), torch.cat(biases) if biases else None)
    merged = MergedLinear(product, [len(sibling.weight) for sibling in siblings])
    # so that code which lists weights finds it
    siblings[0].register_buffer("packed", product.weight.layout, persistent=False)
    for index, sibling in enumerate(siblings):
        del sibling.weight
        sibling.merged, sibling.index, sibling.bias = merged, index, None
        sibling.__class__ = MergedLinearPart


@torch.no_grad()
def _pack(module: Any) -> None:
    product = PackedProduct(module.weight.detach(), module.bias)
    module.register_buffer("packed", product.weight.layout, persistent=False)
    del module.weight
    module.__class__ = PackedLinear
    module.product = product


@cache
def _is_intel() -> bool:
    return "GenuineIntel" in _processor_words()


@dataclass(eq=False)
class PackedWeight:
    """A weight [N, K] in the layout of what multiplies by it.

    layout: float16 or float32 blocks for the kernels, see `in_blocks`; float16 [N, K] for FBGEMM, which has a copy of its
    own; oneDNN's; or for MKL a view of the transposed weight.
    num_outputs: N. scale: power of two by which a float16 layout was multiplied. Float16 has fewer exponents than bfloat16.
    """

    layout: Tensor
    num_outputs: int
    scale: float = 1.0

    @classmethod
    def of(cls, weight: Tensor) -> PackedWeight:
        """Pack a float32 weight on the CPU."""
        if _has_fbgemm():
            largest = math.frexp(float(weight.abs().max()))[1] if weight.numel() else 0
            for scale in (1.0, 2.0 ** (HALF_EXPONENT - largest)):
                half = (weight * scale).half()
                if torch.equal(half.float(), weight * scale):
                    return cls(in_blocks(half) if _has_kernel(half) else half, len(half), scale)
        if _has_kernel(weight) and runs_compiled(weight.device):
            return cls(in_blocks(weight), len(weight))
        return cls(_library_layout(weight), len(weight))

    @property
    def dense(self) -> Tensor:
        """As float32 [N, K]."""
        if self.layout.is_mkldnn:
            return self.layout.to_dense()
        return self.rows.float() / self.scale

    @property
    def is_half(self) -> bool:
        """Whether the layout is float16."""
        return self.layout.dtype == torch.float16

    @property
    def rows(self) -> Tensor:
        """A layout that is not oneDNN's as [N, K], in its own dtype."""
        return self.layout.transpose(1, 2).flatten(0, 1)[: self.num_outputs] if self.in_blocks else self.layout

    @property
    def in_blocks(self) -> bool:
        """Whether the layout is that of the kernels."""
        return self.layout.dim() == 3

    @property
    def fills_blocks(self) -> bool:
        """Whether the kernels' layout has no zeros that fill up the last block."""
        return self.in_blocks and self.num_outputs % BLOCK_OUTPUTS == 0


class PackedProduct:
    """Products in float32 with a weight [N, K] that is packed here, and a bias [N]. One that is stored in float16 takes half
    the bytes of a pass.

    With one thread and numba `eyas.models.cpu_products` multiplies, and a row's result does not depend on the other rows.
    Otherwise a library does, whose sums depend on the number of rows for some outputs on some processors.
    scale: of the output of `scaled`. helpers: threads that share products of MIN_SHARED_ROWS rows and more.
    """

    helpers: Helpers | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = PackedWeight.of(weight)
        self.scale, self._unscale = self.weight.scale, 1.0 / self.weight.scale
        self.bias = None if bias is None else bias.detach() * self.scale
        if not self.weight.in_blocks:
            self._by_library  # noqa: B018 (packed now, not at the first product)

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [..., K] to [..., N]."""
        return self.scaled(rows) if self.scale == 1 else self.scaled(rows).mul_(self._unscale)

    def scaled(self, rows: Tensor) -> Tensor:
        """rows [..., K] to the output [..., N] times `scale`."""
        layout, is_half = self.weight.layout, self.weight.is_half
        if not self.weight.in_blocks or type(rows) is not Tensor or not runs_compiled(rows.device):
            return self._by_library(rows)
        from eyas.models.cpu_products import PHASE_SIZE, multiply_together, multiply_weight

        out = torch.empty(*rows.shape[:-1], layout.shape[0] * BLOCK_OUTPUTS)
        flat, into = rows.reshape(-1, layout.shape[1]), out.view(-1, out.shape[-1])
        arguments, helpers = (flat.contiguous().numpy(), layout.data_ptr(), is_half, into.numpy()), self.helpers
        if helpers and len(flat) >= MIN_SHARED_ROWS:
            helpers.run(multiply_together, *arguments, tickets=np.zeros(PHASE_SIZE, np.int64))
        else:
            multiply_weight(*arguments)
        out = out[..., : self.weight.num_outputs].contiguous()
        return out if self.bias is None else out.add_(self.bias)

    @cached_property
    def _by_library(self) -> Product:
        """The product by FBGEMM, MKL or oneDNN: for several threads, and where there are no kernels."""
        weight, bias = self.weight, self.bias
        if not weight.is_half:
            layout = _library_layout(weight.dense) if weight.in_blocks else weight.layout
            if layout.is_mkldnn:
                return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, layout, bias, "none", [], "")
            return partial(F.linear, weight=layout, bias=bias)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a later torch may have no such function
            packed = torch.fbgemm_pack_gemm_matrix_fp16(weight.rows.float())
            torch.fbgemm_linear_fp16_weight_fp32_activation(torch.zeros(1, weight.rows.shape[1]), packed, None)
        return partial(torch.fbgemm_linear_fp16_weight_fp32_activation, packed_weight=packed, bias=bias)


def _library_layout(weight: Tensor) -> Tensor:
    """A float32 weight as MKL reads it fastest on Intel's processors, and for oneDNN on others."""
    if _is_intel():
        return weight.t().contiguous().t()
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)  # type: ignore[no-any-return]


def in_blocks(weight: Tensor) -> Tensor:
    """A weight [N, K] as `eyas.models.cpu_products` reads it: [N / BLOCK_OUTPUTS, K, BLOCK_OUTPUTS]. Zeros fill it up."""
    filled = F.pad(weight, (0, 0, 0, -len(weight) % BLOCK_OUTPUTS))
    return filled.view(-1, BLOCK_OUTPUTS, weight.shape[1]).transpose(1, 2).contiguous()


def _has_kernel(weight: Tensor) -> bool:
    """Whether the kernels multiply by a weight [N, K]. They convert float16 by an instruction of the processor."""
    is_half = weight.dtype == torch.float16
    return len(weight) > 0 and has_numba() and (_converts_halves() if is_half else _multiplies_and_adds())


@cache
def _converts_halves() -> bool:
    return {"avx2", "f16c", "fma"} <= _processor_words()


@cache
def _multiplies_and_adds() -> bool:
    """Whether one instruction multiplies and adds, so that sums in the order of inputs take no longer than a library's."""
    return platform.machine() in ("aarch64", "arm64") or {"avx2", "fma"} <= _processor_words()


def _processor_words() -> set[str]:
    return set(PROCESSORS.read_text().split()) if PROCESSORS.exists() else set()


@cache
def _has_fbgemm() -> bool:
    names = "fbgemm_pack_gemm_matrix_fp16", "fbgemm_linear_fp16_weight_fp32_activation"
    return "fbgemm" in torch.backends.quantized.supported_engines and all(hasattr(torch, name) for name in names)


NO_ROWS, NO_WEIGHT = np.zeros((0, 0), np.float32), np.zeros(0, np.float32)


class CpuRows:
    """Rows on their way through the layers.

    state, normed: the residual stream and its norm, [R, C]. count: R. inputs: what the next attention reads, [R, X]; by
    default the norm. slots: where keys and values belong, int64 [R]; empty if they are not kept. keys: RowKeys of the
    segments that the kernels attend. prompts: for each longer segment which rows it has, and these packed by themselves.
    """

    def __init__(
        self,
        state: Tensor,
        slots: Ints,
        keys: Any,
        prompts: Sequence[tuple[slice, PackedInputs]] = (),
        inputs: Tensor | None = None,
    ) -> None:
        self.state, self.normed, self.slots = state, torch.empty_like(state), slots
        self.inputs = self.normed if inputs is None else inputs
        self.keys, self.prompts = keys, prompts
        self._state, self._normed = state.numpy(), self.normed.numpy()
        self.count = len(self._state)
        self._buffers: dict[int, tuple[Tensor, Floats]] = {}

    def buffer(self, width: int) -> tuple[Tensor, Floats]:
        """Memory [R, width] that all layers share, as a tensor and as an array. The next call overwrites it."""
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
        """The product, whose scale is left to the kernel behind it."""
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
        """The products with their scales apart. out, down: may be modules."""
        return cls(*map(CpuProduct.of, (qkv, out, gate_up, down)))


@dataclass(frozen=True, eq=False)
class CpuLayer:
    """A decoder layer as `eyas.models.cpu_kernels` computes it; the order is that of `FusedLayer.forward`.

    scaling, window, softcap: of its attention. out_norm, down_norm: of what attention and MLP give; None for none.
    """

    products: CpuProducts
    heads: HeadLayout
    scaling: float
    window: int | None
    softcap: float | None
    activation: str
    mlp_norm: RMSNorm
    next_norm: RMSNorm
    out_norm: RMSNorm | None = None
    down_norm: RMSNorm | None = None

    @property
    def shape(self) -> tuple[object, ...]:
        """What layers of a CpuStack have in common."""
        products = [product.packed for product in self.products]
        sizes = tuple(packed and len(packed.weight.layout) for packed in products)
        biases = tuple(packed is not None and packed.bias is not None for packed in products)
        norms = self.heads.norms is None, self.out_norm is None, self.down_norm is None
        heads = self.heads.num_heads, self.heads.num_kv_heads, self.heads.width
        return sizes, biases, norms, heads, self.scaling, self.softcap, self.activation

    @property
    def can_stack(self) -> bool:
        """Whether the layer may be one of a CpuStack: weights in blocks, and no bias but that of the first product."""
        packed = [product.packed for product in self.products]
        is_biased = any(product is not None and product.bias is not None for product in packed[1:])
        return all(product and product.weight.fills_blocks for product in packed) and not is_biased

    def run(self, kernels: Any, rows: CpuRows, rotary: tuple[Floats, Floats], kv: KVCache, index: int) -> None:
        """Advance `rows` through this layer. rotary: cos and sin [R, D]. index: of the layer in the KV cache."""
        self.finish(kernels, rows, self.project(kernels, rows, rotary, kv, index), kv, index)

    def project(self, kernels: Any, rows: CpuRows, rotary: tuple[Floats, Floats], kv: KVCache, index: int) -> Floats:
        """Rotated queries, keys and values of the rows, [R, H + 2 J, D]; keys and values go to the rows' slots, too."""
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
        heads, count = self.heads, rows.count
        attended, into = rows.buffer(heads.num_heads * heads.width)
        kernels.attend(
            qkv, heads.num_kv_heads, *kv.arrays[index], *rows.keys,
            self.scaling, self.window or kernels.NO_WINDOW, self.softcap or 0.0, 0, heads.num_kv_heads,
            into.reshape(count, -1, heads.width),
        )  # fmt: skip
        for at, packed in rows.prompts:
            query, attention = torch.from_numpy(qkv)[at, : heads.num_heads], (self.scaling, self.window, self.softcap)
            attended[at] = attend_slots(query, kv.keys[index], kv.values[index], packed, *attention).flatten(1)
        rows.add(kernels, out.multiply(attended), out.by, self.out_norm, self.mlp_norm)
        gates_ups = gate_up.multiply(rows.normed).numpy()
        gated, into = rows.buffer(gates_ups.shape[1] // 2)
        kernels.gate(gates_ups, gate_up.by, self.activation == "silu", into)
        rows.add(kernels, down.multiply(gated), down.by, self.down_norm, self.next_norm)
        rows.inputs = rows.normed
