"""Settings of `eyas train run`: one frozen class per section of its YAML file. Names are those of other trainers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Literal

from eyas.config.loader import above_zero, at_least, one_of, require

TrainMethod = Literal["dspark", "dflash", "peagle", "eagle1", "eagle3", "eagle3.1", "medusa", "hydra", "draft_model"]
BLOCK_METHODS = ("dspark", "dflash")
# Methods whose heads have rows of a reserved token.
MASK_METHODS = (*BLOCK_METHODS, "peagle")
# The drafting method that serves what a training method makes.
SERVED_BY = {"eagle1": "eagle2", "eagle3.1": "eagle3", "draft_model": "sps"}
LossType = Literal["kl", "soft_ce", "ce", "tv", "lk", "lk_hybrid", "next_token"]
ConfidenceTarget = Literal["match", "rejection"]
LossDecay = Literal["exponential", "dpace", "none"]
Scheduler = Literal["cosine", "wsd", "constant"]
Precision = Literal["fp32", "bf16"]
OptimizerName = Literal["adamw", "muon"]
MarkovHeadType = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True)
class TrainDataConfig:
    """What to train on.

    Attributes:
        path: folder that `eyas train prepare` wrote.
        features: folder that `eyas train features` wrote; empty computes features while training.
        max_length: tokens of a window, into which documents are packed.
    """

    path: str = ""
    features: str = ""
    max_length: int = 512

    def __post_init__(self) -> None:
        at_least(8, max_length=self.max_length)


@dataclass(frozen=True)
class HeadConfig:
    """Sizes and wiring of the head; 0 or empty takes the target's size, or the method's usual value.

    Attributes:
        num_hidden_layers: decoder layers. 0: 5 for block heads, 4 for P-EAGLE, 1 for EAGLE, 2 for a draft model.
        hidden_size, tie_word_embeddings: of a draft model; heads have the target's width.
        target_layer_ids: layers of the target whose *outputs* are features; evenly spaced by default.
        block_size: rows of a block; DSpark proposes as many tokens, DFlash one less.
        mask_token_id: token of the rows behind the anchor, which the data must not hold; -1 takes the padding token.
        markov_rank: of DSpark's Markov head.
        draft_vocab_size: most frequent tokens that the head can draft; 0 is the whole vocabulary.
        num_heads: of Medusa and Hydra. num_head_layers: residual blocks of each.
        train_embeddings: P-EAGLE trains an embedding of its own, which starts as the target's.
    """

    num_hidden_layers: int = 0
    hidden_size: int = 0
    tie_word_embeddings: bool = True
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    target_layer_ids: tuple[int, ...] = ()
    block_size: int = 7
    mask_token_id: int = -1
    markov_rank: int = 256
    markov_head_type: MarkovHeadType = "vanilla"
    enable_confidence_head: bool = True
    draft_vocab_size: int = 0
    num_heads: int = 4
    num_head_layers: int = 1
    train_embeddings: bool = False

    def __post_init__(self) -> None:
        at_least(0, num_hidden_layers=self.num_hidden_layers, draft_vocab_size=self.draft_vocab_size)
        at_least(1, num_heads=self.num_heads, num_head_layers=self.num_head_layers)
        at_least(2, block_size=self.block_size)
        at_least(0, markov_rank=self.markov_rank)
        one_of(MarkovHeadType, markov_head_type=self.markov_head_type)


@dataclass(frozen=True)
class LossConfig:
    """What is minimised.

    Attributes:
        loss_type: kl and soft_ce: forward KL to the target's distribution; ce: its likeliest token; tv: half the L1
            distance; lk: minus the log of the acceptance under p/q; lk_hybrid: KL and TV mixed by the acceptance;
            next_token: the next token of the data, for draft models alone. The target does not run then.
        final_loss_type: loss of the last final_loss_ratio of the steps, such as lk_hybrid for sampled chains; empty keeps
            loss_type.
        loss_decay: weights by depth: exponential (loss_decay_gamma), dpace (dpace_alpha) or none.
        loss_decay_gamma: depth k, from 0, has the weight exp(-k / gamma).
        step_decay: step k of EAGLE's training-time test, and head k of Medusa and Hydra, has the weight step_decay**k.
        num_anchors: blocks in each window, drawn afresh for each step.
        ttt_steps: steps of EAGLE-3's training-time test.
        num_depths, down_sample_ratio: of P-EAGLE; depth d keeps max(down_sample_ratio**d, .2) of the rows.
        confidence_weight: of the confidence head's loss, whose inputs are detached.
        confidence_target: what the confidence head learns: the target's probability of the proposed token (match), or the
            chance that a sampled token is accepted (rejection).
        feature_weight: of EAGLE-1's distance to the target's features. noise: uniform noise added to those features.
        chunk_rows: logits rows held at a time; they are recomputed in the backward pass, for P-EAGLE with all layers of its
            rows. 0 holds all.
    """

    loss_type: LossType = "kl"
    final_loss_type: LossType | Literal[""] = ""
    final_loss_ratio: float = 0.3
    loss_decay: LossDecay = "exponential"
    loss_decay_gamma: float = 4.0
    dpace_alpha: float = 0.5
    step_decay: float = 0.8
    num_anchors: int = 96
    ttt_steps: int = 7
    num_depths: int = 8
    down_sample_ratio: float = 0.8
    confidence_weight: float = 0.1
    confidence_target: ConfidenceTarget = "match"
    feature_weight: float = 1.0
    noise: float = 0.1
    chunk_rows: int = 8192

    def __post_init__(self) -> None:
        one_of(LossType, loss_type=self.loss_type)
        if self.final_loss_type:
            one_of(LossType, final_loss_type=self.final_loss_type)
        one_of(LossDecay, loss_decay=self.loss_decay)
        one_of(ConfidenceTarget, confidence_target=self.confidence_target)
        above_zero(loss_decay_gamma=self.loss_decay_gamma, step_decay=self.step_decay)
        at_least(1, num_anchors=self.num_anchors, ttt_steps=self.ttt_steps, num_depths=self.num_depths)
        at_least(0, chunk_rows=self.chunk_rows, confidence_weight=self.confidence_weight, noise=self.noise)
        for name in ("dpace_alpha", "down_sample_ratio", "final_loss_ratio"):
            value = getattr(self, name)
            require(0 < value <= 1, f"{name} is {value}; it must lie in (0, 1]")

    @property
    def needs_target(self) -> bool:
        """Whether the target's states are part of the loss."""
        return {self.loss_type, self.final_loss_type or self.loss_type} != {"next_token"}

    def type_at(self, share: float) -> LossType:
        """The loss after this share of the steps."""
        return self.final_loss_type if self.final_loss_type and share >= 1 - self.final_loss_ratio else self.loss_type


