"""Losses between a draft head's logits and the target's distribution, and their weights by depth.

Legend: R rows, G depths, D draft vocabulary. p: the target's distribution, q: the head's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eyas.train.config import LossConfig, LossType


@dataclass(frozen=True)
class RowLosses:
    """loss, acceptance (sum of min(p, q)) and agreement of the likeliest tokens, float32 [R] each; `chance`: p of the head's
    likeliest token. Only `loss` has gradients."""

    loss: Tensor
    acceptance: Tensor
    agrees: Tensor
    chance: Tensor
    cross_entropy: Tensor


def row_losses(logits: Tensor, teacher: Tensor, loss_type: LossType) -> RowLosses:
    """Compare logits float32 [R, D] with the teacher's logits [R, D] in the same vocabulary.

    lk, lk_hybrid: losses of the acceptance under p/q (2602.23881).
    """
    logprobs = torch.log_softmax(logits, -1)
    with torch.no_grad():
        likely = teacher.argmax(-1)
        p = torch.softmax(teacher.float(), -1)
        guess = logits.argmax(-1)
        chance = p.gather(-1, guess[:, None])[:, 0]
    cross_entropy = -logprobs.gather(-1, likely[:, None])[:, 0]
    needs_overlap = loss_type in ("tv", "lk", "lk_hybrid")
    overlap = torch.minimum(p, logprobs.exp()).sum(-1) if needs_overlap else chance
    if loss_type == "ce":
        loss = cross_entropy
    elif loss_type == "tv":
        loss = 1 - overlap
    elif loss_type == "lk":
        loss = -overlap.clamp(min=1e-6).log()
    else:
        loss = -(p * logprobs).sum(-1)
        if loss_type == "kl":
            loss = loss + torch.special.entr(p).neg().sum(-1)
        elif loss_type == "lk_hybrid":
            share = torch.exp(-3 * overlap.detach())
            loss = share * (loss - torch.special.entr(p).sum(-1)) + (1 - share) * (1 - overlap)
    return RowLosses(loss, overlap.detach(), (guess == likely).float(), chance, cross_entropy.detach())


class SoftCrossEntropy(torch.autograd.Function):
    """Minus sum p log q by row. Its gradient is made in the forward pass, so that one array of the size of the logits is
    kept."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, logits: Tensor, p: Tensor) -> Tensor:
        """logits, p float32 [R, D] to the loss [R]; `p` is overwritten."""
        lse = torch.logsumexp(logits, -1)
        loss = lse - (p * logits).sum(-1)
        ctx.save_for_backward(torch.exp(logits - lse[:, None]).sub_(p))
        return loss

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        """q - p for each row."""
        (difference,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return difference * grads[0][:, None], None
