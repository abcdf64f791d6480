"""Losses between a draft head's logits and the target's distribution, and their weights by depth.

Legend: R rows, K blocks, G depths of a block, D draft vocabulary. p: the target's distribution, q: the head's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.train.config import LossConfig, LossType

# Columns of what `row_losses` returns. chance: p of the head's likeliest token. agrees: whether it is the target's too.
# cross_entropy: of the target's likeliest token. overlap: the sum of min(p, q), the acceptance of a sampled token under p/q.
LOSS, CHANCE, AGREES, CROSS_ENTROPY, OVERLAP = range(5)
CACHED_LOGITS = 2**18  # logits that are compared at a time on the CPU
# Logits that are held at a time: for products at full speed, and not much memory.
LOGITS_AT_A_TIME, LOGITS_ON_GPU = 2**23, 2**27


def row_losses(logits: Tensor, teacher: Tensor, loss_type: LossType, needed: Sequence[int] = ()) -> Tensor:
    """Compare logits [..., D] with the teacher's, in the same vocabulary; float32 [..., 5]. Only LOSS has a gradient.

    teacher: of the same shape, or with a size of 1 where several rows of logits share one of its rows. CROSS_ENTROPY and
    OVERLAP are 0 unless they are `needed` or part of the loss.
    """
    if loss_type in ("kl", "lk_hybrid"):
        found: Tensor = _Divergence.apply(logits, teacher, needed)  # type: ignore[no-untyped-call]
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
    """`row_losses` with the KL of p and q as its loss, whose gradient is q - p, as that of their cross-entropy.

    On the CPU rows are compared a few at a time, so that what is computed of them stays in the processor's cache.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor, needed: Sequence[int]) -> Tensor:
        """Compute the loss. needed: columns besides the loss's own. q - p is kept in the dtype of the logits."""
        columns, difference = logits.new_empty(*logits.shape[:-1], 5, dtype=torch.float32), torch.empty_like(logits)
        count = max(1, CACHED_LOGITS // max(1, logits[:1].numel())) if logits.device.type == "cpu" else max(1, len(logits))
        teacher = teacher.expand(len(logits), *teacher.shape[1:])
        parts = (torch.split(x, count) for x in (logits, teacher, columns, difference))
        for own_logits, teacher_logits, found, rest in zip(*parts, strict=True):
            own, right = _Law.of(own_logits), _Law.of(teacher_logits)
            found.copy_(_figures(own, right, needed))
            rest.copy_(own.probs.sub_(right.probs))
            apart = (right.logits - own.logits).mul_(right.probs).sum(-1)
            found[..., LOSS] = (own.lse - right.lse)[..., 0] + apart
        ctx.save_for_backward(difference)
        return columns

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (difference,) = ctx.saved_tensors
        return difference * gradients[0][..., LOSS, None].to(difference.dtype), None, None


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


def weighted_sum(
    function: Callable[..., Tensor],
    rows: Sequence[Tensor],
    weights: Tensor,
    head: nn.Module,
    vocab_size: int,
    weigh: Callable[[Tensor, Tensor], Tensor] = lambda table, weights: weights,
) -> tuple[Tensor, Tensor]:
    """Sum weighted losses in memory that does not grow with the rows: gradients are taken in the forward pass, a chunk at a
    time, and no logits are computed twice (as the fused linear cross-entropy of 2410.10989).

    Args:
        function: takes a chunk of `rows` [N, L, ...], their leading dimensions joined, to what `row_losses` finds.
        weights [N, L] or [N, L, G]: of losses. A row of zeros is left out, and has zeros in the table.
        head: has the parameters that `function` reads. They and `rows` get gradients.
        vocab_size: logits of one loss.
        weigh: takes a chunk of the table and of `weights` to the weights of its losses.

    Returns:
        The sum, and the table [*weights.shape, 5], which has no gradient.
    """
    *rows, flat = (x.flatten(0, 1) for x in (*rows, weights))
    kept = (flat > 0)[..., None].flatten(1).any(1).nonzero()[:, 0]
    chosen = [x if len(kept) == len(flat) else x[kept] for x in (*rows, flat)]
    budget = LOGITS_AT_A_TIME if weights.device.type == "cpu" else LOGITS_ON_GPU
    size = max(1, budget // (vocab_size * math.prod(flat.shape[1:])))
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad and torch.is_grad_enabled()]

    def share(*chunk: Tensor) -> tuple[Tensor, Tensor]:
        table = function(*chunk[:-1])
        return masked_sum(table[..., LOSS], weigh(table, chunk[-1])), table

    total, table = _WeightedSum.apply(share, size, len(chosen), *chosen, *trained)  # type: ignore[no-untyped-call]
    return total, table.new_zeros(*flat.shape, 5).index_copy(0, kept, table).view(*weights.shape, 5)


class _WeightedSum(torch.autograd.Function):
    """`weighted_sum` of rows that are all needed. Its inputs are the rows and the parameters."""

    @staticmethod
    def forward(ctx: Any, share: Callable[..., tuple[Tensor, Tensor]], size: int, num_rows: int, *inputs: Tensor) -> Any:
        """Compute the sum and, for inputs that need one, its gradient. num_rows: of the inputs that are cut to chunks."""
        rows, needs, tables = inputs[:num_rows], ctx.needs_input_grad[3:], []
        gradients = [torch.zeros_like(x) if need else None for x, need in zip(rows, needs, strict=False)]
        gradients += [None] * (len(inputs) - num_rows)
        total = torch.zeros((), device=rows[0].device)
        for start in range(0, max(1, len(rows[0])), size):  # without rows there is one chunk, for the table's shape
            part = slice(start, start + size)
            with torch.set_grad_enabled(any(needs)):
                own = [x[part].detach().requires_grad_(need) for x, need in zip(rows, needs, strict=False)]
                loss, table = share(*own)
            total += loss.detach()
            tables.append(table.detach())
            places = [number for number, is_needed in enumerate(needs) if is_needed]
            leaves = [(*own, *inputs[num_rows:])[number] for number in places]
            found = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else ()
            for number, new in zip(places, found, strict=False):
                gradient = gradients[number]
                if new is not None and gradient is None:
                    gradients[number] = new.clone()  # it may be another one's too
                elif new is not None and gradient is not None:
                    (gradient[part] if number < num_rows else gradient).add_(new)
        ctx.gradients = gradients  # scaled in place: the backward pass runs once
        ctx.mark_non_differentiable(joined := torch.cat(tables))
        return total, joined

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor | None, ...]:
        found, ctx.gradients = ctx.gradients, None
        assert found is not None, "the backward pass of weighted_sum runs once"
        return (None, None, None, *(None if gradient is None else gradient.mul_(outer[0]) for gradient in found))


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


def total_weight(weights: Tensor) -> Tensor:
    """Return the sum of weights, by which a weighted sum is divided for the mean; above 0.

    Where several processes train one head, it is the mean of all their sums, so that the mean of the processes' results, and
    of their gradients, is that of one process with all rows. All processes must call it alike.
    """
    total = weights.sum()
    if dist.is_initialized():
        dist.all_reduce(total)
        total = total / dist.get_world_size()
    return total.clamp(min=1e-6)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of values by `total_weight`; a value of weight 0 may be NaN."""
    return masked_sum(values, weights) / total_weight(weights)


def masked_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of weighted values; a value of weight 0 may be NaN."""
    return (torch.where(weights > 0, values, 0) * weights).sum()
