"""Finds the softness s of the perturbed draft law while serving: trees and what became of them in, a scale out.

At a node whose children have perturbed log-scores a (log q/T plus the noise), the target's sample follows roughly
softmax(a / s), and every visited node tells how likely its sample was under each s of a grid. s depends on the temperature.
Legend: S sessions, P candidates, R expanded nodes, K values of s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.config import EagleConfig
from eyas.drafters.base import DraftContext
from eyas.drafters.expand import Candidates
from eyas.models.inputs import Ints
from eyas.models.tensors import download

Reals = npt.NDArray[np.float64]

GRID = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.4)
START = GRID.index(1.0)
# Looking at every tree would cost K passes over the draft vocabulary each time.
ROUNDS_PER_LOOK = 4
# Visited nodes that count: the older fade away, and fewer than the least say nothing yet.
MEMORY = 4000.0
LEAST = 100.0
TINY = 1e-9
NUM_BANDS = 11


class Measured(Protocol):
    """A ranker that has measured its laws."""

    @property
    def normalisers(self) -> Sequence[Tensor]:
        """Of each level logsumexp(a / s) for every s of the grid, [S, R, K]; empty where nothing was measured."""
        ...


class NoiseScale(Protocol):
    """The s in use. Told of every commit and of every set of candidates; it may look at them or not."""

    def value(self, temperature: float) -> float:
        """s for the next trees of a session."""
        ...

    @property
    def grid(self) -> tuple[float, ...]:
        """Values of s for which the next trees' laws are to be measured; none most of the time."""
        ...

    def watch(self, contexts: Sequence[DraftContext], candidates: Candidates, ranker: Measured, ids: Tensor) -> None:
        """Remember what was guessed. ids maps draft vocabulary ids to the target's."""
        ...

    def note(self, context: DraftContext, laws: Laws) -> None:
        """Remember the same of one session."""
        ...

    def skip(self) -> None:
        """A round in which nothing was measured, or all of it noted."""
        ...

    def learn(self, contexts: Sequence[DraftContext]) -> None:
        """Compare what was guessed with what was committed."""
        ...

    def forget(self, sessions: Sequence[str]) -> None:
        """Sessions that have ended."""
        ...


def noise_scale(config: EagleConfig) -> NoiseScale:
    """The configured s, or one that is found while serving where it is 0."""
    return FixedScale(config.noise_scale) if config.noise_scale or not config.shared_noise else CalibratedScale()


@dataclass(frozen=True)
class FixedScale:
    """A constant."""

    scale: float
    grid: tuple[float, ...] = ()

    def value(self, temperature: float) -> float:
        return self.scale

    def watch(self, contexts: Sequence[DraftContext], candidates: Candidates, ranker: Measured, ids: Tensor) -> None:
        pass

    def note(self, context: DraftContext, laws: Laws) -> None:
        pass

    def skip(self) -> None:
        pass

    def learn(self, contexts: Sequence[DraftContext]) -> None:
        pass

    def forget(self, sessions: Sequence[str]) -> None:
        pass


@dataclass(frozen=True)
class Laws:
    """The candidates of one session. tokens: the target's ids; scores: cumulative; both [P].

    groups: candidate number of each expanded node, the root's 0 first, in the order of their children [R]. starts: where
    the children of each begin, and P [R + 1]. normalisers: [R, K], as `Measured` has them.
    """

    starts: Ints
    tokens: Ints
    scores: Reals
    groups: Ints
    normalisers: Reals

    def log_likelihoods(self, samples: Sequence[int], scale: int) -> Iterator[Reals]:
        """For each expanded node that the samples lead through: log-probability [K] of what the target drew there, which is
        one of the node's children or none of them; nothing for none of them where they are the whole law. scale: place in
        the grid of the s that made the scores."""
        group, score = 0, 0.0
        for token in samples:
            children = slice(int(self.starts[group]), int(self.starts[group + 1]))
            law, grid = self.normalisers[group], np.array(GRID)
            perturbed = GRID[scale] * (self.scores[children] - score + law[scale])
            log_probs = perturbed[:, None] / grid - law
            places = np.flatnonzero((self.tokens[children] == token) & np.isfinite(perturbed))
            if not len(places):
                rest = 1 - np.exp(log_probs).sum(0)
                if rest.max() > TINY:
                    yield np.log(np.clip(rest, TINY, 1))
                return
            place = children.start + int(places[0])
            yield log_probs[places[0]]
            following = np.flatnonzero(self.groups == place + 1)
            if not len(following):
                return
            group, score = int(following[0]), float(self.scores[place])


