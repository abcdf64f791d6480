"""The seam between a target and what runs its passes: `ForwardBackend`, and a plan of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from eyas.cache.kv_cache import KVCache
from eyas.config.engine import KVCacheDtype
from eyas.models.backends.cuda_graphs import CaptureLimits
from eyas.models.inputs import PackedInputs, Segment
from eyas.models.target import TargetOutput


class ForwardBackend(Protocol):
    """A way to run forward passes: TargetModel, KernelBackend or GraphBackend. They agree up to rounding."""

    def pack(self, segments: Sequence[Segment]) -> PackedInputs:
        """Return segments in the form that this `forward` takes."""
        ...

    def forward(self, packed: PackedInputs, kv_cache: KVCache) -> TargetOutput:
        """Return one pass over all rows, as TargetModel.forward."""
        ...


class BackendKind(IntEnum):
    """Plain attention; the kernel, launched kernel by kernel; the kernel in captured graphs."""

    PLAIN = 0
    KERNEL = 1
    GRAPHS = 2


@dataclass(frozen=True)
class BackendPlan:
    """Rank 0's decision for all ranks: NCCL needs a sum captured on every rank or on none, and in the same order.

    Attributes:
        batch_invariant: whether a row must get the same bits in any pass; with one rank only.
        kv_cache_dtype: as configured.
    """

    kind: BackendKind
    limits: CaptureLimits
    batch_invariant: bool = False
    kv_cache_dtype: KVCacheDtype = "auto"
