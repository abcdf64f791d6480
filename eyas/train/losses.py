"""Losses between a draft head's logits and the target's distribution, and their weights by depth.

Legend: R rows, K blocks, G depths of a block, D draft vocabulary. p: the target's distribution, q: the head's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eyas.train.config import LossConfig, LossType

# Columns of what `row_losses` returns. chance: p of the head's likeliest token. agrees: whether it is the target's too.
# cross_entropy: of the target's likeliest token. overlap: the sum of min(p, q), the acceptance of a sampled token under p/q.
LOSS, CHANCE, AGREES, CROSS_ENTROPY, OVERLAP = range(5)


def row_losses(logits: Tensor, teacher: Tensor, loss_type: LossType, needed: Sequence[int] = ()) -> Tensor:
    """Compare logits [..., D] with the teacher's, in the same vocabulary; float32 [..., 5]. Only LOSS has a gradient.

    teacher: of the same shape, or with a size of 1 where several rows of logits share one of its rows. CROSS_ENTROPY and
    OVERLAP are 0 unless they are `needed` or part of the loss.
    """
    logits, teacher = logits.float(), teacher.float()
    with torch.no_grad():
        p, q = torch.softmax(teacher, -1), torch.softmax(logits, -1)
        likeliest, proposed = p.max(-1, keepdim=True), q.max(-1, keepdim=True)
        chance = p.expand_as(q).gather(-1, proposed.indices)
    hard = overlap = torch.zeros_like(chance[..., 0])
    if loss_type == "ce" or CROSS_ENTROPY in needed:
        right = likeliest.indices.expand_as(chance)
        hard = F.cross_entropy(logits.flatten(0, -2), right.flatten(), reduction="none").view_as(hard)
    if loss_type in ("tv", "lk", "lk_hybrid"):
        overlap = torch.minimum(p, torch.softmax(logits, -1)).sum(-1)
    elif OVERLAP in needed:
        overlap = torch.minimum(p, q).sum(-1)
    loss: Tensor = hard
    if loss_type in ("kl", "soft_ce", "lk_hybrid"):
        with torch.no_grad():  # the logarithm of the sum of exp(x) is x - log softmax(x), at any token
            lse = logits.gather(-1, proposed.indices) - proposed.values.log()
            teacher_lse = teacher.gather(-1, likeliest.indices) - likeliest.values.log()
        both = (lse, None if loss_type == "soft_ce" else teacher_lse)
        loss = _Divergence.apply(logits, teacher, p, q, *both)  # type: ignore[no-untyped-call]
    if loss_type in ("tv", "lk", "lk_hybrid"):
        loss = _overlap_loss(overlap, loss, loss_type)
    agrees = (chance == likeliest.values)[..., 0].float()
    return torch.stack([loss, chance[..., 0], agrees, hard.detach(), overlap.detach()], -1)


def _overlap_loss(overlap: Tensor, divergence: Tensor, loss_type: LossType) -> Tensor:
    """Losses [...] of the acceptance under p/q; lk, lk_hybrid: 2602.23881."""
    if loss_type == "tv":
        return 1 - overlap
    if loss_type == "lk":
        return -overlap.clamp(min=1e-6).log()
    share = torch.exp(-3 * overlap.detach())
    return share * divergence + (1 - share) * (1 - overlap)


class _Divergence(torch.autograd.Function):
    """The KL of p and q [..., D] or their cross-entropy, in few passes over [..., D]. The gradient of both is q - p.

    cross-entropy = lse(logits) - sum of p * logits; the entropy of p is alike, and their difference is the KL.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, teacher: Tensor, p: Tensor, q: Tensor, lse: Tensor, teacher_lse: Tensor | None
    ) -> Tensor:
        """q is overwritten. lse [..., 1]: logarithm of the sum of exp(logits). teacher_lse: None for the cross-entropy."""
        ctx.save_for_backward(q.sub_(p))
        if teacher_lse is None:
            return lse[..., 0] - (p * logits).sum(-1)
        return (lse - teacher_lse)[..., 0] + (teacher - logits).mul_(p).sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (difference,) = ctx.saved_tensors
        return difference * gradients[0][..., None], None, None, None, None, None


def in_chunks(function: Callable[..., Tensor], rows: tuple[Tensor, ...], chunk_rows: int) -> Tensor:
    """function(*rows), which works row by row, a chunk at a time; chunks are recomputed in the backward pass.

    So the memory for logits is that of chunk_rows rows. 0 takes all rows at once.
    """
    count = len(rows[0])
    if not chunk_rows or count <= chunk_rows:
        return function(*rows)
    chunks = zip(*(torch.split(tensor, chunk_rows) for tensor in rows), strict=True)
    return torch.cat([checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks])


def depth_weights(config: LossConfig, cross_entropy: Tensor, valid: Tensor) -> Tensor:
    """Weights [K, G] of the depths of blocks: 0 where not valid [K, G].

    D-PACE (2605.18810): w_j = sum over m >= j of the product of s_1 .. s_m, s = (1 - alpha) exp(-CE) + alpha.
    """
    depths = torch.arange(valid.shape[-1], device=valid.device)
    match config.loss_decay:
        case "exponential":
            weights = torch.exp(-depths / config.loss_decay_gamma).expand_as(cross_entropy)
        case "dpace":
            alpha = config.dpace_alpha
            survival = (torch.exp(-cross_entropy.detach()) * (1 - alpha) + alpha).masked_fill(~valid, 0).cumprod(-1)
            weights = survival.flip(-1).cumsum(-1).flip(-1)
        case _:
            weights = torch.ones_like(cross_entropy)
    return weights * valid


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Mean of values whose weights are not 0; a value of weight 0 may be NaN.

    Where several processes train one head, the weights of all of them count, so that the mean of the processes' results, and
    of their gradients, is that of one process with all rows. All processes must call it alike.
    """
    total, chosen = weights.sum(), weights > 0
    if dist.is_initialized():
        dist.all_reduce(total)
        total = total / dist.get_world_size()
    return (torch.where(chosen, values, 0) * weights).sum() / total.clamp(min=1e-6)
