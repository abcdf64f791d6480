"""Finds the wiring with which an EAGLE or block head works, by comparing its guesses with what the target predicts.

A head with the wrong wiring loads and runs, but hardly ever guesses right. Legend: T tokens of a window, C target hidden,
K likeliest tokens of a distribution, R rows, H draft hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from math import sqrt
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.arrays import Ints
from eyas.cache.kv_cache import KVCache
from eyas.errors import CheckpointError
from eyas.kernels.by_device import rank
from eyas.models.checkpoint import CheckpointSource, open_checkpoint
from eyas.models.heads.block import BlockHead, load_block_head
from eyas.models.heads.eagle import EagleHead, load_fuser, load_head
from eyas.models.heads.eagle_config import HeadWiring, Kind, Output
from eyas.models.heads.fusers import FeatureFuser
from eyas.models.heads.mtp import MtpHead, load_mtp_head
from eyas.models.hidden_states import FINAL_NORM_OUTPUT
from eyas.models.inputs import Segment, pack
from eyas.models.target import TargetModel
from eyas.text.tokenizer import load_tokenizer

WINDOW = 256
MAX_WINDOWS = 6
# Without a text: sequences that the target samples, and tokens of each.
NUM_SAMPLED, SAMPLED_LENGTH = 12, 96
# Tokens of each of the target's distributions that are kept.
NUM_LIKELIEST = 64
# Tokens between the anchors of blocks.
BLOCK_STEP = 4
# Standard errors that a difference must exceed to count.
SIGNIFICANT = 3.0

# The first and the second guesses on a window.
Guesses: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class WiringScore:
    """Score of a wiring on first guesses, and on second guesses, which continue from the head's own state.

    Attributes:
        first, second: share of guesses whose likeliest token was the target's.
        overlaps: for each guess, the overlap of the head's distribution and the target's, which is the chance that a sample
            from one is accepted by the other.
    """

    wiring: HeadWiring
    first: float
    second: float
    overlaps: Tensor

    @property
    def accepted(self) -> float:
        """Mean chance that a sampled guess is accepted."""
        return float(self.overlaps.mean())

    def clearly_beats(self, other: WiringScore) -> bool:
        """Return whether it did significantly better on the same guesses."""
        # Paired on the same guesses, so that hard and easy tokens do not add to the deviation.
        gain = self.overlaps - other.overlaps
        return float(gain.mean()) > SIGNIFICANT * float(gain.std()) / sqrt(len(gain))


@dataclass(frozen=True)
class WiringReport:
    """All scores, that of the config's own wiring first. Those that it beat on the first window are of that window only.

    Attributes:
        chance: how often the target's commonest token would be right.
        num_tokens: first guesses.
        is_block: of a block head.
    """

    scores: tuple[WiringScore, ...]
    chance: float
    num_tokens: int
    is_block: bool = False

    @property
    def best(self) -> WiringScore:
        """The wiring that the config states, unless another is clearly better."""
        stated, top = self.scores[0], _top(self.scores)
        return top if top.clearly_beats(stated) else stated

    @property
    def config_is_right(self) -> bool:
        """Return whether the wiring that the config states is the best."""
        return self.best is self.scores[0]

    @property
    def failed(self) -> bool:
        """Return whether even the best wiring guesses no better than chance."""
        # The binomial deviation of guessing at `chance` over num_tokens guesses.
        return self.best.first <= self.chance + SIGNIFICANT * sqrt(self.chance * (1 - self.chance) / self.num_tokens)

    def __str__(self) -> str:
        best, stated = self.best, self.scores[0]
        source = (
            "as its config says" if self.config_is_right else f"not as its config says ({self._described(stated.wiring)})"
        )
        return (
            f"draft head read {source}: {self._described(best.wiring)}; right on {100 * best.first:.1f} % of "
            f"{self.num_tokens} first guesses and {100 * best.second:.1f} % of second ones "
            f"(chance {100 * self.chance:.1f} %)"
        )

    def require(self, head: str) -> None:
        """Raises CheckpointError with the numbers if no wiring is clearly better than chance."""
        if self.failed:
            tried = "; ".join(f"{100 * score.first:.1f} % with {self._described(score.wiring)}" for score in self.scores)
            raise CheckpointError(
                f"{head} hardly ever guesses what this target predicts, with any wiring: {tried}; chance is "
                f"{100 * self.chance:.1f} %. It was trained for another target, or is of a kind that Eyas does not know. To "
                "load it all the same, set validate_head to never"
            )

    def _described(self, wiring: HeadWiring) -> str:
        if wiring.aux_hidden_state_layers == (FINAL_NORM_OUTPUT,):
            return "the target's final state" + (f", output {wiring.output}" if wiring.output != "bare" else "")
        layers = f"inputs of layers {', '.join(map(str, wiring.aux_hidden_state_layers))}"
        if self.is_block:
            return f"{layers}, the anchor's row predicts {'the next token' if wiring.sample_from_anchor else 'nothing'}"
        residual = "normed" if wiring.norm_before_residual else "plain"
        return f"{layers}, {residual} residual, output {wiring.output}"


@torch.inference_mode()
def validate_head(
    target: TargetModel,
    head: CheckpointSource,
    target_checkpoint: CheckpointSource,
    dtype: str,
    device: str,
    kind: Kind = "eagle3",
) -> WiringReport:
    """Try the plausible wirings of a head on one or two thousand tokens.

    EAGLE-1 heads have one wiring. The target's aux hidden state layers stay as they were.
    Raises CheckpointError for what does not load.
    """
    head, target_checkpoint = open_checkpoint(head), open_checkpoint(target_checkpoint)
    loaded = load_head(head, target_checkpoint, dtype, device, kind)
    stated, outputs = loaded.config.wiring, list[Output]()
    if kind != "eagle":
        fuser: FeatureFuser = load_fuser(head, target_checkpoint, dtype, device, kind=kind)
        wirings = _plausible_wirings(stated, int(target.config.num_hidden_layers))
        if loaded.norm is not None:
            outputs = ["state", "normed", "bare"] if kind == "eagle3" else ["state", "bare"]
    else:
        fuser, wirings = FeatureFuser(loaded.config.hidden), [stated]
    return _try_wirings(target, target_checkpoint, wirings, outputs, partial(_guess, loaded, fuser.to(target.dtype)))


@torch.inference_mode()
def validate_mtp_head(
    target: TargetModel, head: CheckpointSource, target_checkpoint: CheckpointSource, dtype: str, device: str
) -> WiringReport:
    """Try the wirings of a module for multi-token prediction: the target's state after its final norm or before it, and
    the module's own state after its norm or before it at the next level. Raises CheckpointError for what does not load.
    """
    loaded = load_mtp_head(head, target_checkpoint, dtype, device)
    stated = loaded.wiring
    num_layers = int(target.config.num_hidden_layers)
    features = [stated.aux_hidden_state_layers, (FINAL_NORM_OUTPUT,), (num_layers,)]
    wirings = [replace(stated, aux_hidden_state_layers=layers) for layers in dict.fromkeys(features)]
    guess = partial(_guess, loaded, FeatureFuser(loaded.config.hidden))
    return _try_wirings(target, target_checkpoint, wirings, ["state", "normed"], guess)


def _try_wirings(
    target: TargetModel,
    target_checkpoint: CheckpointSource,
    wirings: Sequence[HeadWiring],
    outputs: Sequence[Output],
    guess: Callable[[HeadWiring, Window], Guesses],
    block_size: int = 0,
) -> WiringReport:
    """Score wirings, the stated one first, and then the best of them with other outputs.

    Args:
        guess: returns a head's guesses on a window.
        block_size: of a block head, whose blocks lie within longer windows and guess at each of their tokens; 0 for others.
    """
    windows = observe(target, target_checkpoint, sorted({layer for w in wirings for layer in w.aux_hidden_state_layers}))
    windows = [window for window in windows if not block_size or len(window.tokens) > block_size + 1]

    def score(wiring: HeadWiring, windows: Sequence[Window]) -> WiringScore:
        guesses = [guess(wiring, window) for window in windows]
        first, second = (torch.cat([window[step] for window in guesses]) for step in (0, 1))
        return WiringScore(wiring, float(first[:, 0].mean()), float(second[:, 0].mean()), torch.cat([first, second])[:, 1])

    scores = [score(wirings[0], windows)]
    scores += compared(scores[0], wirings[1:], windows, score)
    # The output of the head depends on its wiring, so the best layers are found first, then the best output.
    best = _top(scores)
    others = [replace(best.wiring, output=output) for output in outputs if output != best.wiring.output]
    scores += compared(best, others, windows, score)
    tops = torch.cat([window.tops if block_size else window.tops[1:] for window in windows])
    num_guesses = len(scores[0].overlaps) // 2 if block_size else len(tops)
    return WiringReport(tuple(scores), float(tops.bincount().max()) / len(tops), num_guesses, bool(block_size))


@torch.inference_mode()
def validate_block_head(
    target: TargetModel, head: CheckpointSource, target_checkpoint: CheckpointSource, dtype: str, device: str
) -> WiringReport:
    """Try the plausible wirings of a block head: layers as stated and one to either side, both meanings of the anchor's row.

    Blocks start at every fourth token. Guesses are those of the first two levels, with the text's tokens before them.
    Raises CheckpointError for what does not load.
    """
    loaded = load_block_head(head, target_checkpoint, dtype, device)
    stated = loaded.config.wiring
    wirings = [
        replace(stated, aux_hidden_state_layers=layers, sample_from_anchor=from_anchor)
        for from_anchor in (stated.sample_from_anchor, not stated.sample_from_anchor)
        if from_anchor or loaded.config.block_size > 1
        for layers in _shifted(stated.aux_hidden_state_layers, int(target.config.num_hidden_layers))
    ]
    return _try_wirings(target, target_checkpoint, wirings, (), partial(_guess_blocks, loaded), loaded.config.block_size)


def _top(scores: Sequence[WiringScore]) -> WiringScore:
    """Return the best of those that were tried on as many windows as the first."""
    whole = [score for score in scores if len(score.overlaps) == len(scores[0].overlaps)]
    return max(whole, key=lambda score: score.accepted)


def compared(
    best: WiringScore,
    others: Sequence[HeadWiring],
    windows: Sequence[Window],
    score: Callable[[HeadWiring, Sequence[Window]], WiringScore],
) -> list[WiringScore]:
    """Score the other wirings. Those that `best` clearly beats on the first window are not tried on the others."""
    sample = score(best.wiring, windows[:1]) if others else best
    tried = [score(wiring, windows[:1]) for wiring in others]
    return [one if sample.clearly_beats(one) else score(one.wiring, windows) for one in tried]


def _guess_blocks(head: BlockHead, wiring: HeadWiring, window: Window) -> Guesses:
    """Return the first and second guesses of the window's blocks, [A, 2] each, see `_guess`; the first twice if a block has
    one.
    """
    head.config = replace(head.config, wiring=wiring)
    c, tokens = head.config, window.tokens[None]
    anchors = torch.arange(1, len(window.tokens) - c.block_size, BLOCK_STEP, device=tokens.device)
    states = torch.cat([window.hidden_states[layer] for layer in c.aux_hidden_state_layers], -1)
    drafted = head(states.to(head.embed_tokens.weight.dtype)[None], tokens, anchors[None])[0, :, :2]
    before = anchors[:, None] + torch.arange(drafted.shape[1], device=anchors.device)
    probs = torch.softmax(head.block_logits(drafted, window.tokens[before]), -1)
    judged = [
        _judge(probs[:, depth], head.draft_ids, c.vocab_size, window, before[:, depth]) for depth in range(probs.shape[1])
    ]
    return judged[0], judged[-1]


def _plausible_wirings(stated: HeadWiring, num_layers: int) -> list[HeadWiring]:
    """Return the stated layers, one layer earlier and one later, each with the residual before and after its norm."""
    return [
        replace(stated, aux_hidden_state_layers=layers, norm_before_residual=normed)
        for normed in (stated.norm_before_residual, not stated.norm_before_residual)
        for layers in _shifted(stated.aux_hidden_state_layers, num_layers)
    ]


def _shifted(layers: tuple[int, ...], num_layers: int) -> list[tuple[int, ...]]:
    """Return the layers as stated, one earlier and one later, each once."""
    shifted = [tuple(min(max(layer + by, 0), num_layers) for layer in layers) for by in (0, -1, 1)]
    return list(dict.fromkeys(shifted))


@dataclass(frozen=True)
class Window:
    """A text with the target's predictions.

    Attributes:
        tokens: [T].
        likeliest, probs: the target's prediction after each, [T, K].
        hidden_states: [T, C] by layer.
    """

    tokens: Tensor
    likeliest: Tensor
    probs: Tensor
    hidden_states: Mapping[int, Tensor]

    @property
    def tops(self) -> Tensor:
        """The likeliest token after each, [T]."""
        return self.likeliest[:, 0]


def observe(target: TargetModel, source: CheckpointSource, layers: Sequence[int]) -> list[Window]:
    """Return one or two thousand tokens with the target's predictions and hidden states.

    The tokens are a fixed text if the target's folder has a tokenizer; otherwise the target samples them.
    """
    stored = open_checkpoint(source)
    rows = _text(stored.path, target) if (stored.folder / "tokenizer.json").is_file() else _sampled(target)
    before = target.aux_hidden_state_layers
    target.set_aux_hidden_state_layers(layers)
    try:
        return [_observe(target, tokens, layers) for tokens in rows]
    finally:
        target.set_aux_hidden_state_layers(before)


def _text(folder: str, target: TargetModel) -> list[list[int]]:
    text = files("eyas.models.heads").joinpath("validation.txt").read_text(encoding="utf-8")
    ids = list(load_tokenizer(folder).encode(text))
    size = min(WINDOW, target.max_model_len)
    return [ids[at : at + size] for at in range(0, min(len(ids), MAX_WINDOWS * size), size) if len(ids) - at > size // 2]


def _sampled(target: TargetModel) -> list[list[int]]:
    """Return the sequences that the target samples at temperature 1, each from a random first token; seeded."""
    generator = torch.Generator().manual_seed(0)
    length = min(SAMPLED_LENGTH, target.max_model_len)
    kv_cache = target.new_kv_cache(NUM_SAMPLED * length)
    rows = torch.randint(target.vocab_size, (NUM_SAMPLED, 1), generator=generator).tolist()
    slots = np.arange(NUM_SAMPLED * length).reshape(NUM_SAMPLED, length)
    first = np.zeros(1, dtype=np.int64)
    for at in range(length - 1):
        segments = [
            Segment(np.array(row[at:]), first + at, slots[number, at : at + 1], slots[number, :at], None, first)
            for number, row in enumerate(rows)
        ]
        probs = torch.softmax(target.forward(target.pack(segments), kv_cache).logits, -1).cpu()
        for row, token in zip(rows, torch.multinomial(probs, 1, generator=generator).flatten().tolist(), strict=True):
            row.append(token)
    return rows


def _observe(target: TargetModel, tokens: list[int], layers: Sequence[int]) -> Window:
    ids, rows, none = np.array(tokens, dtype=np.int64), np.arange(len(tokens)), np.zeros(0, dtype=np.int64)
    segment = Segment(ids, rows, rows, none, None, rows)
    out = target.forward(target.pack([segment]), target.new_kv_cache(len(tokens)))
    assert out.aux_hidden_states is not None
    states = out.aux_hidden_states.chunk(len(layers), dim=-1)
    likeliest = rank(torch.softmax(out.logits, -1), min(NUM_LIKELIEST, target.vocab_size))
    return Window(
        torch.from_numpy(ids).to(target.device), likeliest.ids, likeliest.scores, dict(zip(layers, states, strict=True))
    )


def _guess(head: EagleHead | MtpHead, fuser: FeatureFuser, wiring: HeadWiring, window: Window) -> Guesses:
    """Return the first guesses [T - 1, 2] and second ones [T - 2, 2]: whether the likeliest token was the target's, and the
    overlap.

    The tokens in between are the text's. A second guess continues from the head's own state of the first; that of P-EAGLE is
    made by a mask row.
    """
    head.wiring = wiring
    states = torch.cat([window.hidden_states[layer] for layer in wiring.aux_hidden_state_layers], -1)
    # Pairs are (feature i, token i + 1), as EAGLE was trained: the last feature has no token yet.
    slots = _WindowSlots(head, window.tokens.cpu().numpy())
    states = slots.first(fuser(states).to(head.dtype)[:-1])
    first = _judge_logits(head, head.raw_logits(states), window, 1)
    states = slots.second(states[:-1])
    logits = head.module_logits(1, states) if isinstance(head, MtpHead) and head.num_modules > 1 else head.raw_logits(states)
    return first, _judge_logits(head, logits, window, 2)


def _judge_logits(head: EagleHead | MtpHead, logits: Tensor, window: Window, offset: int) -> Tensor:
    """Compare guesses with the target's predictions from `offset` on, see `_judge`."""
    at = torch.arange(offset, offset + len(logits), device=logits.device)
    return _judge(torch.softmax(logits.float(), -1), head.draft_ids, head.config.vocab_size, window, at)


