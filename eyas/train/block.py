"""Training of one-pass block heads, DSpark (2607.05147) and DFlash (2602.06036): blocks from random anchors, all at once.

Legend: N windows, L tokens, A anchors of a window, B rows of a block, G tokens that it proposes, K = N * A blocks, H hidden.

    anchor a            a    (B = G = 3, sample from anchor)
    tokens              x0   x1   x2   x3
    depth               0    1    2
    token before        x0   x1   x2            the truth, not the head's own
    teacher             p(x1|..x0) p(x2|..x1) p(x3|..x2)    from the target's final states at a, a + 1, a + 2
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.errors import ConfigError
from eyas.models.heads.block import BlockHead, block_tensors, load_block_head, new_block_head, write_block_head
from eyas.models.heads.block_config import BlockHeadConfig, Dialect
from eyas.models.heads.eagle_config import HeadWiring
from eyas.models.heads.layers import BackboneSizes
from eyas.train.config import LossConfig, LossType, TrainConfig, check_warm_start
from eyas.train.data import Batch
from eyas.train.features import TargetStates, TargetWeights, layer_sizes
from eyas.train.losses import (
    AGREES,
    CHANCE,
    CROSS_ENTROPY,
    LOSS,
    OVERLAP,
    depth_weights,
    in_chunks,
    row_losses,
    weighted_mean,
)

Metrics = dict[str, Tensor]


class BlockTrainer(nn.Module):
    """A block head and its loss.

    Args:
        lm_head: the target's, float32 [V, C].
    """

    def __init__(self, head: BlockHead, lm_head: Tensor, config: LossConfig) -> None:
        super().__init__()
        self.head, self.config = head, config
        self.register_buffer("teacher", lm_head[head.draft_ids].contiguous(), persistent=False)
        self.teacher: Tensor

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.head.config.aux_hidden_state_layers

    def forward(self, batch: Batch, states: TargetStates, seed: int, loss_type: LossType) -> Metrics:
        """Return the loss and figures of a batch. seed: of the anchors."""
        c = self.head.config
        anchors, valid = draw_anchors(batch, self.config.num_anchors, c.num_drafted, seed)
        rows = self.head(states.aux, batch.tokens, anchors, batch.documents, batch.positions)
        at = anchors[:, :, None] + torch.arange(c.num_drafted, device=anchors.device)
        at = at.clamp(max=batch.tokens.shape[1] - 1).flatten(1)
        previous = batch.tokens.gather(1, at)
        final = states.final.gather(1, at[:, :, None].expand(-1, -1, states.final.shape[-1]))
        found = self._losses(rows.flatten(0, 1), previous.view(-1, c.num_drafted), final.flatten(0, 1), loss_type)
        return self.metrics(found, valid.flatten(0, 1))

    @property
    def _needed(self) -> tuple[int, ...]:
        """Columns of `row_losses` that are needed besides the loss."""
        needs_overlap = self.head.config.confidence and self.config.confidence_target == "rejection"
        return (CROSS_ENTROPY,) * (self.config.loss_decay == "dpace") + (OVERLAP,) * needs_overlap

    def _losses(self, rows: Tensor, previous: Tensor, final: Tensor, loss_type: LossType) -> Tensor:
        """Return what `row_losses` finds, and the confidence logit, [K, G, 6], of rows [K, G, H]."""
        c, needed = self.head.config, self._needed

        def chunk(rows: Tensor, previous: Tensor, final: Tensor) -> Tensor:
            logits = self.head.block_logits(rows, previous).flatten(0, 1)
            teacher = F.linear(final, self.teacher.to(final.dtype)).flatten(0, 1)
            found = row_losses(logits, teacher, loss_type, needed)
            sure = torch.zeros_like(found[:, :1])
            if c.confidence:
                detached = rows.detach()
                sure = self.head.confidence_logits(detached, previous).flatten()[:, None]
            return torch.cat([found, sure], -1).view(*previous.shape, -1)

        depths = c.num_drafted
        return in_chunks(chunk, (rows, previous, final.view(-1, depths, final.shape[-1])), self.config.chunk_rows // depths)

    def metrics(self, found: Tensor, valid: Tensor) -> Metrics:
        """Compute the loss and figures of `_losses`, where `valid` [K, G].

        tau_chain: tokens per verify step of greedy chains, bonus included, if all blocks are whole.
        """
        weights = depth_weights(self.config, found[..., CROSS_ENTROPY], valid)
        loss = weighted_mean(found[..., LOSS], weights)
        agrees, chance = found[..., AGREES].detach() * valid, found[..., CHANCE].detach() * valid
        counts = valid.sum(0).clamp(min=1)
        metrics = {
            "draft_loss": loss.detach(),
            "agreement_1": agrees[:, 0].sum() / counts[0],
            "agreement_last": agrees[:, -1].sum() / counts[-1],
            "tau_chain": 1 + (agrees.cumprod(-1).sum(0) / counts).sum(),
            "chance_1": chance[:, 0].sum() / counts[0],
        }
        if self.head.config.confidence and self.config.confidence_weight:
            accepted = found[..., CHANCE if self.config.confidence_target == "match" else OVERLAP].detach()
            sure = F.binary_cross_entropy_with_logits(found[..., -1], accepted, reduction="none")
            confidence = weighted_mean(sure, valid.float())
            metrics["confidence_loss"] = confidence.detach()
            loss = loss + self.config.confidence_weight * confidence
        return {"loss": loss, **metrics}

    def write(self, folder: Path, dialect: Dialect = "author") -> None:
        """Write the head as a checkpoint in a dialect."""
        write_block_head(folder, self.head.config, block_tensors(self.head), dialect)


def draw_anchors(batch: Batch, count: int, depths: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the anchors int64 [N, A] without replacement, and which of their depths are supervised, bool [N, A, G].

    An anchor has a position before it in its document. Anchor and next token are supervised, as drafts begin at a token that
    the target wrote. Its depths are supervised up to the first token that is not.
    """
    length = batch.tokens.shape[1]
    count = min(count, length - 1)
    ahead = F.pad(batch.loss_mask, (0, depths + 1))
    numbers = F.pad(batch.documents, (0, depths + 1), value=-1)
    eligible = (batch.positions > 0) & (batch.documents >= 0) & batch.loss_mask & ahead[:, 1 : length + 1]
    eligible &= numbers[:, 1 : length + 1] == batch.documents
    scores = batch.random(seed, length).masked_fill(~eligible, -1.0)
    best = scores.topk(count, -1)
    anchors = best.indices.clamp(min=1)
    at = anchors[:, :, None] + 1 + torch.arange(depths, device=anchors.device)
    supervised, own = (x.gather(1, at.flatten(1)).view(at.shape) for x in (ahead, numbers))
    same = own == batch.documents.gather(1, anchors)[:, :, None]
    return anchors, ((supervised & same).cumprod(-1) > 0) & (best.values >= 0)[:, :, None]


