"""Training of EAGLE heads: EAGLE-1 (Li et al. 2024), EAGLE-3 with training-time test (2025), EAGLE-3.1 (2605.09992).

Row i reads the feature at i and token i + 1, and learns the target's prediction of token i + 2. In step s of the
training-time test its feature is the head's own state of row i - 1 in step s - 1. The trained module is the one that
drafters serve. Legend: N windows, L tokens, R = N * (L - 1) rows, H width, J KV heads, G query heads of each, d head width,
D draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.config.file_values import get_setting
from eyas.errors import ConfigError
from eyas.kernels.arguments import Projected
from eyas.models.checkpoint import Checkpoint
from eyas.models.heads.eagle import EagleHead, make_fuser, write_head
from eyas.models.heads.eagle_config import (
    EagleHeadConfig,
    HeadWiring,
    Kind,
    Output,
    canonical_name,
    layer_prefix,
    read_head_config,
    tensor_shapes,
)
from eyas.models.heads.fusers import LinearFuser
from eyas.models.heads.layers import DraftLayer, draft_ids_of, stored_vocabulary
from eyas.models.hidden_states import FINAL_NORM_OUTPUT
from eyas.train.block import fixed_sizes, mask_token_id
from eyas.train.config import LossConfig, LossType, TrainConfig, check_warm_start
from eyas.train.draft_vocabulary import BY_COVERAGE
from eyas.train.features import TargetStates, TargetWeights, additive_document_mask, head_sizes
from eyas.train.losses import AGREES, CHANCE, row_losses, total_weight, weighted_mean, weighted_sum
from eyas.train.start import Samples, low_rank, root_mean_square, solve, unit_rows
from eyas.train.trainee import Metrics, Trainee
from eyas.train.windows import Batch

# Keys and values of every step, [N, L - 1, J, d] each.
Seen = list[tuple[Tensor, Tensor]]


class EagleTrainer(Trainee):
    """An EAGLE head with its fuser, and the loss. EAGLE-1 has no fuser: it is fed final states.

    Args:
        lm_head: the target's, float32 [V, C].
        loss_ids: tokens over which EAGLE-1 is compared with the target; the other heads compare what they can draft.
    """

    def __init__(self, parts: EagleParts, lm_head: Tensor, config: LossConfig, loss_ids: Tensor) -> None:
        head, fuser = parts.head, parts.fuser
        super().__init__(config, lm_head[loss_ids if fuser is None else head.draft_ids])
        self.head, self.fuser = head.requires_grad_(True), fuser
        self._own_embedding = parts.own_embedding
        head.embedding.requires_grad_(False)
        if fuser is None:
            head.lm_head.requires_grad_(False)
        else:
            fuser.requires_grad_(True)
        self.register_buffer("input_scales", torch.ones(len(self.aux_hidden_state_layers) * lm_head.shape[1]))
        self.input_scales: Tensor

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.head.config.aux_hidden_state_layers if self.fuser else (FINAL_NORM_OUTPUT,)

    def forward(self, batch: Batch, states: TargetStates, seed: int, loss_type: LossType) -> Metrics:
        """Return the loss and figures of a batch. seed: of the noise on EAGLE-1's features."""
        tokens, positions, documents = batch.tokens[:, 1:], batch.positions[:, :-1], batch.documents
        aux = states.aux[:, :-1].float()
        if self.fuser is None and self.config.noise:
            aux = aux + 2 * self.config.noise * (batch.random(seed, *aux.shape[1:]) - 0.5)
        aux = aux / self.input_scales
        features = aux if self.fuser is None else self.fuser(aux.flatten(0, 1)).view(*tokens.shape, -1)
        valid = F.pad(batch.loss_mask, (0, 1))[:, 2:] & (F.pad(documents, (0, 1), value=-1)[:, 2:] == documents[:, :-1])
        attended = _AttentionOverSteps(documents[:, :-1], positions, len(self.head.layers))
        steps = []
        for _ in range(self.config.ttt_steps if self.fuser else 1):
            steps.append(self._run(features, tokens, positions, attended))
            features = F.pad(steps[-1][:, :-1], (0, 0, 1, 0))
        shares = [self.config.step_decay**step for step in range(len(steps))]
        supervised = [(valid & (positions >= step)).float() for step in range(len(steps))]
        weights = [share * own / total_weight(own) for share, own in zip(shares, supervised, strict=True)]
        total, found = self._losses(torch.stack(steps, 2), states.final[:, 1:], torch.stack(weights, 2), loss_type)
        metrics, weight = Metrics(), sum(shares)
        agreed, tau = torch.ones_like(valid, dtype=torch.float32), torch.ones((), device=tokens.device)
        for step, (own_losses, own) in enumerate(zip(found.unbind(2), supervised, strict=True)):
            agreed = (F.pad(agreed[:, :-1], (1, 0)) if step else agreed) * own_losses[..., AGREES]
            tau = tau + (agreed * own).sum() / own.sum().clamp(min=1)
            metrics |= {f"agreement_{step + 1}": weighted_mean(own_losses[..., AGREES], own)}
        metrics["chance_1"] = weighted_mean(found[:, :, 0, CHANCE], valid.float())
        if self.fuser is None and self.config.feature_weight:
            distances = F.smooth_l1_loss(steps[0], states.final[:, 1:].float(), reduction="none").mean(-1)
            distance = weighted_mean(distances, valid.float())
            metrics["feature_loss"] = distance.detach()
            total = total + self.config.feature_weight * distance
        return {
            "loss": total / weight,
            "draft_loss": (total / weight).detach(),
            **metrics,
            "tau_chain": tau,
        }

    def _run(self, features: Tensor, tokens: Tensor, positions: Tensor, attended: _AttentionOverSteps) -> Tensor:
        """Return states [N, L - 1, H] of a step."""
        attended.begin()
        flat = self.head.run(features.flatten(0, 1), tokens.flatten(), positions.flatten(), attended)
        return flat.view(*tokens.shape, -1)

    def _losses(self, rows: Tensor, final: Tensor, weights: Tensor, loss_type: LossType) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the losses of states [N, L - 1, S, H] of S steps, and what `row_losses` finds of them,
        [N, L - 1, S, 5]. weights [N, L - 1, S].

        All steps of a row have the same teacher, that of the target's final states [N, L - 1, H].
        """

        def losses(rows: Tensor, final: Tensor) -> Tensor:
            # EAGLE-1's output layer is the target's, which is not trained.
            logits = F.linear(rows, self.teacher) if self.fuser is None else self.head.raw_logits(rows)
            return row_losses(logits, self.teacher_logits(final)[:, None], loss_type)

        return weighted_sum(losses, (rows, final), weights, self.head, len(self.teacher))

    @torch.no_grad()
    def start(self, samples: Samples) -> None:
        """Start as the linear prediction of the next state from the features and the next token.

        EAGLE-1's fc holds it whole, and its layers add nothing yet, as later layers of EAGLE-3. In EAGLE-3 the fuser has the
        part of the states, which reaches the output as the residual. The part of the token takes the way of attention, as
        does the correction of the residual in later steps of the training-time test, where it is the prediction of the step
        before.
        """
        embedded = self.head.embedding[samples.tokens]
        if self.fuser is not None and self.fuser.norms is not None:
            # The norms take the scales, which cannot go through them into fc.
            normed = self.fuser.normed(samples.aux)[samples.documents >= 0]
            self.fuser.norms.copy_((1 / root_mean_square(normed)).view_as(self.fuser.norms))
        else:
            self.input_scales.copy_(samples.input_scales)
        for layer in map(self.head.layer, range(len(self.head.layers))):
            layer.down.weight.zero_()
            layer.out.weight.zero_()
        if self.head.fc is not None:
            (token, feature), final = samples.pairs([(embedded, 1), (samples.final / self.input_scales, 0)], 1)
            found = solve([token, feature], final)
            self.head.fc.weight.copy_(torch.cat(found.weights, -1))
            self.head.fc.bias.copy_(found.bias)
            return
        assert self.fuser is not None
        assert self.head.norm is not None
        aux = self.fuser.normed(samples.aux / self.input_scales)
        scales = samples.scales
        embedded = unit_rows(embedded)
        reads = [(embedded, 1), (aux, 0), (embedded, 2), (samples.final / scales, 1)]
        (token, states, second, state), later = samples.pairs(reads, 2)
        found = solve([token, states], state)
        self.fuser.weight.copy_(found.weights[1])
        # The last norm makes rows as long as predictions are. The output layer has the scales, as its inputs are even then.
        self.head.norm.fill_(float(found.predictions.square().mean().sqrt()))
        self.head.lm_head.weight.mul_(scales)
        # Inputs, residuals and outputs of the first two steps.
        feature = states @ found.weights[1].T
        predicted = found.predictions
        rows = [torch.cat([token, second]), unit_rows(torch.cat([feature, predicted]))]
        both = solve(rows, torch.cat([state - feature, later / scales - predicted]))
        c = self.head.config
        self._let_attention_map(*low_rank(torch.cat(both.weights, -1), torch.cat(rows, -1), c.num_kv_heads * c.head_dim))

    def _let_attention_map(self, outer: Tensor, inner: Tensor) -> None:
        """Let each row see itself in the first layer, whose values and output layer then multiply to a map, as `low_rank`
        returns it.

        Queries that equal keys do that, in half of the heads. Keys are of the tokens alone, as states resemble each other.
        """
        layer = self.head.layer(0)
        c = self.head.config
        width, own = c.head_dim, c.hidden
        kv, groups = c.num_kv_heads * width, c.num_heads // c.num_kv_heads
        query, key, value = torch.split(layer.qkv.weight, [c.num_heads * width, kv, kv])
        key[:, own:] = 0
        key[:, :own] *= (key.shape[1] / own) ** 0.5
        value.zero_()
        value[: len(inner)] = inner
        seeing = range(max(1, groups // 2))  # of each group of heads that share keys
        queries, outputs = query.view(c.num_kv_heads, groups, width, -1), layer.out.weight.view(own, -1, groups, width)
        padded = F.pad(outer, (0, kv - outer.shape[1])).view(own, -1, width)
        for head in seeing:
            queries[:, head] = key.view(c.num_kv_heads, width, -1)
            outputs[:, :, head] = padded / len(seeing)

    def write(self, folder: Path) -> None:
        """Write the head in SafeAILab's layout."""
        tensors = eagle_tensors(self.head, self.fuser, self._own_embedding)
        tensors["fc.weight"][:, -len(self.input_scales) :] /= self.input_scales.cpu()
        write_head(folder, self.head.config, tensors)


