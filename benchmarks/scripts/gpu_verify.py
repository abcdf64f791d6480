"""Measures verify steps of a Llama-3.1-8B-shaped target with random bfloat16 weights on a GPU, and the tree attention kernel
against the plain path. Writes a dated report: `python -m benchmarks.scripts.gpu_verify`. Weights are made on the device."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM, LlamaConfig

from eyas.bench.report import Report, Table, number
from eyas.cache.kv_cache import KVCache
from eyas.config import EngineConfig, TreeConfig
from eyas.models.attention import ATTENTION_NAME, attend, register_attention
from eyas.models.cuda.backend import ForwardBackend, build_backend, plan_backend
from eyas.models.inputs import PackedInputs, Segment
from eyas.models.target import TargetModel
from eyas.tree import DraftTree

BATCHES = (1, 8, 32)
ROWS = (1, 16, 32, 60)
COPIED_BYTES = 4 << 30
NUM_WARM_UPS = 3


@dataclass(frozen=True)
class Settings:
    """cached: tokens that each sequence has in its slots. repeats: measured runs of each case."""

    layers: int
    cached: int
    repeats: int
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Case:
    """Sequences in the step, and rows of each: 1 is plain decoding, more are the nodes of a draft tree."""

    batch: int
    rows: int


@dataclass(frozen=True)
class Step:
    """Medians in ms of whole steps: inputs, forward pass, greedy draw, tokens back on the host. floor: bytes of weights and
    of keys and values over the copy rate. attention: of one layer alone."""

    case: Case
    floor: float
    graphs: float
    kernel: float
    plain: float
    kernel_attention: float
    plain_attention: float


def main(
    layers: Annotated[int, typer.Option(help="Layers of the target; the real one has 32.")] = 32,
    cached: Annotated[int, typer.Option(help="Tokens that each sequence has cached.")] = 1024,
    repeats: Annotated[int, typer.Option(help="Measured runs of each case.")] = 20,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Plain and verify steps at several batch sizes: captured, launched kernel by kernel, and with the plain attention."""
    device = cuda_device()
    settings = Settings(layers, cached, repeats)
    target = make_target(llama_8b(layers), "cuda")
    rate = copy_rate(device, COPIED_BYTES)
    steps = measure(target, [Case(batch, rows) for batch in BATCHES for rows in ROWS], settings, rate)
    program = "python -m benchmarks.scripts.gpu_verify"
    Report.here("gpu-verify", program, "cuda", settings, steps, tables(steps, rate)).publish(out)


def cuda_device() -> torch.device:
    """The CUDA device; without one, exit with status 1."""
    if not torch.cuda.is_available():
        print("error: no CUDA device here", file=sys.stderr)
        raise typer.Exit(1)
    return torch.device("cuda")


def llama_8b(layers: int) -> LlamaConfig:
    """The shape of Llama-3.1-8B."""
    return LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip


def make_target(config: LlamaConfig, device: str) -> TargetModel:
    """A target with random bfloat16 weights, made where they will be used."""
    register_attention()
    causal: Any = AutoModelForCausalLM
    with torch.device(device):
        model = causal.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    return TargetModel(model)


def copy_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes per second of a large copy within the device's memory, read and written ones counted."""
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)
    return 2 * num_bytes / (1e-3 * median_ms(lambda: sink.copy_(source), device, 10))


def measure(target: TargetModel, cases: Sequence[Case], settings: Settings, rate: float) -> list[Step]:
    """Every case in each backend; rate: bytes per second of memory."""
    batch, rows = max(c.batch for c in cases), max(c.rows for c in cases)
    capacity = settings.cached + rows
    kv_cache = KVCache(batch * capacity, target.kv_shapes, 0, target.dtype, target.device)
    for pool in (*kv_cache.keys, *kv_cache.values):
        pool.normal_()
    backends = []
    for graphs in (True, False):
        engine = EngineConfig(max_kv_tokens=batch * capacity, max_num_seqs=batch, max_prefill_tokens=1, cuda_graphs=graphs)
        backends.append(build_backend(plan_backend(target, engine, TreeConfig(rows, 1, 1), capacity), target, kv_cache))
    steps = []
    with Progress(console=Console(stderr=True), refresh_per_second=1) as progress:
        for case in progress.track(cases, description="measuring"):
            segments = make_segments(case, settings.cached, capacity, target.vocab_size)
            times = [
                median_ms(_step(backend, segments, kv_cache), target.device, settings.repeats)
                for backend in (*backends, target)
            ]
            layers = [
                median_ms(_layer(backend, target, segments, kv_cache), target.device, settings.repeats)
                for backend in (backends[1], target)
            ]
            floor = 1e3 * (_weight_bytes(target) + _kv_bytes(target, case, settings.cached)) / rate
            steps.append(Step(case, floor, *times, *layers))
    return steps


