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
from torch import Tensor

from eyas.errors import ConfigError
from eyas.models.heads.block import BlockHead, block_tensors, load_block_head, new_block_head, write_block_head
from eyas.models.heads.block_config import BlockHeadConfig, Dialect
from eyas.models.heads.eagle_config import HeadWiring
from eyas.models.heads.layers import BackboneSizes
from eyas.train.config import LossConfig, LossType, TrainConfig, check_warm_start
from eyas.train.features import TargetStates, TargetWeights, head_sizes
from eyas.train.losses import (
    AGREES,
    CHANCE,
    CROSS_ENTROPY,
    OVERLAP,
    depth_weights,
    row_losses,
    total_weight,
    weighted_mean,
    weighted_sum,
)
from eyas.train.start import Samples, low_rank, solve
from eyas.train.trainee import Metrics, Trainee
from eyas.train.windows import Batch

# Of the length of the target's states, for the backbone's at the start: the Markov head knows more then.
SMALL = 0.4


class BlockTrainer(Trainee):
    """A block head and its loss.

    Args:
        lm_head: the target's, float32 [V, C].
    """

    def __init__(self, head: BlockHead, lm_head: Tensor, config: LossConfig) -> None:
        super().__init__(config, lm_head[head.draft_ids])
        self.head = head
        self.register_buffer("input_scales", torch.ones(head.fc.in_features))
        self.input_scales: Tensor

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.head.config.aux_hidden_state_layers

    def forward(self, batch: Batch, states: TargetStates, seed: int, loss_type: LossType) -> Metrics:
        """Return the loss and figures of a batch. seed: of the anchors."""
        c = self.head.config
        anchors, valid = draw_anchors(batch, self.config.num_anchors, c.num_drafted, seed)
        rows = self.head(
            (states.aux.float() / self.input_scales).to(states.aux.dtype),
            batch.tokens,
            anchors,
            batch.documents,
            batch.positions,
        )
        at = anchors[:, :, None] + torch.arange(c.num_drafted, device=anchors.device)
        at = at.clamp(max=batch.tokens.shape[1] - 1).flatten(1)
        previous = batch.tokens.gather(1, at).view(*anchors.shape, -1)
        final = states.final.gather(1, at[:, :, None].expand(-1, -1, states.final.shape[-1]))
        total, found = self._losses(rows, previous, final.view(*previous.shape, -1), valid, loss_type)
        sure = self.head.confidence_logits(rows.detach(), previous).flatten(0, 1) if c.confidence else None
        return self.metrics(total, found.flatten(0, 1), valid.flatten(0, 1), sure)

    def _losses(
        self, rows: Tensor, previous: Tensor, final: Tensor, valid: Tensor, loss_type: LossType
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of rows [N, A, G, H], weighted by depth, and all that `row_losses` finds."""
        needs_overlap = self.head.config.confidence and self.config.confidence_target == "rejection"
        needed = (CROSS_ENTROPY,) * (self.config.loss_decay == "dpace") + (OVERLAP,) * needs_overlap

        # The Markov head's table has a row for each token of the target: its gradient is taken once, for all chunks.
        has_markov = self.head.markov_head is not None
        given = self.head.latents(rows, previous) if has_markov else previous

        def losses(rows: Tensor, given: Tensor, final: Tensor) -> Tensor:
            logits = (self.head.markov_logits if has_markov else self.head.block_logits)(rows, given)
            return row_losses(logits, self.teacher_logits(final), loss_type, needed)

        def weigh(found: Tensor, valid: Tensor) -> Tensor:
            return depth_weights(self.config, found[..., CROSS_ENTROPY], valid)

        return weighted_sum(losses, (rows, given, final), valid, self.head, len(self.teacher), weigh)

    def metrics(self, total: Tensor, found: Tensor, valid: Tensor, sure: Tensor | None) -> Metrics:
        """Compute the loss and figures of `_losses`, where `valid` [K, G]. sure: the confidence head's logits [K, G].

        tau_chain: tokens per verify step of greedy chains, bonus included, if all blocks are whole.
        """
        loss = total / total_weight(depth_weights(self.config, found[..., CROSS_ENTROPY], valid))
        agrees, chance = found[..., AGREES] * valid, found[..., CHANCE] * valid
        counts = valid.sum(0).clamp(min=1)
        metrics = {
            "draft_loss": loss.detach(),
            "agreement_1": agrees[:, 0].sum() / counts[0],
            "agreement_last": agrees[:, -1].sum() / counts[-1],
            "tau_chain": 1 + (agrees.cumprod(-1).sum(0) / counts).sum(),
            "chance_1": chance[:, 0].sum() / counts[0],
        }
        if sure is not None and self.config.confidence_weight:
            accepted = found[..., CHANCE if self.config.confidence_target == "match" else OVERLAP]
            losses = F.binary_cross_entropy_with_logits(sure, accepted, reduction="none")
            confidence = weighted_mean(losses, valid.float())
            metrics["confidence_loss"] = confidence.detach()
            loss = loss + self.config.confidence_weight * confidence
        return {"loss": loss, **metrics}

    @torch.no_grad()
    def start(self, samples: Samples) -> None:
        """Start with a fuser that sees all numbers of the states on one scale, and a Markov head that knows which states
        follow which tokens.
        """
        head = self.head
        self.input_scales.copy_(samples.input_scales)
        if head.markov_head is None:
            return
        head.norm.weight.copy_(samples.scales * SMALL)
        embedded = head.embed_tokens.weight
        inputs, final = samples.pairs([(embedded[samples.tokens], 0)], 0)
        outer, inner = low_rank(solve(inputs, final).weights[0], inputs[0], self.head.config.markov_rank)
        rank = len(inner)
        head.markov_head.markov_w1.weight[:, :rank] = embedded @ inner.T
        head.markov_head.markov_w2.weight[:, :rank] = head.lm_head.weight @ outer

    def write(self, folder: Path, dialect: Dialect = "author") -> None:
        """Write the head as a checkpoint in a dialect."""
        tensors = block_tensors(self.head)
        tensors["fc.weight"] = tensors["fc.weight"] / self.input_scales.cpu()
        write_block_head(folder, self.head.config, tensors, dialect)


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
    h = config.head
    is_dspark = config.method == "dspark"
    sizes = head_sizes(h, target, 5, draft_vocab_size)
    ids = h.target_layer_ids or spread_layers(target.num_layers, min(5, target.num_layers - 3))
    return BlockHeadConfig(
        **sizes,
        kind="dspark" if is_dspark else "dflash",
        num_target_layers=target.num_layers,
        block_size=h.block_size,
        mask_token_id=mask_token_id(config, target.config),
        wiring=HeadWiring(tuple(layer + 1 for layer in ids), sample_from_anchor=is_dspark),
        windows=(None,) * sizes["num_layers"],
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