@dataclass(frozen=True)
class OptimizerConfig:
    """How it is minimised.

    Attributes:
        name: adamw, or muon for matrices of the decoder layers and adamw for the rest.
        batch_size: windows of a process in one pass. gradient_accumulation_steps: passes of one optimiser step.
        warmup_ratio, decay_ratio: shares of max_steps in which the rate rises, and in which wsd falls to zero.
        precision: of passes; parameters and optimiser are float32.
    """

    name: OptimizerName = "adamw"
    learning_rate: float = 6e-4
    muon_learning_rate: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lr_scheduler: Scheduler = "wsd"
    warmup_ratio: float = 0.04
    decay_ratio: float = 0.2
    max_steps: int = 2000
    batch_size: int = 8
    gradient_accumulation_steps: int = 1
    precision: Precision = "bf16"

    def __post_init__(self) -> None:
        one_of(OptimizerName, name=self.name)
        one_of(Scheduler, lr_scheduler=self.lr_scheduler)
        one_of(Precision, precision=self.precision)
        above_zero(learning_rate=self.learning_rate, max_grad_norm=self.max_grad_norm)
        at_least(1, batch_size=self.batch_size, max_steps=self.max_steps)
        at_least(1, gradient_accumulation_steps=self.gradient_accumulation_steps)
        for name in ("warmup_ratio", "decay_ratio"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{name} is {value}; it must lie in [0, 1]")


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation by draft trees of the serving engine, on held-out prompts. The best checkpoint is kept by the mean tau.

    Attributes:
        every: steps between two evaluations; 0 evaluates at the end only.
        num_prompts, prompt_tokens, max_tokens: held-out documents, tokens taken of each, tokens generated.
        num_draft_tokens, num_steps, top_k: of the trees. num_steps 0 takes all depths of a one-pass head, else 5.
    """

    every: int = 0
    num_prompts: int = 8
    prompt_tokens: int = 64
    max_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_draft_tokens: int = 24
    num_steps: int = 0
    top_k: int = 8

    def __post_init__(self) -> None:
        at_least(0, every=self.every, num_steps=self.num_steps)
        at_least(1, num_prompts=self.num_prompts, prompt_tokens=self.prompt_tokens, top_k=self.top_k)
        at_least(2, max_tokens=self.max_tokens, num_draft_tokens=self.num_draft_tokens)
        require(bool(self.temperatures), "temperatures is empty; name at least one")


@dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Attributes:
        model: folder or hub id of the target.
        method: what to train.
        out: folder of the run: checkpoints, log, `best` and `last` heads, card and plot.
        draft_model: head to start from; empty starts from random weights.
        save_every, log_every: steps between two checkpoints for resuming, and between two lines of the log.
        threads: CPU threads of torch; 0 keeps its default.
        shard_target: spread the target's weights over all processes (FSDP2).
    """

    model: str
    out: str
    method: TrainMethod = "dspark"
    draft_model: str = ""
    data: TrainDataConfig = field(default_factory=TrainDataConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    seed: int = 0
    device: str = "auto"
    save_every: int = 200
    log_every: int = 10
    threads: int = 0
    shard_target: bool = False

    def __post_init__(self) -> None:
        one_of(TrainMethod, method=self.method)
        require(bool(self.model), "model is empty; name the folder or hub id of the target")
        require(bool(self.out), "out is empty; name the folder of the run")
        at_least(1, save_every=self.save_every, log_every=self.log_every)
        require(
            self.method == "draft_model" or "next_token" not in (self.loss.loss_type, self.loss.final_loss_type),
            f"the loss next_token is for the method draft_model; {self.method} learns what the target says",
        )

    @property
    def fingerprint(self) -> str:
        """Digest of all that decides the course of training; a checkpoint can be resumed only under the same one."""
        settings = {key: value for key, value in asdict(self).items() if key not in RESUMABLE_CHANGES}
        settings["optimizer"].pop("max_steps")
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


# Settings that may change between a checkpoint and its resumption, as may optimizer.max_steps.
RESUMABLE_CHANGES = {"out", "eval", "save_every", "log_every", "threads", "device"}
