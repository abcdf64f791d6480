"""Drafting ahead with EAGLE: trees grow from round to round while the target verifies, see `ahead.drafter`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from eyas.arrays import Ints
from eyas.cache.prefix_cache import SlotAllocator
from eyas.config import DraftAheadConfig
from eyas.device.transfer import download
from eyas.drafters.ahead.grown_tree import GrownTree
from eyas.drafters.base import Draft, DraftContext, Path, within, without_banned
from eyas.drafters.trees.rows import FoundRows, GrownRows
from eyas.kernels.choice import tree_kernels
from eyas.protocol.commit import NO_TREE, TreeBudget
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


@dataclass
class AheadTree:
    """The tree of a session.

    Attributes:
        tree: its nodes.
        context: the commit below which it grows.
        num_passes: since then.
        has_ended: whether it has all that it may have until the next commit.
        has_changed: whether it differs from what was sent.
    """

    tree: GrownTree
    context: DraftContext
    num_passes: int = 0
    has_ended: bool = False
    has_changed: bool = False


class AheadTrees:
    """Trees of an EAGLE drafter that grow from round to round."""

    def __init__(self, drafter: EagleDrafter, config: DraftAheadConfig) -> None:
        self._drafter, self._config = drafter, config
        self._draft_ids: Ints = drafter.draft_ids.cpu().numpy()
        self.grown: dict[str, AheadTree] = {}
        assert drafter.num_grown_slots, "its trees have no slots to grow in"
        self.pool = SlotAllocator(drafter.num_grown_slots)
        self._running: list[tuple[str, GrownTree, GrownRows]] = []
        self._found: FoundRows | None = None
        tree_kernels()  # compiled now, not while sessions wait

    def commit(self, contexts: Sequence[DraftContext], paths: Sequence[Path]) -> list[Draft]:
        """Give the drafter commits, without asking for trees. Trees in which they were foreseen go on below them.

        Args:
            paths: of each commit, all tokens since the last `begin`; empty where its tree cannot go on.
        """
        self.collect()
        for context, path in zip(contexts, paths, strict=True):
            own = self.grown.get(context.session)
            if own and path and (root := own.tree.find(path)):
                own.tree.move_root(root)
            else:
                self.release([context.session])
        drafts = self._drafter.propose([context._replace(budget=NO_TREE) for context in contexts])
        lost = [c.session for c, draft in zip(contexts, drafts, strict=True) if not self._goes_on(c.session, draft)]
        self.release(lost)
        return drafts

    def _goes_on(self, session: str, draft: Draft) -> bool:
        """Return whether a tree can grow below a commit that was answered by `draft`."""
        return isinstance(draft, DraftTree) and self._drafter.can_grow(session)

    def begin(self, contexts: Sequence[DraftContext]) -> None:
        """Grow trees below commits that the drafter has, from the true states behind these."""
        self.collect()
        states, best = self._drafter.root_candidates(contexts, self._config.num_candidates)
        ids, scores = download(best.ids, best.scores)
        candidates = self._draft_ids[ids.astype(np.int64)]
        for row, context in enumerate(contexts):
            own, found = self.grown.get(context.session), (states[row], candidates[row], scores[row])
            if own is None:
                self.grown[context.session] = AheadTree(GrownTree(context.tokens[-1], *found, self.pool), context)
            else:
                own.tree.set_root(*found)
                own.context = context
                own.num_passes = 0
                own.has_ended = False

    def step(self) -> bool:
        """Launch a pass over all trees that can grow. Returns whether there was one."""
        self._run([name for name, own in self.grown.items() if not own.has_ended and self._drafter.can_grow(name)])
        return bool(self._running)

    def _run(self, names: Sequence[str]) -> None:
        """Launch a pass over trees of sessions."""
        self._running = []
        if planned := self.plan(names):
            contexts = [self.grown[name].context for name in planned]
            device = self._drafter.device
            repairs = any(rows.nodes.min() < len(tree.tokens) for _, tree, rows in self._running)
            with device.labelled("repair") if device and device.label and repairs else nullcontext():
                self._found = self._drafter.run_rows(contexts, list(planned.values()), self._config.num_candidates)

    def plan(self, names: Sequence[str]) -> dict[str, GrownRows]:
        """Return the rows of sessions in a pass: the most useful ones of all.

        Trees without useful rows have ended growing.
        """
        if not names:
            return {}
        count = min(self._config.top_k, max(MAX_USEFUL // len(names), MIN_USEFUL))
        limits, planned = (count, self._config.num_steps, self._max_nodes), dict[str, GrownRows]()
        useful = {name: self.grown[name].tree.useful(*limits) for name in names}
        counts = {name: len(chosen) for name, (chosen, _) in useful.items()}
        worth = np.concatenate([worth for _, worth in useful.values()])
        order = np.argsort(-worth, kind="stable")
        if len(worth) > MAX_ROWS:
            kept = np.zeros(len(worth), np.bool_)
            kept[order[:MAX_ROWS]] = True
            ends = np.cumsum(list(counts.values()))
            counts = dict(zip(names, np.diff(np.append(0, np.cumsum(kept)[ends - 1])).tolist(), strict=True))
        for name, (chosen, _) in useful.items():
            own = self.grown[name]
            if rows := own.tree.take_rows(chosen[: counts[name]]):
                planned[name] = rows
                self._running.append((name, own.tree, rows))
            elif not len(chosen) or counts[name]:
                own.has_ended = True
                own.has_changed = own.has_changed or not _sends(own.num_passes)
                continue
            own.num_passes += 1
        return planned

    @property
    def _max_nodes(self) -> int:
        """Most nodes of a tree: each session has an equal part of the slots, and room for the rows of a pass."""
        return min(MAX_GROWN_NODES, max(self._drafter.num_grown_slots // len(self.grown) - self._config.top_k, MIN_USEFUL))

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
            part, end = slice(end, end + len(rows.tokens)), end + len(rows.tokens)
            own = self.grown.get(name)
            if own and own.tree is tree:
                tree.apply(rows, found.states[part], candidates[part], scores[part], self._max_nodes)
                own.has_changed = True
            else:
                tree.give_up(rows)

    def take_prepared(self) -> list[PreparedTree]:
        """Return the trees that have changed, after some of the passes: a later tree replaces an earlier one."""
        changed = [own for own in self.grown.values() if own.has_changed and (own.has_ended or _sends(own.num_passes))]
        for own in changed:
            own.has_changed = False
        count = MAX_PREPARED_NODES // max(len(self.grown), 1)
        if count < MIN_PREPARED_NODES:
            return []
        budget = TreeBudget(min(count, PreparedTree.MAX_NODES), self._config.num_steps)
        pairs = [(own.context, own.tree.below((), budget)) for own in changed]
        return [PreparedTree(c.session, c.epoch, c.committed_length, tree) for c, tree in pairs if tree]

    def trees(self, contexts: Sequence[DraftContext], paths: Sequence[Path]) -> list[DraftTree | None]:
        """Cut trees below paths of target tokens since `begin`, within the contexts' budgets; None where none has grown."""
        found = list[DraftTree | None]()
        for context, path in zip(contexts, paths, strict=True):
            own = self.grown.get(context.session)
            below = own.tree.below(path, context.budget) if own else None
            found.append(without_banned(below, context) if below else None)
        return found

    def draft(self, contexts: Sequence[DraftContext], paths: Sequence[Path]) -> list[Draft]:
        """Commit to the drafter, and draft on demand, up to `miss_steps` levels.

        Args:
            contexts: of deterministic trees, as the drafter's next commits.
            paths: as for `commit`.
        """
        drafts = self.commit(contexts, paths)
        places = [i for i, c in enumerate(contexts) if c.budget.wants_tree and self._goes_on(c.session, drafts[i])]
        if not places:
            return drafts
        self.begin([contexts[i] for i in places])
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
        budgets = [within(context.budget, self._drafter.tree) for context in contexts]
        trees = [self.grown[context.session].tree for context in contexts]
        cut = [tree.below((), budget, grown_ahead=False) for tree, budget in zip(trees, budgets, strict=True)]
        return [tree or DraftTree.root_only(c.tokens[-1]) for c, tree in zip(contexts, cut, strict=True)]

    def release(self, sessions: Sequence[str]) -> None:
        """Forget sessions; unknown ones are ignored."""
        for name in sessions:
            if own := self.grown.pop(name, None):
                own.tree.release()


def _sends(number: int) -> bool:
    """Return whether trees are sent after this pass: if its number is a power of two or three times one, half of 16."""
    return any(of and of & (of - 1) == 0 for of in (number, number // 3 if number % 3 == 0 else 0))
