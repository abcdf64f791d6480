"""Draft rounds by replays of CUDA graphs: words and states in, results out in one copy.

A round is captured level by level, for each bucket of sessions: the host leaves out levels that no budget can use. It
travels to the device as one array of int64 words and is padded to its bucket; padding changes no result. What a round reads
of its sessions' prefixes depends on their own lengths alone, see eyas.drafters.trees.rows, so nothing else is padded and all
buckets are captured at start. Legend: S sessions of the bucket, C columns, H width of a state.

    words:  columns [C, S]   what each session's results depend on besides its prefix
            int32 words      see eyas.drafters.trees.rows
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from eyas.arrays import Ints, Reals
from eyas.cache.prefix_cache import Slots
from eyas.config import DraftingConfig, TreeConfig
from eyas.device.transfer import upload
from eyas.drafters.base import DraftContext
from eyas.drafters.trees.growth import (
    Candidates,
    Expansion,
    StaticTree,
    TreeGrowth,
    chain_trees,
    draw_chains,
    grow_static,
    select_columns,
    trees_from_columns,
)
from eyas.drafters.trees.rows import GrowthShape, Roots, RowLayout, SlotLevels, SlotRows, TreeSlots
from eyas.drafters.trees.scoring import (
    NUM_NOISE_WORDS,
    ScorerKind,
    chain_scorer,
    chain_words,
    noise_words,
    perturbed_scorer,
    scorer_kind,
)
from eyas.errors import ConfigError
from eyas.kernels.probabilities import filtered_probs
from eyas.models.backends.attention_metadata import bucket_shape, build_words, max_words, view
from eyas.models.backends.cuda_graphs import MAX_GRAPH_ROWS, Capture, Out, padded_size, row_buckets
from eyas.models.inputs import MetadataShape, PackedInputs, Segment, Segments
from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftTree, DraftTrees

# Columns of a tree that `select_columns` returns.
NUM_RESULTS = 5


@dataclass(frozen=True)
class Stages:
    """Stages of a round, each on static inputs, with results in the same memory each time.

    Attributes:
        levels: in order; the host may leave out the last ones.
        ends: by number of levels that have run, from 1; or the only one. An end returns the result.
    """

    levels: Sequence[Callable[[], None]]
    ends: Sequence[Callable[[], Tensor]]

    def run(self, num_levels: int | None = None) -> Tensor:
        """Return the result after some of the levels; None runs all."""
        for level in self.levels[:num_levels]:
            level()
        return self.ends[-1 if num_levels is None else num_levels - 1]()


# Runs the new rows of sessions: features [R, H], inputs of all rows, whose logits are asked for at each session's last one,
# and inputs of the last rows alone, for attention in the last layer. Returns the states [S, H] of the last rows.
ExtendPass = Callable[[Tensor, PackedInputs, PackedInputs], Tensor]


@dataclass(frozen=True)
class RoundPlace:
    """Place in which a drafter's rounds run: slots of trees, and width and dtype of states."""

    slots: TreeSlots
    state_size: int
    dtype: torch.dtype
    capture: Capture


