"""Replays forward passes that were captured as CUDA graphs, one for each bucket of rows.

A pass travels to the device as one array of words. A replay copies it to where the graph reads it, then runs the graph.
"""

from __future__ import annotations

import gc
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from eyas.cache.kv_cache import KVCache
from eyas.device.memory import explain_out_of_memory
from eyas.device.transfer import upload
from eyas.errors import ConfigError
from eyas.models.backends.attention_metadata import (
    bucket_shape,
    build_words,
    has_room,
    max_words,
    pack_with_metadata,
    shared_runs,
    view,
)
from eyas.models.inputs import PackedInputs, Segment, Segments
from eyas.models.layers.numerics import logits_into
from eyas.models.target import TargetOutput

if TYPE_CHECKING:
    from eyas.models.backends.cuda import KernelBackend

Out = TypeVar("Out")

MAX_GRAPH_ROWS = 1024  # the device computes a longer pass for longer than its launches take
FOR_GRAPHS = (
    "lower engine.gpu_memory_utilization, engine.max_kv_tokens or engine.max_num_seqs, or set engine.cuda_graphs to false"
)
MAX_UNUSED_LOGITS = 64  # rows whose logits may be computed without need, however few logits are asked for


@dataclass(frozen=True)
class CaptureLimits:
    """The most that a pass can hold.

    A SlotMemory has room for as many prefixes as there are segments, each with an equal share of the slots.

    Attributes:
        rows: of all segments together.
        prefix: slots of all prefixes together.
    """

    rows: int
    segments: int
    prefix: int


class Capture(Protocol):
    """Recording of a function on the device; the result runs it once more, on the current contents of its inputs."""

    def __call__(self, run: Callable[[], Out]) -> Callable[[], Out]: ...


class GraphBackend:
    """A ForwardBackend of captured passes over one KV cache. It launches a pass that no graph holds kernel by kernel.

    The choice of a graph depends on the limits and on the sizes of the segments only, so all ranks choose the same.
    """

    def __init__(
        self,
        launched: KernelBackend,
        kv_cache: KVCache,
        limits: CaptureLimits,
        capture: Capture,
    ) -> None:
        """Captures all buckets, the largest first so that the others share its memory.

        Raises ConfigError for a model that cannot be captured.
        """
        self._launched = launched
        self._kv_cache = kv_cache
        self._buckets = row_buckets(min(limits.rows, MAX_GRAPH_ROWS))
        self._shapes = {rows: bucket_shape(rows, limits.segments, launched.tiling) for rows in self._buckets}
        num_words = max(map(max_words, self._shapes.values())) + (0 if launched.memory else limits.prefix)
        self.words = torch.zeros(num_words, dtype=torch.int32, device=launched.target.device)
        self.output: TargetOutput | None = None  # of the largest graph; the others write to its first rows
        self.replays = {self._shapes[rows]: self._capture(rows, capture) for rows in self._buckets[::-1]}

    def pack(self, segments: Sequence[Segment]) -> PackedInputs:
        """Return segments padded to a bucket if one holds them, and if they share no long prefix."""
        segments = Segments.of(segments)
        if shared_runs(segments, self._launched.tiling):
            return self._launched.pack(segments)
        rows = choose_bucket(self._buckets, len(segments.rows.slots), segments.num_logits)
        if rows is None or not has_room(self._shapes[rows], segments):
            return self._launched.pack(segments)
        launched = self._launched
        return pack_with_metadata(
            segments, self._shapes[rows], launched.scratch, launched.target.device, memory=launched.memory
        )

    def forward(self, packed: PackedInputs, kv_cache: KVCache) -> TargetOutput:
        """Run TargetModel.forward, but the next pass overwrites the output, and hidden states may end with padding rows."""
        assert packed.metadata is not None, "packed by another backend"
        assert kv_cache is self._kv_cache, "captured over another KV cache"
        words, replay = packed.metadata.masks, self.replays.get(packed.metadata.shape)
        has_prefixes = self._launched.memory is None or packed.metadata.words is self._launched.memory.words
        if replay is None or not has_prefixes or len(words) > len(self.words):
            return self._launched.forward(packed, kv_cache)
        self.words[: len(words)].copy_(words)
        out = replay()
        return TargetOutput(out.logits[: packed.num_logits], out.aux_hidden_states)

    def release(self) -> None:
        """Free the graphs; no pass may follow. NCCL cannot end a group while a graph holds one of its sums."""
        self.replays.clear()
        self.output = None

    def _capture(self, rows: int, capture: Capture) -> Callable[[], TargetOutput]:
        target = self._launched.target
        # a pass without tiles leaves rows unwritten
        padding = build_words(Segments.of(()), self._shapes[rows], self._launched.scratch)
        self.words[: len(padding)].copy_(upload(padding, target.device))
        try:
            with explain_out_of_memory(f"no memory for a CUDA graph of {rows} rows", target.device, FOR_GRAPHS):
                replay = capture(lambda: self._run(rows))
        except RuntimeError as error:
            name = type(target.model).__name__
            raise ConfigError(
                f"{name} cannot be captured as a CUDA graph, set engine.cuda_graphs to false: {error}"
            ) from error
        return replay

    @torch.inference_mode()
    def _run(self, rows: int) -> TargetOutput:
        """Return what is captured. All graphs leave their output in the same memory: one graph's is used before the next
        runs.
        """
        shape = self._shapes[rows]
        memory = self._launched.memory
        packed = view(self.words, shape, shape.logits, memory.words if memory else None)
        if rows == self._buckets[-1]:
            self.output = out = self._launched.forward(packed, self._kv_cache)
            return out
        assert self.output is not None, "the largest graph is captured first"
        with logits_into(self._launched.target.model, self.output.logits):
            out = self._launched.forward(packed, self._kv_cache)
        states, shared = out.aux_hidden_states, self.output.aux_hidden_states
        both = None if states is None or shared is None else shared[: len(states)].copy_(states)
        logits = self.output.logits[: len(out.logits)]
        is_there = logits.untyped_storage()._cdata == out.logits.untyped_storage()._cdata
        return TargetOutput(logits if is_there else logits.copy_(out.logits), both)


