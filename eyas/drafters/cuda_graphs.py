"""Slots of sessions side by side: one ragged list each in, one padded table out. Knows no heads.

Legend: S sessions, L prefix length, the longest or more.

Whole draft trees by one replay: commits and states in, finished trees out in one copy. Knows no heads and no models.

A round travels to the device as one array of words, into which a graph was captured for each bucket. What fills a bucket up
changes no tree. Legend: S sessions of the bucket, L prefix length of the bucket, R rows of a tree with slots, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.cache.prefix_cache import Slots
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.base import DraftContext
from eyas.drafters.scoring import (
    NUM_NOISE_WORDS,
    FixedScale,
    Kind,
    NoiseScale,
    PerturbedScorer,
    PlainScorer,
    Scorer,
    kind_of,
    noise_rows,
    noise_words,
)
from eyas.drafters.tree_growth import Candidates, Expansion, choose, trees
from eyas.errors import ConfigError
from eyas.models.cuda.graphs import Capture, largest_padded_size, padded, shown
from eyas.sampling.sampler import filtered_probs_no_sync
from eyas.tensors import Ints, upload
from eyas.tree import DraftTree


@dataclass(frozen=True)
class PaddedPrefix:
    """index: slots of each session's prefix, padding behind them, int64 [S, L]. lengths: without padding, int64 [S]."""

    index: Tensor
    lengths: Tensor


def fill_in_slots(cells: Slots, slots: Sequence[Slots]) -> None:
    """Into the first rows of cells [S, L]. Padding names a session's own first slot: what is hidden spreads if it is NaN."""
    for row, own in zip(cells, slots, strict=False):
        row[: len(own)] = own
        row[len(own) :] = own[:1]


def tight_prefix(slots: Sequence[Slots], device: torch.device) -> PaddedPrefix:
    """On the device, padded to the longest."""
    lengths = np.array([len(own) for own in slots])
    index = np.empty((len(slots), int(lengths.max())), dtype=np.int64)
    fill_in_slots(index, slots)
    return PaddedPrefix(upload(index, device), upload(lengths, device))


# Longer prefixes keep the device busy for longer than its launches take.
MAX_CELLS = 1 << 18
LEAST_PREFIX = 128
# Of each session: noise, prefix length, guesses and levels that its budget allows, root.
NUM_COLUMNS = NUM_NOISE_WORDS + 4
NUM_RESULTS = 5

ExpansionT = TypeVar("ExpansionT", bound=Expansion)
Reals = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Roots:
    """Where trees grow from. states: the drafter's behind the last commit [S, H]. tokens: the target's ids, int64 [S].
    prefix: slots of what is cached, of length 0 where nothing is. scratch: slots for the rows of each tree [S, R]."""

    states: Tensor
    tokens: Tensor
    prefix: PaddedPrefix
    scratch: Tensor


@dataclass(frozen=True)
class Grower(Generic[ExpansionT]):
    """How a drafter grows its trees, always of its full depth.

    Nothing here may wait for the device, copy to it, or take sizes from what a tensor holds. tree: nodes and depth. spare: a
    slot that no session ever has. num_slots: of all sessions together. longest: slots of the longest session's prefix; 0
    caches nothing. num_scratch: R. ran: where trees have slots, tokens and parents of the rows in them, int64 [S, 2, R].
    """

    expand: Callable[[Roots, Scorer], ExpansionT]
    grow: Callable[[ExpansionT], Candidates]
    tree: TreeConfig
    hidden: int
    dtype: torch.dtype
    draft_ids: Tensor
    spare: int = 0
    num_slots: int = 0
    longest: int = 0
    num_scratch: int = 0
    ran: Callable[[ExpansionT], Tensor] | None = None


@dataclass(frozen=True)
class Bucket:
    """What is fixed by capturing. prefix: L."""

    sessions: int
    prefix: int
    kind: Kind


@dataclass(frozen=True)
class Replayed:
    """What a replay gives. ran: what `Grower.ran` says of each session [S, 2, R]."""

    trees: list[DraftTree]
    ran: Ints