class _AttentionOverSteps:
    """Attention of the rows of all steps so far, for each layer.

    A row of step s attends to its ancestors: rows 0..i - s of step 0, and row i - (s - j) of each later step j.

    Args:
        documents, positions: see `Ancestry`.
    """

    def __init__(self, documents: Tensor, positions: Tensor, num_layers: int) -> None:
        self._ancestry = Ancestry.of(documents, positions)
        self._seen: list[Seen] = [[] for _ in range(num_layers)]
        self._step = -1

    def begin(self) -> None:
        """Start the next step."""
        self._step += 1

    def __call__(self, layer: int, rows: Projected) -> Tensor:
        """Return the attention output [R, heads, d]."""
        shape, seen, step = self._ancestry.documents.shape, self._seen[layer], self._step
        query, key, value = (x.view(*shape, *x.shape[1:]) for x in (rows.query, rows.key, rows.value))
        seen.append((key, value))
        q = query.view(*shape, key.shape[2], -1, key.shape[3]) * key.shape[3] ** -0.5
        behind = [(_shift(k, step - j), _shift(v, step - j)) for j, (k, v) in enumerate(seen) if j]
        return attend_ancestors(q, seen[0], behind, self._ancestry).flatten(2, 3).flatten(0, 1)


@dataclass(frozen=True)
class Ancestry:
    """Ancestry of the rows of EAGLE-3's training-time test.

    Attributes:
        documents, positions [N, L - 1]: rows see those of their own document, in which they have these positions.
        mask: 0 where a row sees another of step 0, else minus infinity, [N, 1, L - 1, L - 1]; None for single documents.
    """

    documents: Tensor
    positions: Tensor
    mask: Tensor | None

    @classmethod
    def of(cls, documents: Tensor, positions: Tensor) -> Ancestry:
        is_packed = bool((documents > 0).any())
        return cls(documents, positions, additive_document_mask(documents) if is_packed else None)


