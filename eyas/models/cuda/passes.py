"""Chooses how forward passes run: plainly, through the kernel, or as captured graphs. Knows no sequences."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from eyas.config import EngineConfig, TreeConfig
from eyas.models.attention import KVPools
from eyas.models.cuda.graphs import CudaCapture, GraphRunner, Limits
from eyas.models.cuda.launch import KernelRunner
from eyas.models.cuda.tables import Tiling
from eyas.models.inputs import PackedInputs, Segment
from eyas.models.target import TargetModel, TargetOutput

MAX_WIDTH = 256
MAX_HEADS_PER_KV = 64

log = logging.getLogger(__name__)


class Passes(Protocol):
    """A way to run forward passes: TargetModel, KernelRunner or GraphRunner. They agree up to rounding."""

    def pack(self, segments: Sequence[Segment]) -> PackedInputs:
        """Segments in the form that this `forward` takes."""
        ...

    def forward(self, packed: PackedInputs, pools: KVPools) -> TargetOutput:
        """One pass over all rows, as TargetModel.forward."""
        ...


def build_passes(
    target: TargetModel, pools: KVPools, scratch: int, engine: EngineConfig, tree: TreeConfig, context_length: int
) -> Passes:
    """The fastest way that the target's device and shapes allow. On CUDA it says what keeps it from the kernel.

    scratch: a slot of the pools that no sequence ever has.
    """
    if target.device.type != "cuda":
        return target
    lacking = what_kernel_lacks(target)
    if lacking:
        log.warning("%s: attention goes the plain way, without graphs", lacking)
        return target
    processors = torch.cuda.get_device_properties(target.device).multi_processor_count
    most = 16 if target.dtype == torch.float32 else 64
    launched = KernelRunner(target, Tiling(target.heads_per_kv, target.kv_shapes[0][0], processors, most), scratch)
    if not engine.cuda_graphs:
        return launched
    rows = engine.step_tokens + engine.max_running * tree.nodes
    limits = Limits(rows, engine.max_running, engine.max_running * context_length)
    return GraphRunner(launched, pools, limits, CudaCapture(target.device))


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
