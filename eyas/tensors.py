"""Moves numbers to a device and back, and turns tensors into bytes and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.draft_protocol import TensorBytes
from eyas.errors import InvalidRequest

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def runs_compiled(device: torch.device) -> bool:
    """Whether the kernels of numba serve this device: on the CPU, with one thread, if numba is installed."""
    return device.type == "cpu" and torch.get_num_threads() == 1 and has_numba()


@cache
def has_numba() -> bool:
    """Whether kernels of the CPU can be compiled."""
    return find_spec("numba") is not None


def upload(values: npt.NDArray[Any] | Sequence[int], device: torch.device) -> Tensor:
    """Copy numbers to a device: an array in its own dtype and shape, a sequence as int64 [n].

    The host does not wait for a copy to CUDA.
    """
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=torch.int64)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The tensor on a device in a dtype. The host does not wait for a copy to CUDA."""
    on_host = tensor.device.type == "cpu"
    pinned = tensor.pin_memory() if on_host and device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=on_host).to(dtype)


def download(*tensors: Tensor) -> list[npt.NDArray[np.float64]]:
    """Copy tensors of one device to the host together, so that the host waits once.

    Returns a float64 array of each tensor's shape. Whole numbers must lie within 2**53.
    """
    flat = torch.cat([tensor.flatten().double() for tensor in tensors]).cpu().numpy()
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