def attend_ancestors(query: Tensor, first: tuple[Tensor, Tensor], behind: Seen, ancestry: Ancestry) -> Tensor:
    """Return the attention [N, L - 1, J, G, d] of the rows of step s, in memory that grows with the rows, but for the
    ancestry's mask.

    Each later step adds one score to a row. It takes the slot of a key: key m of step 0 moves to slot m + s, and slot j of a
    document gets a unit vector that meets the score of step j + 1 beside the query, and marks its weight beside the values.
    So all steps have the usual causal mask. Rows with fewer than s others before them, which no loss reads, are wrong.

        step 2    slot     0     1     2    3    4
                  key      e0    e1    k0   k1   k2     row 4 sees all, row 2 its own scores and k0

    Args:
        query: scaled, [N, L - 1, J, G, d].
        first: keys and values of step 0, [N, L - 1, J, d].
        behind: of each later step those that the rows see, in the rows' places.
    """
    step, width, groups = len(behind), query.shape[-1], query.shape[3]
    padding = (0, -(width + step) % 8)  # GPU kernels with a mask that keep no scores need multiples of 8
    marks = F.pad(F.one_hot(ancestry.positions.clamp(max=step), step + 1)[:, :, None, :step], padding).to(query.dtype)
    is_mark = (ancestry.positions < step)[..., None, None]
    marked = (torch.cat([_shift(x, step).masked_fill(is_mark, 0), marks.expand(*x.shape[:3], -1)], -1) for x in first)
    own = [torch.einsum("bljgd,bljd->bljg", query, k)[..., None].to(query.dtype) for k, _ in behind]
    q = F.pad(torch.cat([query, *own], -1), padding).flatten(2, 3).transpose(1, 2)
    k, v = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in marked)
    mask = ancestry.mask
    found = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=1.0)
    found = found.transpose(1, 2).view(*query.shape[:4], -1)
    out = found[..., :width]
    for j, (_, value) in enumerate(behind):
        out = out + found[..., width + j, None] * value[..., None, :]
    return out


