"""Finds the softness s of the perturbed draft law while serving: trees and what became of them in, a scale out.

At a node whose children have perturbed log-scores a (log q/T plus the noise), the target's sample follows roughly
softmax(a / s), and every visited node tells how likely its sample was under each s of a grid. s depends on the temperature.
Legend: S sessions, P candidates, R expanded nodes, K values of s.

How a drafter scores children: draft logits in, log-scores out, perturbed by the noise of the target's own draw.

The target emits argmin e/p, with e known from (seed, position, token). A drafter that knows e ranks children by
log softmax((log q / T - log e) / s), the law of its own draw under that noise, instead of log q. It changes what is
proposed, never what is emitted. Legend: S sessions, L levels, R rows per session, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.config import DraftingConfig
from eyas.drafters.base import DraftContext
from eyas.drafters.tree_growth import Candidates
from eyas.sampling.noise import exponential_noise_at, signed
from eyas.sampling.sampler import Filters, filtered_probs
from eyas.tensors import Ints, download, upload

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


def noise_scale(config: DraftingConfig) -> NoiseScale:
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
        self._guesses[context.session] = Guesses(of, context.committed_length, laws, self._bands[of].place)

    def skip(self) -> None:
        self._round += 1

    def learn(self, contexts: Sequence[DraftContext]) -> None:
        for context in contexts:
            guesses = self._guesses.pop(context.session, None)
            if guesses is not None and guesses.committed == context.start_position:
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


# "plain": no session shares its noise; "filtered": some of those that do filter their law too.
Kind = Literal["plain", "noised", "filtered"]
Law = Callable[[Tensor, Filters], Tensor]

NUM_NOISE_WORDS = 8


class Scorer(Protocol):
    """Scores children."""

    def scores(self, logits: Tensor, level: int) -> Tensor:
        """Scores of the children of nodes at `level` (0 is the root); float32 [S, R, D] in and out."""
        ...


@dataclass(frozen=True)
class NoiseRows:
    """What a session's scores depend on besides logits, all [S]: int64 seeds, committed and top_k, float32 the others.

    known: 1 where noise is shared, else 0; such rows have no filters, and temperature and scale 1.
    """

    seeds: Tensor
    committed: Tensor
    known: Tensor
    top_k: Tensor
    temperature: Tensor
    scale: Tensor
    top_p: Tensor
    min_p: Tensor


def noise_words(contexts: Sequence[DraftContext], config: DraftingConfig, scale: NoiseScale, rows: int) -> Ints:
    """NoiseRows as [NUM_NOISE_WORDS, rows], the last four as bits of float64; rows behind the contexts share no noise."""
    ints, reals = np.zeros((4, rows), dtype=np.int64), np.ones((4, rows))
    reals[3] = 0.0
    for row, context in enumerate(contexts):
        key = context.noise
        if config.shared_noise and key.temperature > 0:
            ints[:, row] = signed(key.seed), context.committed_length, 1, key.top_k
            reals[:, row] = key.temperature, scale.value(key.temperature), key.top_p, key.min_p
    return np.concatenate([ints, reals.view(np.int64)])


def noise_rows(words: Tensor) -> NoiseRows:
    """What `noise_words` wrote, from wherever it was copied to."""
    seeds, committed, known, top_k = words[:4]
    temperature, scale, top_p, min_p = words[4:].contiguous().view(torch.float64).float()
    return NoiseRows(seeds, committed, known.float(), top_k, temperature, scale, top_p, min_p)


def kind_of(words: Ints) -> Kind:
    """What `noise_words` asks of a scorer."""
    top_p, min_p = words[6:].view(np.float64)
    if not words[2].any():
        return "plain"
    return "filtered" if ((words[3] > 0) | (top_p < 1) | (min_p > 0)).any() else "noised"


def _filtering(words: Ints) -> list[int]:
    """Sessions whose top-k or top-p does something."""
    return np.flatnonzero((words[3] > 0) | (words[6].view(np.float64) < 1)).tolist()


def law_where(filtering: Sequence[int], num_sessions: int, device: torch.device) -> Law:
    """`filtered_probs` of the rows of sessions, as many of each, where only the `filtering` ones have top-k or top-p."""
    sessions = upload(filtering, device)

    def law(logits: Tensor, filters: Filters) -> Tensor:
        each = len(logits) // num_sessions
        rows = sessions[:, None] * each + torch.arange(each, device=device)
        return filtered_probs(logits, filters, rows.flatten())

    return law


class PlainScorer:
    """Plain log-softmax."""

    def scores(self, logits: Tensor, level: int) -> Tensor:
        """See Scorer."""
        return torch.log_softmax(logits, dim=-1)


class PerturbedScorer:
    """Scores under the noise of the target's own draw. law: filters logits; None where no session has filters.

    grid: values of s for which the laws are measured as well, in `normalisers`. Its sizes depend on nothing that a tensor
    holds, and it copies nothing to the device.
    """

    def __init__(self, rows: NoiseRows, levels: int, draft_ids: Tensor, law: Law | None, grid: Sequence[float] = ()) -> None:
        self._rows, self._law, self._grid = rows, law, grid
        self.normalisers: list[Tensor] = []
        positions = rows.committed[:, None] + torch.arange(levels, device=draft_ids.device)
        seeds = rows.seeds[:, None].expand_as(positions)
        noise = exponential_noise_at(seeds.flatten(), positions.flatten(), draft_ids)
        self._gumbel = noise.log_().neg_().view(*positions.shape, -1) * rows.known[:, None, None]

    def scores(self, logits: Tensor, level: int) -> Tensor:
        """See Scorer."""
        rows = self._rows
        if self._law is None:
            law = logits / rows.temperature[:, None, None]
        else:
            columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
            filters = Filters(*(column.repeat_interleave(logits.shape[1]) for column in columns))
            law = self._law(logits.flatten(0, 1), filters).view_as(logits).log()
        perturbed = law + self._gumbel[:, None, level]
        if self._grid:
            self.normalisers.append(torch.stack([torch.logsumexp(perturbed / s, dim=-1) for s in self._grid], dim=-1))
        return torch.log_softmax(perturbed / rows.scale[:, None, None], dim=-1)


class Ranker:
    """Scores of one propose call. At temperature 0, or without shared noise, plain log-softmax."""

    def __init__(
        self,
        contexts: Sequence[DraftContext],
        config: DraftingConfig,
        levels: int,
        draft_ids: Tensor,
        scale: NoiseScale | None = None,
        grid: Sequence[float] = (),
    ) -> None:
        """scale: the s in use, where it is found while serving; else the configured one, or 1 where that is 0. grid: values
        of s for which the laws are measured as well, in `normalisers`."""
        words = noise_words(contexts, config, scale or FixedScale(config.noise_scale or 1.0), len(contexts))
        kind = kind_of(words)
        self.normalisers: Sequence[Tensor] = ()
        if kind == "plain":
            self._scorer: Scorer = PlainScorer()
            return
        device = draft_ids.device
        law = law_where(_filtering(words), len(contexts), device) if kind == "filtered" else None
        perturbed = PerturbedScorer(noise_rows(upload(words, device)), levels, draft_ids, law, grid)
        self._scorer, self.normalisers = perturbed, perturbed.normalisers

    def scores(self, logits: Tensor, level: int) -> Tensor:
        """Log-scores of the children of nodes at `level` (0 is the root); float32 [S, R, D] in and out."""
        return self._scorer.scores(logits, level)
