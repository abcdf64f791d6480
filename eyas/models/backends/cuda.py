"""Chooses and builds what runs forward passes: plain PyTorch, the attention kernel, or captured CUDA graphs.

With several ranks, rank 0 plans and every rank builds what was planned. To add an attention kernel: write a function with
the signature of `eyas.models.layers.attention.attend` and a ForwardBackend that packs for it, then extend `BackendKind`,
`plan_backend` and `build_backend`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from eyas.cache.kv_cache import KVCache, SlotMemory
from eyas.cache.states import START, StateStep
from eyas.config import EngineConfig, TreeConfig
from eyas.device.host import has_triton
from eyas.errors import ConfigError
from eyas.models.backends.attention_metadata import (
    FIXED_PART,
    Tiling,
    pack_with_metadata,
    shared_runs,
    tight_shape,
    with_prompts,
)
from eyas.models.backends.base import BackendKind, BackendPlan, ForwardBackend
from eyas.models.backends.cuda_graphs import Capture, CaptureLimits, CudaCapture, GraphBackend
from eyas.models.inputs import PackedInputs, Segment, Segments
from eyas.models.layers.fused import is_batch_invariant
from eyas.models.target import TargetModel, TargetOutput

MAX_HEAD_WIDTH = 512
NARROW_HEAD = 256  # wider ones must have 16 bits, and fewer of them may share keys
MAX_HEADS_PER_KV, MAX_WIDE_HEADS_PER_KV = 64, 32
MAX_PREFIX = 1 << 28  # slots, 1 GiB of words; no graph holds a pass with more
CHECKED_PROMPT = 70  # tokens; more than a block of keys
# Rows of a prompt from which on torch attends for it, in 16 bits. At 512 rows it takes a quarter of the kernel's time on an
# H200; with fewer rows the copies of keys and values are not measured.
LIBRARY_ROWS = 256
# The first GPUs with the one attention of torch that shares keys among heads and keeps no table of all scores.
FLASH_CAPABILITY = (8, 0)

log = logging.getLogger(__name__)


def plan_backend(target: TargetModel, engine: EngineConfig, tree: TreeConfig, max_model_len: int) -> BackendPlan:
    """Return the fastest kind that the target's device and shapes allow. Logs what rules out the kernel on CUDA."""
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
    if engine.cuda_graphs and target.state_shapes:
        log.info("recurrent layers run without CUDA graphs")
    kind = BackendKind.GRAPHS if engine.cuda_graphs and not target.state_shapes else BackendKind.KERNEL
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
    tiling = tiling_on(target.device, target.dtype, target.heads_per_kv, target.num_kv_heads)
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
    """Compare a small tree behind a small prompt, and the next token, computed by the kernels, with plain passes.

    Raises ConfigError on all ranks if the logits of one differ by more than rounding. Experts are not checked: rounding may
    choose others.
    """
    target = launched.target
    if target.is_mixture_of_experts:
        return
    rows, none = np.arange(4), np.zeros(0, dtype=np.int64)
    tiling = replace(launched.tiling, library_rows=min(launched.tiling.library_rows, len(rows)))  # the prompt counts as long
    ways: tuple[ForwardBackend, ...] = (target, KernelBackend(target, tiling, launched.scratch, launched.memory))
    parents = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=np.bool_)
    prompt = Segment(rows + 1, rows, rows, none, None, rows[-1:], states=StateStep(START, 1))
    states = StateStep(1, 2, stash=0)
    tree = Segment(rows + 2, 4 + np.array([0, 1, 1, 2]), rows + 4, rows, parents, rows, states=states)
    path = np.array([0, 1, 3])  # of the tree, to its deepest node
    states = StateStep(2, 3, pending=path)
    token = Segment(rows[:1], 7 + rows[:1], 8 + rows[:1], np.append(rows, 4 + path), None, rows[:1], states=states)
    kv_caches = [target.new_kv_cache(9) for _ in ways]
    plain, ours = (
        torch.cat([way.forward(way.pack([segment]), kv).logits for segment in (prompt, tree, token)])
        for way, kv in zip(ways, kv_caches, strict=True)
    )
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
    """Return the tiling of attention over keys and values of a dtype on a device."""
    rows = 16 if dtype == torch.float32 else 64
    if device.type != "cuda":
        return Tiling(heads_per_kv, num_kv, 1, rows)
    found = torch.cuda.get_device_properties(device)
    has_flash = dtype != torch.float32 and (found.major, found.minor) >= FLASH_CAPABILITY
    library_rows = LIBRARY_ROWS if has_flash else 0
    return Tiling(heads_per_kv, num_kv, found.multi_processor_count, rows, library_rows)


def why_no_kernel(target: TargetModel) -> str:
    """Return why the kernel cannot serve a target; empty if it can."""
    if any(shape.is_latent for shape in target.kv_shapes):
        return "it has latent attention, which the kernel does not know"
    num_heads = target.heads_per_kv * target.num_kv_heads
    layouts = {(shape.width, num_heads // shape.num_heads) for shape in target.kv_shapes if shape.num_heads}
    return next(filter(None, (why_no_kernel_for(*layout, target.dtype) for layout in sorted(layouts))), "")


def why_no_kernel_for(head_width: int, heads_per_kv: int, dtype: torch.dtype) -> str:
    """Return why the kernel cannot serve heads of this layout; empty if it can."""
    if not has_triton():
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
    """A target whose attention is the kernel.

    Args:
        scratch: the slot that padding rows write to.
        memory: of prefixes; without it each pass brings its own along.
    """

    def __init__(self, target: TargetModel, tiling: Tiling, scratch: int, memory: SlotMemory | None = None) -> None:
        self.target = target
        self.memory = memory
        self.tiling = tiling
        self.scratch = scratch

    def pack(self, segments: Sequence[Segment]) -> PackedInputs:
        """Return segments without padding."""
        segments = Segments.of(segments)
        runs = shared_runs(segments, self.tiling)
        shape = tight_shape(segments, self.tiling, runs)
        packed = pack_with_metadata(segments, shape, self.scratch, self.target.device, runs, memory=self.memory)
        packed = packed if runs else with_prompts(packed, segments, self.tiling)
        return replace(packed, segments=segments) if self.target.state_shapes else packed

    def forward(self, packed: PackedInputs, kv_cache: KVCache) -> TargetOutput:
        """Run TargetModel.forward, but hidden states may end with padding rows."""
        device = self.target.device
        products = FixedProducts() if self.tiling.fixed_part else nullcontext()
        # Triton launches on the thread's current device, wherever the tensors are.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), products:
            return self.target.forward(packed, kv_cache)


class FixedProducts(TorchFunctionMode):
    """Context in which every linear layer multiplies by the kernel `linear`, whose tiles do not depend on the rows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the two functions that linear layers and output heads call."""
        from eyas.kernels.cuda.layers import linear

        named = kwargs or {}
        if func is F.linear:
            values = dict(zip(("input", "weight", "bias"), args, strict=False)) | named
            return linear(values["input"], values["weight"], values.get("bias"), values["input"].dtype)
        if func is torch.mm:
            rows, transposed = args
            return linear(rows, transposed.T, None, named.get("out_dtype", rows.dtype), named.get("out"))
        return func(*args, **named)
