"""Training of Medusa heads (Cai et al. 2024), Hydra heads (Ankner et al. 2024) and small draft models from final states.

Head h at state t learns the target's prediction of token t + 2 + h; Hydra's also reads tokens t + 1 .. t + 1 + h. Output
layers start as the target's, residual blocks as the identity. A draft model learns the target's prediction at each token.
Legend: N windows, L tokens, S states, M heads, H hidden width, D draft vocabulary.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.errors import ConfigError
from eyas.models.checkpoint import check_vocabulary, explained
from eyas.models.heads.hydra import HydraHead, HydraMLP, load_hydra
from eyas.models.heads.layers import write_checkpoint
from eyas.models.heads.medusa import MedusaHead, load_medusa
from eyas.train.config import HEAD_SETTINGS, LossConfig, LossType, TrainConfig, check_warm_start
from eyas.train.features import TargetStates, TargetWeights, load_whole
from eyas.train.losses import (
    AGREES,
    CHANCE,
    next_token_losses,
    row_losses,
    total_weight,
    weighted_mean,
    weighted_sum,
)
from eyas.train.start import Samples, solve
from eyas.train.trainee import Metrics, Trainee
from eyas.train.windows import Batch


class MultiHeadTrainer(Trainee):
    """Medusa or Hydra heads, and their loss: head h has the weight step_decay**h.

    Args:
        lm_head: the target's, float32 [V, H].
    """

    def __init__(self, head: MedusaHead | HydraHead, lm_head: Tensor, config: LossConfig) -> None:
        super().__init__(config, lm_head[head.draft_ids])
        self.head, self._vocab_size = head.requires_grad_(True), len(lm_head)
        if isinstance(head, HydraHead):
            head.embedding.requires_grad_(False)

    def forward(self, batch: Batch, states: TargetStates, seed: int, loss_type: LossType) -> Metrics:
        """Return the loss and figures of a batch; nothing is random."""
        length, count = batch.tokens.shape[1], self.head.num_heads
        metrics, total, tau, accepted = (
            Metrics(),
            torch.zeros((), device=batch.tokens.device),
            torch.ones(()),
            torch.ones(()),
        )
        for number in range(min(count, length - 2)):
            rows = length - 2 - number
            ahead = slice(2 + number, 2 + number + rows)
            valid = batch.loss_mask[:, ahead] & (batch.documents[:, ahead] == batch.documents[:, :rows])
            embedded = [batch.tokens[:, 1 + i : 1 + i + rows] for i in range(number + 1)]
            teacher = states.final[:, 1 + number : 1 + number + rows]
            weights = valid.float()
            own, found = self._losses(number, states.final[:, :rows], torch.stack(embedded, -1), teacher, weights, loss_type)
            total = total + self.config.step_decay**number * own / total_weight(weights)
            metrics[f"agreement_{number + 1}"] = weighted_mean(found[..., AGREES], weights)
            agreed = found[..., AGREES] * weights
            accepted = agreed if number == 0 else accepted[:, :rows] * agreed
            tau = tau + accepted.sum() / weights.sum().clamp(min=1)
            if number == 0:
                metrics["chance_1"] = weighted_mean(found[..., CHANCE], weights)
        loss = total / sum(self.config.step_decay**number for number in range(count))
        return {"loss": loss, "draft_loss": loss.detach(), **metrics, "tau_chain": tau}

    def _losses(
        self, number: int, states: Tensor, tokens: Tensor, final: Tensor, weights: Tensor, loss_type: LossType
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of a head's losses and what `row_losses` finds, [N, S, 5]; states, final [N, S, H], tokens
        [N, S, number + 1], weights [N, S].
        """

        def losses(states: Tensor, tokens: Tensor, final: Tensor) -> Tensor:
            logits = self._logits(number, states.float(), tokens)
            return row_losses(logits, self.teacher_logits(final), loss_type)

        return weighted_sum(losses, (states, tokens, final), weights, self.head, len(self.teacher))

    def _logits(self, number: int, states: Tensor, tokens: Tensor) -> Tensor:
        if isinstance(self.head, HydraHead):
            embedded = F.embedding(tokens, self.head.embedding).flatten(1)
            return self.head.logits(torch.cat([states, embedded], -1), number)
        x = states
        for weight, bias in zip(self.head.weights, self.head.biases, strict=True):
            x = x + F.silu(F.linear(x, weight[number], bias[number, 0]))
        return F.linear(x, self.head.outputs[number if len(self.head.outputs) > 1 else 0])

    @torch.no_grad()
    def start(self, samples: Samples) -> None:
        """Start as linear predictions of later states: in Medusa's output layers, in the first layers of Hydra's heads."""
        embedded = self.head.embedding[samples.tokens] if isinstance(self.head, HydraHead) else samples.final
        for number in range(self.head.num_heads):
            if isinstance(self.head, HydraHead):
                read = [(samples.final, 0), *((embedded, 1 + place) for place in range(number + 1))]
                found = solve(*samples.pairs(read, 1 + number))
                first: Any = self.head.heads[number]
                first.blocks[0].weight.chunk(2)[0].copy_(torch.cat(found.weights, -1))
                first.blocks[0].bias.chunk(2)[0].copy_(found.bias)
            elif len(self.head.outputs) == self.head.num_heads:
                found = solve(*samples.pairs([(samples.final, 0)], 1 + number))
                self.head.outputs[number].copy_(self.head.outputs[number] @ found.weights[0])

    def write(self, folder: Path) -> None:
        """Write Medusa heads in vLLM's layout, Hydra's in their authors', with a map of the draft vocabulary."""
        if not isinstance(self.head, HydraHead):
            write_medusa(folder, self.head, self._vocab_size)
            return
        _write(folder, self.head, self._vocab_size, *_hydra_checkpoint(self.head))


