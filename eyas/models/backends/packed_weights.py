"""Linear layers on the CPU whose weights are packed for faster products.

Weights of a bfloat16 or float16 checkpoint are kept in half the bytes and multiplied in float32 all the same, or by matrix
units, others as float32, all by kernels of our own (docs/decisions/0038-compiled-cpu.md). Without numba, and with several
threads, libraries multiply: for 8 to 64 rows oneDNN takes a half to a third of MKL's time, but on Intel's processors MKL is
the faster.
Legend: R rows, K inputs, N outputs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.device.host import has_numba, keep_freed_memory
from eyas.device.memory import to_huge_pages
from eyas.device.placement import runs_compiled
from eyas.device.processor import converts_halves, has_matrix_units, is_intel, multiplies_and_adds, multiplies_halves
from eyas.kernels.arguments import (
    BLOCK_OUTPUTS,
    BYTES,
    DOTS,
    FLOATS,
    GROUP_INPUTS,
    HALVES,
    PAIRS,
    QUAD_INPUTS,
    SCALE_INPUTS,
    STEP_INPUTS,
)

if TYPE_CHECKING:
    from eyas.kernels.cpu.sharing import Helpers

Product = Callable[[Tensor], Tensor]

# Rows that the packed layout is made for; it serves any number.
PACKED_ROWS = 8
# Numbers of a weight that are laid out at a time.
PART_ELEMENTS = 1 << 16
# Blocks of a weight whose integers are moved at a time.
PART_BLOCKS = 256
HALF_DTYPES = (torch.bfloat16, torch.float16)
# Of weights that are packed for products in float32.
WEIGHT_DTYPES = (torch.float32, *HALF_DTYPES)
# Exponent of the largest weight of a float16 layout; float16 reaches 2**16. And that of its scale, whose inverse is a normal
# float32.
HALF_EXPONENT, MAX_EXPONENT = 15, 126
# Rows from which on threads share a pass. One row's takes as long as the last token's way to the client, on another core.
MIN_SHARED_ROWS = 4
# Layers that transformers calls one after the other on the same rows.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def optimize_for_cpu(model: Any, dtype: torch.dtype | None = None, to_bytes: bool = False) -> None:
    """Pack linear layers and move weights to huge pages. Weights on other devices stay as they are.

    Args:
        dtype: that a causal LM computes in, whatever dtypes its weights have. Layers of a half precision are packed only
            where the processor has no matrix units for it, but always the output head, which returns float32. None packs
            float32 layers, and all that are rounded.
        to_bytes: round the weights to 8 bits, see `PackedWeight.rounded`.
    """
    if dtype is None:
        pack_weights(model, WEIGHT_DTYPES if to_bytes else (torch.float32,), to_bytes=to_bytes)
    else:
        head = model.get_output_embeddings()
        pack_weights(model, WEIGHT_DTYPES, head, to_bytes)  # the largest weight first, while no other one is there twice
        if not multiplies_halves(str(dtype).removeprefix("torch.")):
            pack_weights(model, WEIGHT_DTYPES, to_bytes=to_bytes)
        if isinstance(head, PackedLinear):
            head.dtype = torch.float32
        for module in model.modules():
            if isinstance(module, PackedEmbedding):
                module.dtype = dtype
    to_huge_pages([*model.parameters(), *model.buffers()])
    if any(tensor.device.type == "cpu" for tensor in model.parameters()):
        keep_freed_memory()


@torch.no_grad()
def copy_stored_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace weights that belong to a file by copies in the dtype that a model computes in. Embeddings keep their own."""
    for module in model.modules():
        if _has_embedding(module) and module.weight.dtype != dtype:
            _pack_embedding(module, PackedWeight(module.weight.clone(), *module.weight.shape), dtype)
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.to(dtype, copy=True), requires_grad=False))


