"""Records on the CPU the operations that would make the host wait for a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Their results are on the host, or have sizes that depend on what a tensor holds.
WAITING = {
    "tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__",
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "equal", "allclose", "is_nonzero",
}  # fmt: skip


class Waits(TorchFunctionMode):
    """names: the operations that wait, in order; copies to a device included, except non-blocking ones."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in WAITING or _copies(name, args, kwargs) or _looks(name, args):
            self.names.append(name)
        return func(*args, **kwargs)


def unwatched(work: Callable[..., Any]) -> Callable[..., Any]:
    """The same function without recording."""

    def run(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return work(*args)

    return run


def watched(work: Callable[..., Any], noted: list[list[str]]) -> Callable[..., Any]:
    """The same function; the waits of each call are recorded separately."""

    def run(*args: Any) -> Any:
        with Waits() as waits:
            result = work(*args)
        noted.append(waits.names)
        return result

    return run


def _copies(name: str, args: Any, kwargs: Any) -> bool:
    """Whether the operation copies to a device while the host waits."""
    if name in ("tensor", "as_tensor"):
        return "device" in kwargs
    devices = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.device | str)]
    return name == "to" and bool(devices) and not kwargs.get("non_blocking")


def _looks(name: str, args: Any) -> bool:
    """Whether the host must read an index or a count: a mask, or an index on the host; or copy a number to places on the
    device.
    """
    if name in ("__getitem__", "__setitem__"):
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if tensors and name == "__setitem__" and not isinstance(args[2], Tensor):
            return True  # torch makes a tensor of the number on the host, and copies it
        has_mask = any(part.dtype == torch.bool for part in tensors)
        return has_mask or any(isinstance(part, list | np.ndarray) for part in parts)
    return (name == "where" and len(args) == 1) or (name == "repeat_interleave" and isinstance(args[1], Tensor))