def write_medusa(folder: Path, head: MedusaHead, vocab_size: int) -> None:
    """Write Medusa heads in vLLM's layout, with an output layer for each head and a map of the draft vocabulary."""
    _write(folder, head, vocab_size, *_medusa_checkpoint(head))


def _medusa_checkpoint(head: MedusaHead) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": head.num_heads,
        "num_hidden_layers": len(head.weights), "medusa_fc_bias": True, "truncated_vocab_size": len(head.draft_ids),
    }  # fmt: skip
    tensors = {f"lm_heads.{number}.weight": rows for number, rows in enumerate(head.outputs.expand(head.num_heads, -1, -1))}
    for layer, (weight, bias) in enumerate(zip(head.weights, head.biases, strict=True)):
        for number in range(head.num_heads):
            name = f"blocks.{number}.layers.{layer}"
            tensors |= {f"{name}.weight": weight[number], f"{name}.bias": bias[number, 0]}
    return config, tensors


def _hydra_checkpoint(head: HydraHead) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    num_layers = 1
    for number, mlp in enumerate(head.heads):
        assert isinstance(mlp, HydraMLP)
        num_layers = len(mlp.blocks)
        for layer, block in enumerate(mlp.blocks):
            parts = ("res_connection", "linear") if layer == 0 else ("linear",)
            for part, w, b in zip(parts, block.weight.chunk(len(parts)), block.bias.chunk(len(parts)), strict=True):
                name = f"hydra_mlp.{number}.{layer}.{part}"
                tensors |= {f"{name}.weight": w, f"{name}.bias": b}
        tensors[f"hydra_lm_head.{number}.weight"] = mlp.output.weight
        if mlp.output.bias is not None:
            tensors[f"hydra_lm_head.{number}.bias"] = mlp.output.bias
    config = {
        "model_type": "hydra", "hydra_num_heads": head.num_heads, "hydra_num_layers": num_layers,
        "hydra_head_arch": "mlp", "grounded_heads": True,
    }  # fmt: skip
    return config, tensors


