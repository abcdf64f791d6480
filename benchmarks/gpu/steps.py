"""Verify steps of a target with random bfloat16 weights by batch, rows and context; their cost table and roofline picture.

Weights are made on the device. Steps are captured, launched kernel by kernel, and run with the plain attention.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.gpu.measuring import Case, Part, Rates, Scale, device_ms, median_ms
from eyas.bench.report import Table, number
from eyas.cache.kv_cache import KV_CACHE_DTYPES, KVCache
from eyas.config import EngineConfig, TreeConfig
from eyas.device.placement import E4M3_CAPABILITY
from eyas.emulation.costs import DeviceCosts, PassCosts
from eyas.kernels.arguments import AttentionRule
from eyas.models.backends.base import ForwardBackend
from eyas.models.backends.cuda import build_backend, plan_backend, release_backend
from eyas.models.inputs import PackedInputs, Segment
from eyas.models.layers.attention import ATTENTION_NAME, attend, register_attention
from eyas.models.layers.fused import fuse_layers
from eyas.models.layers.numerics import use_float32_head
from eyas.models.target import TargetModel
from eyas.protocol.tree import DraftTree


@dataclass(frozen=True)
class Step:
    """Medians in ms of whole steps: inputs, forward pass, greedy draw, tokens back on the host.

    Attributes:
        floor: bytes of weights and of keys and values over the copy rate, or operations over the rate of products.
        forward: the captured forward pass alone. attention: of one layer alone.
        attention_floor: its keys and values.
    """

    target: str
    case: Case
    floor: float
    graphs: float
    forward: float
    kernel: float
    plain: float
    kernel_attention: float
    plain_attention: float
    attention_floor: float
    device_attention: float
    library_attention: float


def measure(device: torch.device, scale: Scale, rates: Rates, part: Part) -> None:
    """Every target, one after the other, with its cost table."""
    part.results = list[Step]()
    part.waiting = [f"{name}, {case}" for name in scale.targets for case in scale.cases]
    for name, config in scale.targets.items():
        target = make_target(config, device)
        try:
            measure_target(name, target, scale, rates, part)
        finally:
            found = [step for step in part.results if step.target == name]
            if sum(not step.case.is_narrow for step in found) == sum(not case.is_narrow for case in scale.cases):
                part.costs.append(cost_table(name, found, device))  # without those of 8 bits, which are the last
            part.tables += tables(name, found, rates)
        del target
        gc.collect()
        torch.cuda.empty_cache()


def make_target(config: LlamaConfig, device: torch.device) -> TargetModel:
    """Return a target with random bfloat16 weights, made where they will be used, and fused as a loaded one."""
    register_attention()
    causal: Any = AutoModelForCausalLM
    with torch.device(device):
        model = causal.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    use_float32_head(model)
    fuse_layers(model)
    return TargetModel(model)


def measure_target(name: str, target: TargetModel, scale: Scale, rates: Rates, part: Part) -> None:
    """Every case in each backend: those with keys and values of the target's dtype, then those of 8 bits."""
    for is_narrow in (False, True):
        cases = [case for case in scale.cases if case.is_narrow == is_narrow]
        if not cases:
            continue
        target.kv_dtype = narrow_dtype(target.device) if is_narrow else None
        num_slots = max(case.batch * (case.cached + case.rows) for case in cases)
        kv_cache = target.new_kv_cache(num_slots)
        for pool in (*kv_cache.keys, *kv_cache.values):
            pool.copy_(torch.randn(pool.shape, dtype=target.dtype, device=target.device))
        captured, launched = make_backends(target, cases, kv_cache)
        for case in cases:
            with part.case(f"{name}, {case}"):
                part.results.append(measure_case(name, case, target, (captured, launched), kv_cache, scale, rates))
        release_backend(captured)
    target.kv_dtype = None


def narrow_dtype(device: torch.device) -> torch.dtype:
    """Return a type of 8 bits that the device has."""
    is_old = device.type == "cuda" and torch.cuda.get_device_capability(device) < E4M3_CAPABILITY
    return KV_CACHE_DTYPES["fp8_e5m2" if is_old else "fp8"]


def make_backends(target: TargetModel, cases: Sequence[Case], kv_cache: KVCache) -> list[ForwardBackend]:
    """Return the captured and the launched one."""
    batch, rows = (max(getattr(case, key) for case in cases) for key in ("batch", "rows"))
    longest = max(case.cached + case.rows for case in cases)  # a graph holds no pass with a longer context
    backends = []
    for graphs in (True, False):
        engine = EngineConfig(max_kv_tokens=kv_cache.scratch, max_num_seqs=batch, max_prefill_tokens=1, cuda_graphs=graphs)
        plan = plan_backend(target, engine, TreeConfig(rows, 1, 1), longest)
        backends.append(build_backend(plan, target, kv_cache))
    return backends