def pack_weights(
    model: nn.Module,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    within: nn.Module | None = None,
    to_bytes: bool = False,
) -> None:
    """Pack every plain linear layer on the CPU for what multiplies fastest, see `PackedWeight`. Others stay as they are.
    Without MKL and oneDNN nothing changes.

    An embedding that shares its weight with such a layer reads the packed one.

    Args:
        model: the module whose embeddings may be tied to a layer.
        dtypes: of the weights that are packed.
        within: the part of the model whose layers are packed; None for all of it.
        to_bytes: see `optimize_for_cpu`.
    """
    backend = torch.backends.mkl if is_intel() else torch.backends.mkldnn
    if not to_bytes and not backend.is_available():
        return
    embeddings = {id(module.weight): module for module in model.modules() if _has_embedding(module)}
    layers = list((within or model).modules())
    for module in layers:
        for names in SIBLINGS:
            siblings: list[Any] = [getattr(module, name, None) for name in names]
            can_pack = all(_can_pack(each, dtypes) for each in siblings)
            if can_pack and len({(each.weight.shape[1], each.weight.dtype) for each in siblings}) == 1:
                _merge(siblings, to_bytes)
    for layer in layers:
        if _can_pack(layer, dtypes):
            embedding = embeddings.get(id(layer.weight))
            packed = _pack(layer, to_bytes)
            if embedding is not None and not packed.layout.is_mkldnn:
                _pack_embedding(embedding, packed, embedding.weight.dtype)


def has_kernel(module: nn.Module) -> bool:
    """Return whether kernels multiply by a packed layer's weight. Then a row's result does not depend on the other rows."""
    weight = packed_weight(module)
    return weight is not None and weight.in_blocks


def packed_weight(module: nn.Module) -> PackedWeight | None:
    """Return the weight of a packed layer, or of the one that it is merged into."""
    if isinstance(module, MergedLinearPart):
        return module.merged.product.weight
    return module.product.weight if isinstance(module, PackedLinear) else None


class PackedLinear(nn.Linear):
    """A linear layer whose weight is kept in a packed layout only.

    dtype: of the output; None for that of the input.
    """

    product: PackedProduct
    dtype: torch.dtype | None = None

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return the weight as [N, K], for a model that reads it; often a copy."""
        return self.product.weight.dense

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows [..., K] to [..., N]."""
        return self.product(rows.float()).to(self.dtype or rows.dtype)


class PackedEmbedding(nn.Embedding):
    """An embedding whose rows are read from a packed weight, most often that of a layer which is tied to it.

    dtype: of the rows. embed_scale: what some families multiply them by.
    """

    stored: PackedWeight
    dtype: torch.dtype

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return the weight as [V, C], for a model that reads it; a copy."""
        return self.stored.dense.to(self.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [...] to [..., C]."""
        scale: Any = getattr(self, "embed_scale", 1.0)
        return self.stored.take(tokens).to(self.dtype) * (scale.to(self.dtype) if isinstance(scale, Tensor) else scale)


@dataclass(eq=False)
class MergedLinear:
    """Sibling layers computed in one product: rows [..., K] times all weights, one below the other.

    Attributes:
        sizes: N of each.
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
        """Return the weight as [N, K]; often a copy."""
        return torch.split(self.merged.product.weight.dense, self.merged.sizes)[self.index]

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows [..., K] to [..., N]."""
        merged = self.merged
        if rows is not merged.rows:
            outputs = merged.product(rows.float()).to(rows.dtype)
            merged.rows, merged.parts = rows, torch.split(outputs, merged.sizes, -1)
        part = merged.parts[self.index]
        if self.index == len(merged.sizes) - 1:
            merged.rows, merged.parts = None, ()
        return part


def _can_pack(module: Any, dtypes: Sequence[torch.dtype]) -> bool:
    weight = module.weight if type(module) is nn.Linear else None
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype in dtypes


def _has_embedding(module: Any) -> TypeGuard[nn.Embedding]:
    """Return whether a module is an embedding that looks rows up in a plain weight, as `nn.Embedding` does."""
    weight = module._parameters.get("weight") if isinstance(module, nn.Embedding) and module.max_norm is None else None
    return type(weight) is nn.Parameter and weight.device.type == "cpu"


@torch.no_grad()
def _merge(siblings: Sequence[Any], to_bytes: bool) -> None:
    biases = [sibling.bias for sibling in siblings if sibling.bias is not None]
    if len(biases) not in (0, len(siblings)):
        return
    bias = torch.cat(biases) if biases else None
    product = PackedProduct(torch.cat([sibling.weight for sibling in siblings]), bias, to_bytes)
    merged = MergedLinear(product, [len(sibling.weight) for sibling in siblings])
    # so that code which lists weights finds it
    siblings[0].register_buffer("packed", product.weight.layout, persistent=False)
    for index, sibling in enumerate(siblings):
        del sibling.weight
        sibling.merged, sibling.index, sibling.bias = merged, index, None
        sibling.__class__ = MergedLinearPart