def row_buckets(most: int) -> tuple[int, ...]:
    """Return the row counts to capture, ascending up to `most`: powers of two, and from 16 on also the values half way
    between.

    Example: row_buckets(100) is (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100).
    """
    powers = [1 << exponent for exponent in range(most.bit_length())]
    halves = [3 * power // 2 for power in powers if power >= 16]
    return (*sorted(rows for rows in (*powers, *halves) if rows < most), most)


def choose_bucket(buckets: Sequence[int], rows: int, num_logits: int) -> int | None:
    """Return the smallest bucket that holds a pass. None if a graph does not help: too many rows, or too few logits asked
    for.

    A graph computes the logits of all rows.
    """
    if rows > buckets[-1] or rows - num_logits > max(num_logits, MAX_UNUSED_LOGITS):
        return None
    return buckets[bisect_left(buckets, rows)]


def padded_size(count: int) -> int:
    """Return the smallest size that holds `count`, at least 1: powers of two, and from 4 on the values half way between."""
    power = 1 << max(count - 1, 0).bit_length()
    half = 3 * power // 4
    return half if power > 4 and half >= count else power


@contextmanager
def without_collection() -> Iterator[None]:
    """Stop garbage collection inside the context: graphs and pinned memory that it frees would call the device."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaCapture:
    """Capture on one GPU. The graphs share memory, because only one runs at a time."""

    _lock = threading.Lock()  # torch allows one capture at a time in a process

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], Out]) -> Callable[[], Out]:
        """Run once, so that kernels are compiled and libraries allocate their workspaces, then capture.

        Other threads may go on using the device.
        """
        with self._lock, torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with (
                without_collection(),
                torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode="thread_local"),
            ):
                out = run()

        def replay() -> Out:
            graph.replay()
            return out

        return replay
