"""What a target makes of a text: a target in, windows of tokens with its tapped states and likeliest tokens out.

Legend: T tokens of a window, C target hidden, K likeliest tokens of a law.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.models.checkpoint import resolve
from eyas.models.inputs import Segment
from eyas.models.sampling.law import rank
from eyas.models.target import TargetModel
from eyas.text import load_tokenizer

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
    taps: Mapping[int, Tensor]

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
    before = target.taps
    target.tap(taps)
    try:
        return [_observe(target, tokens, taps) for tokens in rows]
    finally:
        target.tap(before)


def _text(folder: str, target: TargetModel) -> list[list[int]]:
    text = files("eyas.models.heads.eagle").joinpath("probe.txt").read_text(encoding="utf-8")
    ids = list(load_tokenizer(folder).encode(text))
    size = min(WINDOW, target.context_length)
    return [ids[at : at + size] for at in range(0, min(len(ids), MOST_WINDOWS * size), size) if len(ids) - at > size // 2]


def _observe(target: TargetModel, tokens: list[int], taps: Sequence[int]) -> Window:
    pools, places, none = _pools(target, len(tokens)), np.arange(len(tokens)), np.zeros(0, dtype=np.int64)
    ids = np.array(tokens, dtype=np.int64)
    out = target.forward(target.pack([Segment(ids, places, places, none, None, places)]), pools)
    assert out.taps is not None
    states = out.taps.chunk(len(taps), dim=-1)
    likeliest = rank(torch.softmax(out.logits, -1), min(NUM_LIKELIEST, target.vocab_size))
    return Window(
        torch.from_numpy(ids).to(target.device), likeliest.ids, likeliest.scores, dict(zip(taps, states, strict=True))
    )


def _drawn(target: TargetModel) -> list[list[int]]:
    """Sequences that the target draws at temperature 1, each from a first token of its own; seeded."""
    generator = torch.Generator().manual_seed(0)
    length = min(DRAWN, target.context_length)
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
