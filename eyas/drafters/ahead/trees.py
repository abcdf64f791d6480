"""Drafting ahead with EAGLE: trees that grow from round to round while the target verifies, see `ahead.drafter`.

Expanded nodes are numbered from the root, 0; parents come before their children. A candidate is a child of an expanded node;
some candidates are expanded themselves. The keys and values of expanded nodes stay in slots of the KV cache, so a pass runs
only nodes that are new, or outdated. Legend: E expanded nodes, C candidates of each, R rows of a pass, H hidden.

    expanded    root 0 -- a 1 -- b 2         candidates of 0: a d e,  of 1: b f g,  of 2: h i j
    rows        the best of d e f g h i j; a once the root's state is new, then b
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from eyas.cache.prefix_cache import SlotAllocator
from eyas.config import DraftAheadConfig
from eyas.device.host import has_numba
from eyas.device.transfer import Bools, Ints, Reals, download, upload
from eyas.drafters.base import BOOKKEEPING, Draft, DraftContext, Path, within, without_banned
from eyas.drafters.sessions import num_features
from eyas.drafters.trees.growth import best_places
from eyas.drafters.trees.rows import FoundRows, GrownRows
from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftTree, PreparedTree

if TYPE_CHECKING:
    from eyas.drafters.eagle import EagleDrafter

# Nodes of prepared trees: of all sessions together, and the fewest of one.
MAX_PREPARED_NODES, MIN_PREPARED_NODES = 16384, 256
# Useful rows that are looked for: of all sessions together, and the fewest of a session.
MAX_USEFUL, MIN_USEFUL = 2048, 16
# Rows of a pass, of all sessions together. A GPU takes about as long for them as for one row.
MAX_ROWS = 160
# Nodes of a tree that were run through the network, at most; fewer if many sessions share the slots.
MAX_GROWN_NODES = 1024
# Slots for the nodes of all trees that grow ahead: 64 MB of an EAGLE head of Llama 3 8B's shape.
NUM_GROWN_SLOTS = 2**14
# A node that was run behind an older state of its parent is worth this share of a new one: most of what it says still holds.
REPAIR_SHARE = 0.1


class GrownTree:
    """A tree as far as its nodes were run through the network.

    States of nodes are predicted. When the root gets the state behind true features, all others are outdated: each becomes
    exact, as in a fresh tree, when it is run again behind an exact parent.

    tokens, parents, depths: of the expanded nodes, target token ids [E]. states [E, H]. slots: of their keys and values, but
    for the root's [E - 1]. is_exact [E]. candidates: token ids [E, C]. scores: their log-probabilities given their parents
    [E, C].
    """

    def __init__(self, token: int, state: Tensor, candidates: Ints, scores: Reals, free: SlotAllocator) -> None:
        """token: of the root. state [H]; candidates, scores [C]: of the root. free: where slots come from, for all trees."""
        self.tokens, self.parents, self.depths = np.array([token]), np.zeros(1, np.int64), np.zeros(1, np.int64)
        self.states, self.slots, self.is_exact = state[None], np.zeros(0, np.int64), np.ones(1, np.bool_)
        self.candidates, self.scores = candidates[None], scores[None]
        self._free = free
        self._rank()

    def _rank(self) -> None:
        """Find where the expanded nodes stand among the candidates, and their cumulative scores."""
        if kernels := _kernels():
            self.cumulative, self.expanded = np.empty(len(self.tokens)), np.empty(self.scores.size, np.int64)
            kernels.rank_nodes(self.tokens, self.parents, self.candidates, self.scores, self.cumulative, self.expanded)
            return
        above = self.candidates[self.parents] == self.tokens[:, None]
        above[0] = False
        places = above.argmax(1)
        is_known = above[np.arange(len(places)), places]
        own = np.where(is_known, self.scores[self.parents, places], -np.inf)
        own[0] = 0.0
        self.cumulative = own.copy()
        for depth in range(1, int(self.depths.max()) + 1):
            level = self.depths == depth
            self.cumulative[level] += self.cumulative[self.parents[level]]
        width = self.candidates.shape[1]
        self.expanded = np.zeros(self.candidates.size, np.int64)  # by candidate: its number if it is expanded, else 0
        known = np.flatnonzero(is_known)
        self.expanded[self.parents[known] * width + places[known]] = known

    def best(self, root: int, count: int, max_depth: int) -> Ints:
        """The best candidates below an expanded node, as parent * C + place; parents come before their children."""
        inside = self._within(root) & (self.depths - self.depths[root] < max_depth)
        scores = np.where(inside[:, None], self.cumulative[:, None] + self.scores, -np.inf).ravel()
        chosen = best_places(scores, count)
        return chosen[np.argsort(self.depths[chosen // self.scores.shape[1]], kind="stable")]

    def _within(self, root: int) -> Bools:
        """Which expanded nodes are `root`, or stand below it [E]."""
        inside = np.full(len(self.tokens), not root)
        if not root:
            return inside
        inside[root] = True
        for depth in range(int(self.depths[root]) + 1, int(self.depths.max()) + 1):
            level = np.flatnonzero(self.depths == depth)
            inside[level] = inside[self.parents[level]]
        return inside

    def _parents_among(self, chosen: Ints, root: int) -> tuple[Ints, Ints]:
        """Of candidates from `best` the nodes above, and the numbers of these in the tree of root and candidates."""
        above, numbers = chosen // self.scores.shape[1], np.zeros(len(self.tokens), np.int64)
        numbers[self.expanded[chosen]] = np.arange(1, len(chosen) + 1)
        numbers[root] = 0
        return above, numbers[above]

    def find(self, path: Sequence[int]) -> int | None:
        """The expanded node at the end of a path of tokens below the root."""
        node, width = 0, self.candidates.shape[1]
        for token in path:
            places = np.flatnonzero(self.candidates[node] == token)
            node = int(self.expanded[node * width + places[0]]) if len(places) else 0
            if not node:
                return None
        return node

    def below(self, path: Sequence[int], budget: TreeBudget, grown_ahead: bool = True) -> DraftTree | None:
        """The tree below the end of a path of tokens, within `budget`; None if that is not expanded."""
        root = self.find(path)
        chosen = np.zeros(0, np.int64) if root is None else self.best(root, budget.max_nodes - 1, budget.max_depth)
        if not len(chosen):
            return None
        assert root is not None
        above, parents = self._parents_among(chosen, root)
        scores = self.cumulative[above] + self.scores.ravel()[chosen] - self.cumulative[root]
        tokens = np.append(self.tokens[root], self.candidates.ravel()[chosen])
        rounded = np.append(0.0, np.minimum(scores, 0.0)).astype(np.float32)
        return DraftTree.of(tokens, np.append(0, parents), rounded, grown_ahead)

    def move_root(self, root: int) -> None:
        """Keep only what stands below an expanded node, which becomes the root."""
        depth = self.depths[root]
        self._keep(self._within(root))
        self.depths = self.depths - depth
        self.is_exact[:] = False
        self._rank()

    def set_root(self, state: Tensor, candidates: Ints, scores: Reals) -> None:
        """Replace the predicted state of the root by the true one, unless it has that already."""
        if self.is_exact[0]:
            return
        self.states = torch.cat([state[None], self.states[1:]])
        self.candidates[0], self.scores[0] = candidates, scores
        self.is_exact[:] = False
        self.is_exact[0] = True
        self._rank()
        self._keep(self.cumulative > -np.inf)

    def release(self) -> None:
        """Give the slots back: the tree is no longer used."""
        self._free.free(self.slots)

    def give_up(self, rows: GrownRows) -> None:
        """Give back what rows took whose results are not wanted."""
        self._free.free(rows.slots[rows.nodes >= len(self.tokens)])

    def next_rows(self, count: int, max_depth: int, max_nodes: int) -> GrownRows | None:
        """The most useful rows of a pass, `count` at most; None if there is nothing to do."""
        return self.take_rows(self.useful(count, max_depth, max_nodes)[0])

    def useful(self, count: int, max_depth: int, max_nodes: int) -> tuple[Ints, Reals]:
        """The most useful candidates of a pass, as parent * C + place, `count` at most; and the logarithms of their worth.

        New nodes stand above `max_depth` levels. A tree of max_nodes takes better ones in place of its worst.
        """
        least = self.cumulative.min() if len(self.tokens) >= max_nodes else -np.inf
        repair, exact = math.log(REPAIR_SHARE), self.is_exact
        if kernels := _kernels():
            places, worths = np.empty(count, np.int64), np.empty(count)
            own = self.expanded, self.scores, self.cumulative, self.depths, exact
            num = kernels.best_rows(*own, max_depth, least, repair, places, worths)
            return places[:num], worths[:num]
        width = self.candidates.shape[1]
        number = self.expanded.reshape(-1, width)
        scores = self.cumulative[:, None] + self.scores
        is_new = (number == 0) & (self.depths < max_depth - 1)[:, None] & (scores > least)
        is_outdated = (number > 0) & ~exact[number] & exact[:, None]
        worth = np.where(is_new, scores, np.where(is_outdated, scores + repair, -np.inf)).ravel()
        chosen = best_places(worth, count)
        return chosen, worth[chosen]

    def take_rows(self, chosen: Ints) -> GrownRows | None:
        """Rows of some of the candidates that are `useful`. New nodes take slots, as long as there are some."""
        width, exact = self.candidates.shape[1], self.is_exact
        nodes = self.expanded[chosen]
        kept = (nodes > 0) | (np.cumsum(nodes == 0) <= self._free.num_free)
        chosen, nodes = chosen[kept], nodes[kept]
        if not len(chosen):
            return None
        parents, is_added = chosen // width, nodes == 0
        num_added = int(is_added.sum())
        nodes[is_added] = len(self.tokens) + np.arange(num_added)
        features = self.states[upload(parents, self.states.device)]  # before slots are taken: it may find no memory
        slots = np.empty(len(nodes), np.int64)
        slots[is_added], slots[~is_added] = self._free.take(num_added), self.slots[nodes[~is_added] - 1]
        seen, above = np.zeros((len(nodes), len(self.tokens)), np.bool_), parents
        if kernels := _kernels():
            kernels.mark_above(parents, self.parents, seen)
        else:
            while above.any():
                seen[np.arange(len(nodes)), above] = True
                above = self.parents[above]
        others = np.flatnonzero(seen[:, 1:].any(0)) + 1
        visible = np.concatenate([seen[:, others], np.eye(len(nodes), dtype=np.bool_)], 1)
        return GrownRows(
            self.candidates.ravel()[chosen], self.depths[parents] + 1, features, slots, nodes, parents, exact[parents],
            self.slots[others - 1], visible,
        )  # fmt: skip

    def apply(self, rows: GrownRows, states: Tensor, candidates: Ints, scores: Reals, max_nodes: int) -> None:
        """Take the results of a pass over `next_rows`: states [R, H], candidates and scores [R, C]; keep the best nodes."""
        added = rows.nodes >= len(self.tokens)
        again = rows.nodes[~added]
        self.tokens = np.concatenate([self.tokens, rows.tokens[added]])
        self.parents = np.concatenate([self.parents, rows.parents[added]])
        self.depths = np.concatenate([self.depths, rows.depths[added]])
        self.slots = np.concatenate([self.slots, rows.slots[added]])
        self.is_exact = np.concatenate([self.is_exact, rows.is_exact[added]])
        self.candidates = np.concatenate([self.candidates, candidates[added]])
        self.scores = np.concatenate([self.scores, scores[added]])
        self.candidates[again], self.scores[again], self.is_exact[again] = candidates[~added], scores[~added], True
        order, own = np.arange(len(self.tokens)), len(self.states) + np.arange(len(added))
        order[again], order[len(self.states) :] = own[~added], own[added]
        self.states = torch.cat([self.states, states])
        self._rank()
        kept = np.zeros(len(order), np.bool_)
        kept[best_places(self.cumulative, max_nodes)] = True
        self._keep(kept, order)

    def _keep(self, kept: Bools, order: Ints | None = None) -> None:
        """Keep some nodes, [E]: with each the nodes above it, but for those above a new root.

        order: where their states are now, [E]; in the order of the nodes, if it is None.
        """
        if order is not None:
            self.states = self.states[upload(order[kept], self.states.device)]
        if kept.all():
            return
        nodes, numbers = np.flatnonzero(kept), np.zeros(len(self.tokens), np.int64)
        numbers[nodes] = np.arange(len(nodes))
        self._free.free(self.slots[~kept[1:]] if kept[0] else np.append(self.slots[~kept[1:]], self.slots[nodes[0] - 1]))
        self.slots = self.slots[nodes[1:] - 1]
        self.tokens, self.parents, self.depths = self.tokens[nodes], numbers[self.parents[nodes]], self.depths[nodes]
        self.parents[0] = 0
        if order is None:
            self.states = self.states[upload(nodes, self.states.device)]
        self.is_exact, self.candidates, self.scores = self.is_exact[nodes], self.candidates[nodes], self.scores[nodes]
        self._rank()


@cache
def _kernels() -> Any:
    """The kernels of the CPU for these trees, wherever the drafter runs; None where numba is not installed."""
    if not has_numba():
        return None
    from eyas.kernels.cpu import drafting as cpu_kernels

    cpu_kernels.compile_kernels()
    return cpu_kernels


class AheadTrees:
    """Trees of an EAGLE drafter that grow from round to round."""

    def __init__(self, drafter: EagleDrafter, config: DraftAheadConfig) -> None:
        self._drafter, self._config = drafter, config
        self._draft_ids: Ints = drafter.draft_ids.cpu().numpy()
        self._trees: dict[str, GrownTree] = {}
        assert drafter.num_grown_slots, "its trees have no slots to grow in"
        self._free = SlotAllocator(drafter.num_grown_slots)
        self._contexts: dict[str, DraftContext] = {}
        self._num_passes: dict[str, int] = {}  # by session, since its last commit
        self._ended: set[str] = set()  # sessions whose trees have all that they may have until the next commit
        self._running: list[tuple[str, GrownTree, GrownRows]] = []
        self._found: FoundRows | None = None
        self._changed: dict[str, None] = {}
        _kernels()  # compiled now, not while sessions wait

    def commit(self, contexts: Sequence[DraftContext], paths: Sequence[Path]) -> list[Draft]:
        """Give the drafter commits that were foreseen and want no tree.

        Their pass runs new rows of their trees as well, behind states that are predicted.

        Args:
            contexts: the commits.
            paths: of each, all tokens since the last `begin`.
        """
        self.collect()
        self._running, path_of = [], {context.session: path for context, path in zip(contexts, paths, strict=True)}

        def rows_of(ready: Sequence[DraftContext]) -> list[GrownRows | None]:
            names = list[str]()
            for name in [context.session for context in ready]:
                tree = self._trees.get(name)
                root = tree.find(path_of[name]) if tree else None
                if tree and root:
                    tree.move_root(root)
                    names.append(name)
                else:  # given up since it was the answer
                    self.release([name])
            planned = self._plan(names, sum(map(num_features, ready)))
            return [planned.get(context.session) for context in ready]

        drafts, self._found = self._drafter.commit_beside(contexts, rows_of, self._config.num_candidates)
        return drafts

    def begin(self, contexts: Sequence[DraftContext]) -> None:
        """Grow trees below commits that the drafter has."""
        self.collect()
        self._set_roots(contexts)

    def _set_roots(self, contexts: Sequence[DraftContext]) -> None:
        """Take the true states behind commits that the drafter has."""
        states, best = self._drafter.root_candidates(contexts, self._config.num_candidates)
        ids, scores = download(best.ids, best.scores)
        candidates = self._draft_ids[ids.astype(np.int64)]
        for row, context in enumerate(contexts):
            tree, found = self._trees.get(context.session), (states[row], candidates[row], scores[row])
            if tree:
                tree.set_root(*found)
            else:
                self._trees[context.session] = GrownTree(context.tokens[-1], *found, self._free)
            self._contexts[context.session] = context
            self._num_passes[context.session] = 0
            self._ended.discard(context.session)

    def step(self) -> bool:
        """Launch a pass over all trees that can grow. Returns whether there was one."""
        self._run([name for name in self._trees if name not in self._ended and self._drafter.can_grow(name)])
        return bool(self._running)

    def _run(self, names: Sequence[str]) -> None:
        """Launch a pass over trees of sessions."""
        self._running = []
        if planned := self._plan(names):
            contexts = [self._contexts[name] for name in planned]
            device = self._drafter.device
            repairs = any(rows.nodes.min() < len(tree.tokens) for _, tree, rows in self._running)
            with device.labelled("repair") if device and device.label and repairs else nullcontext():
                self._found = self._drafter.run_rows(contexts, list(planned.values()), self._config.num_candidates)

    def _plan(self, names: Sequence[str], num_taken: int = 0) -> dict[str, GrownRows]:
        """The rows of sessions in a pass: the most useful ones of all. num_taken: rows of the pass for commits.

        Trees without useful rows have ended growing.
        """
        if not names:
            return {}
        count = min(self._config.top_k, max(MAX_USEFUL // len(names), MIN_USEFUL))
        limits, planned = (count, self._config.num_steps, self._max_nodes), dict[str, GrownRows]()
        useful = {name: self._trees[name].useful(*limits) for name in names}
        counts = {name: len(chosen) for name, (chosen, _) in useful.items()}
        worth = np.concatenate([worth for _, worth in useful.values()])
        order = np.argsort(-worth, kind="stable")
        if len(worth) > (limit := max(MAX_ROWS - num_taken, MIN_USEFUL)):
            kept = np.zeros(len(worth), np.bool_)
            kept[order[:limit]] = True
            ends = np.cumsum(list(counts.values()))
            counts = dict(zip(names, np.diff(np.append(0, np.cumsum(kept)[ends - 1])).tolist(), strict=True))
        for name, (chosen, _) in useful.items():
            tree = self._trees[name]
            if rows := tree.take_rows(chosen[: counts[name]]):
                planned[name] = rows
                self._running.append((name, tree, rows))
            elif not len(chosen) or counts[name]:
                self._ended.add(name)
                self._changed |= {} if _sends(self._num_passes[name]) else {name: None}
                continue
            self._num_passes[name] += 1
        return planned

    @property
    def _max_nodes(self) -> int:
        """Most nodes of a tree: each session has an equal part of the slots, and room for the rows of a pass."""
        return min(MAX_GROWN_NODES, max(self._drafter.num_grown_slots // len(self._trees) - self._config.top_k, MIN_USEFUL))

    def collect(self) -> None:
        """Take in what the last pass computed. Waits for the device."""
        found, self._found, end = self._found, None, 0
        if found is None:
            while self._running:  # in a pass that failed
                _, tree, rows = self._running.pop()
                tree.give_up(rows)
            return
        ids, scores = download(found.best.ids, found.best.scores)
        candidates = self._draft_ids[ids.astype(np.int64)]
        while self._running:
            name, tree, rows = self._running.pop(0)
            own, end = slice(end, end + len(rows.tokens)), end + len(rows.tokens)
            if self._trees.get(name) is tree:
                tree.apply(rows, found.states[own], candidates[own], scores[own], self._max_nodes)
                self._changed[name] = None
            else:
                tree.give_up(rows)

    def take_prepared(self) -> list[PreparedTree]:
        """The trees that have changed, after some of the passes: a later tree replaces an earlier one."""
        names = [name for name in self._changed if name in self._ended or _sends(self._num_passes[name])]
        self._changed = {name: None for name in self._changed if name not in names}
        count = MAX_PREPARED_NODES // max(len(self._trees), 1)
        if count < MIN_PREPARED_NODES:
            return []
        budget, found = TreeBudget(min(count, PreparedTree.MAX_NODES), self._config.num_steps), list[PreparedTree]()
        for name in names:
            context, tree = self._contexts[name], self._trees[name].below((), budget)
            if tree:
                found.append(PreparedTree(name, context.epoch, context.committed_length, tree))
        return found

    def trees(self, contexts: Sequence[DraftContext], paths: Sequence[Path]) -> list[DraftTree | None]:
        """Cut trees below paths of target tokens since `begin`, within the contexts' budgets; None where none has grown."""
        found = list[DraftTree | None]()
        for context, path in zip(contexts, paths, strict=True):
            tree = self._trees.get(context.session)
            below = tree.below(path, context.budget) if tree else None
            found.append(without_banned(below, context) if below else None)
        return found

    def draft(self, contexts: Sequence[DraftContext], paths: Sequence[Path]) -> list[Draft]:
        """Commit to the drafter, and draft on demand, up to `miss_steps` levels. paths: as for `trees`.

        contexts: of deterministic trees, as the drafter's next commits.
        """
        self.collect()
        for context, path in zip(contexts, paths, strict=True):
            tree, root = self._trees.get(context.session), None
            if tree and path and (context.budget.wants_tree or context.has_tree) and (root := tree.find(path)):
                tree.move_root(root)
            else:
                self.release([context.session])
        drafts = self._drafter.propose([context._replace(budget=BOOKKEEPING) for context in contexts])
        can_grow = [
            i for i, c in enumerate(contexts) if isinstance(drafts[i], DraftTree) and self._drafter.can_grow(c.session)
        ]
        self.release([context.session for i, context in enumerate(contexts) if i not in can_grow])
        places = [i for i in can_grow if contexts[i].budget.wants_tree]
        if not places:
            return drafts
        self._set_roots([contexts[i] for i in places])
        for i, cut in zip(places, self._grown([contexts[i] for i in places]), strict=True):
            drafts[i] = without_banned(cut, contexts[i])
        return drafts

    def _grown(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """Grow trees by a pass for each further level, for verifiers that wait."""
        for _ in range(min(self._config.miss_steps, self._drafter.tree.num_steps) - 1):
            self._run([context.session for context in contexts])
            if not self._running:
                break
            self.collect()
        return [self._cut(context, within(context.budget, self._drafter.tree)) for context in contexts]

    def _cut(self, context: DraftContext, budget: TreeBudget) -> DraftTree:
        found = self._trees[context.session].below((), budget, grown_ahead=False)
        return found or DraftTree.root_only(context.tokens[-1])

    def release(self, sessions: Sequence[str]) -> None:
        """Forget sessions; unknown ones are ignored."""
        for name in sessions:
            if tree := self._trees.pop(name, None):
                tree.release()
            for known in (self._contexts, self._num_passes, self._changed):
                known.pop(name, None)
            self._ended.discard(name)


def _sends(number: int) -> bool:
    """Whether trees are sent after this pass: if its number is a power of two or three times one, half of 16."""
    return any(of and of & (of - 1) == 0 for of in (number, number // 3 if number % 3 == 0 else 0))