def make_segments(case: Case, cached: int, capacity: int, vocab_size: int) -> list[Segment]:
    """A random tree for each sequence over its cached tokens, in scattered slots."""
    rng = np.random.default_rng(case.rows)
    segments = []
    for index in range(case.batch):
        slots = index * capacity + rng.permutation(capacity)
        tokens = rng.integers(0, vocab_size, case.rows)
        parents = (0, *(int(rng.integers(max(0, node - 8), node)) for node in range(1, case.rows)))
        tree = DraftTree(tuple(tokens.tolist()), parents, (0.0,) * case.rows)
        rows = np.arange(case.rows)
        own, prefix = slots[cached : cached + case.rows], slots[:cached]
        segments.append(Segment(tokens, cached + np.array(tree.depths), own, prefix, tree.ancestor_mask(), rows))
    return segments


def tables(steps: Sequence[Step], rate: float) -> list[Table]:
    """The tables of the report."""
    plain = {step.case.batch: step for step in steps if step.case.rows == 1}
    whole = [
        (f"{s.case.batch}", f"{s.case.rows}", *map(number, (s.floor, s.graphs, s.graphs / s.floor)),
         number(s.graphs / plain[s.case.batch].graphs), *map(number, (s.kernel, s.plain)))
        for s in steps
    ]  # fmt: skip
    layers = [
        (f"{s.case.batch}", f"{s.case.rows}", *map(number, (1e3 * s.kernel_attention, 1e3 * s.plain_attention)))
        for s in steps
    ]
    note = (
        f"ms of a whole step. Floor: bytes of weights, keys and values over the copy rate, here {rate / 1e12:.2f} TB/s. "
        "Launched: the same kernels without graphs. Plain path: gathered keys and torch's own attention, without graphs."
    )
    columns = ("batch", "rows each", "floor", "graphs", "over floor", "over plain step", "launched", "plain path")
    beside = "Microseconds of the attention of one layer, launches included."
    return [
        Table("Verify steps", columns, tuple(whole), note),
        Table("Attention alone", ("batch", "rows each", "kernel", "plain path"), tuple(layers), beside),
    ]


def _step(backend: ForwardBackend, segments: list[Segment], kv_cache: KVCache) -> Callable[[], object]:
    return lambda: backend.forward(backend.pack(segments), kv_cache).logits.argmax(-1).tolist()


def _layer(backend: ForwardBackend, target: TargetModel, segments: list[Segment], kv_cache: KVCache) -> Any:
    packed: PackedInputs = backend.pack(segments)
    num_kv, width = target.kv_shapes[0]
    shape = (len(packed.tokens), num_kv * target.heads_per_kv, width)
    query = torch.randn(shape, dtype=target.dtype, device=target.device)
    return lambda: attend(query, kv_cache.keys[0], kv_cache.values[0], packed, width**-0.5)


def _weight_bytes(target: TargetModel) -> int:
    """All weights but the input embedding; a step reads only a few of its rows."""
    embedding = target.model.get_input_embeddings().weight
    return sum(p.nbytes for p in target.model.parameters() if p is not embedding)


def _kv_bytes(target: TargetModel, case: Case, cached: int) -> int:
    per_token = sum(2 * heads * width * target.dtype.itemsize for heads, width in target.kv_shapes)
    return case.batch * (cached + case.rows) * per_token


@torch.inference_mode()
def median_ms(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median in ms until the device is done."""
    times = []
    for _ in range(NUM_WARM_UPS + repeats):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - started))
    return median(times[NUM_WARM_UPS:])


if __name__ == "__main__":
    typer.run(main)