def _write(
    folder: Path, head: MedusaHead | HydraHead, vocab_size: int, config: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Write a checkpoint with the sizes of the target and the map of the draft vocabulary."""
    sizes = {"hidden_size": head.hidden, "vocab_size": vocab_size}
    own = {name: tensor.detach().cpu().clone() for name, tensor in (tensors | {"token_map": head.draft_ids}).items()}
    write_checkpoint(folder, config | sizes, own)


def new_medusa_trainer(config: TrainConfig, target: TargetWeights, draft_ids: Tensor) -> MultiHeadTrainer:
    """Return the heads that copy the target's output layer, or those of config.draft_model. Raises CheckpointError."""
    if config.draft_model:
        medusa = load_medusa(config.draft_model, str(target.folder))
        check_warm_start(config, _fixed(medusa, len(medusa.weights)))
        return MultiHeadTrainer(medusa, target.lm_head, config.loss)
    c, hidden = config.head, target.hidden
    weights = [torch.zeros(c.num_heads, hidden, hidden) for _ in range(c.num_head_layers)]
    biases = [torch.zeros(c.num_heads, 1, hidden) for _ in range(c.num_head_layers)]
    outputs = target.lm_head[draft_ids].expand(c.num_heads, -1, -1).clone()
    return MultiHeadTrainer(MedusaHead(weights, biases, outputs, draft_ids), target.lm_head, config.loss)


def _fixed(head: MedusaHead | HydraHead, num_layers: int) -> dict[str, object]:
    return {"num_heads": head.num_heads, "num_head_layers": num_layers, "draft_vocab_size": len(head.draft_ids)}


def new_hydra_trainer(config: TrainConfig, target: TargetWeights, draft_ids: Tensor) -> MultiHeadTrainer:
    """Return the heads of the kind mlp, grounded, or those of config.draft_model. Raises CheckpointError or ConfigError."""
    if config.draft_model:
        hydra = load_hydra(config.draft_model, str(target.folder))
        if hydra.prefix is not None:
            raise ConfigError(
                f"{config.draft_model} holds Hydra heads of the kind prefix-mlp, whose prefix layer is not trained; start "
                "from heads of the kind mlp, or leave draft_model out"
            )
        one = hydra.heads[0]
        assert isinstance(one, HydraMLP)
        check_warm_start(config, _fixed(hydra, len(one.blocks)))
        return MultiHeadTrainer(hydra, target.lm_head, config.loss)
    c, hidden, heads = config.head, target.hidden, []
    for number in range(c.num_heads):
        width = (number + 2) * hidden
        first = torch.cat([torch.eye(hidden, width), torch.zeros(hidden, width)])
        blocks = [(first, torch.zeros(2 * hidden))]
        blocks += [(torch.zeros(hidden, hidden), torch.zeros(hidden)) for _ in range(1, c.num_head_layers)]
        heads.append(HydraMLP(blocks, target.lm_head[draft_ids].clone(), torch.zeros(len(draft_ids))))
    return MultiHeadTrainer(HydraHead(heads, target.embedding, draft_ids), target.lm_head, config.loss)


class DraftModelTrainer(Trainee):
    """A small causal LM, a Llama or some of the target's own layers, distilled from the target or trained on text.

    Args:
        lm_head: the target's, float32 [V, H].
        loss_ids: tokens over which it is compared with the target, int64 [D].
    """

    def __init__(self, model: Any, lm_head: Tensor, config: LossConfig, loss_ids: Tensor) -> None:
        is_whole = len(loss_ids) == len(lm_head)
        super().__init__(config, lm_head if is_whole else lm_head[loss_ids])
        self.model = model
        self.register_buffer("loss_ids", None if is_whole else loss_ids, persistent=False)
        self.loss_ids: Tensor | None

    def forward(self, batch: Batch, states: TargetStates, seed: int, loss_type: LossType) -> Metrics:
        """Return the loss and figures of a batch; nothing is random."""
        decoder, head = self.model.get_decoder(), self.model.get_output_embeddings()
        # transformers keeps documents apart where positions begin again. A mask would replace the windows of its layers.
        found = decoder(batch.tokens, attention_mask=None, position_ids=batch.positions, use_cache=False).last_hidden_state

        def losses(rows: Tensor, final: Tensor, following: Tensor) -> Tensor:
            if loss_type == "next_token":
                return next_token_losses(head(rows), following)
            logits = head(rows) if self.loss_ids is None else F.linear(rows, head.weight[self.loss_ids])
            return row_losses(logits, self.teacher_logits(final), loss_type)

        rows, weights = (found[:, :-1], states.final[:, :-1], batch.tokens[:, 1:]), batch.loss_mask[:, 1:].float()
        total, table = weighted_sum(losses, rows, weights, head, len(self.teacher))
        loss = total / total_weight(weights)
        agreement = weighted_mean(table[..., AGREES], weights)
        return {"loss": loss, "draft_loss": loss.detach(), "agreement_1": agreement}

    def write(self, folder: Path) -> None:
        """Write the model as transformers does."""
        self.model.save_pretrained(folder)


def new_draft_model_trainer(config: TrainConfig, target: TargetWeights, draft_ids: Tensor) -> DraftModelTrainer:
    """Return config.draft_model, layers of the target, or a random small Llama with the target's vocabulary.

    draft_ids: tokens of the loss. Raises CheckpointError.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if config.draft_model:
        check_vocabulary(config.draft_model, str(target.folder))
        model: Any = AutoModelForCausalLM.from_pretrained(config.draft_model, dtype=torch.float32)
        sizes = HEAD_SETTINGS["draft_model"]
        check_warm_start(config, {key: getattr(model.config, key, None) for key in sizes})
        return DraftModelTrainer(model, target.lm_head, config.loss, draft_ids)
    if config.head.init_layers:
        return DraftModelTrainer(_some_layers(config), target.lm_head, config.loss, draft_ids)
    h, t = config.head, target.config
    hidden, heads = h.hidden_size or target.hidden // 2, h.num_attention_heads or int(t["num_attention_heads"])
    made = LlamaConfig(
        vocab_size=target.vocab_size, hidden_size=hidden, intermediate_size=h.intermediate_size or 2 * hidden,
        num_hidden_layers=h.num_hidden_layers or 2, num_attention_heads=heads,
        num_key_value_heads=h.num_key_value_heads or int(t.get("num_key_value_heads") or heads),
        max_position_embeddings=int(t["max_position_embeddings"]), tie_word_embeddings=h.tie_word_embeddings,
        bos_token_id=t.get("bos_token_id"), eos_token_id=t.get("eos_token_id"), pad_token_id=t.get("pad_token_id"),
    )  # fmt: skip
    return DraftModelTrainer(LlamaForCausalLM(made), target.lm_head, config.loss, draft_ids)


def _some_layers(config: TrainConfig) -> Any:
    """Return a model of the target's family with head.init_layers of its layers, whose embedding and output layer are not
    trained.

    Raises CheckpointError, and ConfigError for layers that the target does not have.
    """
    layers = config.head.init_layers
    whole = load_whole(config.model, torch.float32)
    own = copy.deepcopy(whole.config)
    if len(set(layers)) < len(layers) or not all(0 <= layer < own.num_hidden_layers for layer in layers):
        raise ConfigError(
            f"head.init_layers is {list(layers)}; the target has the layers 0 to {own.num_hidden_layers - 1}, once each"
        )
    for key, value in list(vars(own).items()):
        is_of_layers = isinstance(value, list) and len(value) == own.num_hidden_layers
        if is_of_layers and all(isinstance(kind, str) for kind in value):
            setattr(own, key, [value[layer] for layer in layers])
    own.num_hidden_layers = len(layers)
    places = {f"layers.{layer}.": f"layers.{place}." for place, layer in enumerate(layers)}
    tensors = {}
    for name, tensor in whole.state_dict().items():
        found = re.search(r"\blayers\.\d+\.", name)
        if found is None or found[0] in places:
            tensors[name if found is None else name.replace(found[0], places[found[0]])] = tensor
    with explained(f"the layers {list(layers)} (head.init_layers) of {config.model!r} are no model of their own"):
        model = type(whole)(own)
        model.load_state_dict(tensors)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.requires_grad_(False)
    return model
