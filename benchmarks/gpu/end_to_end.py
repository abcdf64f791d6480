"""The widened demo end to end: plain and speculative decoding, `generate` and assisted generation in one run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.progress import Progress

from benchmarks.gpu.measuring import Part, Scale
from eyas.bench import methods, offline
from eyas.bench.methods import MethodsResults
from eyas.bench.results import OfflineResults
from eyas.bench.settings import MethodSpec, MethodsSettings, OfflineSettings
from eyas.bench.widen_heads import widen
from eyas.config import Dtype, TreeConfig

DEMO = Path("models/demo")
HEADS = {"eagle3": "eagle3-full", "dspark": "dspark", "medusa": "medusa", "sps": "small"}
TREE = TreeConfig(num_draft_tokens=24)


@dataclass(frozen=True)
class EndToEnd:
    """methods: every method at batch 1. batches: EAGLE-3 beside plain decoding and `generate`."""

    methods: MethodsResults
    batches: OfflineResults


def measure(device: torch.device, scale: Scale, progress: Progress) -> Part:
    """Widen the demo in a temporary folder, then measure. Raises EyasError."""
    dtype: Dtype = "bfloat16" if device.type == "cuda" else "float32"
    with TemporaryDirectory(prefix="eyas-gpu-") as folder:
        sources = [str(DEMO / name) for name in HEADS.values()]
        target, *heads = widen(str(DEMO / "target"), sources, scale.shape, Path(folder), dtype, progress)
        specs = [MethodSpec(name, str(head)) for name, head in zip(HEADS, heads, strict=True)]
        every = MethodsSettings(
            model=str(target),
            methods=(*specs, MethodSpec("prompt_lookup")),
            prompts=DEMO / "prompts.jsonl",
            num_prompts=scale.num_prompts,
            temperatures=scale.temperatures,
            max_tokens=scale.max_tokens,
            tree=TREE,
            dtype=dtype,
            device=str(device),
            assistant=specs[-1].draft_model,
        )
        by_method = methods.measure(every, progress)
        _free(device)
        batched = OfflineSettings(
            model=every.model, draft_model=specs[0].draft_model, method=specs[0].name, prompts=every.prompts,
            batches=tuple(scale.batches), num_groups=scale.num_groups, rows=(1, 16, 24), temperatures=(0.0,),
            max_tokens=scale.max_tokens,
            tree=TREE, dtype=dtype, device=every.device,
        )  # fmt: skip
        by_batch = offline.measure(batched, progress)
        _free(device)
    titled = [replace(table, title=f"End to end, {table.title}") for table in (*by_method.tables(), *by_batch.tables())]
    return Part(titled, EndToEnd(by_method, by_batch))


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
