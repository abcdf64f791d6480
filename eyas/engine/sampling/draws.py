"""Draws one token per row of logits: logits and noise keys in, token ids out. Knows no sequences.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.models.sampling.keys import filtering, filters_of
from eyas.models.sampling.law import filtered_law, greedy, race
from eyas.models.sampling.noise import exponential_noise
from eyas.models.tensors import upload
from eyas.request import NoiseKey


@dataclass(frozen=True)
class Draw:
    """Who draws a row: the request's noise key and the absolute position of the token being drawn."""

    key: NoiseKey
    position: int


def sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """One token id per row, int64 [N]; logits float32 [N, V]. V where logits are NaN. Does not wait for the device.

    Temperature 0 takes the likeliest token. Above it, argmin noise/law: noise depends on (seed, position, token) alone.
    """
    random = [row for row, draw in enumerate(draws) if draw.key.temperature > 0]
    if random and len(random) == len(draws):
        return _race(logits, draws)
    tokens = greedy(logits)
    if random:
        rows = upload(random, logits.device)
        tokens[rows] = _race(logits[rows], [draws[row] for row in random])
    return tokens


def target_law(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The law float32 [N, V] that each row's token is drawn from, not normalised; every filter has been applied."""
    keys = [draw.key for draw in draws]
    return filtered_law(logits, filters_of(keys, logits.device), upload(filtering(keys), logits.device))


def run_race(law: Tensor, draws: Sequence[Draw]) -> Tensor:
    """One token id per row of a law [N, V], not necessarily normalised; int64 [N]. V where the law holds NaN."""
    streams: dict[tuple[int, int], int] = {}
    rows = [streams.setdefault((d.key.seed, d.position), len(streams)) for d in draws]
    vocabulary = torch.arange(law.shape[-1], device=law.device)
    noise = exponential_noise([seed for seed, _ in streams], [position for _, position in streams], vocabulary)
    return race(noise.index_select(0, upload(rows, law.device)), law)


def _race(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    return run_race(target_law(logits, draws), draws)
