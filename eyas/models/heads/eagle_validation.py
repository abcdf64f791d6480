"""What a target makes of a text: a target in, windows of tokens with its tapped states and likeliest tokens out.

Legend: T tokens of a window, C target hidden, K likeliest tokens of a law.

Tries out how a head is to be read: target and head in, how often each wiring guesses what the target says out.

A head that is read wrongly loads and runs, and is hardly ever right. Legend: T tokens of a window, C target hidden,
R rows, H draft hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from math import sqrt
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.errors import CheckpointError
from eyas.models.attention import masked_attention
from eyas.models.checkpoint import resolve
from eyas.models.heads.eagle import EagleHead, Projected
from eyas.models.heads.eagle_config import HeadWiring, Kind
from eyas.models.heads.eagle_loader import load_fuser, load_head
from eyas.models.heads.features import FINAL_NORM_OUTPUT, FeatureFuser, final_state_fuser
from eyas.models.inputs import Segment
from eyas.models.target import TargetModel
from eyas.sampling.sampler import rank
from eyas.tokenizer import load_tokenizer

WINDOW = 256
MOST_WINDOWS = 6
# Without a text: so many sequences of so many tokens, which the target draws itself.
NUM_DRAWN, DRAWN = 12, 96
# Tokens of each of the target's laws that are kept.
NUM_LIKELIEST = 64


@dataclass(frozen=True)
class Window:
    """tokens [T]; likeliest, probs [T, K]: what the target says comes behind each; taps: states [T, C] by tap."""

    tokens: Tensor
    likeliest: Tensor
    probs: Tensor
    hidden_states: Mapping[int, Tensor]

    @property
    def tops(self) -> Tensor:
        """The likeliest token behind each, [T]."""
        return self.likeliest[:, 0]


class _Pools(NamedTuple):
    keys: list[Tensor]
    values: list[Tensor]


def observe(target: TargetModel, folder: str, taps: Sequence[int]) -> list[Window]:
    """One or two thousand tokens: of a fixed text if the target in `folder` has a tokenizer, else drawn by the target.
    The target's own taps are left as they were."""
    rows = _text(folder, target) if (resolve(folder) / "tokenizer.json").is_file() else _drawn(target)
    before = target.aux_hidden_state_layers
    target.set_aux_hidden_state_layers(taps)
    try:
        return [_observe(target, tokens, taps) for tokens in rows]
    finally:
        target.set_aux_hidden_state_layers(before)


