"""Training of P-EAGLE heads (2602.01469): EAGLE-3's pairs, and mask rows behind them for all depths at once.

Depth 0 is the pair itself. A pair's row of depth d stands d positions behind it and learns the target's prediction d tokens
later. Conditional drop-off keeps depth d behind max(ratio**d, least) of the pairs, and nested sets of them, so that a row's
shallower rows are always there.
Legend: N windows, L tokens, P = L - 1 pairs, S pairs of a segment, R mask rows of a segment, H width, d head width.

    pair i reads feature i, token i + 1    depth    0        1        2
    a row sees pairs 0..i of its document  at       i        i + 1    i + 2
    and its pair's rows before it          learns   p(i+2)   p(i+3)   p(i+4)
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eyas.kernels.arguments import Projected
from eyas.models.heads.eagle import write_head
from eyas.train.config import LossConfig, LossType, TrainConfig
from eyas.train.eagle import EagleParts, eagle_tensors, make_eagle_parts
from eyas.train.features import TargetStates, TargetWeights, additive_document_mask
from eyas.train.losses import AGREES, CHANCE, LOSS, masked_sum, row_losses, total_weight, weighted_mean, weighted_sum
from eyas.train.trainee import Metrics, Trainee
from eyas.train.windows import Batch

LEAST_KEPT = 0.2  # of the pairs, at any depth


class PEagleTrainer(Trainee):
    """A P-EAGLE head with its fuser and the mask row's hidden states, and the loss.

    Args:
        lm_head: the target's, float32 [V, C].
    """

    def __init__(self, parts: EagleParts, lm_head: Tensor, config: LossConfig, trains_embedding: bool) -> None:
        head, fuser, mask_hidden = parts.head, parts.fuser, parts.mask_hidden
        super().__init__(config, lm_head[head.draft_ids])
        assert fuser is not None
        assert mask_hidden is not None
        self.head, self.fuser = head.requires_grad_(True), fuser.requires_grad_(True)
        head.embedding.requires_grad_(trains_embedding)
        self._own_embedding = parts.own_embedding or trains_embedding
        self.mask_hidden = nn.Parameter(mask_hidden.clone())  # in place of the target's hidden states

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.head.config.aux_hidden_state_layers

    def forward(self, batch: Batch, states: TargetStates, seed: int, loss_type: LossType) -> Metrics:
        """Return the loss and figures of a batch: the mean over all rows of all depths. seed: of the pairs that keep their
        rows.
        """
        tokens, positions = batch.tokens[:, 1:], batch.positions[:, :-1]
        features = self.fuser(states.aux[:, :-1].float().flatten(0, 1)).view(*tokens.shape, -1)
        context = Pairs(batch.documents[:, :-1])
        rows = self.head.run(features.flatten(0, 1), tokens.flatten(), positions.flatten(), context).view(*tokens.shape, -1)
        valid = supervised_depths(batch, self.config.num_depths)
        order = batch.random(seed, tokens.shape[1]).masked_fill(~valid[:, :, 0], 2.0).argsort(-1)
        total, first = self._first_losses(rows, states.final[:, 1:], valid[:, :, 0].float(), loss_type)
        depths = [first.gather(1, order[:, :, None].expand_as(first))]
        depths += self._mask_losses(order, context, positions, states.final, loss_type)
        weights = [valid[:, :, depth].gather(1, order)[:, : own.shape[1]].float() for depth, own in enumerate(depths)]
        return _metrics(total, depths, weights)

    def _first_losses(self, rows: Tensor, final: Tensor, weights: Tensor, loss_type: LossType) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the losses of the pairs, and what `row_losses` finds, [N, P, 5]. weights [N, P]."""

        def losses(rows: Tensor, final: Tensor) -> Tensor:
            return row_losses(self.head.logits(rows), self.teacher_logits(final), loss_type)

        return weighted_sum(losses, (rows, final), weights, self.head, len(self.teacher))

    def _mask_losses(
        self, order: Tensor, context: Pairs, positions: Tensor, final: Tensor, loss_type: LossType
    ) -> list[Tensor]:
        """Return what `row_losses` finds at each depth from 1, [N, pairs that keep it, 5], in the order of `order` [N, P].

        Segments of pairs are recomputed in the backward pass, so that only one segment's rows are held; gradients add up.
        """
        kept = kept_pairs(order.shape[1], self.config)
        found: list[list[Tensor]] = [[] for _ in kept]
        for start, end in segments(kept, len(order), self.config.chunk_rows):
            counts = [max(0, min(end, count) - start) for count in kept]
            own = order[:, start:end]
            arguments = (own, positions.gather(1, own), final, counts, loss_type, context.documents, *context.flat)
            losses: Tensor = checkpoint(self._segment, *arguments, use_reentrant=False)
            for depth, part in zip(found, torch.split(losses, counts, 1), strict=True):
                depth.append(part)
        return [torch.cat(parts, 1) for parts in found]

    def _segment(
        self, pairs: Tensor, positions: Tensor, final: Tensor, counts: list[int], loss_type: LossType,
        documents: Tensor, *context: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return what `row_losses` finds of the mask rows of pairs [N, S] at positions [N, S]: depth 1 of counts[0] of them,
        ...

        Returns [N, R, 5]. context: keys and values of all pairs, in turn for each layer.
        """
        states = self.mask_states(pairs, positions, counts, documents, *context)
        depth = torch.cat([torch.full((count,), number, device=pairs.device) for number, count in enumerate(counts, 1)])
        at = torch.cat([pairs[:, :count] for count in counts], 1) + 1 + depth
        teacher = final.gather(1, at.clamp(max=final.shape[1] - 1)[:, :, None].expand(-1, -1, final.shape[-1]))
        losses = row_losses(self.head.logits(states.flatten(0, 1)), self.teacher_logits(teacher.flatten(0, 1)), loss_type)
        return losses.view(*at.shape, -1)

    def mask_states(
        self, pairs: Tensor, positions: Tensor, counts: list[int], documents: Tensor, *context: Tensor
    ) -> Tensor:
        """Return the states of mask rows [N, R, H], those of depth 1 first; arguments as in `_segment`."""
        c, device = self.head.config, pairs.device
        place = torch.cat([torch.arange(count, device=device) for count in counts])
        depth = torch.cat([torch.full((count,), number, device=device) for number, count in enumerate(counts, 1)])
        base = pairs[:, place]
        own = (place[:, None] == place) & (depth[:, None] >= depth)
        length = documents.shape[1]
        seen = (torch.arange(length, device=device) <= base[:, :, None]) & (
            documents[:, None, :] == documents.gather(1, base)[:, :, None]
        )
        mask = torch.cat([seen, own.expand(len(base), -1, -1)], -1)

        def attend(layer: int, rows: Projected) -> Tensor:
            query, key, value = (x.view(*base.shape, *x.shape[1:]) for x in (rows.query, rows.key, rows.value))
            keys, values = torch.cat([context[2 * layer], key], 1), torch.cat([context[2 * layer + 1], value], 1)
            return _attend(query, keys, values, mask[:, None])

        assert c.mask_token_id is not None
        feature = self.fuser(self.mask_hidden.view(1, -1)).expand(base.numel(), -1)
        tokens = torch.full((base.numel(),), c.mask_token_id, device=device)
        at = (positions[:, place] + depth).clamp(max=self.head.max_model_len - 1)
        states = self.head.run(feature, tokens, at.flatten(), attend)
        return states.view(*base.shape, -1)

    def write(self, folder: Path) -> None:
        """Write the head in its authors' layout."""
        tensors = eagle_tensors(self.head, self.fuser, self._own_embedding)
        write_head(folder, self.head.config, tensors | {"mask_hidden": self.mask_hidden.detach().cpu().clone()})


class Pairs:
    """Attention among the pairs of a pass, [N, P] of them; keeps keys and values of each layer for the rows behind them."""

    def __init__(self, documents: Tensor) -> None:
        self.documents, self._mask = documents, additive_document_mask(documents)
        self.flat: list[Tensor] = []

    def __call__(self, layer: int, rows: Projected) -> Tensor:
        shape = self.documents.shape
        query, key, value = (x.view(*shape, *x.shape[1:]) for x in (rows.query, rows.key, rows.value))
        self.flat += [key, value]
        return _attend(query, key, value, self._mask)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attend: query [N, R, heads, d], key and value [N, K, kv heads, d], mask [N, 1, R, K] to [N * R, heads, d]."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    attended = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return attended.transpose(1, 2).flatten(0, 1)


def supervised_depths(batch: Batch, num_depths: int) -> Tensor:
    """Return whether all tokens that a pair's rows up to a depth predict are supervised, in its document; bool
    [N, P, depths].
    """
    length = batch.tokens.shape[1]
    ahead, numbers = F.pad(batch.loss_mask, (0, num_depths)), F.pad(batch.documents, (0, num_depths), value=-1)
    at = 2 + torch.arange(length - 1, device=ahead.device)[:, None] + torch.arange(num_depths, device=ahead.device)
    at = at.clamp(max=ahead.shape[1] - 1)
    same = numbers[:, at] == batch.documents[:, :-1, None]
    return (ahead[:, at] & same).cumprod(-1) > 0


def kept_pairs(count: int, config: LossConfig) -> list[int]:
    """Return how many of `count` pairs keep their row at depth 1, 2, ...; at least one does."""
    shares = (max(config.down_sample_ratio**depth, LEAST_KEPT) for depth in range(1, config.num_depths))
    return [max(1, math.ceil(count * share)) for share in shares]


def segments(kept: list[int], windows: int, chunk_rows: int) -> list[tuple[int, int]]:
    """Return the ranges of pairs, in the order in which they keep rows, that have about `chunk_rows` mask rows in all
    windows each.
    """
    if not kept:
        return []
    found, start = [], 0
    while start < kept[0]:
        depths = sum(count > start for count in kept)
        end = min(kept[0], start + max(1, chunk_rows // (depths * windows))) if chunk_rows else kept[0]
        found.append((start, end))
        start = end
    return found


def _metrics(total: Tensor, depths: list[Tensor], weights: list[Tensor]) -> Metrics:
    """Return the metrics of what `row_losses` found at each depth [N, pairs, 5], and the weights of the rows. tau_chain: as
    in block heads. total: the sum of the losses of depth 0, whose rows have no gradient.
    """
    for own, weight in zip(depths[1:], weights[1:], strict=True):
        total = total + masked_sum(own[..., LOSS], weight)
    loss = total / total_weight(torch.cat([weight.flatten() for weight in weights]))
    accepted, tau = torch.ones_like(weights[0]), torch.ones((), device=loss.device)
    for own, weight in zip(depths, weights, strict=True):
        accepted = accepted[:, : own.shape[1]] * own[..., AGREES].detach()
        tau = tau + weighted_mean(accepted, weight)
    return {
        "loss": loss,
        "draft_loss": loss.detach(),
        "agreement_1": weighted_mean(depths[0][..., AGREES].detach(), weights[0]),
        "agreement_last": weighted_mean(depths[-1][..., AGREES].detach(), weights[-1]),
        "tau_chain": tau,
        "chance_1": weighted_mean(depths[0][..., CHANCE].detach(), weights[0]),
    }


def new_peagle_trainer(config: TrainConfig, target: TargetWeights, draft_ids: Tensor) -> PEagleTrainer:
    """Return a head with random weights, or with those of config.draft_model. Raises CheckpointError or ConfigError."""
    parts = make_eagle_parts(config, target, draft_ids)
    return PEagleTrainer(parts, target.lm_head, config.loss, config.head.train_embeddings)
