"""The choice of how forward passes run: plainly, through the attention kernel, or as captured CUDA graphs.

With several ranks, rank 0 plans and every rank builds what was planned. To add an attention kernel: write a function with
the signature of `eyas.models.attention.attend` and a ForwardBackend that packs for it, then extend BackendKind,
`plan_backend` and `build_backend`.

Memory of passes and graphs is computed, so that the KV cache can take a share of what they leave.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from eyas.cache.kv_cache import KVCache, SlotMemory
from eyas.config import EngineConfig, TreeConfig
from eyas.config.engine import KVCacheDtype
from eyas.errors import ConfigError
from eyas.models.cuda.graphs import MAX_GRAPH_ROWS, Capture, CaptureLimits, CudaCapture, GraphBackend, row_buckets
from eyas.models.cuda.metadata import (
    FIXED_PART,
    Tiling,
    bucket_shape,
    max_words,
    pack_with_metadata,
    shared_runs,
    tight_shape,
)
from eyas.models.fused import is_batch_invariant
from eyas.models.inputs import MetadataShape, PackedInputs, Segment
from eyas.models.numerics import keeps_logits
from eyas.models.target import TargetModel, TargetOutput

MAX_HEAD_WIDTH = 512
NARROW_HEAD = 256  # wider ones must have 16 bits, and fewer of them may share keys
MAX_HEADS_PER_KV, MAX_WIDE_HEADS_PER_KV = 64, 32
MAX_PREFIX = 1 << 28  # slots, 1 GiB of words; no graph holds a pass with more
CHECKED_PROMPT = 70  # tokens; more than a block of keys
# Of matrix products (32 MiB on Hopper), for the streams of launched and captured passes.
WORKSPACES = 2 * 2**25
# Of one graph, for its some hundreds of launches and their arguments.
GRAPH_NODES = 2**20
# Rows of a matrix product of attention in passes of prompts, by compute capability: 128 where `make gpu` found them faster.
PREFILL_ROWS: Mapping[tuple[int, int], int] = {}

log = logging.getLogger(__name__)


class ForwardBackend(Protocol):
    """A way to run forward passes: TargetModel, KernelBackend or GraphBackend. They agree up to rounding."""

    def pack(self, segments: Sequence[Segment]) -> PackedInputs:
        """Segments in the form that this `forward` takes."""
        ...

    def forward(self, packed: PackedInputs, kv_cache: KVCache) -> TargetOutput:
        """One pass over all rows, as TargetModel.forward."""
        ...


class BackendKind(IntEnum):
    """Plain attention; the kernel, launched kernel by kernel; the kernel in captured graphs."""

    PLAIN = 0
    KERNEL = 1
    GRAPHS = 2


@dataclass(frozen=True)
class BackendPlan:
    """Rank 0's decision for all ranks: NCCL needs a sum captured on every rank or on none, and in the same order.

    batch_invariant: whether a row must get the same bits in any pass; with one rank only. kv_cache_dtype: as configured.
    """

    kind: BackendKind
    limits: CaptureLimits
    batch_invariant: bool = False
    kv_cache_dtype: KVCacheDtype = "auto"


def plan_backend(target: TargetModel, engine: EngineConfig, tree: TreeConfig, max_model_len: int) -> BackendPlan:
    """The fastest kind that the target's device and shapes allow. Logs what rules out the kernel on CUDA."""
    rows = engine.max_prefill_tokens + engine.max_num_seqs * tree.num_draft_tokens
    limits = CaptureLimits(rows, engine.max_num_seqs, min(engine.max_num_seqs * max_model_len, MAX_PREFIX))
    if target.device.type != "cuda":
        return BackendPlan(BackendKind.PLAIN, limits, kv_cache_dtype=engine.kv_cache_dtype)
    reason = why_no_kernel(target)
    if not reason and engine.deterministic and not is_batch_invariant(target.model):
        reason = "deterministic mode computes one sequence at a time, because the model's layers are not fused or quantised"
    if reason:
        log.warning("%s: attention runs without the kernel and without CUDA graphs", reason)
        return BackendPlan(BackendKind.PLAIN, limits, kv_cache_dtype=engine.kv_cache_dtype)
    kind = BackendKind.GRAPHS if engine.cuda_graphs else BackendKind.KERNEL
    return BackendPlan(kind, limits, engine.deterministic, engine.kv_cache_dtype)


