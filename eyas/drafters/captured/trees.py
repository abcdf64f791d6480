"""Whole draft trees by one replay: commits and states in, finished trees out in one copy. Knows no heads.

A round travels to the device as one array of words, into which a graph was captured for each bucket. What fills a bucket up
changes no tree. Legend: S sessions of the bucket, L prefix length of the bucket, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from eyas.cache.slots import Slots
from eyas.config import EagleConfig, TreeConfig
from eyas.drafters.base import DraftContext
from eyas.drafters.calibration import NoiseScale
from eyas.drafters.captured.prefix import Prefix, padded_slots
from eyas.drafters.expand import Candidates, Expansion, choose, trees
from eyas.drafters.ranking import (
    NUM_NOISE_WORDS,
    Kind,
    PerturbedScorer,
    PlainScorer,
    Scorer,
    kind_of,
    noise_rows,
    noise_words,
)
from eyas.errors import ConfigError
from eyas.models.cuda.buckets import padded
from eyas.models.cuda.graphs import Capture
from eyas.models.inputs import Ints
from eyas.models.sampling.law import filtered_law_unseen
from eyas.models.tensors import upload
from eyas.tree import DraftTree

# More sessions, or longer prefixes, keep the device busy for longer than its launches take.
MAX_SESSIONS = 64
MAX_CELLS = 1 << 18
LEAST_PREFIX = 128
# Of each session: noise, prefix length, guesses and levels that its budget allows, root.
NUM_COLUMNS = NUM_NOISE_WORDS + 4


@dataclass(frozen=True)
class Roots:
    """Where trees grow from. states: the head's behind the last commit [S, H]. tokens: the target's ids, int64 [S]. prefix:
    slots of what the head has cached, of length 0 where it caches nothing."""

    states: Tensor
    tokens: Tensor
    prefix: Prefix


@dataclass(frozen=True)
class Grower:
    """How a drafter grows its trees, always of its full depth.

    Neither may wait for the device, copy to it, or take sizes from what a tensor holds. tree: nodes and depth. spare: a slot
    that no session ever has.
    """

    expand: Callable[[Roots, Scorer], Expansion]
    grow: Callable[[Expansion], Candidates]
    tree: TreeConfig
    hidden: int
    dtype: torch.dtype
    draft_ids: Tensor
    spare: int = 0


@dataclass(frozen=True)
class Bucket:
    """What is fixed by capturing. prefix: L."""

    sessions: int
    prefix: int
    kind: Kind


class CapturedTrees:
    """Captures each bucket when it is first needed. Not safe for use from several threads."""

    def __init__(self, grower: Grower, config: EagleConfig, capture: Capture) -> None:
        device = grower.draft_ids.device
        self._grower, self._config, self._capture = grower, config, capture
        self._words = torch.zeros(NUM_COLUMNS * MAX_SESSIONS + MAX_CELLS, dtype=torch.int64, device=device)
        self._states = torch.zeros(MAX_SESSIONS, grower.hidden, dtype=grower.dtype, device=device)
        self._replays: dict[Bucket, Callable[[], Tensor]] = {}

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Those captured so far."""
        return tuple(self._replays)

    def grow(
        self, contexts: Sequence[DraftContext], slots: Sequence[Slots], states: Tensor, scale: NoiseScale
    ) -> list[DraftTree] | None:
        """The trees of sessions, each with its slots and its row of states [sessions, H]; None where no bucket holds them.

        Raises ConfigError for a head that cannot be captured.
        """
        longest = max(map(len, slots))
        sessions, length = padded(len(contexts), 1), padded(longest, LEAST_PREFIX) if longest else 0
        if sessions > MAX_SESSIONS or sessions * length > MAX_CELLS:
            return None
        columns = self._columns(contexts, slots, scale, sessions)
        cells = np.full((sessions, length), self._grower.spare, dtype=np.int64)
        cells[: len(slots)] = padded_slots(slots, length, self._grower.spare)
        words = np.concatenate([columns.ravel(), cells.ravel()])
        self._words[: len(words)].copy_(upload(words, self._words.device))
        self._states[: len(states)].copy_(states)
        replay = self._replay(Bucket(sessions, length, kind_of(columns[:NUM_NOISE_WORDS])))
        return trees(replay()[:, : len(contexts)].tolist(), [context.tokens[-1] for context in contexts])

    def _columns(self, contexts: Sequence[DraftContext], slots: Sequence[Slots], scale: NoiseScale, sessions: int) -> Ints:
        """[NUM_COLUMNS, sessions]; sessions that fill up have one slot of prefix and no budget."""
        columns = np.zeros((NUM_COLUMNS, sessions), dtype=np.int64)
        columns[:NUM_NOISE_WORDS] = noise_words(contexts, self._config, scale, sessions)
        columns[NUM_NOISE_WORDS] = 1
        for row, (context, own) in enumerate(zip(contexts, slots, strict=True)):
            limit = min(context.budget.max_nodes, self._grower.tree.nodes) - 1
            columns[NUM_NOISE_WORDS:, row] = len(own), limit, context.budget.max_depth, context.tokens[-1]
        return columns

    def _replay(self, bucket: Bucket) -> Callable[[], Tensor]:
        if bucket not in self._replays:
            try:
                self._replays[bucket] = self._capture(partial(self._run, bucket))
            except RuntimeError as error:
                raise ConfigError(
                    f"the draft head cannot be captured as a CUDA graph, set eagle.cuda_graphs to false: {error}"
                ) from error
        return self._replays[bucket]

    def _run(self, bucket: Bucket) -> Tensor:
        """What is captured: from words and states to the columns of finished trees, float64 [5, S, nodes - 1]."""
        grower, sessions = self._grower, bucket.sessions
        fixed = NUM_COLUMNS * sessions
        columns = self._words[:fixed].view(NUM_COLUMNS, sessions)
        index = self._words[fixed : fixed + sessions * bucket.prefix].view(sessions, bucket.prefix)
        lengths, limits, depths, tokens = columns[NUM_NOISE_WORDS:]
        scorer = self._scorer(bucket.kind, columns[:NUM_NOISE_WORDS])
        expansion = grower.expand(Roots(self._states[:sessions], tokens, Prefix(index, lengths)), scorer)
        return choose(grower.grow(expansion), limits, depths, grower.tree.nodes - 1, grower.draft_ids)

    def _scorer(self, kind: Kind, words: Tensor) -> Scorer:
        if kind == "plain":
            return PlainScorer()
        law = filtered_law_unseen if kind == "filtered" else None
        return PerturbedScorer(noise_rows(words), self._grower.tree.depth, self._grower.draft_ids, law)