def _shift(x: Tensor, rows: int) -> Tensor:
    return F.pad(x[:, : x.shape[1] - rows], (0, 0, 0, 0, rows, 0)) if rows else x


@dataclass(frozen=True)
class EagleParts:
    """Parts from which a head is trained.

    Attributes:
        fuser: None for EAGLE-1.
        mask_hidden [1, 1, m * C]: of P-EAGLE's rows.
        own_embedding: whether the head's embedding differs from the target's, so that it must be written.
    """

    head: EagleHead
    fuser: LinearFuser | None
    mask_hidden: Tensor | None
    own_embedding: bool


def new_eagle_trainer(config: TrainConfig, target: TargetWeights, draft_ids: Tensor) -> EagleTrainer:
    """Return a head with random weights, or with those of config.draft_model; its vocabulary may grow. Raises
    CheckpointError.
    """
    return EagleTrainer(make_eagle_parts(config, target, draft_ids), target.lm_head, config.loss, draft_ids)


def make_eagle_parts(config: TrainConfig, target: TargetWeights, draft_ids: Tensor) -> EagleParts:
    """Return the parts of a head of config.method; see `new_eagle_trainer`. Raises CheckpointError."""
    if not config.draft_model:
        c = _head_config(config, target, len(draft_ids))
        tensors = _random_tensors(c, target, draft_ids)
    else:
        stored = Checkpoint(config.draft_model)
        old = read_head_config(stored, target.config, _kind(config))
        check_warm_start(config, fixed_sizes(old) | {"mask_token_id": old.mask_token_id})
        method = "eagle3.1" if (old.input_norms, old.wiring.output) == ("each", "normed") else "eagle3"
        if old.kind == "eagle3" and config.method != method:
            raise ConfigError(f"{config.draft_model} is a head of the method {method}; name that")
        found = {canonical_name(name, old.kind): tensor.float() for name, tensor in stored.tensors().items()}
        if config.head.draft_vocab_size == BY_COVERAGE:
            draft_ids = draft_ids_of(found, old.draft_vocab_size)
        depth = config.loss.num_depths if old.kind == "peagle" else 0
        own = {"draft_vocab_size": len(draft_ids), "wiring": _rewired(old, config), "depth": depth}
        c = EagleHeadConfig(**{**vars(old), **own})
        tensors = _random_tensors(c, target, draft_ids) | _widened(found, target, draft_ids)
    length = get_setting(int, target.config, "max_position_embeddings", target.folder)
    embedding = tensors.pop("embed_tokens.weight", target.embedding)
    lm_head = tensors.pop("lm_head.weight", target.lm_head)
    is_own = embedding is not target.embedding and not torch.equal(embedding, target.embedding)
    head = EagleHead(c, tensors, embedding.clone(), lm_head, length)
    fuser = None if c.kind == "eagle" else make_fuser(c, tensors)
    return EagleParts(head, fuser, tensors.get("mask_hidden"), is_own)


