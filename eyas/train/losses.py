"""Losses between a draft head's logits and the target's distribution, and their weights by depth.

Legend: R rows, K blocks, G depths of a block, D draft vocabulary. p: the target's distribution, q: the head's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eyas.train.config import LossConfig, LossType

# Columns of what `row_losses` returns. chance: p of the head's likeliest token. agrees: whether it is the target's too.
# cross_entropy: of the target's likeliest token. overlap: the sum of min(p, q), the acceptance of a sampled token under p/q.
LOSS, CHANCE, AGREES, CROSS_ENTROPY, OVERLAP = range(5)
CACHED_LOGITS = 2**18  # logits that are compared at a time on the CPU


def row_losses(logits: Tensor, teacher: Tensor, loss_type: LossType, needed: Sequence[int] = ()) -> Tensor:
    """Compare logits [..., D] with the teacher's, in the same vocabulary; float32 [..., 5]. Only LOSS has a gradient.

    teacher: of the same shape, or with a size of 1 where several rows of logits share one of its rows. CROSS_ENTROPY and
    OVERLAP are 0 unless they are `needed` or part of the loss.
    """
    if loss_type in ("kl", "soft_ce", "lk_hybrid"):
        found: Tensor = _Divergence.apply(logits, teacher, loss_type == "soft_ce", needed)  # type: ignore[no-untyped-call]
    else:
        with torch.no_grad():
            found = _figures(_Law.of(logits), _Law.of(teacher), needed)
    loss, chance, agrees, hard, overlap = found.unbind(-1)
    if loss_type == "ce":
        right = teacher.max(-1).indices.expand_as(chance)
        loss = hard = F.cross_entropy(logits.float().flatten(0, -2), right.flatten(), reduction="none").view_as(chance)
    if loss_type in ("tv", "lk", "lk_hybrid"):
        p, q = (torch.softmax(x.float(), -1) for x in (teacher, logits))
        overlap = torch.minimum(p, q).sum(-1)
        loss = _overlap_loss(overlap, loss, loss_type)
    return torch.stack([loss, chance, agrees, hard.detach(), overlap.detach()], -1)


def next_token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the columns of `row_losses` for logits [R, V] against tokens [R], as against a target that is sure of them.

    AGREES says whether the likeliest token is the right one. Only LOSS has a gradient.
    """
    loss = F.cross_entropy(logits.float(), tokens, reduction="none")
    agrees = (logits.argmax(-1) == tokens).float()
    return torch.stack([loss, agrees, agrees, loss.detach(), torch.exp(-loss.detach())], -1)


def _overlap_loss(overlap: Tensor, divergence: Tensor, loss_type: LossType) -> Tensor:
    """Return the losses [...] of the acceptance under p/q; lk, lk_hybrid: 2602.23881."""
    if loss_type == "tv":
        return 1 - overlap
    if loss_type == "lk":
        return -overlap.clamp(min=1e-6).log()
    share = torch.exp(-3 * overlap.detach())
    return share * divergence + (1 - share) * (1 - overlap)


class _Divergence(torch.autograd.Function):
    """`row_losses` with the KL of p and q or their cross-entropy as its loss; the gradient of both is q - p.

    cross-entropy = lse(logits) - sum of p * logits; the entropy of p is alike, and their difference is the KL. On the CPU
    rows are compared a few at a time, so that what is computed of them stays in the processor's cache.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor, is_soft_ce: bool, needed: Sequence[int]) -> Tensor:
        """Compute the loss. needed: columns besides the loss's own. q - p is kept in the dtype of the logits."""
        columns, difference = logits.new_empty(*logits.shape[:-1], 5, dtype=torch.float32), torch.empty_like(logits)
        count = max(1, CACHED_LOGITS // max(1, logits[:1].numel())) if logits.device.type == "cpu" else max(1, len(logits))
        teacher = teacher.expand(len(logits), *teacher.shape[1:])
        parts = (torch.split(x, count) for x in (logits, teacher, columns, difference))
        for own_logits, teacher_logits, found, rest in zip(*parts, strict=True):
            own, right = _Law.of(own_logits), _Law.of(teacher_logits)
            found.copy_(_figures(own, right, needed))
            rest.copy_(own.probs.sub_(right.probs))
            if is_soft_ce:
                found[..., LOSS] = own.lse[..., 0] - (right.probs * own.logits).sum(-1)
            else:
                apart = (right.logits - own.logits).mul_(right.probs).sum(-1)
                found[..., LOSS] = (own.lse - right.lse)[..., 0] + apart
        ctx.save_for_backward(difference)
        return columns

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (difference,) = ctx.saved_tensors
        return difference * gradients[0][..., LOSS, None].to(difference.dtype), None, None, None


class _Law(NamedTuple):
    """A distribution, all in float32: logits and probs [..., D], the likeliest token [..., 1], and the logarithm of the sum
    of exp(logits) [..., 1].
    """

    logits: Tensor
    probs: Tensor
    likeliest: Tensor
    lse: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> _Law:
        logits = logits.float()
        probs = torch.softmax(logits, -1)
        best = probs.max(-1, keepdim=True)
        return cls(logits, probs, best.indices, logits.gather(-1, best.indices) - best.values.log())


def _figures(own: _Law, teacher: _Law, needed: Sequence[int]) -> Tensor:
    """Return the columns of `row_losses`, [..., 5], with 0 for the loss."""
    shape = own.likeliest.shape
    chance = teacher.probs.expand_as(own.probs).gather(-1, own.likeliest)
    agrees = (chance == teacher.probs.gather(-1, teacher.likeliest)).float()
    hard = overlap = torch.zeros_like(chance)
    if CROSS_ENTROPY in needed:
        hard = own.lse - own.logits.gather(-1, teacher.likeliest.expand(shape))
    if OVERLAP in needed:
        overlap = torch.minimum(teacher.probs, own.probs).sum(-1, keepdim=True)
    return torch.cat([torch.zeros_like(chance), chance, agrees, hard, overlap], -1)


def in_chunks(function: Callable[..., Tensor], rows: tuple[Tensor, ...], chunk_rows: int) -> Tensor:
    """Run function(*rows), which works row by row, a chunk at a time; chunks are recomputed in the backward pass.

    So the memory for logits is that of chunk_rows rows. 0 takes all rows at once.
    """
    count = len(rows[0])
    if not chunk_rows or count <= chunk_rows:
        return function(*rows)
    chunks = zip(*(torch.split(tensor, chunk_rows) for tensor in rows), strict=True)
    return torch.cat([checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks])


def depth_weights(config: LossConfig, cross_entropy: Tensor, valid: Tensor) -> Tensor:
    """Return weights [K, G] of the depths of blocks: 0 where not valid [K, G].

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
    """Return the mean of values whose weights are not 0; a value of weight 0 may be NaN.

    Where several processes train one head, the weights of all of them count, so that the mean of the processes' results, and
    of their gradients, is that of one process with all rows. All processes must call it alike.
    """
    total, chosen = weights.sum(), weights > 0
    if dist.is_initialized():
        dist.all_reduce(total)
        total = total / dist.get_world_size()
    return (torch.where(chosen, values, 0) * weights).sum() / total.clamp(min=1e-6)
