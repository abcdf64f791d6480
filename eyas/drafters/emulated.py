"""Drafts of an emulated device: an expansion that counts time."""

from __future__ import annotations

from torch import Tensor

from eyas.drafters.trees.growth import Expansion
from eyas.emulation.device import EmulatedDevice, on_host


class EmulatedExpansion:
    """Expansion whose levels take the time of an emulated device. Reading their logits waits.

    Args:
        expansion: the one that computes them.
        num_cached: tokens that all its rows attend to.
    """

    def __init__(self, expansion: Expansion, device: EmulatedDevice, num_cached: int) -> None:
        self.expansion = expansion
        self._device, self._num_cached = device, num_cached

    def first(self) -> Tensor:
        return self._device.on_device(self.expansion.first())

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        inputs = level, on_host(parents), on_host(tokens)
        logits = self._device.run("draft_level", tokens.numel(), self._num_cached, lambda: self.expansion.next(*inputs))
        return self._device.on_device(logits)
