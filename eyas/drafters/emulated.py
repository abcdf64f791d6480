"""Drafts of an emulated device: an expansion that counts time."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from eyas.drafters.trees.growth import Expansion
from eyas.drafters.trees.scoring import Scores
from eyas.emulation.device import EmulatedDevice, on_host


class EmulatedExpansion:
    """Expansion whose levels take the time of an emulated device. Reading their scores waits.

    Args:
        expansion: the one that computes them.
        num_cached: tokens that all its rows attend to.
    """

    def __init__(self, expansion: Expansion, device: EmulatedDevice, num_cached: int) -> None:
        self.expansion = expansion
        self._device, self._num_cached = device, num_cached

    def first(self) -> Scores:
        return self._on_device(self.expansion.first())

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Scores:
        inputs = level, on_host(parents), on_host(tokens)
        scores = self._device.run("draft_level", tokens.numel(), self._num_cached, lambda: self.expansion.next(*inputs))
        return self._on_device(scores)

    def _on_device(self, scores: Scores) -> Scores:
        return replace(scores, logits=self._device.on_device(scores.logits))
