"""A loaded model in, the same model out, its weights laid out as the CPU reads them fastest."""

from __future__ import annotations

from torch import nn

from eyas.models.cpu.linear import pack_weights
from eyas.models.cpu.pages import to_huge_pages, weights_of


def lay_out(model: nn.Module) -> None:
    """Pack its linear layers and move its weights to huge pages; what is not on the CPU stays as it is."""
    pack_weights(model)
    to_huge_pages(weights_of(model))
