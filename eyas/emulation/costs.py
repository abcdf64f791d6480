"""Cost tables: how long the passes of a target and of a drafter take on a device. Emulation and `eyas plan` read them.

A table comes from a file, such as the one that a GPU was measured into, or from the arithmetic of a roofline: a preset
MODEL@GPU, such as llama-3.1-8b@h100 or eagle3-8b@l4. A pass reads all weights and the keys and values of its context, and
computes two operations for each weight and row; the slower of the two is its time, and launches add a fixed part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from eyas.config.checks import at_least, one_of, require
from eyas.errors import ConfigError

# verify: of the target. draft_extend: new features and tokens enter a drafter whose round needs a pass of its own.
# draft_round: the first pass of a round. draft_level: each level of a tree after it.
PassKind = Literal["verify", "draft_extend", "draft_round", "draft_level"]

# Shares of the peak rates that good kernels reach, assumed alike for all GPUs.
MEMORY_EFFICIENCY, COMPUTE_EFFICIENCY = 0.8, 0.6
# Seconds of a captured graph per layer besides reading and computing: gaps between kernels, norms, and the like.
LAYER_S = 6e-6
FLAT = re.compile(r"(\d+(?:\.\d+)?)ms(?:/(\d+(?:\.\d+)?)ms)?")
# Seconds of one all-reduce over NVLink for a few rows.
ALL_REDUCE_S = 10e-6


@dataclass(frozen=True)
class PassCosts:
    """Milliseconds of one kind of pass by its rows, at least one entry each, rows ascending.

    Between entries it is interpolated, below the first constant, beyond the last extended along the last slope.
    us_per_context_token: microseconds added for each cached token that the pass attends to, of all sequences together.
    """

    rows: tuple[int, ...]
    ms: tuple[float, ...]
    us_per_context_token: float = 0.0

    def __post_init__(self) -> None:
        require(
            bool(self.rows) and len(self.rows) == len(self.ms) and all(a < b for a, b in pairwise(self.rows)),
            f"rows {list(self.rows)} and ms {list(self.ms)} must be equally long, with ascending rows",
        )
        at_least(1, rows=self.rows[0])
        at_least(0, ms=min(self.ms), us_per_context_token=self.us_per_context_token)

    def seconds(self, rows: float, context: float = 0.0) -> float:
        """Expected seconds of a pass of `rows` rows that attend to `context` cached tokens in all."""
        points = list(zip(self.rows, self.ms, strict=True))
        ms = points[0][1]
        for index, ((left, low), (right, high)) in enumerate(pairwise(points), 2):
            if rows > left:
                reach = rows if index == len(points) else min(rows, right)
                ms = low + (high - low) * (reach - left) / (right - left)
        return (ms + 1e-3 * self.us_per_context_token * context) / 1e3

    def scaled(self, factor: float) -> PassCosts:
        """Return the same with all times multiplied."""
        return PassCosts(self.rows, tuple(ms * factor for ms in self.ms), self.us_per_context_token * factor)


@dataclass(frozen=True)
class DeviceCosts:
    """The passes of one model on one device; kinds that are missing take no time.

    Attributes:
        device, model: their names.
        source: how the times were found, in words.
        dollars_h: price of an hour of the whole device; 0 if unknown.
        log: file that an emulated device writes a line of JSON to for each pass, see PassRecord; empty for none.
    """

    device: str
    model: str
    source: str
    passes: Mapping[PassKind, PassCosts]
    log: str = ""
    dollars_h: float = 0.0

    def __post_init__(self) -> None:
        at_least(0, dollars_h=self.dollars_h)
        for kind in self.passes:
            one_of(PassKind, passes=kind)

    def seconds(self, kind: PassKind, rows: float, context: float = 0.0) -> float:
        """Expected seconds of a pass."""
        costs = self.passes.get(kind)
        return costs.seconds(rows, context) if costs else 0.0

    def scaled(self, factor: float) -> DeviceCosts:
        """Return the same with all times multiplied: a slower machine with the same ratios."""
        passes = {kind: costs.scaled(factor) for kind, costs in self.passes.items()}
        return replace(self, passes=passes, source=f"{self.source}; times {factor:g}" if factor != 1 else self.source)

    def write(self, file: Path) -> None:
        """Write the table as JSON."""
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, name: str) -> DeviceCosts:
        """Return the table in a JSON file, of a preset MODEL@GPU, or flat: 60ms, or 12ms/1ms for rounds and levels.

        Raises ConfigError.
        """
        if times := FLAT.fullmatch(name):
            first, level = float(times[1]), float(times[2] or times[1])
            return flat(name, verify=first, draft_round=first, draft_level=level)
        if not name.endswith(".json"):
            return preset(name)
        try:
            return cls.from_json(json.loads(Path(name).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"cannot read a cost table from {name}: {error!r}; see docs/split.md") from error

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceCosts:
        """Return the table that `write` wrote. Raises TypeError and KeyError."""
        passes: Any = {kind: _pass_costs(raw) for kind, raw in data["passes"].items()}
        return cls(**{**data, "passes": passes})


def _pass_costs(raw: Mapping[str, Any]) -> PassCosts:
    return PassCosts(tuple(raw["rows"]), tuple(raw["ms"]), float(raw.get("us_per_context_token", 0.0)))


@dataclass(frozen=True)
class Gpu:
    """Peak rates from the vendor's data sheet.

    Attributes:
        gb_s: of its memory.
        tflops: of dense bfloat16 products.
        dollars_h: price of an hour, a typical one of 2025 on demand: the default of `eyas plan`, which takes others.
    """

    name: str
    gb_s: float
    tflops: float
    dollars_h: float


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model that decide the cost of a pass.

    Attributes:
        weight_bytes: read by a pass.
        flops: of a row.
        kv_bytes: of a cached token.
        kind: of the pass.
        level_bytes: weights read by each further level of a tree.
        num_gpus: that share all of it.
    """

    kind: PassKind
    weight_bytes: float
    flops: float
    kv_bytes: float
    num_layers: int
    level_bytes: float = 0.0
    num_gpus: int = 1


