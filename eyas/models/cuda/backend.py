"""Chooses how forward passes run: plainly, through the kernel, or as captured graphs. Knows no sequences.

With several ranks, rank 0 plans and every rank builds what was planned.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from eyas.config import EngineConfig, TreeConfig
from eyas.errors import ConfigError
from eyas.models.attention import KVTensors
from eyas.models.cuda.graphs import (
    BackendKind,
    BackendPlan,
    Capture,
    CaptureLimits,
    CudaCapture,
    GraphBackend,
    KernelBackend,
    Watch,
    with_bar,
)
from eyas.models.cuda.metadata import Tiling
from eyas.models.inputs import PackedInputs, Segment
from eyas.models.target import TargetModel, TargetOutput

MAX_WIDTH = 256
MAX_HEADS_PER_KV = 64
MAX_PREFIX = 1 << 28  # slots, 1 GiB of words; a graph holds no pass with more

log = logging.getLogger(__name__)


class ForwardBackend(Protocol):
    """A way to run forward passes: TargetModel, KernelBackend or GraphBackend. They agree up to rounding."""

    def pack(self, segments: Sequence[Segment]) -> PackedInputs:
        """Segments in the form that this `forward` takes."""
        ...

    def forward(self, packed: PackedInputs, pools: KVTensors) -> TargetOutput:
        """One pass over all rows, as TargetModel.forward."""
        ...


def plan_backend(target: TargetModel, engine: EngineConfig, tree: TreeConfig, context_length: int) -> BackendPlan:
    """The fastest way that the target's device and shapes allow. On CUDA it says what keeps it from the kernel."""
    rows = engine.max_prefill_tokens + engine.max_num_seqs * tree.num_draft_tokens
    limits = CaptureLimits(rows, engine.max_num_seqs, min(engine.max_num_seqs * context_length, MAX_PREFIX))
    if target.device.type != "cuda" or engine.deterministic:
        return BackendPlan(BackendKind.PLAIN, limits)
    if lacking := what_kernel_lacks(target):
        log.warning("%s: attention goes the plain way, without graphs", lacking)
        return BackendPlan(BackendKind.PLAIN, limits)
    return BackendPlan(BackendKind.GRAPHS if engine.cuda_graphs else BackendKind.KERNEL, limits)


def build_backend(
    plan: BackendPlan,
    target: TargetModel,
    pools: KVTensors,
    scratch: int,
    watch: Watch = with_bar,
    capture_on: Callable[[torch.device], Capture] = CudaCapture,
) -> ForwardBackend:
    """What was planned, for a target or one rank's share of it; ranks must build at the same time, for a capture runs sums.

    scratch: a slot of the pools that no sequence ever has. Raises ConfigError where the plan cannot be kept.
    """
    if plan.kind is BackendKind.PLAIN:
        return target
    if lacking := what_kernel_lacks(target):
        raise ConfigError(f"rank 0 takes the kernel for attention, but here {lacking}; install the same on every rank")
    most = 16 if target.dtype == torch.float32 else 64
    tiling = Tiling(target.heads_per_kv, target.kv_shapes[0][0], _num_processors(target.device), most)
    launched = KernelBackend(target, tiling, scratch)
    if plan.kind is BackendKind.KERNEL:
        return launched
    return GraphBackend(launched, pools, plan.limits, capture_on(target.device), watch)


def release(passes: ForwardBackend) -> None:
    """Free what was captured, before the ranks that share it part."""
    if isinstance(passes, GraphBackend):
        passes.release()


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def what_kernel_lacks(target: TargetModel) -> str:
    """Why the kernel cannot serve a target, empty if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    widths = {width for _, width in target.kv_shapes}
    if max(widths) > MAX_WIDTH:
        return f"heads are {max(widths)} wide, the kernel takes {MAX_WIDTH} at most"
    if target.heads_per_kv > MAX_HEADS_PER_KV:
        return f"{target.heads_per_kv} query heads share a key-value head, the kernel takes {MAX_HEADS_PER_KV} at most"
    return ""
