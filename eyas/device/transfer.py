"""Moves numbers to a device and back, and turns tensors into bytes and back."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.errors import InvalidRequest
from eyas.protocol.commit import TensorBytes

# Characters of torch's own text on missing memory.
MAX_REASON = 300

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Let Triton launch on the tensor's GPU inside the context. It takes the thread's current device, wherever tensors are.

    `torch.cuda.device_of` does the same, but Dynamo cannot trace it.
    """
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def upload(values: npt.NDArray[Any] | Sequence[int], device: torch.device) -> Tensor:
    """Copy numbers to a device: an array in its own dtype and shape, a sequence as int64 [n].

    The host does not wait for a copy to CUDA. `values` may change afterwards: pinned memory is a copy, and torch reuses it
    only once the device has read it.
    """
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=torch.int64)
    return (pinned_copy(host) if device.type == "cuda" else host).to(device, non_blocking=True)


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the tensor on a device in a dtype. The host does not wait for a copy to CUDA."""
    on_host = tensor.device.type == "cpu"
    pinned = pinned_copy(tensor) if on_host and device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=on_host).to(dtype)


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host, from CUDA straight into pinned memory: into other memory the driver would copy it twice.

    Waits for the copy: the result is complete, and no later copy writes to its memory while it is in use.
    """
    if tensor.device.type != "cuda":
        return tensor.cpu()
    return pinned_like(tensor).copy_(tensor)


def pinned_like(tensor: Tensor) -> Tensor:
    """Return an empty tensor of this shape and dtype in pinned memory, or in other memory where the system pins no more."""
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError as error:
        _warn_of_pageable(error)
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def pinned_copy(host: Tensor) -> Tensor:
    """Return a copy in pinned memory, or the tensor itself where the system pins no more: CUDA reads that before a copy
    returns.
    """
    try:
        return host.pin_memory()
    except RuntimeError as error:
        _warn_of_pageable(error)
        return host


def _warn_of_pageable(error: RuntimeError) -> None:
    reason = str(error).partition("\n")[0][:MAX_REASON]
    log.warning("copies to and from the GPU are slower, as no memory is pinned: %s", reason, extra={"rate_limited": True})


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
    """Return a new CPU tensor. Raises InvalidRequest for an unknown dtype, or bytes that do not fill the shape."""
    dtype = _DTYPES.get(value.dtype)
    if dtype is None:
        raise InvalidRequest(f"tensor has dtype {value.dtype!r}; known are {', '.join(_DTYPES)}")
    if any(size < 0 for size in value.shape) or math.prod(value.shape) * dtype.itemsize != len(value.data):
        raise InvalidRequest(f"tensor of {value.dtype} {list(value.shape)} comes with {len(value.data)} bytes")
    if not value.data:
        return torch.empty(value.shape, dtype=dtype)
    return torch.frombuffer(bytearray(value.data), dtype=dtype).reshape(value.shape)
