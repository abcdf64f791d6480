"""Measuring for the parts of `make gpu`: medians, what the memory and the matrix units reach, and the sizes of a run."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.widen.target import SHAPES, Shape
from eyas.bench.report import Table
from eyas.emulation.costs import DeviceCosts
from eyas.models.backends.cuda_graphs import CudaCapture
from eyas.models.heads.eagle_config import EagleHeadConfig, HeadWiring

NUM_WARM_UPS, CALLS = 3, 10
# Times behind which a median needs no more, if they take this many seconds together.
LEAST, ENOUGH_S = 5, 0.25
# Minutes below which a run has one target and one head, and fewer cases and prompts.
SHORT_MINUTES = 20.0
VOCAB, DRAFT_VOCAB = 128256, 32000


@dataclass(frozen=True)
class Case:
    """A verify step.

    Attributes:
        rows: of each sequence, 1 for plain decoding, else nodes of a draft tree.
        cached: tokens each.
        is_narrow: whether keys and values have 8 bits.
    """

    batch: int
    rows: int
    cached: int = 1024
    is_narrow: bool = False

    def __str__(self) -> str:
        bits = ", keys of 8 bits" if self.is_narrow else ""
        return f"batch {self.batch}, {self.rows} rows, {self.cached} cached{bits}"


@dataclass(frozen=True)
class Scale:
    """The sizes of a run.

    Attributes:
        targets, heads: by name.
        cases: verify steps.
        sessions: of a draft round.
        widths: hidden, intermediate and vocabulary of the kernels.
        rows: of the kernels.
        shape: that the demo is widened to. batches to max_tokens: end to end.
        chunks: rows of prompts that one prefill pass of the first target takes, behind as many tokens as each of prefixes.
    """

    targets: Mapping[str, LlamaConfig]
    heads: Mapping[str, EagleHeadConfig]
    cases: Sequence[Case]
    sessions: Sequence[int]
    rows: Sequence[int]
    widths: tuple[int, int, int]
    shape: Shape
    batches: Sequence[int] = (1, 8, 64)
    num_prompts: int = 8
    num_groups: int = 2
    max_groups: int = 8
    temperatures: tuple[float, ...] = (0.0, 0.8)
    max_tokens: int = 96
    repeats: int = 20
    copied_bytes: int = 4 << 30
    product_width: int = 8192
    num_steps: int = 8
    cached: int = 1100
    chunks: Sequence[int] = (512, 2048, 8192)
    prefixes: Sequence[int] = (0, 8192)


class OutOfTime(BaseException):
    """A stage has used its time. No `except Exception` of the measured code may take it for its own error."""


@dataclass(frozen=True)
class Limit:
    """The moment at which a stage ends, on a clock of seconds."""

    end: float
    now: Callable[[], float] = time.monotonic

    @property
    def left(self) -> float:
        return self.end - self.now()

    def check(self) -> None:
        """Raises OutOfTime behind the end."""
        if self.left <= 0:
            raise OutOfTime

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Raise OutOfTime at the end, wherever Python is then. A call into the device is first waited for.

        Only the main thread can be interrupted; elsewhere time is up between two cases.
        """
        if (left := self.left) <= 0:
            raise OutOfTime
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(*_: object) -> None:
            raise OutOfTime

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, left)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@dataclass
class Part:
    """Findings of a stage.

    Attributes:
        error: why it stopped early; empty if it did not.
        waiting: cases that have not run yet.
    """

    limit: Limit
    tables: list[Table] = field(default_factory=list)
    results: Any = None
    costs: list[DeviceCosts] = field(default_factory=list)
    error: str = ""
    waiting: list[str] = field(default_factory=list)

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """One case of `waiting`, which ends with it. Raises OutOfTime instead if no time is left."""
        self.limit.check()
        yield
        self.waiting.remove(name)


@dataclass(frozen=True)
class Rates:
    """Rates that the device reaches: bytes per second of a large copy, read and written ones counted, and operations per
    second of a large bfloat16 product.
    """

    bytes: float
    operations: float

    def floor_ms(self, num_bytes: float, operations: float = 0.0) -> float:
        """Return the least time for both."""
        return 1e3 * max(num_bytes / self.bytes, operations / self.operations)


