"""`eyas env`: versions, processor, GPUs and compiled kernels of this machine, for a bug report. It shows no secrets."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from eyas import __version__
from eyas.bench.report import checkout_commit, processor_name
from eyas.device.host import num_cores
from eyas.kernels.choice import describe_compiled

PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "numba", "llguidance"),
    *("torchao", "accelerate", "grpcio", "protobuf", "pydantic", "fastapi", "uvicorn", "redis", "typer", "rich", "httpx"),
)
# Features of processors that change which kernels run, as Linux names them.
CPU_FEATURES = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8"),
    *("neon", "asimd", "asimddp", "bf16", "i8mm", "sve"),
)
# Variables that change how Eyas runs. Their values are shown, unlike those of all others, which may be keys.
VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "NUMBA_DISABLE_JIT", "CUDA_VISIBLE_DEVICES"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "HF_HUB_OFFLINE", "LD_PRELOAD", "TRITON_INTERPRET"),
)


def env(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False) -> None:
    """Print what a bug report needs: versions, processor, GPUs and which kernels are compiled. It holds no secrets."""
    found = describe_environment()
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for title, value in found.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{name} {part}" for name, part in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        print(f"{title}: {value or 'none'}")


def describe_environment() -> dict[str, Any]:
    """Return what `eyas env` prints, by title."""
    return {
        "eyas": f"{__version__}, commit {checkout_commit()}",
        "python": f"{platform.python_version()} {platform.python_implementation()}",
        "system": platform.platform(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "processor": processor_name(),
        "cores": f"{num_cores()} of {os.cpu_count() or 1} usable",
        "cpu features": _cpu_features(),
        "memory": _memory(),
        **_torch_facts(),
        "compiled on the CPU": describe_compiled(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _lines(file: str) -> list[str]:
    """Return the lines of a file of the system; none where there is no such file."""
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _cpu_features() -> list[str]:
    lines = [line for line in _lines("/proc/cpuinfo") if line.startswith(("flags", "Features"))]
    flags = set(lines[0].partition(":")[2].split()) if lines else set()
    return [feature for feature in CPU_FEATURES if feature in flags]


def _memory() -> str:
    sizes = dict(line.split(":", 1) for line in _lines("/proc/meminfo"))
    gib = {name: int(sizes[name].split()[0]) / 2**20 for name in ("MemTotal", "MemAvailable") if name in sizes}
    return f"{gib['MemTotal']:.1f} GiB, {gib['MemAvailable']:.1f} GiB available" if len(gib) == 2 else "unknown"


def _torch_facts() -> dict[str, Any]:
    """Return what torch says of itself and of the GPUs."""
    try:
        import torch
    except ImportError as error:
        return {"torch": f"cannot be imported: {error}"}
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        gpus.append(f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, compute capability {capability}")
    return {
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}",
        "gpus": gpus,
        "driver": next(iter(_lines("/proc/driver/nvidia/version")), ""),
    }