def _rewired(old: EagleHeadConfig, config: TrainConfig) -> HeadWiring:
    """Return the wiring of a head to start from; the settings may name other layers, as many as it reads."""
    layers = tuple(layer + 1 for layer in config.head.target_layer_ids) or old.aux_hidden_state_layers
    if len(layers) != (count := len(old.aux_hidden_state_layers)):
        raise ConfigError(
            f"head.target_layer_ids names {len(layers)} layers, but the head in {config.draft_model} reads {count}; name as "
            "many, or leave the setting out"
        )
    return HeadWiring(layers, old.wiring.norm_before_residual, old.wiring.output)


def _widened(found: Mapping[str, Tensor], target: TargetWeights, draft_ids: Tensor) -> dict[str, Tensor]:
    """Return the tensors of another head; rows of lm_head that it lacks are the target's."""
    kept = {name: tensor for name, tensor in found.items() if name not in ("d2t", "t2d")}
    if "lm_head.weight" in found:
        rows = target.lm_head.clone()
        rows[draft_ids_of(found, len(found["lm_head.weight"]))] = found["lm_head.weight"]
        kept["lm_head.weight"] = rows[draft_ids]
    return kept


def _kind(config: TrainConfig) -> Kind:
    return "eagle" if config.method == "eagle1" else "peagle" if config.method == "peagle" else "eagle3"


