"""The scale s of the noise that a drafter shares with the target: a configured value, or one estimated while serving.

At a node whose children have perturbed log-scores a = log q / T + noise, the target's sample follows roughly
softmax(a / s). Every visited node shows how likely its sample was under each s of a grid; the likeliest s is used.
The estimate depends on the temperature. Legend: S sessions, P candidates, R expanded nodes, K values of s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.config import DraftingConfig
from eyas.drafters.base import DraftContext
from eyas.drafters.tree_growth import Candidates, Reals
from eyas.tensors import Ints, download

GRID = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.4)
START = GRID.index(1.0)
# Every fourth round is measured: a measurement costs K passes over the draft vocabulary.
ROUNDS_PER_MEASUREMENT = 4
# The estimate averages over about this many visited nodes; with fewer than MIN_NODES it stays at START.
MEMORY = 4000.0
MIN_NODES = 100.0
TINY = 1e-9
NUM_BUCKETS = 11


@dataclass(frozen=True)
class MeasuredTree:
    """The candidates of one session, and how probable each s makes them.

    tokens: the target's ids [P]. scores: cumulative log-scores [P].
    parents: candidate number of each expanded node [R], the root's 0 first; candidates count from 1.
    starts: the children of expanded node r are candidates starts[r] .. starts[r + 1] - 1, counted from 0 [R + 1].
    log_norms: logsumexp(a / s) over the draft vocabulary at each expanded node, for every s of GRID [R, K].
    """

    starts: Ints
    tokens: Ints
    scores: Reals
    parents: Ints
    log_norms: Reals

    def log_likelihoods(self, samples: Sequence[int], scale_index: int) -> Iterator[Reals]:
        """For each expanded node on the path of the samples: log-probability [K] of the sample under every s.

        A sample is one of the node's children or "none of them"; the latter is skipped where the children cover all
        probability. scale_index: place in GRID of the s behind `scores`.
        """
        row, score, grid = 0, 0.0, np.array(GRID)
        for token in samples:
            children = slice(int(self.starts[row]), int(self.starts[row + 1]))
            log_norms = self.log_norms[row]
            perturbed = GRID[scale_index] * (self.scores[children] - score + log_norms[scale_index])
            log_probs = perturbed[:, None] / grid - log_norms
            found = np.flatnonzero((self.tokens[children] == token) & np.isfinite(perturbed))
            if not len(found):
                rest = 1 - np.exp(log_probs).sum(0)
                if rest.max() > TINY:
                    yield np.log(np.clip(rest, TINY, 1))
                return
            yield log_probs[found[0]]
            child = children.start + int(found[0])
            below = np.flatnonzero(self.parents == child + 1)
            if not len(below):
                return
            row, score = int(below[0]), float(self.scores[child])


@dataclass(frozen=True)
class PendingTree:
    """A measured tree whose samples are not known yet. scale_index: as `MeasuredTree.log_likelihoods` takes it."""

    bucket: int
    committed_length: int
    tree: MeasuredTree
    scale_index: int


@dataclass
class ScaleEstimate:
    """Decayed sums of log-likelihoods under every s of GRID, and the decayed number of nodes."""

    sums: Reals = field(default_factory=lambda: np.zeros(len(GRID)))
    count: float = 0.0

    def add(self, log_likelihoods: npt.NDArray[np.float64]) -> None:
        """Add one node."""
        self.sums = (1 - 1 / MEMORY) * self.sums + log_likelihoods
        self.count = (1 - 1 / MEMORY) * self.count + 1

    @property
    def index(self) -> int:
        """Place in GRID of the likeliest s."""
        return int(self.sums.argmax()) if self.count >= MIN_NODES else START


class NoiseScale:
    """The s in use for each temperature. fixed: a constant s; None estimates it while serving."""

    def __init__(self, fixed: float | None = None) -> None:
        self.fixed = fixed
        self._estimates = [ScaleEstimate() for _ in range(NUM_BUCKETS)]
        self._round = 0
        self._pending: dict[str, PendingTree] = {}

    @classmethod
    def from_config(cls, config: DraftingConfig) -> NoiseScale:
        """The configured s; if it is 0 and noise is shared, an estimated one."""
        return cls(config.noise_scale if config.noise_scale or not config.shared_noise else None)

    def value(self, temperature: float) -> float:
        """s for the next tree of a session."""
        return GRID[self._estimates[bucket_of(temperature)].index] if self.fixed is None else self.fixed

    @property
    def grid(self) -> tuple[float, ...]:
        """Values of s to measure for the next trees; empty in most rounds."""
        return GRID if self.fixed is None and self._round % ROUNDS_PER_MEASUREMENT == 0 else ()

    def count_round(self) -> None:
        """Count a round of trees, measured or not."""
        self._round += 1

    def record_all(
        self, contexts: Sequence[DraftContext], candidates: Candidates, log_norms: Sequence[Tensor], target_ids: Tensor
    ) -> None:
        """Count a round, and record its trees if they were measured.

        log_norms: of each level [S, R or 1, K], 1 if all nodes of the level share one row; empty if nothing was measured.
        target_ids maps draft vocabulary ids to the target's.
        """
        self.count_round()
        if not log_norms:
            return
        norms, tokens, parents, scores = download(
            torch.cat(list(log_norms), 1), target_ids[candidates.tokens], candidates.parents, candidates.scores
        )
        starts = np.flatnonzero(np.diff(parents[0], prepend=-1))
        bounds = np.append(starts, parents.shape[1])
        norms = norms[:, _norm_rows(starts, candidates.ends, [level.shape[1] for level in log_norms])]
        for row, context in enumerate(contexts):
            if context.noise.temperature > 0:
                expanded = parents[row, starts].astype(np.int64)
                tree = MeasuredTree(bounds, tokens[row].astype(np.int64), scores[row], expanded, norms[row])
                self.record(context, tree)

    def record(self, context: DraftContext, tree: MeasuredTree) -> None:
        """Record the measured tree of one session."""
        bucket = bucket_of(context.noise.temperature)
        index = self._estimates[bucket].index
        self._pending[context.session] = PendingTree(bucket, context.committed_length, tree, index)

    def update(self, contexts: Sequence[DraftContext]) -> None:
        """Compare recorded trees with the tokens committed since."""
        for context in contexts:
            pending = self._pending.pop(context.session, None)
            if pending is not None and pending.committed_length == context.start_position:
                for log_likelihoods in pending.tree.log_likelihoods(context.tokens, pending.scale_index):
                    self._estimates[pending.bucket].add(log_likelihoods)

    def release(self, sessions: Sequence[str]) -> None:
        """Drop sessions; unknown ones are ignored."""
        for session in sessions:
            self._pending.pop(session, None)


def _norm_rows(starts: Ints, ends: Sequence[int], sizes: Sequence[int]) -> Ints:
    """Row of each expanded node in the concatenated log_norms, where level i has sizes[i] rows.

    Example: the root and 3 nodes of level 1 are expanded. Sizes (1, 3) give rows 0, 1, 2, 3; sizes (1, 1), where the nodes
    of level 1 share a row, give 0, 1, 1, 1.
    """
    levels = np.searchsorted(np.array(ends), starts, side="right")
    within = np.arange(len(starts)) - np.searchsorted(levels, levels)
    rows: Ints = np.cumsum([0, *sizes])[levels] + np.minimum(within, np.array(sizes)[levels] - 1)
    return rows


def bucket_of(temperature: float) -> int:
    """Temperatures that share an estimate: steps of 0.2, and everything from 2.0 on."""
    return min(round(5 * temperature), NUM_BUCKETS - 1)
