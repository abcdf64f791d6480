"""How the forward passes of a target run, as integers that can be sent to every rank. Knows no tensors.

Which captured size a pass is padded to. Integers only; knows no tensors.

Passes over tables, launched kernel by kernel: segments in, logits out. Knows no sequences.

Replays forward passes that were captured as CUDA graphs, one for each bucket of rows. Knows no sequences.

A pass travels to the device as one array of words, and a replay begins with copying it to where the graph reads it.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from eyas.errors import ConfigError
from eyas.models.attention import KVTensors
from eyas.models.cuda.metadata import (
    Tiling,
    bucket_shape,
    fixed_words,
    lay_out,
    mask_words,
    num_logits,
    tight_shape,
    upload,
    view,
)
from eyas.models.inputs import MetadataShape, PackedInputs, Segment
from eyas.models.target import TargetModel, TargetOutput


class BackendKind(IntEnum):
    """With plain attention; with the kernel, launched kernel by kernel; the same as captured graphs."""

    PLAIN = 0
    KERNEL = 1
    GRAPHS = 2


@dataclass(frozen=True)
class CaptureLimits:
    """The most that a pass can hold. rows: of all segments together; prefix: slots of all prefixes together."""

    rows: int
    segments: int
    prefix: int


@dataclass(frozen=True)
class BackendPlan:
    """What rank 0 decides for all ranks: NCCL wants a sum to be captured on every rank or on none, and in the same order."""

    kind: BackendKind
    limits: CaptureLimits


SPARE_LOGITS = 64  # rows whose logits may be computed in vain, however few are wanted


def row_buckets(most: int) -> tuple[int, ...]:
    """Row counts to capture, ascending up to `most`: powers of two, from 16 on also half way between them."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    halves = [3 * power // 2 for power in powers if power >= 16]
    return (*sorted(rows for rows in (*powers, *halves) if rows < most), most)


def padded(count: int, least: int) -> int:
    """The smallest size that holds `count`, at least `least`: powers of two, and half way between them from 4 on."""
    power = 1 << max(count - 1, 0).bit_length()
    half = 3 * power // 4
    return max(least, half if power > 4 and half >= count else power)


def largest_padded_size(count: int) -> int:
    """The largest size of `padded` that is not above `count`, at least 1."""
    power = 1 << max(count.bit_length() - 1, 0)
    half = 3 * power // 2
    return half if power >= 4 and half <= count else power


def choose_bucket(buckets: Sequence[int], rows: int, wanted: int) -> int | None:
    """The smallest bucket that holds a pass. None where a graph is of no use: too many rows, or mostly rows whose logits
    nobody wants, for a graph computes them all."""
    if rows > buckets[-1] or rows - wanted > max(wanted, SPARE_LOGITS):
        return None
    return buckets[bisect_left(buckets, rows)]


class KernelBackend:
    """A target whose attention is the kernel. scratch: the slot that padding rows write to."""

    def __init__(self, target: TargetModel, tiling: Tiling, scratch: int) -> None:
        self.target = target
        self.tiling = tiling
        self._scratch = scratch

    def pack(self, segments: Sequence[Segment]) -> PackedInputs:
        """Tables without padding."""
        return self.pad(segments, tight_shape(segments, self.tiling))

    def pad(self, segments: Sequence[Segment], shape: MetadataShape) -> PackedInputs:
        """Tables padded to a shape that has room for the segments."""
        return view(self.words(segments, shape), shape, num_logits(segments))

    def words(self, segments: Sequence[Segment], shape: MetadataShape) -> Tensor:
        """What `pad` looks at, on the device."""
        return upload(lay_out(segments, shape, self._scratch), self.target.device)

    def forward(self, packed: PackedInputs, pools: KVTensors) -> TargetOutput:
        """As TargetModel.forward. Of `taps`, rows at the end may be padding."""
        with _on(self.target.device):
            return self.target.forward(packed, pools)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the thread's current device, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