class RoundGraphs:
    """The captured stages of one kind of round by bucket. The last column is the token of the root.

    Args:
        make_stages: makes the stages from columns, int64 [C, S], and a function that makes the roots within a stage. They
            must not wait for the device, copy to it, or take sizes from what a tensor holds.
        padding: the columns of padding sessions, [C].
    """

    def __init__(
        self,
        make_stages: Callable[[Tensor, Callable[[], Roots]], Stages],
        padding: Sequence[int],
        layout: RowLayout,
        place: RoundPlace,
    ) -> None:
        device = layout.device
        self.max_sessions = padded_size(place.slots.max_sessions)
        self._make_stages, self._padding, self._layout, self._place = make_stages, padding, layout, place
        num_words = layout.num_fixed_words(self.max_sessions) + place.slots.spare
        # One buffer of 64-bit words: columns, then the 32-bit words of the layout, two to a word.
        size = len(padding) * self.max_sessions + -(-num_words // 2)
        self._words = torch.zeros(size, dtype=torch.int64, device=device)
        self._states = torch.zeros(self.max_sessions, place.state_size, dtype=place.dtype, device=device)
        self._replays: dict[int, Stages] = {}

    @property
    def buckets(self) -> tuple[int, ...]:
        """The buckets that are captured."""
        return tuple(self._replays)

    def warm_up(self) -> None:
        """Capture all buckets, the largest first so that the others share its memory.

        Raises ConfigError for a drafter that cannot be captured.
        """
        sizes = {padded_size(count) for count in range(1, self.max_sessions + 1)}
        for sessions in sorted(sizes, reverse=True):
            self._write(self._padded([[]] * len(self._padding), sessions), (), (), sessions)
            self._stages(sessions)

    def run(
        self,
        columns: Ints,
        slots: Sequence[Slots],
        scratch: Sequence[Slots],
        states: Tensor,
        num_levels: int | None = None,
    ) -> Tensor:
        """Return the result [S, ...] of a round. The next round overwrites it.

        Raises ConfigError for a drafter that cannot be captured.

        Args:
            columns: [C, number of sessions].
            slots, scratch, states: of each session.
            num_levels: that run, all by default.
        """
        sessions = padded_size(len(slots))
        self._write(self._padded(columns, sessions), slots, scratch, sessions)
        self._states[: len(states)].copy_(states)
        return self._stages(sessions).run(num_levels)

    def _padded(self, columns: Ints | Sequence[Sequence[int]], sessions: int) -> Ints:
        padded = np.empty((len(self._padding), sessions), dtype=np.int64)
        for row, own, padding in zip(padded, columns, self._padding, strict=True):
            row[: len(own)] = own
            row[len(own) :] = padding
        return padded

    def _write(self, columns: Ints, slots: Sequence[Slots], scratch: Sequence[Slots], sessions: int) -> None:
        layout = self._layout
        # Padding rows get the spare slot, whose contents no row reads.
        cells = np.full((sessions, layout.num_rows), self._place.slots.spare, dtype=np.int64)
        for row, own in zip(cells, scratch, strict=False):
            row[:] = own[: len(row)]
        ints = layout.build_words(slots, cells, sessions)
        words = np.zeros(columns.size + -(-len(ints) // 2), dtype=np.int64)
        words[: columns.size] = columns.ravel()
        words[columns.size :].view(np.int32)[: len(ints)] = ints
        self._words[: len(words)].copy_(upload(words, self._words.device))

    def _stages(self, sessions: int) -> Stages:
        if sessions not in self._replays:
            self._replays[sessions] = self._captured(sessions)
        return self._replays[sessions]

    def _captured(self, sessions: int) -> Stages:
        stages, levels = self.stages(sessions), list[Callable[[], None]]()
        for level in stages.levels:
            levels.append(capture_or_explain(self._place.capture, level))
            levels[-1]()  # what follows reads what this one leaves, and a capture leaves nothing
        return Stages(levels, [capture_or_explain(self._place.capture, end) for end in stages.ends])

    def stages(self, sessions: int) -> Stages:
        """Return what is captured for a bucket."""
        num_columns = len(self._padding)
        columns, rest = self._words[: num_columns * sessions], self._words[num_columns * sessions :]
        columns = columns.view(num_columns, sessions)

        def roots() -> Roots:
            # The last column is the root's token.
            rows = SlotLevels(SlotRows(self._layout, rest.view(torch.int32), sessions))
            return Roots(self._states[:sessions], columns[-1], rows)

        return self._make_stages(columns, roots)


@dataclass(frozen=True)
class TreeSpec:
    """Recipe by which a drafter grows its deterministic trees: static ones whole at once, others as deep as a round's
    budgets can use.

    Attributes:
        expand: see NeuralDrafter.
        rows_run: tokens and parents of the rows that a tree ran, int64 [S, 2, R], if the drafter keeps them.
        tree: nodes and depth; top_k is the number of nodes that a level expands.
        static_tree: their shape, if it is fixed.
    """

    expand: Callable[[Roots, GrowthShape], Expansion]
    rows_run: Callable[[Expansion], Tensor | None]
    tree: TreeConfig
    static_tree: StaticTree | None
    draft_ids: Tensor

    def num_cells(self, num_levels: int) -> int:
        """Return nodes that `select_columns` returns."""
        if self.static_tree:
            return min(self.tree.num_draft_tokens - 1, sum(len(level.parents) for level in self.static_tree.levels))
        # The first level has top_k candidates, each further one top_k children of top_k nodes.
        num_candidates = self.tree.top_k * (1 + (num_levels - 1) * self.tree.top_k)
        return min(self.tree.num_draft_tokens - 1, num_candidates)

    def num_levels(self, budgets: Sequence[TreeBudget]) -> int:
        """Return the levels that trees within the budgets can have: a node at level d has d - 1 others above it."""
        if self.static_tree:
            return 1
        usable = max(min(budget.max_depth, budget.max_nodes - 1) for budget in budgets)
        return max(1, min(self.tree.num_steps, self.tree.num_draft_tokens - 1, usable))

    def stages(self, kind: ScorerKind, columns: Tensor, roots: Callable[[], Roots]) -> Stages:
        """Return the stages of a round: the first level, or the whole static tree; each further level; the best nodes.

        The result is float64 [S, NUM_RESULTS * nodes + 2 R], see `num_cells`.
        """
        noise, (limits, depths, _) = columns[:NUM_NOISE_WORDS], columns[NUM_NOISE_WORDS:]
        grown: dict[int, TreeGrowth] = {}
        fixed: dict[int, tuple[Expansion, Candidates]] = {}
        num_steps = self.tree.num_steps

        def begin() -> None:
            scorer = perturbed_scorer(noise, num_steps, self.draft_ids, kind, filtered_probs)
            expansion = self.expand(roots(), GrowthShape(num_steps, self.tree.top_k))
            if self.static_tree:
                fixed[0] = expansion, grow_static(expansion, scorer, self.static_tree, num_steps)
            else:
                grown[1] = TreeGrowth(expansion, scorer, self.tree.top_k, self.tree.top_k)

        def step(level: int) -> None:
            grown[level + 1] = grown[level].stepped()

        def finish(level: int) -> Tensor:
            expansion, candidates = fixed[0] if fixed else (grown[level].expansion, grown[level].candidates)
            found = select_columns(candidates, limits, depths, self.tree.num_draft_tokens - 1, self.draft_ids)
            results, rows = found.transpose(0, 1).flatten(1), self.rows_run(expansion)
            return results if rows is None else torch.cat([results, rows.flatten(1).double()], 1)

        num_levels = self.num_levels([TreeBudget(self.tree.num_draft_tokens, num_steps)])
        ends = [partial(finish, level) for level in range(1, num_levels + 1)]
        return Stages([begin, *(partial(step, level) for level in range(1, num_levels))], ends)


class TreeGraphs:
    """Deterministic trees from captured rounds, one for each kind of noise."""

    def __init__(self, spec: TreeSpec, config: DraftingConfig, place: RoundPlace) -> None:
        kinds: tuple[ScorerKind, ...] = ("plain", "noised", "filtered") if config.shared_noise else ("plain",)
        self._spec, self._drafting = spec, config
        # padding has a ranking temperature and no budget
        padding = (*noise_words((), config, 1)[:, 0].tolist(), 0, 0, 0)
        self.rounds = {kind: RoundGraphs(partial(spec.stages, kind), padding, place.slots.trees, place) for kind in kinds}

    def warm_up(self) -> None:
        """See RoundGraphs."""
        for graphs in self.rounds.values():
            graphs.warm_up()

    def grow(
        self, contexts: Sequence[DraftContext], slots: Sequence[Slots], states: Tensor, scratch: Sequence[Slots]
    ) -> tuple[DraftTrees, Ints]:
        """Grow the trees of sessions, each with its slots, its slots for a tree if it needs some, and its row of states.

        Returns the trees and the rows in their slots [S, 2, R], see TreeSpec.
        """
        tree, num_levels = self._spec.tree, self._spec.num_levels([context.budget for context in contexts])
        columns = np.zeros((NUM_NOISE_WORDS + 3, len(contexts)), dtype=np.int64)
        columns[:NUM_NOISE_WORDS] = noise_words(contexts, self._drafting, len(contexts))
        for row, context in enumerate(contexts):
            max_drafted = min(context.budget.max_nodes, tree.num_draft_tokens) - 1
            columns[NUM_NOISE_WORDS:, row] = max_drafted, context.budget.max_depth, context.tokens[-1]
        graphs = self.rounds[scorer_kind(columns[:NUM_NOISE_WORDS])]
        results = graphs.run(columns, slots, scratch, states, num_levels).cpu().numpy()[: len(contexts)]
        tree_cells = NUM_RESULTS * self._spec.num_cells(num_levels)
        # results [S, NUM_RESULTS * cells] to [NUM_RESULTS, S, cells]; the rows that ran follow.
        found = results[:, :tree_cells].reshape(len(contexts), NUM_RESULTS, -1).transpose(1, 0, 2)
        trees = trees_from_columns(found, [context.tokens[-1] for context in contexts])
        return trees, results[:, tree_cells:].astype(np.int64).reshape(len(contexts), 2, -1)


class ChainGraphs:
    """Sampled chains from captured rounds."""

    def __init__(self, spec: TreeSpec, config: DraftingConfig, place: RoundPlace) -> None:
        self._spec, self._proposal_top_k = spec, config.proposal_top_k
        one = int(np.float64(1.0).view(np.int64))  # a column has the bits of a real
        self.rounds = RoundGraphs(self._stages, (0, 0, 0, 0, one, one, one, 0, 0), place.slots.chains, place)

    def warm_up(self) -> None:
        """See RoundGraphs."""
        self.rounds.warm_up()

    def draw(
        self, contexts: Sequence[DraftContext], slots: Sequence[Slots], states: Tensor, scratch: Sequence[Slots]
    ) -> tuple[list[DraftTree], Ints]:
        """Draw the chains of sessions, see `draw_chains`. Returns them and the rows in their slots, see TreeGraphs.grow."""
        columns = np.concatenate([chain_words(contexts), [[context.tokens[-1] for context in contexts]]])
        results = self.rounds.run(columns, slots, scratch, states)
        cells: Reals = results[: len(contexts)].cpu().numpy()
        size = self._spec.tree.num_steps * (2 * min(self._proposal_top_k, len(self._spec.draft_ids)) + 1)
        drawn = cells[:, :size].reshape(len(contexts), self._spec.tree.num_steps, -1).tolist()
        rows = cells[:, size:].astype(np.int64).reshape(len(contexts), 2, -1)
        return chain_trees(drawn, contexts, self._spec.tree.num_draft_tokens), rows

    def _stages(self, columns: Tensor, roots: Callable[[], Roots]) -> Stages:
        tree, draft_ids, words = self._spec.tree, self._spec.draft_ids, columns[:NUM_NOISE_WORDS]

        def draw() -> Tensor:
            expansion = self._spec.expand(roots(), GrowthShape(tree.num_steps, 1))
            scorer = chain_scorer(words, filtered_probs)
            drawn = draw_chains(expansion, scorer, tree.num_steps, self._proposal_top_k, draft_ids)
            rows = self._spec.rows_run(expansion)
            return drawn.flatten(1) if rows is None else torch.cat([drawn.flatten(1), rows.flatten(1).double()], 1)

        return Stages((), [draw])


class ExtendGraphs:
    """The new rows of sessions from captured passes, one for each bucket of rows.

    Args:
        run: what is captured.
        rows_per_session: of a round that is captured, on average.
    """

    def __init__(self, run: ExtendPass, place: RoundPlace, feature_size: int, rows_per_session: int) -> None:
        slots, device = place.slots, place.slots.trees.device
        self._run, self._place = run, place
        self._buckets = row_buckets(min(slots.max_sessions * rows_per_session, MAX_GRAPH_ROWS))
        most = max(max_words(shape) for shape in self._shapes(self._buckets[-1]))
        self._words = torch.zeros(2, most + slots.spare, dtype=torch.int32, device=device)
        self._features = torch.zeros(self._buckets[-1], feature_size, dtype=place.dtype, device=device)
        self._replays: dict[int, Callable[[], Tensor]] = {}

    def warm_up(self) -> None:
        """Capture all buckets, the largest first."""
        for bucket in self._buckets[::-1]:
            self._write((), self._shapes(bucket))
            self._replay(bucket)

    def extend(self, rows: Sequence[Segment], last: Sequence[Segment], features: Tensor) -> Tensor | None:
        """Return states [S, H] of the last rows, see ExtendPass; None for more rows than a graph holds."""
        count = sum(len(segment.tokens) for segment in rows)
        if count > self._buckets[-1] or len(rows) > self._place.slots.max_sessions:
            return None
        bucket = self._buckets[bisect_left(self._buckets, count)]
        self._write((rows, last), self._shapes(bucket))
        self._features[:count].copy_(features)
        return self._replay(bucket)()[: len(rows)].clone()

    def _shapes(self, bucket: int) -> tuple[MetadataShape, MetadataShape]:
        """Return shapes of all rows, with the last ones as those whose logits are asked for, and of the last rows alone."""
        slots = self._place.slots
        sessions = min(bucket, slots.max_sessions)
        shapes = [bucket_shape(rows, sessions, slots.trees.tiling) for rows in (bucket, sessions)]
        return replace(shapes[0], logits=sessions), shapes[1]

    def _write(self, passes: Sequence[Sequence[Segment]], shapes: Sequence[MetadataShape]) -> None:
        for segments, shape, buffer in zip(passes or ((), ()), shapes, self._words, strict=True):
            words = build_words(Segments.of(segments), shape, self._place.slots.spare)
            buffer[: len(words)].copy_(upload(words, buffer.device))

    def _replay(self, bucket: int) -> Callable[[], Tensor]:
        if bucket not in self._replays:
            self._replays[bucket] = capture_or_explain(self._place.capture, partial(self._captured, bucket))
        return self._replays[bucket]

    def _captured(self, bucket: int) -> Tensor:
        rows, last = (
            view(words, shape, shape.logits) for words, shape in zip(self._words, self._shapes(bucket), strict=True)
        )
        return self._run(self._features[:bucket], rows, last)


def capture_or_explain(capture: Capture, run: Callable[[], Out]) -> Callable[[], Out]:
    """Capture a function. Raises ConfigError for a drafter that cannot be captured, whatever memory there is."""
    try:
        return capture(run)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ConfigError(
            f"the drafter cannot be captured as a CUDA graph, set drafting.cuda_graphs to false: {error}"
        ) from error
