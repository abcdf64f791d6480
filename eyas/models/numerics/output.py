"""The output head in float32: a model in, the same model out, whose logits are no longer rounded to its dtype.

Legend: N rows, H hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK_ELEMENTS = 1 << 20
HALVES = (torch.bfloat16, torch.float16)


class Float32Head(nn.Linear):
    """A linear layer over weights of any float dtype whose products are summed and returned in float32.

    In bfloat16 a logit near 20 is rounded to steps of 0.125: ties become common, and upcasting afterwards mends nothing.
    """

    def forward(self, rows: Tensor) -> Tensor:
        """Hidden rows [..., H] to logits float32 [..., V]."""
        return float32_linear(rows, self.weight, self.bias)


def widen_head(model: Any) -> None:
    """Let the model's output head return float32. Only its arithmetic changes: the module, its hooks and tied weights stay.

    A head that is not a plain linear layer (a quantised one) keeps its own arithmetic.
    """
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and type(head.weight) is nn.Parameter and head.weight.dtype in HALVES:
        head.__class__ = Float32Head


def float32_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rows [..., H] times weight [V, H] plus bias [V], products of the given dtype summed in float32."""
    flat = rows.reshape(-1, rows.shape[-1])
    out = torch.mm(flat, weight.T, out_dtype=torch.float32) if flat.is_cuda else chunked_linear(flat, weight)
    out = out if bias is None else out + bias.float()
    return out.view(*rows.shape[:-1], len(weight))


def chunked_linear(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [N, H] times weight [V, H] in float32; the weight is widened in chunks of the vocabulary."""
    size = max(1, CHUNK_ELEMENTS // weight.shape[1])
    return torch.cat([F.linear(rows.float(), part.float()) for part in torch.split(weight, size)], dim=-1)
