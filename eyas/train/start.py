"""Least-squares starts: the linear maps from what a head reads to the target's later states, solved before the first step.

A head that begins there has learned of the first windows what thousands of steps from random weights would teach it. Legend:
N windows, L tokens, R rows, m layers that the head reads, C target hidden, H head hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.errors import ConfigError
from eyas.train.features import StateSource
from eyas.train.windows import Windows

# Tokens whose states are read, as far as these states are no more numbers, 2 GiB; solving takes several times as much.
SAMPLE_TOKENS = 2**16
SAMPLE_NUMBERS = 2**29
# A share of each input's mean square.
RIDGE = 1e-2


class Samples(NamedTuple):
    """Windows with the target's states: tokens, documents [N, L], aux [N, L, m * C], final [N, L, C], all float32."""

    tokens: Tensor
    documents: Tensor
    aux: Tensor
    final: Tensor

    @classmethod
    def read(cls, source: StateSource, windows: Windows, device: torch.device) -> Samples:
        """Read the states of evenly spread windows, about SAMPLE_TOKENS tokens, or fewer if states are wide."""
        one = source.states(windows.batch([0]).to(device))
        num_tokens = min(SAMPLE_TOKENS, SAMPLE_NUMBERS // (one.aux.shape[-1] + one.final.shape[-1]))
        count = min(len(windows), -(-num_tokens // windows.max_length))
        batches = [windows.batch([number * len(windows) // count]).to(device) for number in range(count)]
        states = [source.states(batch) for batch in batches]
        return cls(
            torch.cat([batch.tokens for batch in batches]),
            torch.cat([batch.documents for batch in batches]),
            torch.cat([own.aux.float() for own in states]),
            torch.cat([own.final.float() for own in states]),
        )

    @property
    def scales(self) -> Tensor:
        """The root mean square of each number of the final states, [C]."""
        return root_mean_square(self.final[self.documents >= 0])

    @property
    def input_scales(self) -> Tensor:
        """The root mean square of each number that the head reads, [m * C]. Some are a thousand times as large as others."""
        return root_mean_square(self.aux[self.documents >= 0])

    def pairs(self, sequences: Sequence[tuple[Tensor, int]], ahead: int) -> tuple[list[Tensor], Tensor]:
        """Return rows of inputs, [R, *] each, and of the final states `ahead` tokens later, [R, C], all of one document.

        sequences: values of all positions [N, L, *], each with the distance at which a row reads it. Raises ConfigError if
        no document is that long.
        """
        reach = max(ahead, *(distance for _, distance in sequences))
        rows = max(0, self.tokens.shape[1] - reach)
        first = self.documents[:, :rows]
        kept = (first == self.documents[:, self.tokens.shape[1] - rows :]) & (first >= 0)
        if not kept.any():
            raise ConfigError(
                f"no document of the training data has more than {reach} tokens in a window, which the start of the head "
                "needs; set start to random"
            )
        cut = [values[:, distance : distance + rows][kept] for values, distance in (*sequences, (self.final, ahead))]
        return cut[:-1], cut[-1]


class LinearMap(NamedTuple):
    """A map of several inputs to one output: weights [C, *] for each, bias [C], predictions [R, C] of its own rows."""

    weights: tuple[Tensor, ...]
    bias: Tensor
    predictions: Tensor


def solve(inputs: Sequence[Tensor], outputs: Tensor) -> LinearMap:
    """Solve ridge regression of outputs [R, C] on inputs [R, *] side by side."""
    rows = torch.cat([*inputs, torch.ones_like(outputs[:, :1])], -1)
    scales = rows.square().mean(0).sqrt().clamp(min=1e-8)
    scaled = rows / scales  # each input weighs alike, whatever its size
    squares, products = (scaled.T @ other / len(rows) for other in (scaled, outputs))
    squares = squares.double() + RIDGE * torch.eye(len(squares), dtype=torch.float64, device=squares.device)
    whole = torch.linalg.solve(squares, products.double()).float() / scales[:, None]
    *weights, bias = whole.split([*(x.shape[1] for x in inputs), 1])
    return LinearMap(tuple(weight.T for weight in weights), bias[0], rows @ whole)


def low_rank(weight: Tensor, inputs: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return factors [C, rank] and [rank, *] of the map of this rank that is nearest to a weight [C, *] on inputs [R, *]."""
    # Inputs with the covariance S S^T: the best approximation on them is that of weight S.
    values, vectors = torch.linalg.eigh((inputs.T @ inputs / len(inputs)).double())
    spread = values.clamp(min=values.max() * 1e-6).sqrt()
    left, strengths, right = torch.linalg.svd(weight.double() @ vectors * spread, full_matrices=False)
    rank = min(rank, len(strengths))
    half = strengths[:rank].sqrt()
    return (left[:, :rank] * half).float(), (half[:, None] * right[:rank] / spread @ vectors.T).float()


def root_mean_square(rows: Tensor) -> Tensor:
    """Return that of each number of rows [R, C], [C], so that one may divide by it."""
    return rows.square().mean(0).sqrt().clamp(min=1e-6)


def unit_rows(x: Tensor) -> Tensor:
    """Return rows [..., C] of root mean square 1."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