def _head_config(config: TrainConfig, target: TargetWeights, draft_vocab_size: int) -> EagleHeadConfig:
    h, t, kind = config.head, target.config, _kind(config)
    is_first, is_parallel = kind == "eagle", kind == "peagle"
    layers = target.num_layers
    inputs = tuple(layer + 1 for layer in h.target_layer_ids) or (min(2, layers - 1), layers // 2, layers)
    normed = config.method == "eagle3.1"
    output: Output = "bare" if is_first else "normed" if normed else "state"
    return EagleHeadConfig(
        **head_sizes(h, target, 4 if is_parallel else 1, target.vocab_size if is_first else draft_vocab_size),
        kind=kind,
        wiring=HeadWiring((FINAL_NORM_OUTPUT,) if is_first else inputs, output=output),
        input_norms="each" if normed else "none",
        fc_bias=is_first,
        mask_token_id=mask_token_id(config, t) if is_parallel else None,
        depth=config.loss.num_depths if is_parallel else 0,
    )


def _random_tensors(c: EagleHeadConfig, target: TargetWeights, draft_ids: Tensor) -> dict[str, Tensor]:
    """Return the weights of a new head under their published names; its lm_head starts as the target's."""
    optional = c.optional_tensors - {"norm.weight"}
    tensors = {}
    for name, shape in tensor_shapes(c).items():
        if name in optional or name in ("d2t", "t2d", "lm_head.weight"):
            continue
        is_norm = len(shape) == 1 and "bias" not in name
        tensors[name] = torch.ones(shape) if is_norm else torch.zeros(shape)
        if len(shape) > 1:
            tensors[name] = torch.randn(shape) / math.sqrt(shape[-1])
    if c.kind != "eagle":
        tensors["lm_head.weight"] = target.lm_head[draft_ids].clone()
        if len(draft_ids) < c.vocab_size:
            tensors |= stored_vocabulary(draft_ids, c.vocab_size)
    return tensors


def eagle_tensors(head: EagleHead, fuser: LinearFuser | None, has_embedding: bool) -> dict[str, Tensor]:
    """Return the tensors of a head under their published names, on the CPU: projections apart again that the module has
    fused.

    has_embedding: whether the embedding is the head's own.
    """
    c = head.config
    tensors: dict[str, Tensor] = {"embed_tokens.weight": head.embedding} if has_embedding else {}
    for number, layer in enumerate(head.layers):
        assert isinstance(layer, DraftLayer)
        tensors |= {layer_prefix(c, number) + name: tensor for name, tensor in _layer_tensors(c, layer).items()}
    if head.norm is not None:
        tensors["norm.weight"] = head.norm
    if head.fc is not None:
        tensors["fc.weight"], tensors["fc.bias"] = head.fc.weight, head.fc.bias
    if fuser is not None:
        tensors |= {"fc.weight": fuser.weight, "lm_head.weight": head.lm_head.weight}
        tensors |= {"fc.bias": fuser.bias} if fuser.bias is not None else {}
        names = ["input_norm.weight"] if c.input_norms == "joint" else [f"fc_norm.{i}.weight" for i in range(9)]
        tensors |= dict(zip(names, fuser.norms, strict=False)) if fuser.norms is not None else {}
        if c.draft_vocab_size < c.vocab_size:
            tensors |= stored_vocabulary(head.draft_ids, c.vocab_size)
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _layer_tensors(c: EagleHeadConfig, layer: DraftLayer) -> dict[str, Tensor]:
    sizes = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
    tensors: dict[str, Tensor] = {}
    for part, fused in (("weight", layer.qkv.weight), ("bias", layer.qkv.bias)):
        if fused is not None:
            names = (f"self_attn.{p}_proj.{part}" for p in "qkv")
            tensors |= zip(names, torch.split(fused, sizes), strict=True)
    gate, up = layer.gate_up.weight.chunk(2)
    tensors |= {"self_attn.o_proj.weight": layer.out.weight, "mlp.down_proj.weight": layer.down.weight}
    tensors |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    tensors["post_attention_layernorm.weight"] = layer.post_norm
    norms = {"input_layernorm.weight": layer.input_norm, "hidden_norm.weight": layer.hidden_norm}
    return tensors | {name: norm for name, norm in norms.items() if norm is not None}
