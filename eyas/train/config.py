"""Settings of `eyas train run`: one frozen class per section of its YAML file. Names are those of other trainers."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from eyas.config.checks import above_zero, at_least, one_of, require
from eyas.errors import ConfigError

log = logging.getLogger(__name__)

TrainMethod = Literal["dspark", "dflash", "peagle", "eagle1", "eagle3", "eagle3.1", "medusa", "hydra", "draft_model"]
BLOCK_METHODS = ("dspark", "dflash")
# Methods whose heads have rows of a reserved token.
MASK_METHODS = (*BLOCK_METHODS, "peagle")
# Methods that draft every token of the target.
WHOLE_VOCABULARY = ("eagle1", "draft_model")
# The drafting method that serves what a training method makes.
SERVED_BY = {"eagle1": "eagle2", "eagle3.1": "eagle3", "draft_model": "sps"}
LossType = Literal["kl", "ce", "tv", "lk", "lk_hybrid", "next_token"]
ConfidenceTarget = Literal["match", "rejection"]
LossDecay = Literal["exponential", "dpace", "none"]
Scheduler = Literal["cosine", "wsd", "constant"]
Start = Literal["least_squares", "random"]
Precision = Literal["auto", "fp32", "bf16"]
OptimizerName = Literal["adamw", "muon"]
MarkovHeadType = Literal["vanilla", "gated", "rnn"]


_SIZES = {"intermediate_size", "num_attention_heads", "num_key_value_heads"}
_LAYERS = {"num_hidden_layers"} | _SIZES
_FEATURES = _LAYERS | {"head_dim", "target_layer_ids", "draft_vocab_size"}
_DFLASH = _FEATURES | {"block_size", "mask_token_id"}
_OFFSETS = {"num_heads", "num_head_layers", "draft_vocab_size"}
# Settings of `head` that each method reads. Others are refused.
HEAD_SETTINGS: Mapping[TrainMethod, set[str]] = {
    "dspark": _DFLASH | {"markov_rank", "markov_head_type", "enable_confidence_head"},
    "dflash": _DFLASH,
    "peagle": _FEATURES | {"mask_token_id", "train_embeddings"},
    "eagle1": _LAYERS | {"head_dim"},
    "eagle3": _FEATURES,
    "eagle3.1": _FEATURES,
    "medusa": _OFFSETS,
    "hydra": _OFFSETS,
    "draft_model": _LAYERS | {"hidden_size", "tie_word_embeddings", "init_layers"},
}
_ANY_LOSS = {"loss_type", "final_loss_type", "final_loss_ratio"}
_BLOCK_LOSS = _ANY_LOSS | {
    "loss_decay", "loss_decay_gamma", "dpace_alpha", "num_anchors",
}  # fmt: skip
_TTT_LOSS = _ANY_LOSS | {"step_decay", "ttt_steps"}
# The same of `loss`.
LOSS_SETTINGS: Mapping[TrainMethod, set[str]] = {
    "dspark": _BLOCK_LOSS | {"confidence_weight", "confidence_target"},
    "dflash": _BLOCK_LOSS,
    "peagle": _ANY_LOSS | {"num_depths", "down_sample_ratio", "chunk_rows"},
    "eagle1": _ANY_LOSS | {"feature_weight", "noise", "vocab_size"},
    "eagle3": _TTT_LOSS,
    "eagle3.1": _TTT_LOSS,
    "medusa": _ANY_LOSS | {"step_decay"},
    "hydra": _ANY_LOSS | {"step_decay"},
    "draft_model": _ANY_LOSS | {"vocab_size"},
}


@dataclass(frozen=True)
class TrainDataConfig:
    """Data to train on.

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
        hidden_size: width of a draft model, by default half of the target's. Heads have the target's width.
        init_layers: layers of the target, from 0, that a draft model copies, with the target's embedding and output layer,
            which stay as they are. Empty makes a Llama with random weights.
        tie_word_embeddings: whether a draft model's output layer is its embedding.
        intermediate_size: width of the MLPs.
        num_attention_heads, num_key_value_heads, head_dim: of attention.
        target_layer_ids: layers of the target whose *outputs* are features; evenly spaced by default.
        block_size: rows of a block; DSpark proposes as many tokens, DFlash one fewer.
        mask_token_id: token of the rows after the anchor, which the data must not hold; -1 takes the one that `eyas train
            prepare` found.
        markov_rank: rank of DSpark's Markov head; 0 for none.
        markov_head_type: vanilla, gated or rnn.
        enable_confidence_head: give DSpark a head that predicts whether each token will be accepted.
        draft_vocab_size: most frequent tokens that the head can draft; 0 is the whole vocabulary, -1 as many as cover 99.5 %
            of the supervised tokens, or those of the head to start from.
        num_heads: of Medusa and Hydra.
        num_head_layers: residual blocks of each head of Medusa and Hydra.
        train_embeddings: P-EAGLE trains an embedding of its own, which starts as the target's.
    """

    num_hidden_layers: int = 0
    hidden_size: int = 0
    init_layers: tuple[int, ...] = ()
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
    draft_vocab_size: int = -1
    num_heads: int = 4
    num_head_layers: int = 1
    train_embeddings: bool = False

    def __post_init__(self) -> None:
        at_least(0, num_hidden_layers=self.num_hidden_layers)
        at_least(-1, draft_vocab_size=self.draft_vocab_size, mask_token_id=self.mask_token_id)
        at_least(1, num_heads=self.num_heads, num_head_layers=self.num_head_layers)
        at_least(2, block_size=self.block_size)
        at_least(0, markov_rank=self.markov_rank)
        one_of(MarkovHeadType, markov_head_type=self.markov_head_type)


@dataclass(frozen=True)
class LossConfig:
    """Loss that is minimised.

    Attributes:
        loss_type: kl: forward KL to the target's distribution; ce: its likeliest token; tv: half the L1 distance; lk: minus
            the log of the acceptance under p/q; lk_hybrid: KL and TV mixed by the acceptance; next_token: the next token of
            the data, for draft models alone, without the target.
        vocab_size: most frequent tokens over which EAGLE-1 and draft models are compared with the target; 0 takes all, -1 as
            many as cover 99.5 % of the supervised tokens. They still draft all tokens.
        final_loss_type: loss of the last steps, such as lk_hybrid for sampled chains; empty keeps loss_type.
        final_loss_ratio: share of the steps that have it.
        loss_decay: weights by depth: exponential (loss_decay_gamma), dpace (dpace_alpha) or none.
        loss_decay_gamma: depth k, from 0, has the weight exp(-k / gamma).
        dpace_alpha: least chance of acceptance in the weights of D-PACE (2605.18810), where a depth counts as often as it is
            reached.
        step_decay: step k of EAGLE's training-time test, and head k of Medusa and Hydra, has the weight step_decay**k.
        num_anchors: blocks in each window, drawn afresh for each step.
        ttt_steps: steps of EAGLE-3's training-time test.
        num_depths: depths that P-EAGLE trains.
        down_sample_ratio: depth d of P-EAGLE keeps max(down_sample_ratio**d, .2) of the rows.
        confidence_weight: of the confidence head's loss, whose inputs are detached.
        confidence_target: what the confidence head learns: the target's probability of the proposed token (match), or the
            chance that a sampled token is accepted (rejection).
        feature_weight: of EAGLE-1's distance to the target's features.
        noise: uniform noise that is added to those features.
        chunk_rows: rows of later depths that P-EAGLE holds at a time; they are recomputed in the backward pass. 0 holds all.
    """

    loss_type: LossType = "kl"
    vocab_size: int = 0
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
        at_least(-1, vocab_size=self.vocab_size)
        at_least(1, num_anchors=self.num_anchors, ttt_steps=self.ttt_steps, num_depths=self.num_depths)
        at_least(0, chunk_rows=self.chunk_rows, confidence_weight=self.confidence_weight, noise=self.noise)
        for name in ("dpace_alpha", "down_sample_ratio", "final_loss_ratio"):
            value = getattr(self, name)
            require(0 < value <= 1, f"{name} is {value}; it must lie in (0, 1]")

    @property
    def needs_target(self) -> bool:
        """Return whether the target's states are part of the loss."""
        return {self.loss_type, self.final_loss_type or self.loss_type} != {"next_token"}

    def type_at(self, share: float) -> LossType:
        """Return the loss after this share of the steps."""
        return self.final_loss_type if self.final_loss_type and share >= 1 - self.final_loss_ratio else self.loss_type


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimiser that minimises the loss.

    Attributes:
        name: adamw, or muon for matrices of the decoder layers and adamw for the rest.
        learning_rate: highest rate of AdamW.
        muon_learning_rate: highest rate of Muon.
        betas: of AdamW.
        weight_decay: of both.
        max_grad_norm: length to which gradients are clipped.
        lr_scheduler: wsd, cosine or constant; each has a warm-up.
        warmup_ratio: share of max_steps in which the rate rises.
        decay_ratio: share of max_steps in which wsd falls to zero.
        max_steps: steps of the optimiser; it may change when a run continues.
        batch_size: windows of a process in one pass.
        gradient_accumulation_steps: passes of one optimiser step.
        precision: of passes; auto takes bf16 on a GPU and on a CPU with units for it (AMX, avx512_bf16, Arm's BF16), else
            fp32. Parameters and optimiser are float32.
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
    precision: Precision = "auto"

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
        every: steps between two evaluations; 0 evaluates at each tenth of the run, as far as evaluations take less than a
            tenth of the time.
        num_prompts: held-out documents that are continued; 0 switches evaluation off.
        prompt_tokens: tokens that are taken of a document without a prompt.
        max_tokens: tokens that the target writes for each prompt.
        temperatures: at which it writes them; the mean tau counts.
        num_draft_tokens: most nodes of a tree, the root included.
        num_steps: levels of a tree; 0 takes all depths of a one-pass head, else 5.
        top_k: nodes expanded on each level.
        device: of target and head; empty is that of training.
    """

    every: int = 0
    num_prompts: int = 8
    prompt_tokens: int = 64
    max_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_draft_tokens: int = 24
    num_steps: int = 0
    top_k: int = 8
    device: str = ""

    def __post_init__(self) -> None:
        at_least(0, every=self.every, num_steps=self.num_steps, num_prompts=self.num_prompts)
        at_least(1, prompt_tokens=self.prompt_tokens, top_k=self.top_k)
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
        start: of a new head: least_squares lets EAGLE, Medusa, Hydra and DSpark heads begin with linear predictions of the
            target's next states, solved from windows of the data, and brings what they and DFlash read to one scale; random
            keeps random weights.
        seed: decides all that is random.
        save_every: steps between two checkpoints for resuming.
        log_every: steps between two lines of the log.
        device: of the head.
        target_device: of the target whose states it learns from; empty is the head's.
        threads: CPU threads of torch; 0 keeps its default: passes that train have no compiled kernels.
        shard_target: spread the target's weights over all processes (FSDP2).
    """

    model: str
    out: str
    method: TrainMethod = "dspark"
    draft_model: str = ""
    start: Start = "least_squares"
    data: TrainDataConfig = field(default_factory=TrainDataConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    seed: int = 0
    device: str = "auto"
    target_device: str = ""
    save_every: int = 200
    log_every: int = 10
    threads: int = 0
    shard_target: bool = False

    def __post_init__(self) -> None:
        one_of(TrainMethod, method=self.method)
        one_of(Start, start=self.start)
        require(bool(self.model), "model is empty; name the folder or hub id of the target")
        require(bool(self.out), "out is empty; name the folder of the run")
        require(bool(self.data.path), "data.path is empty; name the folder that `eyas train prepare` has written")
        at_least(1, save_every=self.save_every, log_every=self.log_every)
        _check_read("head", self.head, HEAD_SETTINGS, self.method)
        _check_read("loss", self.loss, LOSS_SETTINGS, self.method)
        require(
            not (self.shard_target and self.target_device),
            f"target_device is {self.target_device}, but shard_target spreads the target over the processes' own devices; "
            "name one of them",
        )
        require(
            not self.shard_target or bool(self.eval.device) or not self.eval.num_prompts,
            "shard_target spreads a target that fits on no device, but trees are evaluated with the whole target; name a "
            "device that holds it as eval.device, such as cpu, or set eval.num_prompts to 0",
        )
        require(
            self.method == "draft_model" or "next_token" not in (self.loss.loss_type, self.loss.final_loss_type),
            f"the loss next_token is for the method draft_model; {self.method} learns what the target says",
        )
        require(
            not self.loss.vocab_size or self.loss.needs_target,
            f"loss.vocab_size is {self.loss.vocab_size}, but the loss next_token has a say for every token; leave it out",
        )
        sizes = {key for key in ("num_hidden_layers", "hidden_size", *_SIZES) if getattr(self.head, key)}
        require(
            not self.head.init_layers or not sizes,
            f"head.init_layers takes layers of the target as they are; leave out head.{min(sizes, default='')}",
        )

    @property
    def fingerprint(self) -> str:
        """Digest of all that decides the course of training; a checkpoint can be resumed only under the same one."""
        settings = {key: value for key, value in asdict(self).items() if key not in RESUMABLE_CHANGES}
        settings["optimizer"].pop("max_steps")
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


# Settings that may change between a checkpoint and its resumption, as may optimizer.max_steps.
RESUMABLE_CHANGES = {"out", "eval", "save_every", "log_every", "threads", "device", "target_device"}


def _changed(section: Any) -> dict[str, Any]:
    """Return the settings of a section that differ from their defaults."""
    return {part.name: own for part in fields(section) if (own := getattr(section, part.name)) != part.default}


def _check_read(name: str, section: Any, read: Mapping[TrainMethod, set[str]], method: TrainMethod) -> None:
    for key, value in _changed(section).items():
        methods = [other for other, settings in read.items() if key in settings]
        require(
            key in read[method],
            f"{name}.{key} is {value}, but {method} does not read it; leave it out, it is for {', '.join(methods)}",
        )


def check_warm_start(config: TrainConfig, fixed: Mapping[str, object]) -> None:
    """Raises ConfigError if the settings of `head` want another head than draft_model. fixed: its values, which stay.

    A setting that equals its default may have been left out. So the log names what of the head differs from the defaults.
    """
    changed = _changed(config.head)
    for key, value in changed.items():
        if key in fixed and fixed[key] != value:
            raise ConfigError(
                f"head.{key} is {value}, but the head in {config.draft_model} has {fixed[key]}, which training keeps; leave "
                "the setting out, or leave out draft_model"
            )
    usual = {key: getattr(config.head, key) for key in fixed if key in HEAD_SETTINGS[config.method] and key not in changed}
    kept = [f"head.{key} {fixed[key]}, not {value}" for key, value in usual.items() if value not in (0, -1, (), fixed[key])]
    if kept:
        log.warning(
            "the head in %s keeps its own settings in place of the defaults: %s", config.draft_model, "; ".join(kept)
        )