Out = TypeVar("Out")
Item = TypeVar("Item")

MAX_GRAPH_ROWS = 1024  # a longer pass keeps the device busy for longer than its launches take


class Capture(Protocol):
    """Records a pass; what it gives back runs the pass once more, on what its inputs hold then."""

    def __call__(self, run: Callable[[], Out]) -> Callable[[], Out]: ...


Watch = Callable[[Sequence[int]], Iterable[int]]


def with_bar(buckets: Sequence[int]) -> Iterable[int]:
    """The buckets in turn, with a progress bar on a terminal."""
    return shown(buckets, "capturing CUDA graphs")


def shown(items: Sequence[Item], doing: str) -> Iterable[Item]:
    """The items, with a progress bar on a terminal."""
    return track(items, doing, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


class GraphBackend:
    """Captured passes over one set of pools. A pass that no graph holds is launched kernel by kernel.

    Which graph a pass takes follows from the limits and from the sizes of its segments alone, so that ranks agree on it.
    """

    def __init__(
        self, launched: KernelBackend, pools: KVTensors, limits: CaptureLimits, capture: Capture, watch: Watch = with_bar
    ) -> None:
        """Captures all buckets, the largest first so that the others share its memory. watch: goes through the buckets.

        Raises ConfigError for a model that cannot be captured.
        """
        self._launched = launched
        self._pools = pools
        self._buckets = row_buckets(min(limits.rows, MAX_GRAPH_ROWS))
        self._shapes = {rows: bucket_shape(rows, limits.segments, launched.tiling) for rows in self._buckets}
        num_words = max(fixed_words(shape) + mask_words(rows) for rows, shape in self._shapes.items()) + limits.prefix
        self._words = torch.zeros(num_words, dtype=torch.int32, device=launched.target.device)
        self._replays = {self._shapes[rows]: self._capture(rows, capture) for rows in watch(self._buckets[::-1])}

    def pack(self, segments: Sequence[Segment]) -> PackedInputs:
        """Tables, padded to a bucket if one holds the segments."""
        rows = choose_bucket(self._buckets, sum(len(s.tokens) for s in segments), num_logits(segments))
        return self._launched.pack(segments) if rows is None else self._launched.pad(segments, self._shapes[rows])

    def forward(self, packed: PackedInputs, pools: KVTensors) -> TargetOutput:
        """As TargetModel.forward; the output is overwritten by the next pass. Of `taps`, rows at the end may be padding."""
        assert packed.tables is not None, "packed by another runner"
        assert pools is self._pools, "captured over other pools"
        words, replay = packed.tables.words, self._replays.get(packed.tables.shape)
        if replay is None or len(words) > len(self._words):
            return self._launched.forward(packed, pools)
        self._words[: len(words)].copy_(words)
        out = replay()
        return TargetOutput(out.logits[: packed.num_logits], out.aux_hidden_states)

    def release(self) -> None:
        """Free the graphs; no pass may follow. NCCL ends no group while a captured sum of it is left."""
        self._replays.clear()

    def _capture(self, rows: int, capture: Capture) -> Callable[[], TargetOutput]:
        shape, target = self._shapes[rows], self._launched.target
        words = self._launched.words([], shape)
        self._words[: len(words)].copy_(words)
        try:
            return capture(lambda: self._launched.forward(view(self._words, shape, shape.wanted), self._pools))
        except RuntimeError as error:
            name = type(target.model).__name__
            raise ConfigError(
                f"{name} cannot be captured as a CUDA graph, set engine.cuda_graphs to false: {error}"
            ) from error


class CudaCapture:
    """Captures on one GPU; the graphs share memory, for only one runs at a time."""

    _alone = threading.Lock()  # torch allows one capture at a time in a process

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], Out]) -> Callable[[], Out]:
        """Runs once before capturing: kernels are compiled and libraries take their workspaces. Other threads may go on
        using the device."""
        with self._alone, torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                out = run()

        def replay() -> Out:
            graph.replay()
            return out

        return replay
