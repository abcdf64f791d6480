"""Norms and head layouts of the layers that Eyas fuses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.arrays import Floats


class RMSNorm:
    """A root-mean-square norm over the last dimension. weight: [C], or [H + J, D] with one row for each head.

    Without `adds_one` narrow types are rounded before the weight and behind it, else behind it alone.
    """

    def __init__(self, weight: Tensor, eps: float, adds_one: bool) -> None:
        self.weight, self.eps, self.adds_one = weight.detach(), eps, adds_one

    @cached_property
    def _scaled(self) -> Tensor:
        return (self.weight.float() + self.adds_one) * math.sqrt(self.weight.shape[-1])

    @cached_property
    def factors(self) -> Floats:
        """Return what rows are multiplied by once they are normed, float32 of the weight's shape."""
        return (self.weight.float() + self.adds_one).contiguous().numpy()

    @cached_property
    def _floor(self) -> Tensor:
        # filled on the device: a graph that is being captured cannot copy a number to it
        return torch.full((), math.sqrt(self.weight.shape[-1] * self.eps), device=self.weight.device)

    @classmethod
    def of(cls, module: Any, adds_one: bool, rounds_once: bool = False) -> RMSNorm:
        """Return the norm of a module of transformers. rounds_once: multiply by its weight as by 1 + (weight - 1)."""
        eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        weight = module.weight.detach().float() - 1.0 if rounds_once else module.weight
        return cls(weight, float(eps), adds_one or rounds_once)

    def __call__(self, x: Tensor) -> Tensor:
        """Norm x [..., C] in float32, or in a narrower type and rounded where transformers rounds."""
        if x.dtype == torch.float32:
            # x w / sqrt(mean(x^2) + eps), where hypot(|x|, sqrt(C eps)) is sqrt(C) times the root
            root = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)
            return (x * self._scaled).div_(root)
        normed = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        return (normed * (1.0 + self.weight.float())).to(x.dtype) if self.adds_one else self.weight * normed.to(x.dtype)


@dataclass(frozen=True)
class HeadLayout:
    """Heads of this rank.

    Attributes:
        norms: of query and key heads, if the family has them; in Gemma 4 of value heads, too.
        num_kv_heads: 0 for a layer that reads the keys and values of another one.
    """

    num_heads: int
    num_kv_heads: int
    width: int
    norms: RMSNorm | None