GPUS: Mapping[str, Gpu] = {
    "h100": Gpu("H100 SXM", 3350, 989, 3.0),
    "h200": Gpu("H200 SXM", 4800, 989, 3.8),
    "l40s": Gpu("L40S", 864, 362, 1.1),
    "l4": Gpu("L4", 300, 121, 0.6),
    "h100-mig": Gpu("H100 MIG 1g.10gb", 3350 / 8, 989 / 7, 3.0 / 7),
}
# The input embedding is left out: a pass reads single rows of it. KV: layers x KV heads x head size x 2 x 2 bytes.
MODELS: Mapping[str, ModelShape] = {
    # 8.03 G parameters - 128,256 x 4,096 = 7.50 G, bfloat16
    "llama-3.1-8b": ModelShape("verify", 15.0e9, 15.0e9, 32 * 8 * 128 * 4, 32),
    # 70.55 G - 128,256 x 8,192 = 69.5 G, bfloat16, on four GPUs
    "llama-3.1-70b-tp4": ModelShape("verify", 139e9, 139e9, 80 * 8 * 128 * 4, 80, num_gpus=4),
    # attention of 2 x 4,096 inputs 67 M + MLP 176 M + output head of 32,000 tokens 131 M = 374 M, 8-bit weights
    "eagle3-8b": ModelShape("draft_round", 0.374e9, 0.75e9, 8 * 128 * 4, 1, level_bytes=0.374e9),
    # the same with h = 8,192, MLP 28,672: 268 M + 705 M + 262 M = 1.24 G, 8-bit weights
    "eagle3-70b": ModelShape("draft_round", 1.24e9, 2.5e9, 8 * 128 * 4, 1, level_bytes=1.24e9),
    # three layers of 42 M + 176 M, output head 131 M = 785 M, 8-bit; a level reads a Markov head of rank 256, 16-bit
    "dspark-8b": ModelShape("draft_round", 0.785e9, 1.57e9, 3 * 8 * 128 * 4, 3, level_bytes=0.033e9),
}


def preset(name: str) -> DeviceCosts:
    """Return the table of MODEL@GPU by arithmetic. Raises ConfigError for an unknown one."""
    model, _, device = name.partition("@")
    if model not in MODELS or device not in GPUS:
        raise ConfigError(
            f"{name!r} is no cost table; give a file that ends in .json, times such as 60ms, or MODEL@GPU with a model of "
            f"{', '.join(MODELS)} and a GPU of {', '.join(GPUS)}"
        )
    shape, gpu = MODELS[model], GPUS[device]
    bytes_s = gpu.gb_s * 1e9 * MEMORY_EFFICIENCY * shape.num_gpus
    flops_s = gpu.tflops * 1e12 * COMPUTE_EFFICIENCY * shape.num_gpus
    fixed_s = shape.num_layers * (LAYER_S + (2 * ALL_REDUCE_S if shape.num_gpus > 1 else 0.0))
    us_per_context_token = 1e6 * shape.kv_bytes / bytes_s
    passes = {shape.kind: roofline(shape.weight_bytes / bytes_s, shape.flops / flops_s, fixed_s, us_per_context_token)}
    if shape.level_bytes:
        share = shape.level_bytes / shape.weight_bytes
        level_s, row_s = shape.level_bytes / bytes_s, share * shape.flops / flops_s
        passes["draft_level"] = roofline(level_s, row_s, LAYER_S, us_per_context_token if share == 1 else 0.0)
    source = (
        f"arithmetic: {shape.weight_bytes / 1e9:.3g} GB and {shape.flops / 1e9:.3g} GFLOP a row at {MEMORY_EFFICIENCY:g} of "
        f"{gpu.gb_s:.0f} GB/s and {COMPUTE_EFFICIENCY:g} of {gpu.tflops:.0f} TFLOP/s"
    )
    name = f"{shape.num_gpus} x {gpu.name}" if shape.num_gpus > 1 else gpu.name
    return DeviceCosts(name, model, source, passes, dollars_h=shape.num_gpus * gpu.dollars_h)


def roofline(read_s: float, row_s: float, fixed_s: float, us_per_context_token: float = 0.0) -> PassCosts:
    """Return the larger of the time to read the weights and of that to compute the rows, and a fixed time.

    Flat up to the row count where both are equal; from there on in proportion to the rows.
    """
    knee = max(int(read_s / row_s), 1)
    rows = (1, knee, 2 * knee) if knee > 1 else (1, 2)
    ms = tuple(1e3 * (fixed_s + max(read_s, count * row_s)) for count in rows)
    return PassCosts(rows, ms, us_per_context_token)


def flat(device: str, **ms: float) -> DeviceCosts:
    """Return a table of passes that take the same time at any size, by kind."""
    known = get_args(PassKind)
    passes: dict[PassKind, PassCosts] = {kind: PassCosts((1,), (ms[kind],)) for kind in known if ms.get(kind)}
    return DeviceCosts(device, "any", "given by hand", passes)
