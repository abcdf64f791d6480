"""Merges sibling linear layers whose weights torchao has quantised."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn


@torch.no_grad()
def merge_quantised(parts: Sequence[nn.Module]) -> nn.Linear | None:
    """Return the sibling linear layers as one, if torchao quantised their weights by rows; None for others.

    Numbers and scales of all are put one below the other, so nothing is rounded again. The layers' weights become views.
    """
    if any(type(part) is not nn.Linear for part in parts):
        return None
    layers = cast(Sequence[nn.Linear], parts)
    weights: list[Any] = [layer.weight.data for layer in layers]
    if len({(type(weight), layer.bias is None) for weight, layer in zip(weights, layers, strict=True)}) > 1:
        return None
    kind, counts = type(weights[0]), [len(weight) for weight in weights]
    if not hasattr(kind, "__tensor_flatten__"):
        return None
    names, settings = weights[0].__tensor_flatten__()
    inner = [{name: getattr(weight, name) for name in names} for weight in weights]
    has_rows = all(len(tensor) == count for own, count in zip(inner, counts, strict=True) for tensor in own.values())
    if not has_rows or any(weight.__tensor_flatten__() != (names, settings) for weight in weights):
        return None
    whole, width = {name: torch.cat([own[name] for own in inner]) for name in names}, weights[0].shape[1]

    def rows(start: int, count: int) -> Tensor:
        tensors = {name: tensor[start : start + count] for name, tensor in whole.items()}
        built: Tensor = kind.__tensor_unflatten__(tensors, settings, torch.Size((count, width)), (width, 1))
        return built

    for layer, count, end in zip(layers, counts, accumulate(counts), strict=True):
        layer.weight = nn.Parameter(rows(end - count, count), requires_grad=False)
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    merged = nn.Linear(width, sum(counts), bias=False, device="meta")
    merged.weight = nn.Parameter(rows(0, sum(counts)), requires_grad=False)
    merged.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None  # type: ignore[assignment]
    return merged
