"""Prefill: one chunk of a prompt behind what is cached of it, as a whole pass and as the attention of one layer.

Chunks are launched kernel by kernel, as the engine launches them. Only the logits of the last row are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.measuring import Part, Rates, Scale, median_ms
from benchmarks.gpu.steps import make_target, weight_bytes
from eyas.bench.report import Table, number
from eyas.cache.kv_cache import KVCache
from eyas.config import EngineConfig, TreeConfig
from eyas.kernels.arguments import AttentionRule
from eyas.models.backends.base import ForwardBackend
from eyas.models.backends.cuda import KernelBackend, build_backend, plan_backend
from eyas.models.inputs import Segment
from eyas.models.layers.attention import attend
from eyas.models.target import TargetModel


@dataclass(frozen=True)
class Chunk:
    """Medians in ms of a pass over `rows` rows of a prompt behind `cached` ones, and their floors.

    Attributes:
        kernel: attention of one layer by the kernel.
        library: the same by torch's causal attention, copies of keys and values included.
    """

    rows: int
    cached: int
    whole: float
    floor: float
    attention_floor: float
    kernel: float
    library: float


def measure(device: torch.device, scale: Scale, rates: Rates, part: Part) -> None:
    """Every chunk behind every prefix, of the first target."""
    cases = [(rows, cached) for rows in scale.chunks for cached in scale.prefixes]
    part.results, part.waiting = list[Chunk](), [_name(*case) for case in cases]
    name, config = next(iter(scale.targets.items()))
    target, num_slots = make_target(config, device), max(map(sum, cases))
    kv_cache = target.new_kv_cache(num_slots)
    for pool in (*kv_cache.keys, *kv_cache.values):
        pool.normal_()
    engine = EngineConfig(max_kv_tokens=num_slots, max_num_seqs=1, max_prefill_tokens=max(scale.chunks), cuda_graphs=False)
    backend = build_backend(plan_backend(target, engine, TreeConfig(1, 1, 1), num_slots), target, kv_cache)
    try:
        for rows, cached in cases:
            with part.case(_name(rows, cached)):
                part.results.append(measure_chunk(rows, cached, target, backend, kv_cache, scale, rates))
    finally:
        part.tables = [table(name, part.results, rates)]
    torch.cuda.empty_cache()


def measure_chunk(
    rows: int,
    cached: int,
    target: TargetModel,
    backend: ForwardBackend,
    kv_cache: KVCache,
    scale: Scale,
    rates: Rates,
) -> Chunk:
    """Return one chunk in scattered slots."""
    segment = make_segment(rows, cached, target.vocab_size)
    packed, *ways = [with_library(backend, least).pack([segment]) for least in (None, 0, 1)]
    num_kv, width = target.kv_shapes[0][:2]
    heads, half = num_kv * target.heads_per_kv, target.dtype
    query = torch.randn(rows, heads, width, dtype=half, device=target.device)
    keys, values = kv_cache.keys[0], kv_cache.values[0]
    whole = median_ms(lambda: backend.forward(packed, kv_cache).logits.argmax(-1).tolist(), target.device, scale.repeats)
    works = [partial(attend, query, keys, values, inputs, AttentionRule(width**-0.5)) for inputs in ways]
    kernel, library = (median_ms(work, target.device, scale.repeats) for work in works)
    moved, operations = attention_work(rows, cached, heads, num_kv, width, half.itemsize)
    layers, weights = len(target.kv_shapes), weight_bytes(target)
    head = target.model.get_output_embeddings().weight
    products = 2 * (rows * (weights - head.nbytes) + head.nbytes) / head.itemsize
    floor = rates.floor_ms(weights + layers * moved, products + layers * operations)
    return Chunk(rows, cached, whole, floor, rates.floor_ms(moved, operations), kernel, library)


def with_library(backend: ForwardBackend, least: int | None) -> ForwardBackend:
    """Return the backend with the library for prompts of `least` rows or more, for none of 0, and as it is for None."""
    if least is None or not isinstance(backend, KernelBackend):
        return backend
    return KernelBackend(backend.target, replace(backend.tiling, library_rows=least), backend.scratch, backend.memory)


def attention_work(rows: int, cached: int, heads: int, kv_heads: int, width: int, itemsize: int) -> tuple[int, int]:
    """Return bytes and operations of the causal attention of one layer: keys, values, queries and results once; two
    products.
    """
    seen = rows * cached + rows * (rows + 1) // 2
    return 2 * width * itemsize * (kv_heads * (cached + rows) + heads * rows), 4 * seen * heads * width


def make_segment(rows: int, cached: int, vocab_size: int) -> Segment:
    """Return a chunk of random tokens behind a prefix, in scattered slots; logits of the last row."""
    rng = np.random.default_rng(rows)
    slots, own = rng.permutation(cached + rows), np.arange(rows)
    tokens = rng.integers(0, vocab_size, rows)
    return Segment(tokens, cached + own, slots[cached:], slots[:cached], None, own[-1:])


def table(name: str, chunks: Sequence[Chunk], rates: Rates) -> Table:
    """Return one line for each chunk."""
    note = (
        "ms of a chunk of a prompt, launched kernel by kernel, and microseconds of the attention of one layer. Floors: "
        f"operations over {rates.operations / 1e12:.0f} TFLOP/s, or bytes over {rates.bytes / 1e12:.2f} TB/s. Library: "
        "torch's causal attention over copies of keys and values. LIBRARY_ROWS in eyas/models/backends/cuda.py says from "
        "how many rows on it serves prompts."
    )
    columns = (
        "rows", "cached", "pass", "floor", "over floor", "attention: floor", "kernel", "library",
    )  # fmt: skip
    lines = []
    for c in chunks:
        attention = (1e3 * c.attention_floor, 1e3 * c.kernel, 1e3 * c.library)
        lines.append((f"{c.rows}", f"{c.cached}", *map(number, (c.whole, c.floor, c.whole / c.floor, *attention))))
    return Table(f"Prefill of {name}", columns, tuple(lines), note)


def _name(rows: int, cached: int) -> str:
    return f"chunk of {rows} rows behind {cached}"