@torch.no_grad()
def _pack(module: Any, to_bytes: bool) -> PackedWeight:
    product = PackedProduct(module.weight.detach(), module.bias, to_bytes)
    module.register_buffer("packed", product.weight.layout, persistent=False)
    del module.weight
    module.__class__ = PackedLinear
    module.product = product
    return product.weight


@torch.no_grad()
def _pack_embedding(module: Any, weight: PackedWeight, dtype: torch.dtype) -> None:
    """Let an embedding read a packed weight, unless its family does more to the rows than `PackedEmbedding`.

    dtype: of the rows.
    """
    few, kind = torch.arange(min(2, weight.num_outputs)), type(module)
    module.padding_idx = None  # it matters to gradients only
    expected = torch.func.functional_call(module, {"weight": weight.take(few).to(dtype)}, (few,))
    module.stored, module.dtype, module.__class__ = weight, dtype, PackedEmbedding
    if torch.equal(module(few), expected):
        del module.weight
        module.register_buffer("packed", weight.layout, persistent=False)
    else:
        del module.stored, module.dtype
        module.__class__ = kind


@dataclass(eq=False)
class PackedWeight:
    """A weight [N, K] in the layout of what multiplies by it.

    Attributes:
        layout: blocks of float16, float32, bfloat16 in pairs or 8-bit integers for the kernels, see `in_blocks`; float16
            [N, K] for FBGEMM, which has a copy of its own; oneDNN's; or for MKL a view of the transposed weight. Of
            integers, each GROUP_INPUTS rows of a block are followed by SCALE_INPUTS rows, the bytes of their float32 scales
            [BLOCK_OUTPUTS].
        num_outputs, num_inputs: N, K.
        scale: power of two by which a float16 layout was multiplied. Float16 has fewer exponents than bfloat16.
    """

    layout: Tensor
    num_outputs: int
    num_inputs: int
    scale: float = 1.0

    @classmethod
    def of(cls, weight: Tensor) -> PackedWeight:
        """Pack a float weight on the CPU. Its numbers stay as they are, bit for bit; in 8 bits -0 becomes 0."""
        shape = len(weight), weight.shape[1]
        if has_fbgemm():
            is_blocked = len(weight) > 0 and runs_kernel(torch.float16)
            if (layout := _laid_out(weight, torch.float16, 1.0, is_blocked)) is not None:
                return cls(layout, *shape)
            low, high = torch.aminmax(weight)
            exponent = HALF_EXPONENT - math.frexp(max(-float(low), float(high)))[1]
            scale = 2.0 ** min(exponent, MAX_EXPONENT)
            if (layout := _laid_out(weight, torch.float16, scale, is_blocked)) is not None:
                return cls(layout, *shape, scale)
        if len(weight) > 0 and runs_kernel(torch.float32) and runs_compiled(weight.device):
            layout = _in_groups(weight, is_exact=True)
            if layout is None:
                layout = _laid_out(weight, torch.float32, 1.0, is_blocked=True)
            assert layout is not None, "float32 holds every weight"
            return cls(layout, *shape)
        return cls(_library_layout(weight.float()), *shape)

    @classmethod
    @torch.no_grad()
    def rounded(cls, weight: Tensor) -> PackedWeight:
        """Pack a float weight on the CPU as integers of 8 bits. The kernels must run.

        Each GROUP_INPUTS weights of an output have a scale, by which the largest of them becomes 127. A weight that is not
        finite stays as it is, for `load_target` to name it.
        """
        layout = _in_groups(weight, is_exact=True)
        if layout is None:
            layout = _in_groups(weight, is_exact=False)
        return cls.of(weight) if layout is None else cls(layout, *weight.shape)

    @property
    def dense(self) -> Tensor:
        """Return the weight as float32 [N, K]."""
        if self.layout.is_mkldnn:
            return self.layout.to_dense()
        if self.stored in (BYTES, DOTS, PAIRS):
            return self.take(torch.arange(self.num_outputs))
        return self.rows.float() / self.scale

    def round_rows(self) -> None:
        """Have rows rounded when they are multiplied by the weight: lay BYTES out as DOTS, and HALVES as PAIRS, in place.

        Halves stay as they are if bfloat16 does not hold them, and where a step of a matrix unit would read inputs that the
        weight lacks.
        """
        if self.stored == HALVES and self.in_blocks and self.num_inputs % STEP_INPUTS == 0 and _holds(self.layout):
            self.layout = _in_pairs(self.layout)
        elif self.stored == BYTES:
            self.layout = _in_words(self.layout)
        del self.stored

    def take(self, rows: Tensor) -> Tensor:
        """Take some rows [...] in float32 [..., K], of a layout that is not oneDNN's."""
        if self.layout.dim() == 3:  # in blocks. NumPy gathers columns of blocks in a third of torch's time
            if self.stored in (BYTES, DOTS):
                return self._scaled_integers(rows)
            numbers = rows.numpy()
            size = 2 if self.stored == PAIRS else 1  # inputs of an output side by side
            layout = self.layout.view(torch.int16) if self.stored == PAIRS else self.layout
            blocks = layout.view(len(layout), -1, BLOCK_OUTPUTS, size).numpy()
            found = layout.new_empty(*rows.shape, self.num_inputs)
            found.numpy()[...] = blocks[numbers // BLOCK_OUTPUTS, :, numbers % BLOCK_OUTPUTS].reshape(found.shape)
            found = found.view(self.layout.dtype)
        else:
            found = F.embedding(rows, self.layout)
        return found.float() if self.scale == 1 else found.float() / self.scale

    def _scaled_integers(self, rows: Tensor) -> Tensor:
        """Return some rows [..., K] of integers times their scales."""
        block, output = (rows // BLOCK_OUTPUTS).numpy(), (rows % BLOCK_OUTPUTS).numpy()
        size, zero = (QUAD_INPUTS, 128) if self.stored == DOTS else (1, 0)
        groups = self.layout.view(len(self.layout), -1, (GROUP_INPUTS + SCALE_INPUTS) * BLOCK_OUTPUTS)
        scales = groups[:, :, GROUP_INPUTS * BLOCK_OUTPUTS :].view(torch.float32)
        parts = groups[:, :, : GROUP_INPUTS * BLOCK_OUTPUTS].view(*groups.shape[:2], -1, BLOCK_OUTPUTS, size).numpy()
        integers = torch.from_numpy(parts[block, :, :, output]).flatten(-2).float() - zero  # [..., groups, GROUP_INPUTS]
        numbers = (integers * scales[block, :, output][..., None]).flatten(-2)
        return numbers[..., : self.num_inputs]

    @property
    def is_half(self) -> bool:
        """Return whether the layout is float16."""
        return self.layout.dtype == torch.float16

    @cached_property
    def stored(self) -> int:
        """Return how the kernels find the numbers: FLOATS, HALVES, BYTES, DOTS or PAIRS."""
        pairs = {torch.bfloat16: PAIRS} if self.in_blocks else {}
        return ({torch.float16: HALVES, torch.int8: BYTES, torch.uint8: DOTS} | pairs).get(self.layout.dtype, FLOATS)

    @property
    def rows(self) -> Tensor:
        """A layout of FLOATS or HALVES that is not oneDNN's as [N, K], in its own dtype."""
        return self.layout.transpose(1, 2).flatten(0, 1)[: self.num_outputs] if self.in_blocks else self.layout

    @property
    def in_blocks(self) -> bool:
        """Return whether the layout is that of the kernels."""
        return self.layout.dim() == 3

    @property
    def fills_blocks(self) -> bool:
        """Return whether the kernels' layout has no zeros that fill up the last block."""
        return self.in_blocks and self.num_outputs % BLOCK_OUTPUTS == 0


class PackedProduct:
    """Products in float32 with a weight [N, K] that is packed here, and a bias [N]. One that is stored in float16 takes half
    the bytes of a pass.

    With one thread and numba `eyas.kernels.cpu.products` multiplies, and a row's result does not depend on the other rows.
    Otherwise a library does, whose sums depend on the number of rows for some outputs on some processors.
    scale: of the output of `scaled`. helpers: threads that share products of MIN_SHARED_ROWS rows and more.

    Args:
        to_bytes: round the weight to 8 bits.
    """

    helpers: Helpers | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None = None, to_bytes: bool = False) -> None:
        self.weight = PackedWeight.rounded(weight) if to_bytes else PackedWeight.of(weight)
        self.scale, self._unscale = self.weight.scale, 1.0 / self.weight.scale
        self.bias = None if bias is None else bias.detach().float() * self.scale
        if not self.weight.in_blocks:
            self.by_library  # noqa: B018 (packed now, not at the first product)

    def __call__(self, rows: Tensor) -> Tensor:
        """Map rows [..., K] to [..., N]."""
        return self.scaled(rows) if self.scale == 1 else self.scaled(rows).mul_(self._unscale)

    def scaled(self, rows: Tensor) -> Tensor:
        """Map rows [..., K] to the output [..., N] times `scale`."""
        layout = self.weight.layout
        if not self.weight.in_blocks or type(rows) is not Tensor or not runs_compiled(rows.device):
            return self.by_library(rows)
        from eyas.kernels.cpu.products import multiply_together, multiply_weight
        from eyas.kernels.cpu.sharing import PHASE_SIZE

        out = torch.empty(*rows.shape[:-1], layout.shape[0] * BLOCK_OUTPUTS)
        flat, into = rows.reshape(-1, self.weight.num_inputs), out.view(-1, out.shape[-1])
        arguments = flat.contiguous().numpy(), layout.data_ptr(), self.weight.stored, into.numpy()
        helpers = self.helpers
        if helpers and len(flat) >= MIN_SHARED_ROWS:
            helpers.run(multiply_together, *arguments, tickets=np.zeros(PHASE_SIZE, np.int64))
        else:
            multiply_weight(*arguments)
        out = out[..., : self.weight.num_outputs].contiguous()
        return out if self.bias is None else out.add_(self.bias)

    @cached_property
    def by_library(self) -> Product:
        """The product by FBGEMM, MKL or oneDNN: for several threads, and where there are no kernels."""
        weight, bias = self.weight, self.bias
        if not weight.is_half:
            layout = _library_layout(weight.dense * self.scale) if weight.in_blocks else weight.layout
            if layout.is_mkldnn:
                return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, layout, bias, "none", [], "")
            return partial(F.linear, weight=layout, bias=bias)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a later torch may have no such function
            packed = torch.fbgemm_pack_gemm_matrix_fp16(weight.rows.float())
            torch.fbgemm_linear_fp16_weight_fp32_activation(torch.zeros(1, weight.rows.shape[1]), packed, None)
        return partial(torch.fbgemm_linear_fp16_weight_fp32_activation, packed_weight=packed, bias=bias)