def measure_case(
    name: str,
    case: Case,
    target: TargetModel,
    backends: Sequence[ForwardBackend],
    kv_cache: KVCache,
    scale: Scale,
    rates: Rates,
) -> Step:
    """Return the medians of one case. backends: the captured and the launched one."""
    captured, launched = backends
    segments = make_segments(case, target.vocab_size)
    packed = captured.pack(segments)
    works = [_step(backend, segments, kv_cache) for backend in (captured, launched, target)]
    works += [lambda: captured.forward(packed, kv_cache)]
    works += [_layer(backend, target, segments, kv_cache) for backend in (launched, target)]
    graphs_ms, kernel, plain, forward, *layers = (median_ms(work, target.device, scale.repeats) for work in works)
    weights, kv = weight_bytes(target), _kv_bytes(target, case)
    floor = rates.floor_ms(weights + kv, weights * case.batch * case.rows)
    attention = rates.floor_ms(kv / len(target.kv_shapes))
    alone = device_ms(works[-2], target.device, scale.repeats)
    library = 0.0 if case.is_narrow else device_ms(_library(target, segments, kv_cache), target.device, scale.repeats)
    return Step(name, case, floor, graphs_ms, forward, kernel, plain, layers[0], layers[1], attention, alone, library)


def make_segments(case: Case, vocab_size: int) -> list[Segment]:
    """Return a random tree for each sequence over its cached tokens, in scattered slots."""
    rng = np.random.default_rng(case.rows)
    capacity, segments = case.cached + case.rows, []
    for index in range(case.batch):
        slots = index * capacity + rng.permutation(capacity)
        tokens = rng.integers(0, vocab_size, case.rows)
        parents = (0, *(int(rng.integers(max(0, node - 8), node)) for node in range(1, case.rows)))
        tree = DraftTree.of(tokens, parents, (0.0,) * case.rows)
        rows = np.arange(case.rows)
        own, prefix = slots[case.cached :], slots[: case.cached]
        segments.append(Segment(tokens, case.cached + np.array(tree.depths), own, prefix, tree.ancestor_mask(), rows))
    return segments


def cost_table(name: str, steps: Sequence[Step], device: torch.device) -> DeviceCosts:
    """Times of captured forward passes by rows, and microseconds for each cached token: what emulation and planning read."""
    steps = [step for step in steps if not step.case.is_narrow]
    us_per_token = _slope(steps)
    by_rows: dict[int, list[float]] = {}
    for step in steps:
        own = step.forward - 1e-3 * us_per_token * step.case.batch * step.case.cached
        by_rows.setdefault(step.case.batch * step.case.rows, []).append(max(0.0, own))
    rows = tuple(sorted(by_rows))
    costs = PassCosts(rows, tuple(median(by_rows[count]) for count in rows), us_per_token)
    return DeviceCosts(device_name(device), f"{name}, bfloat16", "measured", {"verify": costs})


def _slope(steps: Sequence[Step]) -> float:
    """Microseconds for each cached token, from steps that differ in nothing else; 0 without any."""
    slopes = [
        1e3 * (b.forward - a.forward) / (a.case.batch * (b.case.cached - a.case.cached))
        for a in steps
        for b in steps
        if (a.case.batch, a.case.rows) == (b.case.batch, b.case.rows) and a.case.cached < b.case.cached
    ]
    return max(0.0, median(slopes)) if slopes else 0.0