def new_block_trainer(config: TrainConfig, target: TargetWeights, draft_ids: Tensor) -> BlockTrainer:
    """Return a head with random weights, or with those of config.draft_model. Raises CheckpointError or ConfigError."""
    if config.draft_model:
        head = load_block_head(config.draft_model, str(target.folder))
        c = head.config
        if c.kind != config.method:
            raise ConfigError(f"method is {config.method}, but {config.draft_model} holds a {c.kind} head; name that method")
        own: dict[str, object] = {
            "target_layer_ids": tuple(layer - 1 for layer in c.aux_hidden_state_layers), "block_size": c.block_size,
            "mask_token_id": c.mask_token_id, "draft_vocab_size": c.draft_vocab_size, "markov_rank": c.markov_rank,
            "markov_head_type": c.markov_kind, "enable_confidence_head": c.confidence,
        }  # fmt: skip
        check_warm_start(config, fixed_sizes(c) | own)
    else:
        head = new_block_head(_head_config(config, target, len(draft_ids)), str(target.folder))
        head.draft_ids = draft_ids
        if len(draft_ids) < target.vocab_size:
            head.lm_head.weight.data.copy_(target.lm_head[draft_ids])
    return BlockTrainer(head, target.lm_head, config.loss)


def _head_config(config: TrainConfig, target: TargetWeights, draft_vocab_size: int) -> BlockHeadConfig:
    h, t = config.head, target.config
    is_dspark = config.method == "dspark"
    num_layers = h.num_hidden_layers or 5
    mask = mask_token_id(config, t)
    ids = h.target_layer_ids or spread_layers(target.num_layers, min(5, target.num_layers - 3))
    return BlockHeadConfig(
        **vars(layer_sizes(h, target)),
        kind="dspark" if is_dspark else "dflash",
        target_hidden=target.hidden,
        num_target_layers=target.num_layers,
        num_layers=num_layers,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        block_size=h.block_size,
        mask_token_id=mask,
        rotary=target.rotary,
        max_positions=int(t["max_position_embeddings"]),
        wiring=HeadWiring(tuple(layer + 1 for layer in ids), sample_from_anchor=is_dspark),
        windows=(None,) * num_layers,
        markov_rank=h.markov_rank if is_dspark else 0,
        markov_kind=h.markov_head_type,
        confidence=is_dspark and h.enable_confidence_head,
        confidence_with_markov=is_dspark and h.enable_confidence_head and h.markov_rank > 0,
    )


def fixed_sizes(c: BackboneSizes) -> dict[str, object]:
    """Return the sizes of a head's layers, by the settings of `head`."""
    return {
        "num_hidden_layers": c.num_layers, "intermediate_size": c.intermediate, "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_dim,
    }  # fmt: skip


def spread_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Return `count` layers whose outputs are features, evenly spaced from 1 to num_layers - 3."""
    first, last = min(1, num_layers - 1), max(1, num_layers - 3)
    return tuple(dict.fromkeys(round(first + (last - first) * i / max(1, count - 1)) for i in range(max(1, count))))


def mask_token_id(config: TrainConfig, target: Mapping[str, object]) -> int:
    """Return the reserved token of a head. Raises ConfigError if neither the settings, the data nor the target name one."""
    named = config.head.mask_token_id if config.head.mask_token_id >= 0 else target.get("pad_token_id")
    if not isinstance(named, int) or not 0 <= named < int(str(target["vocab_size"])):
        raise ConfigError(
            f"head.mask_token_id is {named}; name a token below {target['vocab_size']} that never occurs in the data: "
            "`eyas train prepare` found none, and the target has no padding token"
        )
    return named