@dataclass(frozen=True)
class Guesses:
    """What a session was offered. band: of its temperature; committed: its length; scale: as `log_likelihoods` has it."""

    band: int
    committed: int
    laws: Laws
    scale: int


@dataclass
class Estimate:
    """Faded sums of log-likelihoods under every s of the grid, and of how many nodes."""

    sums: Reals = field(default_factory=lambda: np.zeros(len(GRID)))
    count: float = 0.0

    def add(self, log_likelihoods: Reals) -> None:
        """One node more."""
        self.sums = (1 - 1 / MEMORY) * self.sums + log_likelihoods
        self.count = (1 - 1 / MEMORY) * self.count + 1

    @property
    def place(self) -> int:
        """Of the likeliest s."""
        return int(self.sums.argmax()) if self.count >= LEAST else START


class CalibratedScale:
    """The s of the grid under which the target's samples were likeliest, older ones counting less; by temperature."""

    def __init__(self) -> None:
        self._bands = [Estimate() for _ in range(NUM_BANDS)]
        self._round = 0
        self._guesses: dict[str, Guesses] = {}

    def value(self, temperature: float) -> float:
        return GRID[self._bands[band(temperature)].place]

    @property
    def grid(self) -> tuple[float, ...]:
        return GRID if self._round % ROUNDS_PER_LOOK == 0 else ()

    def watch(self, contexts: Sequence[DraftContext], candidates: Candidates, ranker: Measured, ids: Tensor) -> None:
        self.skip()
        if not ranker.normalisers:
            return
        measured = torch.cat(list(ranker.normalisers), 1)
        laws, tokens, parents, scores = download(measured, ids[candidates.tokens], candidates.parents, candidates.scores)
        starts = np.flatnonzero(np.diff(parents[0], prepend=-1))
        bounds = np.append(starts, parents.shape[1])
        laws = laws[:, _law_rows(starts, candidates.ends, [law.shape[1] for law in ranker.normalisers])]
        for row, context in enumerate(contexts):
            if context.noise.temperature > 0:
                groups = parents[row, starts].astype(np.int64)
                self.note(context, Laws(bounds, tokens[row].astype(np.int64), scores[row], groups, laws[row]))

    def note(self, context: DraftContext, laws: Laws) -> None:
        of = band(context.noise.temperature)
        self._guesses[context.session] = Guesses(of, context.committed, laws, self._bands[of].place)

    def skip(self) -> None:
        self._round += 1

    def learn(self, contexts: Sequence[DraftContext]) -> None:
        for context in contexts:
            guesses = self._guesses.pop(context.session, None)
            if guesses is not None and guesses.committed == context.base:
                for log_likelihoods in guesses.laws.log_likelihoods(context.tokens, guesses.scale):
                    self._bands[guesses.band].add(log_likelihoods)

    def forget(self, sessions: Sequence[str]) -> None:
        for session in sessions:
            self._guesses.pop(session, None)


def _law_rows(starts: Ints, ends: Sequence[int], sizes: Sequence[int]) -> Ints:
    """Row of each expanded node's law, where level i has sizes[i] rows: one for each of its nodes, or one for all."""
    levels = np.searchsorted(np.array(ends), starts, side="right")
    within = np.arange(len(starts)) - np.searchsorted(levels, levels)
    rows: Ints = np.cumsum([0, *sizes])[levels] + np.minimum(within, np.array(sizes)[levels] - 1)
    return rows


def band(temperature: float) -> int:
    """Temperatures that share an estimate: 0.2 apart, all that are high together."""
    return min(round(5 * temperature), NUM_BANDS - 1)
