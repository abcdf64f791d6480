"""Decides on which device and with how many threads PyTorch runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import torch

from eyas.config import Dtype
from eyas.device.host import has_numba, has_triton, num_cores
from eyas.device.processor import multiplies_and_adds
from eyas.errors import ConfigError, install_command

# The first GPUs that have floats of 8 bits, in the layout e4m3.
E4M3_CAPABILITY = (8, 9)
# Cores up to which one thread of torch is the default: its own threads gain nothing there. More were not measured.
MOST_CORES = 2


def runs_compiled(device: torch.device) -> bool:
    """Return whether the kernels of numba serve this device: on the CPU, with one thread, if numba is installed."""
    return device.type == "cpu" and torch.get_num_threads() == 1 and has_numba()


def may_run_compiled(device: str, threads: int | None) -> bool:
    """Return whether the kernels of numba serve this device once `use_threads` has set `threads`; None if it has."""
    is_default = threads == 0 and device == "cpu" and "OMP_NUM_THREADS" not in os.environ and num_cores() <= MOST_CORES
    if threads == 1 or is_default:
        return torch.device(device).type == "cpu" and has_numba()
    return not threads and runs_compiled(torch.device(device))


def runs_triton(device: torch.device) -> bool:
    """Return whether Triton's kernels serve this device."""
    return device.type != "cpu" and has_triton()


def why_uncompiled() -> str:
    """Return why the kernels of numba cannot run on the CPU here, and what to do; nothing where they can."""
    num_threads = torch.get_num_threads()
    if num_threads > 1:
        return f"torch has {num_threads} threads; set OMP_NUM_THREADS=1, and more threads by engine.layer_threads"
    return "" if has_numba() else f"there is no numba that can be imported; run: {install_command('cpu')}"


def use_threads(count: int, *placements: tuple[str, str]) -> None:
    """Set the number of torch's threads for models at these placements (device, dtype).

    It holds for the calling thread and for those that first use torch afterwards. 0 takes OMP_NUM_THREADS. Without that
    variable it is one thread where compiled kernels can run and there are MOST_CORES at most, else torch's own number.

    Raises ConfigError for a number below 0.
    """
    if count < 0:
        raise ConfigError(f"threads is {count}; it must be at least 0")
    if not count and set(placements) == {("cpu", "float32")}:
        count = int(may_run_compiled("cpu", 0))
    if count:
        torch.set_num_threads(count)


@contextmanager
def threads_for(count: int, *placements: tuple[str, str]) -> Iterator[None]:
    """Set torch's threads as `use_threads` does, and give the number before back at the end."""
    before = torch.get_num_threads()
    use_threads(count, *placements)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def why_no_int8(device: str) -> str:
    """Return why no kernel multiplies by weights of 8 bits, and what to do; nothing where one does.

    They run with one thread of torch on a CPU.
    """
    if device.partition(":")[0] != "cpu":
        return f"device is {device}; on a GPU, serve a checkpoint that is quantised, by fp8 for example"
    return why_uncompiled() if multiplies_and_adds() else "this processor lacks AVX2 and FMA; leave it out"


def check_int8(device: str, setting: str = "quantization") -> None:
    """Raises ConfigError for a device on which no kernel multiplies by weights of 8 bits. setting: what asks for them."""
    if reason := why_no_int8(device):
        raise ConfigError(f"{setting} is 'int8', which is for the compiled kernels of a CPU: {reason}")


def check_e4m3(setting: str, device: torch.device, remedy: str) -> None:
    """Raises ConfigError for a GPU without floats of 8 bits. setting: what asks for them, and its value."""
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < E4M3_CAPABILITY:
        raise ConfigError(
            f"{setting}, which {torch.cuda.get_device_name(device)} does not have: its compute capability is "
            f"{capability[0]}.{capability[1]}, and 8.9 is the first. {remedy}"
        )


DTYPES = tuple(name for name in get_args(Dtype) if name != "auto")


def check_device(dtype: str, device: str) -> None:
    """Raises ConfigError for a dtype or device that torch does not have here. `auto` must have been resolved."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; it must be one of auto, {', '.join(DTYPES)}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from error
