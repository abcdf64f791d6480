"""Kernels against their floors: products, what is between them, and the sampler, at the widths of a large model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.measuring import Part, Rates, Scale, device_ms, median_ms
from eyas.bench.report import Table, number
from eyas.device.placement import runs_triton
from eyas.kernels.arguments import Draws
from eyas.kernels.by_device import sample
from eyas.kernels.plain import layers as plain_layers
from eyas.models.layers.norms import HeadLayout, RMSNorm
from eyas.protocol.commit import NoiseKey

HEAD_WIDTH = 128


@dataclass(frozen=True)
class KernelTime:
    """Microseconds of one call.

    Attributes:
        us: its launch included, unless `plain_us` is there.
        floor_us: of its bytes or operations at the measured rates.
        plain_us: of torch's own operations for the same; 0 for what is torch's, and for the sampler.
    """

    name: str
    rows: int
    us: float
    floor_us: float
    plain_us: float = 0.0


@dataclass(frozen=True)
class Work:
    """A call, the bytes that it must move, and its operations. plain: the same by torch's own operations."""

    name: str
    rows: int
    call: Callable[[], object]
    num_bytes: float
    operations: float = 0.0
    plain: Callable[[], object] | None = None


def measure(device: torch.device, scale: Scale, rates: Rates, part: Part) -> None:
    """Every kernel at every number of rows."""
    part.results, part.waiting = list[KernelTime](), [f"{rows} rows" for rows in scale.rows]
    try:
        for rows in scale.rows:
            with part.case(f"{rows} rows"):
                for work in _works(device, scale, rows):
                    measured = median_ms if work.plain is None else device_ms
                    us = 1e3 * measured(work.call, device, scale.repeats)
                    plain_us = 0.0 if work.plain is None else 1e3 * device_ms(work.plain, device, scale.repeats)
                    floor_us = 1e3 * rates.floor_ms(work.num_bytes, work.operations)
                    part.results.append(KernelTime(work.name, rows, us, floor_us, plain_us))
    finally:
        part.tables = [table(part.results, rates)]


def table(times: Sequence[KernelTime], rates: Rates) -> Table:
    """Return one line for each kernel and number of rows."""
    note = (
        "Microseconds. Torch: the same by its own operations, both in a CUDA graph; other kernels with their launch, which "
        f"bounds few rows. Floor: bytes over {rates.bytes / 1e12:.2f} TB/s, or operations over "
        f"{rates.operations / 1e12:.0f} TFLOP/s, both measured here."
    )
    lines = [
        (t.name, f"{t.rows}", number(t.us), number(t.plain_us) if t.plain_us else "", number(t.floor_us),
         number(t.us / t.floor_us))
        for t in times
    ]  # fmt: skip
    return Table("Kernels", ("kernel", "rows", "us", "torch", "floor", "over floor"), tuple(lines), note)


def _works(device: torch.device, scale: Scale, rows: int) -> Iterator[Work]:
    hidden, intermediate, vocab = scale.widths
    half: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    states = torch.randn(rows, hidden, **half)
    products = {"product qkv": (hidden * 3 // 2, hidden), "product out": (hidden, hidden)}
    products |= {"product gate and up": (2 * intermediate, hidden), "product down": (hidden, intermediate)}
    for name, (outputs, inputs) in products.items():
        weight, x = torch.randn(outputs, inputs, **half), torch.randn(rows, inputs, **half)
        moved = 2 * (weight.numel() + rows * (inputs + outputs))
        yield Work(name, rows, lambda x=x, weight=weight: F.linear(x, weight), moved, 2 * rows * weight.numel())  # type: ignore[misc]
    yield from _between(_functions(device), states, intermediate)
    logits = torch.randn(rows, vocab, device=device)
    for name, key in (
        ("sample, greedy", NoiseKey(1)),
        ("sample, temperature 1", NoiseKey(1, 1.0)),
        ("sample, top_p", NoiseKey(1, 1.0, 50, 0.9)),
    ):
        draws = Draws([key], range(rows), rows)
        yield Work(name, rows, lambda draws=draws: sample(logits, draws), 4 * rows * vocab)  # type: ignore[misc]


def _between(kernels: Any, states: torch.Tensor, intermediate: int) -> Iterator[Work]:
    """Norm with residual, rotary embedding with the write to the cache, and the gate."""
    rows, hidden = states.shape
    half = states.element_size()
    norm = RMSNorm(torch.ones(hidden, dtype=states.dtype, device=states.device), 1e-5, adds_one=False)
    width = min(HEAD_WIDTH, hidden // 2)
    heads = hidden // width
    layout = HeadLayout(heads, max(1, heads // 4), width, None)
    qkv = states.new_empty(rows, heads + 2 * layout.num_kv_heads, width).normal_()
    cache = states.new_zeros(2, rows, layout.num_kv_heads, width)
    rotary = states.new_ones(2, 1, rows, width)
    slots = torch.arange(rows, device=states.device)
    gates = states.new_empty(rows, 2 * intermediate).normal_()

    def add(own: Any) -> Callable[[], object]:
        return lambda: own.add_norm(states[None], states[None].clone(), norm, None)

    def turn(own: Any) -> Callable[[], object]:
        return lambda: own.rotate_and_store(qkv, layout, rotary, cache[0], cache[1], slots)

    def gate(own: Any) -> Callable[[], object]:
        return lambda: own.gate(gates.clone(), "silu")

    sizes = {"residual and norm": 4 * rows * hidden, "rotary and cache": 2 * qkv.numel(), "gate": 3 * rows * intermediate}
    for (name, size), make in zip(sizes.items(), (add, turn, gate), strict=True):
        yield Work(name, rows, make(kernels), half * size, plain=make(plain_layers))


def _functions(device: torch.device) -> Any:
    """Triton's kernels on CUDA; the functions of the plain path elsewhere."""
    if not runs_triton(device):
        return plain_layers
    from eyas.kernels.cuda import layers as layer_kernels

    return layer_kernels
