"""The widened demo end to end: plain and speculative decoding, `generate` and assisted generation in one run.

A table gives the shares of a step that the pass, the sampler, the draft round and the host take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.gpu.measuring import Part, Scale
from benchmarks.widen.heads import widen
from eyas.bench import methods, offline
from eyas.bench.methods import MethodsResults
from eyas.bench.report import Table, number
from eyas.bench.results import OfflineResults, SpeedComparison
from eyas.bench.settings import MethodSpec, MethodsSettings, OfflineSettings
from eyas.config import Dtype, TreeConfig
from eyas.progress import Progress

DEMO = Path("models/demo")
HEADS = {"eagle3": "eagle3-full", "dspark": "dspark", "medusa": "medusa", "sps": "small"}
TREE = TreeConfig(num_draft_tokens=24)

CASES = ("widened checkpoints", "batches", "methods")


@dataclass
class EndToEnd:
    """Results of whole runs.

    Attributes:
        methods: every method at batch 1.
        compared: EAGLE-3 beside plain decoding and `generate`, as far as it has run.
    """

    methods: MethodsResults | None = None
    compared: list[SpeedComparison] = field(default_factory=list)


def measure(device: torch.device, scale: Scale, progress: Progress, part: Part) -> None:
    """Widen the demo in a temporary folder, then measure. Raises EyasError."""
    dtype: Dtype = "bfloat16" if device.type == "cuda" else "float32"
    part.results, part.waiting = EndToEnd(), list(CASES)
    with TemporaryDirectory(prefix="eyas-gpu-") as folder:
        sources = [str(DEMO / name) for name in HEADS.values()]
        with part.case(CASES[0]):
            target, *heads = widen(str(DEMO / "target"), sources, scale.shape, Path(folder), dtype, progress)
        specs = [MethodSpec(name, str(head)) for name, head in zip(HEADS, heads, strict=True)]
        batched = OfflineSettings(
            model=str(target), draft_model=specs[0].draft_model, method=specs[0].name, prompts=DEMO / "prompts.jsonl",
            batches=tuple(scale.batches), num_groups=scale.num_groups, max_groups=scale.max_groups,
            temperatures=scale.temperatures, max_tokens=scale.max_tokens, tree=TREE, dtype=dtype, device=str(device),
        )  # fmt: skip
        with part.case(CASES[1]):
            try:
                offline.measure(batched, progress, part.results.compared.append)
            finally:
                compared = part.results.compared
                part.tables += [shares(compared), *_titled(OfflineResults(compared).tables())] if compared else []
        torch.cuda.empty_cache()
        every = MethodsSettings(
            model=batched.model,
            methods=(*specs, MethodSpec("prompt_lookup")),
            prompts=batched.prompts,
            num_prompts=scale.num_prompts,
            temperatures=scale.temperatures,
            max_tokens=scale.max_tokens,
            tree=TREE,
            dtype=dtype,
            device=batched.device,
            assistant=specs[-1].draft_model,
        )
        with part.case(CASES[2]):
            part.results.methods = methods.measure(every, progress)
            part.tables += _titled(part.results.methods.tables())
        torch.cuda.empty_cache()


def shares(comparisons: Sequence[SpeedComparison]) -> Table:
    """Return how a step's time is divided, by batch and contender. What is left is work of the host."""
    lines = []
    for each in comparisons:
        for name, times in each.stages.items():
            whole = sum(times.stages_ms.values()) or 1.0
            parts = [times.stages_ms[stage] / whole for stage in ("forward", "sample", "drafts")]
            percent = [f"{share:.0%}" for share in (*parts, 1 - sum(parts))]
            lines.append((f"{each.batch}", name, number(times.step_ms.median), *percent))
    note = (
        "Of the medians of decode steps at full batch, with a wait for the device after each stage. Pass: inputs on the "
        "device to logits. Draft round: the wait for trees. Host: schedule, inputs, commit, and asking for drafts."
    )
    columns = ("batch", "contender", "step, ms", "pass", "sampler", "draft round", "host")
    return Table("End to end, shares of a step", columns, tuple(lines), note)


def _titled(found: Sequence[Table]) -> list[Table]:
    return [replace(table, title=f"End to end, {table.title}") for table in found]