def device_name(device: torch.device) -> str:
    """Return the device's name as its maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def tables(name: str, steps: Sequence[Step], rates: Rates) -> list[Table]:
    """Return the tables of a target."""
    plain = {replace(s.case, rows=1): s for s in steps if s.case.rows == 1}
    whole, layers = [], []
    for s in steps:
        case = (f"{s.case.batch}", f"{s.case.rows}", f"{s.case.cached}", "8 bits" if s.case.is_narrow else "whole")
        beside = plain.get(replace(s.case, rows=1))
        over_plain = number(s.graphs / beside.graphs) if beside else ""
        own, other = (s.floor, s.graphs, s.graphs / s.floor, s.forward), (s.kernel, s.plain)
        whole.append((*case, *map(number, own), over_plain, *map(number, other)))
        attention = (s.attention_floor, s.device_attention, s.library_attention, s.kernel_attention, s.plain_attention)
        layers.append((*case, *(number(1e3 * ms) for ms in attention)))
    note = (
        f"ms of a whole step. Floor: bytes of weights, keys and values over {rates.bytes / 1e12:.2f} TB/s, or operations "
        f"over {rates.operations / 1e12:.0f} TFLOP/s. Forward: the captured pass alone. Launched: the same without graphs. "
        "Plain path: gathered keys and torch's own attention, without graphs. Sums over ranks are not counted. "
        "Keys of 8 bits are those of `engine.kv_cache_dtype`."
    )
    columns = ("batch", "rows each", "cached each", "keys")
    times_of = (*columns, "floor", "graphs", "over floor", "forward", "over plain step", "launched", "plain path")
    attention_of = (*columns, "floor", "kernel", "library", "launched", "plain path")
    alone = (
        "Microseconds of the attention of one layer. Kernel and library (torch's, over keys that lie side by side) in a "
        "CUDA graph; launched ones with their launches. Floor: its keys and values."
    )
    return [
        Table(f"Verify steps of {name}", times_of, tuple(whole), note),
        Table(f"Attention of {name}", attention_of, tuple(layers), alone),
    ]


def draw_roofline(steps: Sequence[Step], path: Path) -> bool:
    """Draw measured steps over their floors, by rows. Returns whether matplotlib is there to do it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    whole = [step for step in steps if not step.case.is_narrow]
    by_target: Mapping[str, list[Step]] = {s.target: [t for t in whole if t.target == s.target] for s in whole}
    for index, (name, own) in enumerate(by_target.items()):
        points = sorted((s for s in own if s.case.cached == own[0].case.cached), key=lambda s: s.case.batch * s.case.rows)
        rows = [s.case.batch * s.case.rows for s in points]
        axes.plot(rows, [s.graphs for s in points], "o", color=f"C{index}", label=f"{name}, step")
        axes.plot(rows, [s.forward for s in points], "x", color=f"C{index}", label=f"{name}, forward pass")
        axes.plot(rows, [s.floor for s in points], "-", color=f"C{index}", label=f"{name}, floor")
    axes.set(xscale="log", yscale="log", xlabel="rows in the step", ylabel="ms")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    return True


def _step(backend: ForwardBackend, segments: list[Segment], kv_cache: KVCache) -> Callable[[], object]:
    return lambda: backend.forward(backend.pack(segments), kv_cache).logits.argmax(-1).tolist()


def _layer(backend: ForwardBackend, target: TargetModel, segments: list[Segment], kv_cache: KVCache) -> Any:
    packed: PackedInputs = backend.pack(segments)
    num_kv, width = target.kv_shapes[0][:2]
    shape = (len(packed.tokens), num_kv * target.heads_per_kv, width)
    query = torch.randn(shape, dtype=target.dtype, device=target.device)
    return lambda: attend(query, kv_cache.keys[0], kv_cache.values[0], packed, AttentionRule(width**-0.5))


def _library(target: TargetModel, segments: Sequence[Segment], kv_cache: KVCache) -> Callable[[], object]:
    """Return torch's attention over the same keys, as if they lay side by side already."""
    batch, rows, context = len(segments), len(segments[0].tokens), len(segments[0].prefix)
    num_kv, width = target.kv_shapes[0][:2]
    index = np.concatenate([np.concatenate([each.prefix, each.slots]) for each in segments])
    places = torch.from_numpy(index).to(target.device)
    keys, values = (
        pool[0][places].view(batch, -1, num_kv, width).transpose(1, 2).contiguous()
        for pool in (kv_cache.keys, kv_cache.values)
    )
    query = torch.randn(batch, num_kv * target.heads_per_kv, rows, width, dtype=target.dtype, device=target.device)
    mask = torch.ones(rows, context + rows, dtype=torch.bool)
    if segments[0].visible is not None:
        mask[:, context:] = torch.from_numpy(segments[0].visible)
    mask = mask.to(target.device)
    return lambda: F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


def weight_bytes(target: TargetModel) -> int:
    """Return all weights but the input embedding; a step reads only a few of its rows."""
    embedding = target.model.get_input_embeddings().weight
    return sum(p.nbytes for p in target.model.parameters() if p is not embedding)


def _kv_bytes(target: TargetModel, case: Case) -> int:
    itemsize = 1 if case.is_narrow else target.dtype.itemsize
    per_token = sum(shape.numbers for shape in target.kv_shapes) * itemsize
    return case.batch * (case.cached + case.rows) * per_token
