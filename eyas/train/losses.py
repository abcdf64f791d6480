"""Losses between a draft head's logits and the target's distribution, and their weights by depth.

Legend: R rows, K blocks, G depths of a block, D draft vocabulary. p: the target's distribution, q: the head's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eyas.train.config import LossConfig, LossType

# Columns of what `row_losses` returns. chance: p of the head's likeliest token. agrees: whether it is the target's too.
LOSS, CHANCE, AGREES, CROSS_ENTROPY = range(4)


def row_losses(logits: Tensor, teacher: Tensor, loss_type: LossType, needs_cross_entropy: bool = False) -> Tensor:
    """Compare logits [R, D] with the teacher's, in the same vocabulary; float32 [R, 4]. Only LOSS has a gradient.

    CROSS_ENTROPY is that of the target's likeliest token; 0 unless it is needed. lk, lk_hybrid: see 2602.23881.
    """
    logprobs = torch.log_softmax(logits.float(), -1)
    with torch.no_grad():
        teacher = torch.log_softmax(teacher.float(), -1)
        chance = teacher.gather(-1, logprobs.argmax(-1, keepdim=True))[:, 0]
        agrees = chance == teacher.amax(-1)
        likely = teacher.argmax(-1, keepdim=True) if needs_cross_entropy or loss_type == "ce" else None
    hard = torch.zeros_like(chance) if likely is None else -logprobs.gather(-1, likely)[:, 0]
    loss = hard if loss_type == "ce" else _soft_loss(logprobs, teacher, loss_type)
    return torch.stack([loss, chance.exp(), agrees.float(), hard.detach()], -1)


def _soft_loss(logprobs: Tensor, teacher: Tensor, loss_type: LossType) -> Tensor:
    """Of log q and log p [R, D]."""
    if loss_type in ("kl", "soft_ce"):
        return soft_cross_entropy(logprobs, teacher, less_entropy=loss_type == "kl")
    overlap = torch.minimum(teacher.exp(), logprobs.exp()).sum(-1)
    if loss_type == "tv":
        return 1 - overlap
    if loss_type == "lk":
        return -overlap.clamp(min=1e-6).log()
    share = torch.exp(-3 * overlap.detach())
    return share * soft_cross_entropy(logprobs, teacher, less_entropy=True) + (1 - share) * (1 - overlap)


def soft_cross_entropy(logprobs: Tensor, teacher: Tensor, less_entropy: bool) -> Tensor:
    """Minus the sum of p log q by row, [R], of log q and log p [R, D]. less_entropy: less the entropy of p, the KL."""
    p = teacher.exp()
    return -(p * (logprobs - teacher if less_entropy else logprobs)).sum(-1)


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
    """Mean of values whose weights are not 0; a value of weight 0 may be NaN."""
    chosen = weights > 0
    return (torch.where(chosen, values, 0) * weights).sum() / weights.sum().clamp(min=1e-6)