def _library_layout(weight: Tensor) -> Tensor:
    """Return a float32 weight as MKL reads it fastest on Intel's processors, and for oneDNN on others."""
    if is_intel():
        return weight.t().contiguous().t()
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)  # type: ignore[no-any-return]


def in_blocks(weight: Tensor) -> Tensor:
    """Return a weight [N, K] in the shape in which `eyas.kernels.cpu.products` reads it, often a view of it:
    [N / BLOCK_OUTPUTS, K, BLOCK_OUTPUTS]. Zeros fill it up.
    """
    filled = F.pad(weight, (0, 0, 0, -len(weight) % BLOCK_OUTPUTS)) if len(weight) % BLOCK_OUTPUTS else weight
    return filled.view(-1, BLOCK_OUTPUTS, weight.shape[1]).transpose(1, 2)


def _in_groups(weight: Tensor, is_exact: bool) -> Tensor | None:
    """Return a float weight [N, K] as blocks of 8-bit integers with scales. None if that changes a number and must not, and
    for numbers that are not finite.
    """
    from eyas.kernels.cpu.packing import narrow_groups

    num_outputs, num_inputs = weight.shape
    group_rows = GROUP_INPUTS + SCALE_INPUTS
    num_blocks, num_groups = -(-num_outputs // BLOCK_OUTPUTS), -(-num_inputs // GROUP_INPUTS)
    layout = torch.empty(num_blocks, num_groups, group_rows, BLOCK_OUTPUTS, dtype=torch.int8)
    to_huge_pages([layout], collapse=False)
    size = max(PART_ELEMENTS // max(num_inputs, 1) // BLOCK_OUTPUTS, 1) * BLOCK_OUTPUTS
    for start in range(0, num_outputs, size):
        part = weight[start : start + size].float().contiguous().numpy()
        blocks = layout[start // BLOCK_OUTPUTS : -(-(start + len(part)) // BLOCK_OUTPUTS)].flatten(2)
        if not narrow_groups(part, is_exact, blocks.numpy(), blocks.view(torch.float32).numpy()):
            return None
    return layout.flatten(1, 2)


def _in_words(layout: Tensor) -> Tensor:
    """Lay BYTES out as DOTS, in place."""
    groups = layout.view(len(layout), -1, GROUP_INPUTS + SCALE_INPUTS, BLOCK_OUTPUTS).view(torch.uint8)
    for integers in torch.split(groups[:, :, :GROUP_INPUTS], PART_BLOCKS):
        quads = integers.reshape(*integers.shape[:2], -1, QUAD_INPUTS, BLOCK_OUTPUTS) + 128
        integers.copy_(quads.transpose(3, 4).reshape(integers.shape))  # [blocks, groups, quads, outputs, inputs]
    return layout.view(torch.uint8)


def _holds(halves: Tensor) -> bool:
    """Return whether bfloat16 holds all numbers."""
    return all(torch.equal(part.bfloat16().to(part.dtype), part) for part in torch.split(halves, PART_BLOCKS))


def _in_pairs(layout: Tensor) -> Tensor:
    """Lay HALVES out as PAIRS, in place."""
    for halves in torch.split(layout, PART_BLOCKS):
        # [blocks, K / 2, outputs, 2]
        pairs = halves.to(torch.bfloat16).reshape(len(halves), -1, 2, BLOCK_OUTPUTS).transpose(2, 3)
        halves.view(torch.bfloat16).copy_(pairs.reshape(halves.shape))
    return layout.view(torch.bfloat16)


def _laid_out(weight: Tensor, dtype: torch.dtype, scale: float, is_blocked: bool) -> Tensor | None:
    """Return a weight [N, K] times a power of two in another dtype, as `in_blocks` or as it is. None if that changes a
    number.

    Parts of it are converted one after the other, each in the cache of the processor.
    """
    size = max(PART_ELEMENTS // max(weight.shape[1], 1) // BLOCK_OUTPUTS, 1) * BLOCK_OUTPUTS
    step, num_blocks = (BLOCK_OUTPUTS, -(-len(weight) // BLOCK_OUTPUTS)) if is_blocked else (1, 0)
    layout = torch.empty((num_blocks, weight.shape[1], BLOCK_OUTPUTS) if is_blocked else weight.shape, dtype=dtype)
    to_huge_pages([layout], collapse=False)
    for start in range(0, len(weight), size):
        part = weight[start : start + size].float()
        scaled = part if scale == 1 else part * scale
        narrow = scaled.to(dtype)
        if dtype != torch.float32 and not torch.equal(narrow.float(), scaled):
            return None
        rows = layout[start // step : -(-(start + len(part)) // step)]
        rows.copy_(in_blocks(narrow) if is_blocked else narrow)
    return layout


def multiplies_tiles() -> bool:
    """Return whether the kernels multiply by matrix units of this processor."""
    if not has_numba() or not has_matrix_units():
        return False
    from eyas.kernels.cpu.matrix_units import HAS_UNITS

    return HAS_UNITS


def runs_kernel(dtype: torch.dtype) -> bool:
    """Return whether the kernels multiply by weights of a dtype. They convert float16 by an instruction of the processor."""
    return has_numba() and (converts_halves() if dtype == torch.float16 else multiplies_and_adds())


@cache
def has_fbgemm() -> bool:
    """Return whether torch has FBGEMM's products with half-precision weights."""
    names = "fbgemm_pack_gemm_matrix_fp16", "fbgemm_linear_fp16_weight_fp32_activation"
    return "fbgemm" in torch.backends.quantized.supported_engines and all(hasattr(torch, name) for name in names)


NO_ROWS, NO_WEIGHT = np.zeros((0, 0), np.float32), np.zeros(0, np.float32)
