"""Decides on which device a target runs, and the dtypes of its weights and of its passes."""

from __future__ import annotations

from typing import cast

import torch

from eyas.config import Dtype, EngineConfig
from eyas.config.engine import INT8
from eyas.config.target_limits import has_experts, quantisation
from eyas.device.placement import DTYPES, may_run_compiled
from eyas.device.processor import multiplies_halves
from eyas.models.backends.packed_weights import multiplies_tiles
from eyas.models.checkpoint import CheckpointSource, open_checkpoint


def pass_dtype(target: CheckpointSource, dtype: str, device: str, engine: EngineConfig, threads: int | None = None) -> str:
    """Return the dtype that passes over weights of `dtype` compute in. `auto` must have been resolved.

    On a CPU that is float32 for `engine.quantization` INT8, for deterministic mode, where the processor has no matrix units
    for a half precision, and where our kernels use them: kernels read the weights in as many bytes, and a row does not
    depend on the other rows (docs/decisions/0050-half-weights.md). Kernels read neither experts nor quantised weights, so
    models with these compute in the dtype of their weights, as ranks do.

    Args:
        threads: that `use_threads` will set; None if it has.
    """
    if dtype == "float32" or device.partition(":")[0] != "cpu" or engine.tensor_parallel_size > 1:
        return dtype
    if engine.quantization == INT8:
        return "float32"
    config = open_checkpoint(target).config
    if has_experts(config) or quantisation(config):
        return dtype
    has_kernels = dtype == "bfloat16" and may_run_compiled(device, threads) and multiplies_tiles()
    return "float32" if engine.deterministic or has_kernels or not multiplies_halves(dtype) else dtype


def resolve_placement(device: str, dtype: str, target: CheckpointSource) -> tuple[str, Dtype]:
    """Return the device and dtype that `auto` stands for; others stay as they are. target: folder or hub id of the target
    model.

    Device: CUDA where torch finds a GPU, else the CPU. Dtype: the target checkpoint's on a GPU; float32 on the CPU, and
    where the config names none that Eyas serves. Raises CheckpointError for a config that cannot be read.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto" and device.startswith("cuda"):
        config = open_checkpoint(target).text_config
        stored = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
        dtype = stored if stored in DTYPES else "float32"
    return device, cast(Dtype, "float32" if dtype == "auto" else dtype)
