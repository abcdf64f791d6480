"""Whole draft trees by one CUDA graph replay: commits and states in, finished trees out in one copy.

A round travels to the device as one array of int64 words. A graph is captured for each bucket, and rounds are padded to the
next bucket; padding changes no tree. Legend: S sessions of the bucket, L prefix length of the bucket, R rows of a tree with
slots, H width of a state.

    words:  columns [NUM_COLUMNS, S]: NUM_NOISE_WORDS of noise, prefix length, max drafted nodes, max levels, root token
            cells   [S, L + R]:       slots of the prefix, slots of the tree's rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from eyas.cache.prefix_cache import Slots
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.base import DraftContext
from eyas.drafters.scoring import (
    NUM_NOISE_WORDS,
    Ranking,
    Scorer,
    ScorerKind,
    noise_words,
    perturbed_scorer,
    scorer_kind,
)
from eyas.drafters.tree_growth import Candidates, Reals, select_columns, trees_from_columns
from eyas.errors import ConfigError
from eyas.models.cuda.graphs import Capture, largest_padded_size, padded_size, with_progress
from eyas.sampling.sampler import filtered_probs_no_sync
from eyas.tensors import Ints, upload
from eyas.tree import DraftTree

# Longer prefixes keep the device busy for longer than its launches take.
MAX_CELLS = 1 << 18
MIN_PREFIX = 128
NUM_COLUMNS = NUM_NOISE_WORDS + 4
# Columns of a tree that `select_columns` returns.
NUM_RESULTS = 5


def padded_prefix(slots: Sequence[Slots], device: torch.device) -> tuple[Tensor, Tensor]:
    """The prefixes on a device, padded to the longest, int64 [S, L]; and their lengths without padding, int64 [S]."""
    lengths = np.array([len(own) for own in slots])
    cells = np.empty((len(slots), int(lengths.max())), dtype=np.int64)
    _fill_slots(cells, slots)
    return upload(cells, device), upload(lengths, device)


def _fill_slots(cells: Ints, slots: Sequence[Slots]) -> None:
    """Write slots into the first rows of cells [S, L].

    Padding repeats a session's own first slot: NaN in another session's slot would spread through masked attention.
    """
    for row, own in zip(cells, slots, strict=False):
        row[: len(own)] = own
        row[len(own) :] = own[:1]


@dataclass(frozen=True)
class Roots:
    """What trees grow from.

    states: of the drafter, behind the last commit [S, H]. tokens: the target's ids, int64 [S]. prefix: slots of what is
    cached, with padding behind them, int64 [S, L]. prefix_lengths: without padding, int64 [S]. scratch: slots for the rows
    of each tree [S, R].
    """

    states: Tensor
    tokens: Tensor
    prefix: Tensor
    prefix_lengths: Tensor
    scratch: Tensor


@dataclass(frozen=True)
class GraphSpec:
    """How a drafter grows its trees, always to their full depth.

    grow: the candidates, and if trees have slots, tokens and parents of the rows in them, int64 [S, 2, R]. It must not wait
    for the device, copy to it, or take sizes from what a tensor holds.
    tree: nodes and depth. state_size, dtype: of a state. num_slots: of all sessions together; slot num_slots is a spare one.
    max_prefix: slots of the longest session's prefix; 0 if trees attend to none. num_scratch: R.
    """

    grow: Callable[[Roots, Scorer], tuple[Candidates, Tensor | None]]
    tree: TreeConfig
    state_size: int
    dtype: torch.dtype
    draft_ids: Tensor
    num_slots: int = 0
    max_prefix: int = 0
    num_scratch: int = 0


@dataclass(frozen=True)
class Bucket:
    """The sizes that a capture fixes. prefix: L."""

    sessions: int
    prefix: int
    kind: ScorerKind


class TreeGraphs:
    """Captured graphs by bucket. `warm_up` captures two sizes; others are captured when they are first needed."""

    def __init__(self, spec: GraphSpec, config: DraftingConfig, ranking: Ranking, capture: Capture) -> None:
        device = spec.draft_ids.device
        self._spec, self._ranking, self._capture = spec, ranking, capture
        self._max_sessions, self._shared_noise = padded_size(config.cuda_graph_max_batch, 1), config.shared_noise
        self._words = torch.zeros(NUM_COLUMNS * self._max_sessions + MAX_CELLS, dtype=torch.int64, device=device)
        self._states = torch.zeros(self._max_sessions, spec.state_size, dtype=spec.dtype, device=device)
        self._replays: dict[Bucket, Callable[[], Tensor]] = {}

    def warm_up(self) -> None:
        """Capture the bucket of one session with a short prefix, and that of the most sessions, which share all slots; for
        each kind of noise. The largest comes first, so that the other shares its memory. Shows a progress bar.

        Raises ConfigError for a drafter that cannot be captured.
        """
        most, spec = self._max_sessions, self._spec
        share = min(spec.num_slots // most, spec.max_prefix, largest_padded_size(MAX_CELLS // most - spec.num_scratch))
        sizes = dict.fromkeys([(most, self._prefix_length(share)), (1, self._prefix_length(1))])
        kinds: tuple[ScorerKind, ...] = ("plain", "noised", "filtered") if self._shared_noise else ("plain",)
        buckets = [Bucket(*size, kind) for size in sizes if self._fits(*size) for kind in kinds]
        for bucket in with_progress(buckets, "capturing draft trees"):
            self._write(self._columns((), (), bucket.sessions), (), (), bucket.prefix)
            self._replay(bucket)

    def grow(
        self, contexts: Sequence[DraftContext], slots: Sequence[Slots], states: Tensor, scratch: Sequence[Slots]
    ) -> tuple[list[DraftTree], Ints] | None:
        """Grow the trees of sessions, each with its slots, its slots for a tree if it needs some, and its row of states.

        Returns the trees and the rows in their slots [S, 2, R], see GraphSpec; None if no bucket holds them.
        Raises ConfigError for a drafter that cannot be captured.
        """
        sessions, length = padded_size(len(contexts), 1), self._prefix_length(max(map(len, slots)))
        if not self._fits(sessions, length):
            return None
        columns = self._columns(contexts, slots, sessions)
        self._write(columns, slots, scratch, length)
        self._states[: len(states)].copy_(states)
        replay = self._replay(Bucket(sessions, length, scorer_kind(columns[:NUM_NOISE_WORDS])))
        return self._read(replay().cpu().numpy(), contexts)

    def _prefix_length(self, longest: int) -> int:
        return padded_size(max(longest, 1), MIN_PREFIX) if self._spec.max_prefix else 0

    def _fits(self, sessions: int, length: int) -> bool:
        return sessions <= self._max_sessions and sessions * (length + self._spec.num_scratch) <= MAX_CELLS

    def _columns(self, contexts: Sequence[DraftContext], slots: Sequence[Slots], sessions: int) -> Ints:
        """[NUM_COLUMNS, sessions]; padding sessions have one slot of prefix and no budget."""
        columns = np.zeros((NUM_COLUMNS, sessions), dtype=np.int64)
        columns[:NUM_NOISE_WORDS] = noise_words(contexts, self._ranking, sessions)
        columns[NUM_NOISE_WORDS] = 1
        for row, (context, own) in enumerate(zip(contexts, slots, strict=True)):
            max_drafted = min(context.budget.max_nodes, self._spec.tree.num_draft_tokens) - 1
            columns[NUM_NOISE_WORDS:, row] = len(own), max_drafted, context.budget.max_depth, context.tokens[-1]
        return columns

    def _write(self, columns: Ints, slots: Sequence[Slots], scratch: Sequence[Slots], length: int) -> None:
        """Write a round's words; padding sessions use the spare slot only."""
        cells = np.full((columns.shape[1], length + self._spec.num_scratch), self._spec.num_slots, dtype=np.int64)
        _fill_slots(cells[:, :length], slots)
        _fill_slots(cells[:, length:], scratch)
        words = np.concatenate([columns.ravel(), cells.ravel()])
        self._words[: len(words)].copy_(upload(words, self._words.device))

    def _read(self, results: Reals, contexts: Sequence[DraftContext]) -> tuple[list[DraftTree], Ints]:
        """Unpack the output of `_run` on the host."""
        num_ints, results = 2 * self._spec.num_scratch, results[: len(contexts)]
        columns, rows_run = np.split(results, [results.shape[1] - num_ints], axis=1)
        found = columns.reshape(len(contexts), NUM_RESULTS, -1).transpose(1, 0, 2).tolist()
        trees = trees_from_columns(found, [context.tokens[-1] for context in contexts])
        return trees, rows_run.astype(np.int64).reshape(len(contexts), 2, -1)

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
        """What is captured: from words and states to the columns of finished trees and the rows run for them.

        Returns float64 [S, NUM_RESULTS * (num_draft_tokens - 1) + 2 R].
        """
        spec, sessions = self._spec, bucket.sessions
        num_fixed, width = NUM_COLUMNS * sessions, bucket.prefix + spec.num_scratch
        columns = self._words[:num_fixed].view(NUM_COLUMNS, sessions)
        cells = self._words[num_fixed : num_fixed + sessions * width].view(sessions, width)
        lengths, limits, depths, tokens = columns[NUM_NOISE_WORDS:]
        roots = Roots(self._states[:sessions], tokens, cells[:, : bucket.prefix], lengths, cells[:, bucket.prefix :])
        candidates, rows_run = spec.grow(roots, self._scorer(bucket.kind, columns[:NUM_NOISE_WORDS]))
        found = select_columns(candidates, limits, depths, spec.tree.num_draft_tokens - 1, spec.draft_ids)
        results = found.transpose(0, 1).flatten(1)
        return results if rows_run is None else torch.cat([results, rows_run.flatten(1).double()], 1)

    def _scorer(self, kind: ScorerKind, words: Tensor) -> Scorer:
        return perturbed_scorer(words, self._spec.tree.num_steps, self._spec.draft_ids, kind, filtered_probs_no_sync)