def measure_rates(device: torch.device, scale: Scale) -> Rates:
    """Measure a copy and a square product."""
    source = torch.randint(256, (scale.copied_bytes,), dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)
    copied = median_ms(lambda: sink.copy_(source), device, 10)
    width = scale.product_width
    left, right = (torch.randn(width, width, dtype=torch.bfloat16, device=device) for _ in "lr")
    multiplied = median_ms(lambda: left @ right, device, 10)
    return Rates(2e3 * scale.copied_bytes / copied, 2e3 * width**3 / multiplied)


@torch.inference_mode()
def median_ms(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median in ms until the device is done. Long work is repeated less often than `repeats` times."""

    def run() -> float:
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    for _ in range(min(NUM_WARM_UPS, repeats)):
        run()
    times = list[float]()
    while len(times) < repeats and (len(times) < LEAST or sum(times) < ENOUGH_S):
        times.append(run())
    return 1e3 * median(times)


@torch.inference_mode()
def device_ms(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median in ms of a call as one of CALLS in a CUDA graph, so without its launches; elsewhere `median_ms`.

    What a call reads may still be in the device's cache from the call before.
    """
    if device.type != "cuda":
        return median_ms(work, device, repeats)
    return median_ms(CudaCapture(device)(lambda: [work() for _ in range(CALLS)]), device, repeats) / CALLS


def llama(shape: Shape, ranks: int = 1) -> LlamaConfig:
    """Return a Llama of a shape, or one rank's part of it, with its own part of the vocabulary."""
    return LlamaConfig(
        vocab_size=shape.vocab_size // ranks, hidden_size=shape.hidden, intermediate_size=shape.intermediate // ranks,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads // ranks, head_dim=shape.head_dim,
        num_key_value_heads=shape.num_kv_heads // ranks, max_position_embeddings=131072, tie_word_embeddings=False,
    )  # fmt: skip


def llama_head(hidden: int, intermediate: int, num_heads: int) -> EagleHeadConfig:
    """Return an EAGLE-3 head as wide as a Llama 3 of that hidden size, with the published draft vocabulary of 32,000."""
    return EagleHeadConfig(
        kind="eagle3", target_hidden=hidden, hidden=hidden, intermediate=intermediate, num_heads=num_heads, num_kv_heads=8,
        head_dim=128, num_layers=1, vocab_size=VOCAB, draft_vocab_size=DRAFT_VOCAB, rms_norm_eps=1e-5,
        rotary={"rope_type": "default", "rope_theta": 500000.0}, max_positions=8192, wiring=HeadWiring((2, 16, 29)),
    )  # fmt: skip


def full_scale(minutes: float = 25.0) -> Scale:
    """Return the run that a GPU of 80 GB takes in 25 minutes, or the part of it that four minutes are enough for."""
    cases = [Case(1, rows) for rows in (1, 16, 32, 60)]
    cases += [Case(8, rows) for rows in (1, 16)] + [Case(64, rows) for rows in (1, 16)]
    cases += [Case(1, rows, 8192) for rows in (1, 60)] + [Case(1, 16, is_narrow=True)]
    targets, heads = {"llama-8b": llama(SHAPES["8b"])}, {"eagle3-8b": llama_head(4096, 14336, 32)}
    scale = Scale(targets, heads, cases, (1, 8, 32), (1, 60, 256, 1024), (4096, 14336, VOCAB), SHAPES["8b"])
    if minutes < SHORT_MINUTES:
        return replace(scale, num_groups=1, max_groups=2, num_prompts=2, max_tokens=64, chunks=(512, 2048), repeats=12)
    more = [Case(8, rows) for rows in (32, 60)] + [Case(32, rows) for rows in (1, 16, 32, 60)]
    more += [Case(1, rows, 32768) for rows in (1, 60)] + [Case(32, rows, is_narrow=True) for rows in (1, 16)]
    more += [Case(1, rows, 32768, is_narrow=True) for rows in (1, 60)]
    targets["llama-70b-rank-of-4"], heads["eagle3-70b"] = llama(SHAPES["70b"], ranks=4), llama_head(8192, 28672, 64)
    return replace(scale, targets=targets, heads=heads, cases=[*cases, *more])