def _judge(probs: Tensor, draft_ids: Tensor, vocab_size: int, window: Window, at: Tensor) -> Tensor:
    """Compare guesses [R, D] with the target's predictions behind the tokens `at` [R]; float [R, 2].

    Whether the likeliest token is the target's, and the overlap of the distributions.
    """
    right = draft_ids[probs.argmax(-1)] == window.tops[at]
    # columns: of each target token its column in `probs`; the last one, which is padded with 0, for tokens that
    # the head cannot draft.
    columns = torch.full((vocab_size,), probs.shape[1], device=probs.device)
    columns[draft_ids] = torch.arange(probs.shape[1], device=probs.device)
    drafted = F.pad(probs, (0, 1)).gather(1, columns[window.likeliest[at]])
    # Overlap: the sum of min(p, q), which is the chance that rejection sampling accepts a draft from q.
    return torch.stack([right.float(), torch.minimum(drafted, window.probs[at]).sum(-1)], 1)


class _WindowSlots:
    """A window's pairs of feature and token, and the pairs that follow each of them, in slots of a KV cache.

    Args:
        tokens: of the window, [T].
    """

    def __init__(self, head: EagleHead | MtpHead, tokens: Ints) -> None:
        self._head = head
        self._tokens = tokens
        self._rows = np.arange(len(tokens) - 1)
        self._kv = KVCache(2 * len(tokens), head.kv_shapes, 0, head.dtype, head.draft_ids.device)

    def first(self, features: Tensor) -> Tensor:
        """Run the window's pairs, features [T - 1, H]; row i sees those up to i."""
        rows = self._rows
        return self._run(features, [Segment(self._tokens[1:], rows, rows, rows[:0], None, rows)])

    def second(self, states: Tensor) -> Tensor:
        """Run the pairs that follow, behind states [T - 2, H]; row i sees the window's pairs up to i, and itself. Of several
        modules the second runs them, and its rows see one another. P-EAGLE has mask rows instead.
        """
        head, rows, tokens = self._head, self._rows, self._tokens[2:]
        if isinstance(head, MtpHead) and head.num_modules > 1:
            packed = pack([Segment(tokens, rows[:-1], rows[:-1], rows[:0], None, rows[:-1])], states.device)
            return head.run_module(1, states, packed, self._kv)
        if isinstance(head, EagleHead) and head.mask_feature is not None:
            states, tokens = head.mask_feature.expand_as(states), np.full_like(tokens, head.config.mask_token_id)
        one = np.zeros(1, dtype=np.int64)
        segments = [
            Segment(tokens[i : i + 1], one + i + 1, one + len(rows) + i, rows[: i + 1], None, one)
            for i in range(len(states))
        ]
        return self._run(states, segments)

    def _run(self, features: Tensor, segments: Sequence[Segment]) -> Tensor:
        return self._head.run_slots(features, pack(segments, features.device), self._kv)