def _text(folder: str, target: TargetModel) -> list[list[int]]:
    text = files("eyas.models.heads").joinpath("eagle_validation.txt").read_text(encoding="utf-8")
    ids = list(load_tokenizer(folder).encode(text))
    size = min(WINDOW, target.max_model_len)
    return [ids[at : at + size] for at in range(0, min(len(ids), MOST_WINDOWS * size), size) if len(ids) - at > size // 2]


def _observe(target: TargetModel, tokens: list[int], taps: Sequence[int]) -> Window:
    pools, places, none = _pools(target, len(tokens)), np.arange(len(tokens)), np.zeros(0, dtype=np.int64)
    ids = np.array(tokens, dtype=np.int64)
    out = target.forward(target.pack([Segment(ids, places, places, none, None, places)]), pools)
    assert out.aux_hidden_states is not None
    states = out.aux_hidden_states.chunk(len(taps), dim=-1)
    likeliest = rank(torch.softmax(out.logits, -1), min(NUM_LIKELIEST, target.vocab_size))
    return Window(
        torch.from_numpy(ids).to(target.device), likeliest.ids, likeliest.scores, dict(zip(taps, states, strict=True))
    )


def _drawn(target: TargetModel) -> list[list[int]]:
    """Sequences that the target draws at temperature 1, each from a first token of its own; seeded."""
    generator = torch.Generator().manual_seed(0)
    length = min(DRAWN, target.max_model_len)
    pools = _pools(target, NUM_DRAWN * length)
    rows = torch.randint(target.vocab_size, (NUM_DRAWN, 1), generator=generator).tolist()
    slots = np.arange(NUM_DRAWN * length).reshape(NUM_DRAWN, length)
    here = np.zeros(1, dtype=np.int64)
    for at in range(length - 1):
        segments = [
            Segment(np.array(row[at:]), here + at, slots[number, at : at + 1], slots[number, :at], None, here)
            for number, row in enumerate(rows)
        ]
        law = torch.softmax(target.forward(target.pack(segments), pools).logits, -1).cpu()
        for row, token in zip(rows, torch.multinomial(law, 1, generator=generator).flatten().tolist(), strict=True):
            row.append(token)
    return rows


def _pools(target: TargetModel, count: int) -> _Pools:
    def layers() -> list[Tensor]:
        return [torch.zeros(count, *shape, dtype=target.dtype, device=target.device) for shape in target.kv_shapes]

    return _Pools(layers(), layers())


# How many standard errors are no coincidence.
CLEARLY = 3.0


@dataclass(frozen=True)
class WiringScore:
    """A wiring, and how well it did on first guesses and on second ones, which go on from the head's own state.

    first, second: share of guesses whose likeliest token was the target's. overlaps: of each guess, how much its law and
    the target's have in common, which is how often a draw from the one would be accepted by the other.
    """

    wiring: HeadWiring
    first: float
    second: float
    overlaps: Tensor

    @property
    def accepted(self) -> float:
        """Mean chance that a drawn guess is accepted."""
        return float(self.overlaps.mean())

    def clearly_beats(self, other: WiringScore) -> bool:
        """Whether it did better on the same guesses by more than coincidence."""
        gain = self.overlaps - other.overlaps
        return float(gain.mean()) > CLEARLY * float(gain.std()) / sqrt(len(gain))


@dataclass(frozen=True)
class WiringReport:
    """All trials, that of the config's own wiring first. chance: how often the target's commonest token would be right."""

    trials: tuple[WiringScore, ...]
    chance: float
    num_tokens: int

    @property
    def best(self) -> WiringScore:
        """The stated wiring, unless another is clearly better."""
        stated = self.trials[0]
        top = max(self.trials, key=lambda trial: trial.accepted)
        return top if top.clearly_beats(stated) else stated

    @property
    def least(self) -> float:
        """What first guesses must exceed: chance, and what may be coincidence."""
        return self.chance + CLEARLY * sqrt(self.chance * (1 - self.chance) / self.num_tokens)

    @property
    def refused(self) -> bool:
        return self.best.first <= self.least

    def __str__(self) -> str:
        best, stated = self.best, self.trials[0]
        said = "as its config says" if best is stated else f"not as its config says ({_words(stated.wiring)})"
        return (
            f"draft head read {said}: {_words(best.wiring)}; right on {100 * best.first:.1f} % of {self.num_tokens} first "
            f"guesses and {100 * best.second:.1f} % of second ones (chance {100 * self.chance:.1f} %)"
        )

    def require(self, head: str) -> None:
        """Raises CheckpointError with the numbers when no wiring is clearly better than chance."""
        if self.refused:
            tried = "; ".join(f"{100 * trial.first:.1f} % with {_words(trial.wiring)}" for trial in self.trials)
            raise CheckpointError(
                f"{head} hardly ever guesses what this target says, read in any way: {tried}; chance is "
                f"{100 * self.chance:.1f} %. It was trained for another target, or is of a kind that Eyas does not know; to "
                "load it all the same, set validate_head to never"
            )


@torch.inference_mode()
def validate_head(
    target: TargetModel, head: str, target_folder: str, dtype: str, device: str, kind: Kind = "eagle3"
) -> WiringReport:
    """Try the plausible wirings of a head on one or two thousand tokens. The target's taps are left as they were.

    EAGLE-1 heads have one wiring. Raises CheckpointError for what does not load.
    """
    loaded = load_head(head, target_folder, dtype, device, kind)
    fuser = (
        load_fuser(head, target_folder, dtype, device) if kind == "eagle3" else final_state_fuser(loaded.config.hidden)
    ).to(target.dtype)
    stated = loaded.config.wiring
    layers = int(target.config.num_hidden_layers)
    wirings = _wirings(stated, layers) if kind == "eagle3" else [stated]
    windows = observe(target, target_folder, sorted({tap for wiring in wirings for tap in wiring.aux_hidden_state_layers}))
    trials = [_try(loaded, fuser, wiring, windows) for wiring in wirings]
    best = max(trials, key=lambda trial: trial.accepted).wiring
    if kind == "eagle3" and loaded.norm is not None:
        trials += [_try(loaded, fuser, wiring, windows) for wiring in _outputs(best)]
    tops = torch.cat([window.tops[1:] for window in windows])
    return WiringReport(tuple(trials), float(tops.bincount().max()) / len(tops), len(tops))


def _wirings(stated: HeadWiring, layers: int) -> list[HeadWiring]:
    """Taps where they are said to be, one layer earlier and one later, with the residual on either side of its norm."""
    shifted = [tuple(min(max(tap + by, 0), layers) for tap in stated.aux_hidden_state_layers) for by in (0, -1, 1)]
    return [
        replace(stated, aux_hidden_state_layers=taps, norm_before_residual=normed)
        for normed in (stated.norm_before_residual, not stated.norm_before_residual)
        for taps in dict.fromkeys(shifted)
    ]


def _outputs(wiring: HeadWiring) -> list[HeadWiring]:
    outputs = ("state", "normed", "bare")
    return [replace(wiring, output=output) for output in outputs if output != wiring.output]  # type: ignore[arg-type]


def _try(head: EagleHead, fuser: FeatureFuser, wiring: HeadWiring, windows: Sequence[Window]) -> WiringScore:
    stated, head.config = head.config, replace(head.config, wiring=wiring)
    try:
        guesses = [_guess(head, fuser, wiring, window) for window in windows]
    finally:
        head.config = stated
    first, second = (torch.cat([window[step] for window in guesses]) for step in (0, 1))
    return WiringScore(wiring, float(first[:, 0].mean()), float(second[:, 0].mean()), torch.cat([first, second])[:, 1])


def _guess(head: EagleHead, fuser: FeatureFuser, wiring: HeadWiring, window: Window) -> tuple[Tensor, Tensor]:
    """Of first guesses [T - 1, 2] and of second ones [T - 2, 2]: whether the likeliest token was the target's, and the
    overlap. Tokens between are the text's; the second guess goes on from the head's own state of the first."""
    taps = torch.cat([window.hidden_states[tap] for tap in wiring.aux_hidden_state_layers], -1)
    features = fuser(taps).to(head.embedding.dtype)[:-1]
    tokens, places = window.tokens[1:], torch.arange(len(features), device=features.device)
    memory = _Memory(head, places[:, None] >= places)
    states = head.run(features, tokens, places, memory.attend)
    first = _score(head, states, window, 1)
    states = head.run(states[:-1], tokens[1:], places[1:], memory.attend_alone)
    return first, _score(head, states, window, 2)


def _score(head: EagleHead, states: Tensor, window: Window, offset: int) -> Tensor:
    """Of guesses that the target's laws from `offset` on judge, [R, 2]: whether the likeliest was the target's, overlap."""
    law = torch.softmax(head.logits(states), -1)
    right = head.draft_ids[law.argmax(-1)] == window.tops[offset:]
    places = torch.full((head.config.vocab_size,), law.shape[1], device=law.device)
    places[head.draft_ids] = torch.arange(law.shape[1], device=law.device)
    drafted = F.pad(law, (0, 1)).gather(1, places[window.likeliest[offset:]])
    return torch.stack([right.float(), torch.minimum(drafted, window.probs[offset:]).sum(-1)], 1)


class _Memory:
    """Keys and values of the true pairs of a window, for the pairs that follow each of them."""

    def __init__(self, head: EagleHead, causal: Tensor) -> None:
        self._config = head.config
        self._causal = causal
        self._rows: dict[int, Projected] = {}

    def attend(self, layer: int, rows: Projected) -> Tensor:
        self._rows[layer] = rows
        return self._attention(rows.query, rows.key, rows.value, self._causal)

    def attend_alone(self, layer: int, rows: Projected) -> Tensor:
        """Row i sees the true pairs up to i, and itself."""
        true, count = self._rows[layer], len(rows.query)
        own = torch.eye(count, dtype=torch.bool, device=rows.query.device)
        keys, values = torch.cat([true.key, rows.key]), torch.cat([true.value, rows.value])
        return self._attention(rows.query, keys, values, torch.cat([self._causal[:count], own], 1))

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        c, groups = self._config, self._config.num_heads // self._config.num_kv_heads
        q = query.view(-1, c.num_kv_heads, groups, c.head_dim).permute(1, 2, 0, 3).reshape(1, c.num_kv_heads, -1, c.head_dim)
        bias = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, float("-inf"))
        out = masked_attention(
            q, key.transpose(0, 1)[None], value.transpose(0, 1)[None], bias.repeat(groups, 1), c.head_dim**-0.5
        )
        return out[0].view(c.num_heads, -1, c.head_dim).transpose(0, 1)


def _words(wiring: HeadWiring) -> str:
    residual = "normed" if wiring.norm_before_residual else "plain"
    if wiring.aux_hidden_state_layers == (FINAL_NORM_OUTPUT,):
        return "the target's final state"
    return f"inputs of layers {', '.join(map(str, wiring.aux_hidden_state_layers))}, {residual} residual, output {wiring.output}"
