"""Moves numbers to a device and back, turns tensors into bytes and back, and moves their memory to huge pages.

A pass over 36 MB of weights looks up 9,000 pages of 4 KiB, or 18 of 2 MiB (docs/decisions/0025-huge-pages.md).
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from eyas.draft_protocol import TensorBytes
from eyas.errors import ConfigError, InvalidRequest, OutOfMemory
from eyas.process import has_numba, num_cores

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]

# Cores up to which one thread of torch is the default: its own threads gain nothing there. More were not measured.
MOST_CORES = 2
HUGE_PAGE = 2 << 20
# Advice to madvise(2): collapse into huge pages now (Linux 6.1 and later), or when memory is first touched.
MADV_COLLAPSE, MADV_HUGEPAGE = 25, 14
MAPPINGS = Path("/proc/self/maps")

# Characters of torch's own text on missing memory.
MAX_REASON = 300

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def runs_compiled(device: torch.device) -> bool:
    """Whether the kernels of numba serve this device: on the CPU, with one thread, if numba is installed."""
    return device.type == "cpu" and torch.get_num_threads() == 1 and has_numba()


def use_threads(count: int, *placements: tuple[str, str]) -> None:
    """Set the number of torch's threads for models at these placements (device, dtype).

    It holds for the calling thread and for those that first use torch afterwards. 0 takes OMP_NUM_THREADS. Without that
    variable it is one thread where compiled kernels can run and there are MOST_CORES at most, else torch's own number.

    Raises ConfigError for a number below 0.
    """
    if count < 0:
        raise ConfigError(f"threads is {count}; it must be at least 0")
    if not count and "OMP_NUM_THREADS" not in os.environ and set(placements) == {("cpu", "float32")}:
        count = int(num_cores() <= MOST_CORES and has_numba())
    if count:
        torch.set_num_threads(count)


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Inside the context Triton launches on the tensor's GPU. It takes the thread's current device, wherever tensors are.

    `torch.cuda.device_of` does the same, but Dynamo cannot trace it.
    """
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def upload(values: npt.NDArray[Any] | Sequence[int], device: torch.device) -> Tensor:
    """Copy numbers to a device: an array in its own dtype and shape, a sequence as int64 [n].

    The host does not wait for a copy to CUDA. `values` may change afterwards: pinned memory is a copy, and torch reuses it
    only once the device has read it.
    """
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=torch.int64)
    return (_pinned(host) if device.type == "cuda" else host).to(device, non_blocking=True)


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The tensor on a device in a dtype. The host does not wait for a copy to CUDA."""
    on_host = tensor.device.type == "cpu"
    pinned = _pinned(tensor) if on_host and device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=on_host).to(dtype)


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host, from CUDA straight into pinned memory: into other memory the driver would copy it twice.

    Waits for the copy: the result is complete, and no later copy writes to its memory while it is in use.
    """
    if tensor.device.type != "cuda":
        return tensor.cpu()
    return _pinned_like(tensor).copy_(tensor)


def _pinned_like(tensor: Tensor) -> Tensor:
    """An empty tensor of this shape and dtype in pinned memory, or in other memory where the system pins no more."""
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError as error:
        _warn_of_pageable(error)
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def _pinned(host: Tensor) -> Tensor:
    """A copy in pinned memory, or the tensor itself where the system pins no more: CUDA reads that before a copy returns."""
    try:
        return host.pin_memory()
    except RuntimeError as error:
        _warn_of_pageable(error)
        return host


def _warn_of_pageable(error: RuntimeError) -> None:
    reason = str(error).partition("\n")[0][:MAX_REASON]
    log.warning("copies to and from the GPU are slower, as no memory is pinned: %s", reason, extra={"rate_limited": True})