class TreeGraphs:
    """Captures some buckets when told to, the others when they are first needed. Not safe for use from several threads."""

    def __init__(self, grower: Grower[Any], config: DraftingConfig, capture: Capture) -> None:
        device = grower.draft_ids.device
        self._grower, self._config, self._capture = grower, config, capture
        self._most = padded(config.cuda_graph_max_batch, 1)
        self._words = torch.zeros(NUM_COLUMNS * self._most + MAX_CELLS, dtype=torch.int64, device=device)
        self._states = torch.zeros(self._most, grower.hidden, dtype=grower.dtype, device=device)
        self._replays: dict[Bucket, Callable[[], Tensor]] = {}

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Those captured so far."""
        return tuple(self._replays)

    def warm_up(self) -> None:
        """Capture the bucket of one session with a short prefix, and that of the most sessions, which share all slots; for
        each kind of noise that may come. The largest first, so that the other shares its memory. Shows a progress bar.

        Raises ConfigError for a drafter that cannot be captured.
        """
        most, grower = self._most, self._grower
        share = min(grower.num_slots // most, grower.longest, largest_padded_size(MAX_CELLS // most - grower.num_scratch))
        sizes = dict.fromkeys([(most, self._length(share)), (1, self._length(1))])
        kinds: tuple[Kind, ...] = ("plain", "noised", "filtered") if self._config.shared_noise else ("plain",)
        buckets = [Bucket(*size, kind) for size in sizes if self._fits(*size) for kind in kinds]
        for bucket in shown(buckets, "capturing draft trees"):
            self._write(self._columns((), (), FixedScale(1.0), bucket.sessions), (), (), bucket.prefix)
            self._replay(bucket)

    def grow(
        self,
        contexts: Sequence[DraftContext],
        slots: Sequence[Slots],
        states: Tensor,
        scale: NoiseScale,
        scratch: Sequence[Slots] = (),
    ) -> Replayed | None:
        """The trees of sessions, each with its slots, its slots for a tree if it has some, and its row of states
        [sessions, H]; None where no bucket holds them, and while `scale` wants the laws measured.

        Raises ConfigError for a drafter that cannot be captured.
        """
        sessions, length = padded(len(contexts), 1), self._length(max(map(len, slots)))
        if scale.grid or not self._fits(sessions, length):
            return None
        columns = self._columns(contexts, slots, scale, sessions)
        self._write(columns, slots, scratch, length)
        self._states[: len(states)].copy_(states)
        replay = self._replay(Bucket(sessions, length, kind_of(columns[:NUM_NOISE_WORDS])))
        scale.skip()
        return self._read(replay().cpu().numpy(), contexts)

    def _length(self, longest: int) -> int:
        return padded(max(longest, 1), LEAST_PREFIX) if self._grower.longest else 0

    def _fits(self, sessions: int, length: int) -> bool:
        return sessions <= self._most and sessions * (length + self._grower.num_scratch) <= MAX_CELLS

    def _columns(self, contexts: Sequence[DraftContext], slots: Sequence[Slots], scale: NoiseScale, sessions: int) -> Ints:
        """[NUM_COLUMNS, sessions]; sessions that fill up have one slot of prefix and no budget."""
        columns = np.zeros((NUM_COLUMNS, sessions), dtype=np.int64)
        columns[:NUM_NOISE_WORDS] = noise_words(contexts, self._config, scale, sessions)
        columns[NUM_NOISE_WORDS] = 1
        for row, (context, own) in enumerate(zip(contexts, slots, strict=True)):
            limit = min(context.budget.max_nodes, self._grower.tree.num_draft_tokens) - 1
            columns[NUM_NOISE_WORDS:, row] = len(own), limit, context.budget.max_depth, context.tokens[-1]
        return columns

    def _write(self, columns: Ints, slots: Sequence[Slots], scratch: Sequence[Slots], length: int) -> None:
        """A round's words. Sessions that fill up have the spare slot only."""
        cells = np.full((columns.shape[1], length + self._grower.num_scratch), self._grower.spare, dtype=np.int64)
        fill_in_slots(cells[:, :length], slots)
        fill_in_slots(cells[:, length:], scratch)
        words = np.concatenate([columns.ravel(), cells.ravel()])
        self._words[: len(words)].copy_(upload(words, self._words.device))

    def _read(self, results: Reals, contexts: Sequence[DraftContext]) -> Replayed:
        """From what `_run` gives, on the host."""
        num_ran, results = 2 * self._grower.num_scratch, results[: len(contexts)]
        columns, ran = np.split(results, [results.shape[1] - num_ran], axis=1)
        found = columns.reshape(len(contexts), NUM_RESULTS, -1).transpose(1, 0, 2).tolist()
        roots = [context.tokens[-1] for context in contexts]
        return Replayed(trees(found, roots), ran.astype(np.int64).reshape(len(contexts), 2, -1))

    def _replay(self, bucket: Bucket) -> Callable[[], Tensor]:
        if bucket not in self._replays:
            try:
                self._replays[bucket] = self._capture(partial(self._run, bucket))
            except RuntimeError as error:
                raise ConfigError(
                    f"the drafter cannot be captured as a CUDA graph, set drafting.cuda_graphs to false: {error}"
                ) from error
        return self._replays[bucket]

    def _run(self, bucket: Bucket) -> Tensor:
        """What is captured: from words and states to the columns of finished trees and what was run for them, float64
        [S, NUM_RESULTS * (nodes - 1) + 2 R]."""
        grower, sessions = self._grower, bucket.sessions
        fixed, width = NUM_COLUMNS * sessions, bucket.prefix + grower.num_scratch
        columns = self._words[:fixed].view(NUM_COLUMNS, sessions)
        cells = self._words[fixed : fixed + sessions * width].view(sessions, width)
        lengths, limits, depths, tokens = columns[NUM_NOISE_WORDS:]
        prefix = PaddedPrefix(cells[:, : bucket.prefix], lengths)
        roots = Roots(self._states[:sessions], tokens, prefix, cells[:, bucket.prefix :])
        expansion = grower.expand(roots, self._scorer(bucket.kind, columns[:NUM_NOISE_WORDS]))
        found = choose(grower.grow(expansion), limits, depths, grower.tree.num_draft_tokens - 1, grower.draft_ids)
        results = [found.transpose(0, 1).flatten(1)]
        if grower.ran:
            results.append(grower.ran(expansion).flatten(1).double())
        return torch.cat(results, 1)

    def _scorer(self, kind: Kind, words: Tensor) -> Scorer:
        if kind == "plain":
            return PlainScorer()
        law = filtered_probs_no_sync if kind == "filtered" else None
        return PerturbedScorer(noise_rows(words), self._grower.tree.num_steps, self._grower.draft_ids, law)
