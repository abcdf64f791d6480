"""Emulated devices: passes are computed here, and their results become available when a table of times says so.

As on a GPU, a device runs its passes one after the other while the host goes on, and the host waits where it reads what a
pass has computed. So scheduling, wire and acceptance are measured as they would be beside that device; see
docs/split.md.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from eyas.cache.kv_cache import KVCache
from eyas.emulation.costs import DeviceCosts, PassKind
from eyas.errors import ConfigError
from eyas.models.backends.base import ForwardBackend
from eyas.models.inputs import PackedInputs, Segment, Segments
from eyas.models.target import TargetOutput

T = TypeVar("T")

# Of the last passes of a device, and the share of late ones from which it is refused.
NUM_RECENT = 64
MAX_LATE = 0.5
# What a reader of a tensor waits for: its results are on the host, or have sizes that depend on what the tensor holds.
READS = frozenset({
    "cpu", "numpy", "tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__",
    "nonzero", "argwhere", "masked_select", "unique", "bincount", "equal", "allclose", "is_nonzero",
})  # fmt: skip


@dataclass(frozen=True)
class PassRecord:
    """One pass, for a log. Times by time.perf_counter, which all processes of a machine share on Linux.

    Attributes:
        kind: of its costs.
        label: what the pass is for.
        rows: how many it computed, of how many sequences, which attended to `context` cached tokens.
        launched: when the host began it.
        began, ended: when the device did.
        real_ms: of the real computation.
        late: whether that ended later.
    """

    kind: PassKind
    label: str
    rows: int
    context: int
    launched: float
    began: float
    ended: float
    real_ms: float
    late: bool


class Clock:
    """Seconds, and waiting for them: by time.perf_counter, in the real world."""

    __call__ = staticmethod(time.perf_counter)

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


class VirtualClock(Clock):
    """A clock that moves only when somebody waits: emulation at full speed, in which host work takes no time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class EmulatedDevice:
    """A queue of passes in time. Used by one thread.

    clock: its time. label: what the passes are for, as the log says it. num_late: passes that took too long.
    """

    def __init__(self, costs: DeviceCosts, clock: Clock | None = None) -> None:
        self.costs = costs
        self.label = ""
        self.num_late = 0
        self.clock = clock or Clock()
        self._free_at = 0.0
        self._recent: deque[bool] = deque(maxlen=NUM_RECENT)

    def run(self, kind: PassKind, rows: int, context: int, work: Callable[[], T]) -> T:
        """Compute a pass, and have the device take the time of the table for it, after all earlier passes.

        Raises ConfigError if the real computation takes longer again and again: the table is too fast for this machine.
        """
        launched = self.clock()
        result = work()
        done = self.clock()
        began = max(launched, self._free_at)
        seconds = self.costs.seconds(kind, rows, context)
        ended = began + seconds
        late = seconds > 0 and done > ended
        self._free_at = max(ended, done) if seconds else max(self._free_at, launched)
        if seconds:
            self._count(kind, rows, seconds, done - launched, late)
            if self.costs.log:
                real_ms = 1e3 * (done - launched)
                self._write(PassRecord(kind, self.label, rows, context, launched, began, self._free_at, real_ms, late))
        return result

    @property
    def remaining_s(self) -> float:
        """Seconds until all passes have ended."""
        return max(self._free_at - self.clock(), 0.0)

    def synchronize(self) -> None:
        """Wait until all passes have ended."""
        while remaining := self.remaining_s:
            self.clock.sleep(remaining)

    def on_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor as a result of the device: reading it, or what is computed from it, waits for the device."""
        result = tensor.as_subclass(DeviceTensor)
        result.emulated = self
        return result

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Label passes in the log inside the context."""
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before

    def _write(self, record: PassRecord) -> None:
        with Path(self.costs.log).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")

    def _count(self, kind: PassKind, rows: int, seconds: float, real_s: float, late: bool) -> None:
        self.num_late += late
        self._recent.append(late)
        if len(self._recent) == NUM_RECENT and sum(self._recent) > MAX_LATE * NUM_RECENT:
            self._recent.clear()
            raise ConfigError(
                f"the emulated device {self.costs.device} is too fast for this machine: a {kind} pass of {rows} rows takes "
                f"{1e3 * real_s:.1f} ms here, and {1e3 * seconds:.1f} ms in its table; scale the table's times up"
            )


def emulated_device(name: str, device: torch.device, clock: Clock | None = None) -> EmulatedDevice:
    """Return the device with the cost table `name`, see DeviceCosts.read. Raises ConfigError unless `device` is the CPU."""
    if device.type != "cpu":
        raise ConfigError(f"emulated_device is {name!r}, but the device is {device}; only a CPU can emulate another device")
    return EmulatedDevice(DeviceCosts.read(name), clock)


class DeviceTensor(Tensor):
    """A tensor that an emulated device has computed. Operations are computed at once; reading it waits for the device."""

    emulated: EmulatedDevice

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        device = next(_devices([*args, *kwargs.values()]))
        with torch._C.DisableTorchFunctionSubclass():
            if name in READS or (name == "__getitem__" and _has_mask(args[1])):
                device.synchronize()
                result = func(*args, **kwargs)
                return on_host(result) if name == "cpu" else _wrapped(result, device)
            return _wrapped(func(*args, **kwargs), device)


def on_host(value: Any) -> Any:
    """Return a tensor without its device, such as an input of a pass; other values as they are."""
    return value.as_subclass(Tensor) if isinstance(value, DeviceTensor) else value


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


def _devices(values: Sequence[Any]) -> Iterator[EmulatedDevice]:
    for value in values:
        if isinstance(value, DeviceTensor):
            yield value.emulated
        elif isinstance(value, (list, tuple)):
            yield from _devices(value)


def _wrapped(value: Any, device: EmulatedDevice) -> Any:
    if isinstance(value, DeviceTensor):
        return value
    if isinstance(value, Tensor):
        return device.on_device(value)
    if isinstance(value, (list, tuple)):
        parts = [_wrapped(part, device) for part in value]
        return type(value)(parts)
    return value


class EmulatedBackend:
    """ForwardBackend whose passes take the time of an emulated device."""

    def __init__(self, backend: ForwardBackend, device: EmulatedDevice) -> None:
        self.backend = backend
        self.device = device
        self._context = 0

    def pack(self, segments: Sequence[Segment]) -> PackedInputs:
        segments = Segments.of(segments)
        self._context = sum(map(len, segments.prefixes))
        return self.backend.pack(segments)

    def forward(self, packed: PackedInputs, kv_cache: KVCache) -> TargetOutput:
        """Run the backend's pass; reading the logits waits."""
        out = self.device.run("verify", len(packed.tokens), self._context, lambda: self.backend.forward(packed, kv_cache))
        return replace(out, logits=self.device.on_device(out.logits))