@contextmanager
def explain_out_of_memory(problem: str, device: torch.device | str, remedy: str) -> Iterator[None]:
    """Raise OutOfMemory where the body finds no memory. problem: "no memory for" what it makes. remedy: what to do."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(out_of_memory_text(problem, torch.device(device), remedy, error)) from error


def out_of_memory_text(problem: str, device: torch.device, remedy: str, error: Exception) -> str:
    """The problem, how much is free, and what to do; then the reason that torch or NumPy gives."""
    free = "an unknown number of"
    if device.type == "cuda" and torch.cuda.is_available():
        free = f"{torch.cuda.mem_get_info(device)[0] / 2**30:.2f}"
    reason = str(error).partition("\n")[0][:MAX_REASON]
    return f"{problem} on {device}, where {free} GiB are free: {remedy}. {reason}"


def download(*tensors: Tensor) -> list[npt.NDArray[np.float64]]:
    """Copy tensors of one device to the host together, so that the host waits once.

    Returns a float64 array of each tensor's shape. Whole numbers must lie within 2**53.
    """
    filled = [tensor.flatten().double() for tensor in tensors if tensor.numel()] or [tensors[0].flatten().double()]
    flat = (torch.cat(filled) if len(filled) > 1 else filled[0]).cpu().numpy()
    ends = accumulate(tensor.numel() for tensor in tensors)
    return [flat[end - tensor.numel() : end].reshape(tensor.shape) for end, tensor in zip(ends, tensors, strict=True)]


def tensor_to_bytes(tensor: Tensor) -> TensorBytes:
    """Copy a float tensor of any device and layout."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorBytes(dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes())


def tensor_from_bytes(value: TensorBytes) -> Tensor:
    """A new CPU tensor. Raises InvalidRequest for an unknown dtype, or bytes that do not fill the shape."""
    dtype = _DTYPES.get(value.dtype)
    if dtype is None:
        raise InvalidRequest(f"tensor has dtype {value.dtype!r}; known are {', '.join(_DTYPES)}")
    if any(size < 0 for size in value.shape) or math.prod(value.shape) * dtype.itemsize != len(value.data):
        raise InvalidRequest(f"tensor of {value.dtype} {list(value.shape)} comes with {len(value.data)} bytes")
    if not value.data:
        return torch.empty(value.shape, dtype=dtype)
    return torch.frombuffer(bytearray(value.data), dtype=dtype).reshape(value.shape)


def to_huge_pages(tensors: Iterable[Tensor], collapse: bool = True) -> None:
    """Ask the kernel to move the memory of these tensors to huge pages. Addresses and contents stay.

    collapse: also move memory that is in use; without it, pages become huge when they are first touched. Where the kernel
    refuses, and for less than a huge page in all, nothing changes. Tensors on other devices and wrapper tensors (quantised
    ones) are skipped.
    """
    plain = [tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"]
    spans = [_memory_of(tensor) for tensor in plain]
    if sum(size for _, size in spans) < HUGE_PAGE or not MAPPINGS.exists():
        return
    pages = [range(start // HUGE_PAGE, -(-(start + size) // HUGE_PAGE)) for start, size in spans if size]
    wanted = set(chain.from_iterable(pages))
    madvise = ctypes.CDLL(None).madvise
    for mapping in _anonymous_mappings():
        for first, end in _runs(sorted(wanted.intersection(mapping))):
            memory = ctypes.c_void_p(first * HUGE_PAGE), ctypes.c_size_t((end - first) * HUGE_PAGE)
            if not collapse or madvise(*memory, MADV_COLLAPSE) != 0:
                madvise(*memory, MADV_HUGEPAGE)


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of the tensor's memory."""
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _anonymous_mappings() -> Iterator[range]:
    """Whole huge pages of each writable mapping that belongs to no file."""
    for line in MAPPINGS.read_text().splitlines():
        span, rights, _, _, inode = line.split()[:5]
        first, end = (int(address, 16) for address in span.split("-"))
        if rights.startswith("rw") and inode == "0":
            yield range(-(-first // HUGE_PAGE), end // HUGE_PAGE)


def _runs(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Consecutive numbers as (first, last + 1)."""
    for _, run in groupby(enumerate(pages), lambda item: item[1] - item[0]):
        members = [page for _, page in run]
        yield members[0], members[-1] + 1