def build_backend(
    plan: BackendPlan,
    target: TargetModel,
    kv_cache: KVCache,
    capture_on: Callable[[torch.device], Capture] = CudaCapture,
) -> ForwardBackend:
    """Build the planned backend for a target or one rank's part of it. All ranks must build at the same time.

    Raises ConfigError if this rank cannot follow the plan, or if its kernels compute something else than plain operations.
    """
    if plan.kind is BackendKind.PLAIN:
        return target
    reason = why_no_kernel(target)
    if target.on_any_rank(bool(reason)):
        where = f"here {reason}" if reason else "another rank cannot"
        raise ConfigError(f"rank 0 takes the kernel for attention, but {where}; install the same on every rank")
    tiling = tiling_on(target.device, target.dtype, target.heads_per_kv, target.kv_shapes[0][0])
    tiling = replace(tiling, longest=target.max_model_len, fixed_part=FIXED_PART if plan.batch_invariant else 0)
    limits = plan.limits
    memory = SlotMemory(limits.segments, min(limits.prefix // limits.segments, kv_cache.scratch), target.device)
    launched = KernelBackend(target, tiling, kv_cache.scratch, memory)
    check_kernels(launched)
    if plan.batch_invariant:
        check_batch_invariance(launched)
    if plan.kind is BackendKind.KERNEL:
        return launched
    return GraphBackend(launched, kv_cache, plan.limits, capture_on(target.device))


def check_kernels(launched: KernelBackend) -> None:
    """Compare a small tree behind a small prompt, computed by the kernels, with the plain pass.

    Raises ConfigError on all ranks if the logits of one differ by more than rounding. Experts are not checked: rounding may
    choose others.
    """
    target = launched.target
    ways: tuple[ForwardBackend, ...] = (target, launched)
    if target.is_mixture_of_experts:
        return
    rows, none = np.arange(4), np.zeros(0, dtype=np.int64)
    parents = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=np.bool_)
    prompt = Segment(rows + 1, rows, rows, none, None, rows[-1:])
    tree = Segment(rows + 2, 4 + np.array([0, 1, 1, 2]), rows + 4, rows, parents, rows)
    kv_caches = [target.new_kv_cache(8) for _ in ways]
    for segment in (prompt, tree):
        found = [way.forward(way.pack([segment]), kv).logits for way, kv in zip(ways, kv_caches, strict=True)]
    plain, ours = found
    is_exact = target.dtype == torch.float32 and target.kv_dtype is None  # a rounding may change a bit of 8
    tolerance = (1e-3 if is_exact else 0.1) * float(plain.abs().max())
    error = float((ours - plain).abs().max())
    if target.on_any_rank(not error <= tolerance):  # NaN is an error too
        others = ", but another rank differs by more" if error <= tolerance else ""
        raise ConfigError(
            f"{type(target.model).__name__}: on {target.device} the kernels give logits that differ by {error:.2g} from "
            f"those of plain operations, and rounding explains {tolerance:.2g}{others}; install the versions of torch and "
            "triton in constraints.txt, or uninstall triton to run without kernels"
        )


def check_batch_invariance(launched: KernelBackend) -> None:
    """Compare a tree behind a prompt with plain decoding of its path, behind a prompt in chunks and beside another sequence.

    Raises ConfigError unless the logits are equal bit for bit.
    """
    target, none = launched.target, np.zeros(0, dtype=np.int64)
    length = min(CHECKED_PROMPT, target.max_model_len - 3)
    rows = np.arange(length + 3)
    words = 3 + rows * 7 % min(64, target.vocab_size - 3)

    def run(kv_cache: KVCache, *segments: Segment) -> Tensor:
        return launched.forward(launched.pack(segments), kv_cache).logits[-1]

    def part(start: int, end: int, prefix: npt.NDArray[np.int64], first_slot: int) -> Segment:
        own = rows[start:end]
        return Segment(words[own], own, first_slot + own, prefix, None, own[-1:] - start)

    kv_cache, batch = target.new_kv_cache(length + 4), target.new_kv_cache(3 * length)
    run(kv_cache, part(0, length, none, 0))
    parents = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=np.bool_)  # the path is 0, 2, 3
    path = words[length:]
    tree = np.array([path[0], 3, path[1], path[2]])
    positions, slots = length + np.array([0, 1, 1, 2]), length + np.arange(4)
    drafted = run(kv_cache, Segment(tree, positions, slots, rows[:length], parents, np.array([3])))
    other, start = part(0, length // 2, none, 2 * length), length // 3
    run(batch, other, part(0, start, none, 0))
    run(batch, part(start, length, rows[:start], 0), other)
    for end in range(length, length + 3):
        plain = run(batch, other, part(end, end + 1, rows[:end], 0))
    if not torch.equal(drafted, plain):
        raise ConfigError(
            f"{type(target.model).__name__}: on {target.device} logits of a tree differ in their bits from plain decoding; "
            "install the versions of torch and triton in constraints.txt, or set engine.deterministic to false"
        )


def release_backend(backend: ForwardBackend) -> None:
    """Free captured graphs, before the ranks that share them leave their group."""
    if isinstance(backend, GraphBackend):
        backend.release()


def tiling_on(device: torch.device, dtype: torch.dtype, heads_per_kv: int, num_kv: int) -> Tiling:
    """The tiling of attention over keys and values of a dtype on a device."""
    rows = 16 if dtype == torch.float32 else 64
    if device.type != "cuda":
        return Tiling(heads_per_kv, num_kv, 1, rows)
    found = torch.cuda.get_device_properties(device)
    prefill_rows = 0 if dtype == torch.float32 else PREFILL_ROWS.get((found.major, found.minor), 0)
    return Tiling(heads_per_kv, num_kv, found.multi_processor_count, rows, prefill_rows)


def why_no_kernel(target: TargetModel) -> str:
    """Why the kernel cannot serve a target; empty if it can."""
    num_heads = target.heads_per_kv * target.kv_shapes[0][0]
    layouts = {(width, num_heads // num_kv) for num_kv, width in target.kv_shapes}
    return next(filter(None, (why_no_kernel_for(*layout, target.dtype) for layout in sorted(layouts))), "")


def why_no_kernel_for(head_width: int, heads_per_kv: int, dtype: torch.dtype) -> str:
    """Why the kernel cannot serve heads of this layout; empty if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if head_width > MAX_HEAD_WIDTH:
        return f"heads are {head_width} wide, the kernel takes {MAX_HEAD_WIDTH} at most"
    if head_width > NARROW_HEAD and dtype == torch.float32:
        return f"heads are {head_width} wide, the kernel takes {NARROW_HEAD} at most in float32"
    if head_width > NARROW_HEAD and heads_per_kv > MAX_WIDE_HEADS_PER_KV:
        most = MAX_WIDE_HEADS_PER_KV
        return f"{heads_per_kv} query heads {head_width} wide share a key-value head, the kernel takes {most} at most"
    if heads_per_kv > MAX_HEADS_PER_KV:
        return f"{heads_per_kv} query heads share a key-value head, the kernel takes {MAX_HEADS_PER_KV} at most"
    return ""


class KernelBackend:
    """A target whose attention is the kernel. scratch: the slot that padding rows write to. memory: of prefixes; without it
    each pass brings its own along."""

    def __init__(self, target: TargetModel, tiling: Tiling, scratch: int, memory: SlotMemory | None = None) -> None:
        self.target = target
        self.memory = memory
        self.tiling = tiling
        self.scratch = scratch

    def pack(self, segments: Sequence[Segment]) -> PackedInputs:
        """Segments without padding."""
        runs = shared_runs(segments, self.tiling)
        shape = tight_shape(segments, self.tiling, runs)
        return pack_with_metadata(segments, shape, self.scratch, self.target.device, runs, memory=self.memory)

    def forward(self, packed: PackedInputs, kv_cache: KVCache) -> TargetOutput:
        """As TargetModel.forward, but hidden states may end with padding rows."""
        device = self.target.device
        products = FixedProducts() if self.tiling.fixed_part else nullcontext()
        # Triton launches on the thread's current device, wherever the tensors are.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), products:
            return self.target.forward(packed, kv_cache)


class FixedProducts(TorchFunctionMode):
    """Inside the context every linear layer multiplies by `layer_kernels.linear`, whose tiles do not depend on the rows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the two functions that linear layers and output heads call."""
        from eyas.models.cuda.layer_kernels import linear

        named = kwargs or {}
        if func is F.linear:
            values = dict(zip(("input", "weight", "bias"), args, strict=False)) | named
            return linear(values["input"], values["weight"], values.get("bias"), values["input"].dtype)
        if func is torch.mm:
            rows, transposed = args
            return linear(rows, transposed.T, None, named.get("out_dtype", rows.dtype), named.get("out"))
        return func(*args, **named)


@dataclass(frozen=True)
class PassSizes:
    """Widths of a target, or of one rank's part of it. itemsize: bytes of a hidden number. num_aux: collected layers.

    keeps_logits: whether smaller graphs write logits straight to the output that all share. pairs: numbers inside and behind
    the experts of a row, side by side; 0 without experts.
    """

    vocab: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_width: int
    itemsize: int
    num_aux: int = 0
    keeps_logits: bool = False
    pairs: int = 0

    @classmethod
    def of(cls, target: TargetModel) -> PassSizes:
        """The widths of a loaded target."""
        config, shapes = target.config, target.kv_shapes
        width = max(width for _, width in shapes)
        kv_heads = -(-max(heads * width for heads, width in shapes) // width)
        hidden = int(config.hidden_size)
        dense = int(getattr(config, "intermediate_size", None) or 4 * hidden)
        experts = int(getattr(config, "moe_intermediate_size", None) or dense) if target.is_mixture_of_experts else 0
        top_k = int(getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 1)
        mlp, pairs = max(dense, experts * top_k), top_k * (experts + hidden) if experts else 0
        heads, num_aux = target.heads_per_kv * shapes[0][0], len(target.aux_hidden_state_layers)
        own_logits = keeps_logits(target.model)
        itemsize = target.dtype.itemsize
        return cls(target.vocab_size, hidden, mlp, heads, kv_heads, width, itemsize, num_aux, own_logits, pairs)

    def logits(self, rows: int) -> int:
        """Bytes of logits [N, V], float32."""
        return rows * self.vocab * 4

    def layers(self, rows: int, results: int) -> int:
        """Most bytes inside the layers: of attention, of the MLP or of experts, and of hidden states around them.

        Beside the pairs of experts are their inputs and outputs, and queries, keys and values that attention has left.

        results: partial results of attention for all rows together; 0 if keys are not cut.
        """
        attention = rows * (2 * self.heads + 2 * self.kv_heads) * self.head_width * self.itemsize
        partials = results * self.heads * (self.head_width + 1) * 4
        mlp = rows * 3 * self.mlp * self.itemsize
        left = (3 * self.heads + 2 * self.kv_heads) * self.head_width + 5 * self.hidden
        experts = rows * (self.pairs + left) * self.itemsize if self.pairs else 0
        return max(attention + partials, mlp, experts) + self.states(rows)

    def states(self, rows: int) -> int:
        """Bytes of hidden states: of the residual stream, and of collected layers, one by one and side by side."""
        return rows * (4 + 2 * self.num_aux) * self.hidden * self.itemsize

    def peak(self, rows: int, num_logits: int, results: int) -> int:
        """Most bytes in use at once; an allocator that reuses no block of layers for logits takes more."""
        return max(self.layers(rows, results), self.states(rows) + self.logits(num_logits))


def output_bytes(sizes: PassSizes, rows: int) -> int:
    """Bytes that all graphs together keep for their outputs: logits and hidden states of the largest, which all share."""
    return sizes.logits(rows) + rows * sizes.num_aux * sizes.hidden * sizes.itemsize


def graph_bytes(sizes: PassSizes, max_rows: int, max_segments: int, tiling: Tiling) -> int:
    """Bytes that captured graphs keep. They share one pool: the outputs, and what the neediest graph takes besides.

    All but the largest write logits to the shared output, or compute them in the pool and copy if the model scales them.
    """
    buckets = row_buckets(min(max_rows, MAX_GRAPH_ROWS))
    shapes = [bucket_shape(rows, max_segments, tiling) for rows in buckets]
    inner = max(sizes.layers(shape.rows, num_partials(shape)) for shape in shapes)
    copied = sizes.logits(buckets[-2]) if len(buckets) > 1 and not sizes.keeps_logits else 0
    words = 4 * max(map(max_words, shapes))
    return output_bytes(sizes, buckets[-1]) + inner + copied + words + len(buckets) * GRAPH_NODES


def num_partials(shape: MetadataShape) -> int:
    """Partial results of attention that a pass keeps until they are combined."""
    return shape.part_rows or (shape.rows * shape.num_results if shape.num_results > 1 else 0)


def launched_bytes(sizes: PassSizes, max_rows: int, max_drawn: int, max_prompt: int, tiling: Tiling) -> int:
    """Bytes of the largest pass that no graph holds, and of what its draws copy.

    max_drawn: rows at which tokens are drawn. max_prompt: rows of prompts; `prompt_logprobs` asks for their logits. Then the
    logits of drawn rows are copied, in memory that layers have left.
    """
    if tiling.fixed_part:  # each row may lie at the end of a longest context
        partials = min(max_rows, max_drawn + max_prompt) * -(-tiling.longest // tiling.fixed_part)
    else:
        partials = num_partials(
            tiling.shape(max_rows, max_drawn, max(-(-max_rows // tiling.most_rows), 1), tiling.most_rows)
        )
    copied = sizes.logits(min(max_rows, max_drawn)) if max_prompt else 0
    behind_layers = max(sizes.layers(max_rows, partials), sizes.states(max_rows) + copied)
    return behind_layers + sizes.logits(min(max_rows, max_drawn + max_prompt))


def reserved_bytes(target: TargetModel, plan: BackendPlan, engine: EngineConfig) -> int:
    """Bytes to leave free beside the KV cache, for graphs and for the largest pass; 0 on the CPU."""
    if target.device.type != "cuda":
        return 0
    limits, sizes = plan.limits, PassSizes.of(target)
    tiling = tiling_on(target.device, target.dtype, target.heads_per_kv, target.kv_shapes[0][0])
    if plan.batch_invariant:
        longest = engine.max_model_len or target.max_model_len
        tiling = replace(tiling, longest=longest, fixed_part=FIXED_PART)
    max_drawn = engine.max_verify_tokens + limits.segments
    total = launched_bytes(sizes, limits.rows, max_drawn, engine.max_prefill_tokens, tiling) + WORKSPACES
    if plan.kind is not BackendKind.PLAIN:
        total += limits.prefix * torch.int32.itemsize
    if plan.kind is BackendKind.GRAPHS:
        total += graph_bytes(sizes, limits.rows, limits.segments, tiling)
    return total
