"""Drafting ahead: what a drafter does while the target verifies, so that the next tree costs no pass of the network.

EAGLE trees keep growing, and are cut where the committed path ends. For one-pass heads, blocks are run behind the likeliest
nodes of the tree under verification, all in one pass; when the path and the token behind it are known, a tree grows from the
block behind the path's last node. A commit that was foreseen is answered so at once. Such commits queue up and reach the
drafter in one piece, when there is time or when a tree has to be grown on demand. Legend: S sessions, P candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from eyas.config import DraftAheadConfig
from eyas.draft_protocol import TreeBudget
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter, Path, within, without_banned
from eyas.drafters.block import BlockDrafter
from eyas.drafters.cuda_graphs import CapturedGrowth
from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.tree_growth import TreeGrowth
from eyas.errors import ConfigError
from eyas.tensors import Ints, download
from eyas.tree import DraftTree

BOOKKEEPING = TreeBudget(1, 0)


class Ahead(Protocol):
    """What was prepared for the next commits of some sessions. A session's row is its place among them."""

    def step(self) -> bool:
        """Prepare more. Returns whether there was more to do."""
        ...

    def copy_to_host(self) -> None:
        """Copy to the host what `trees` reads there. Waits for the device."""
        ...

    def trees(self, rows: Sequence[int], contexts: Sequence[DraftContext], paths: Sequence[Path]) -> list[DraftTree | None]:
        """Trees of sessions below paths of target tokens, within the contexts' budgets; None where none is ready."""
        ...


class AheadTrees:
    """Implements Ahead: the trees of one TreeGrowth on the host, as of the last copy."""

    def __init__(self, growth: TreeGrowth | CapturedGrowth, draft_ids: Ints, num_steps: int) -> None:
        """draft_ids maps draft vocabulary ids to the target's. num_steps: levels that trees grow."""
        self.growth = growth
        self._draft_ids = draft_ids
        self._num_steps = num_steps
        self._num_copied = 0

    def step(self) -> bool:
        is_growing = self.growth.num_levels < self._num_steps
        if is_growing:
            self.growth.step()
        return is_growing

    def trees(self, rows: Sequence[int], contexts: Sequence[DraftContext], paths: Sequence[Path]) -> list[DraftTree | None]:
        trees = [self.below(r, p, c.budget) for r, c, p in zip(rows, contexts, paths, strict=True)]
        return [tree and without_banned(tree, context) for tree, context in zip(trees, contexts, strict=True)]

    def below(self, row: int, path: Sequence[int], budget: TreeBudget) -> DraftTree | None:
        """The tree of session `row` below `path`, within `budget` and the levels that are copied; None if there is none.

        path: the target's token ids below the root. Scores of nodes are those of their whole paths less that of `path`.
        """
        if not self._num_copied:
            self.copy_to_host()
        node = 0
        for token in path:
            children = np.flatnonzero(self._parents[row] == node)
            found = children[self._draft_ids[self._tokens[row, children]] == token]
            if not len(found):
                return None
            node = int(found[0]) + 1
        return self._cut(row, node, path[-1], budget)

    def copy_to_host(self) -> None:
        """Copy the candidates of all sessions, if levels were added since the last copy. Waits for the device."""
        if self._num_copied < self.growth.num_levels:
            candidates = self.growth.candidates
            self._num_copied = self.growth.num_levels
            tokens, parents, scores = download(candidates.tokens, candidates.parents, candidates.scores)
            self._tokens, self._parents = tokens.astype(np.int64), parents.astype(np.int64)
            self._scores, self._ends = scores.astype(np.float32), candidates.ends

    def _cut(self, row: int, root: int, token: int, budget: TreeBudget) -> DraftTree | None:
        """The best descendants of candidate `root` with a finite score. Ties go to the lower number, hence parents come
        before children."""
        parents = self._parents[row]
        inside = np.zeros(len(parents) + 1, dtype=bool)
        inside[root] = True
        first = int(np.searchsorted(self._ends, root))
        for level in range(first + 1, min(first + 1 + budget.max_depth, len(self._ends))):
            span = slice(self._ends[level - 1], self._ends[level])
            inside[1:][span] = inside[parents[span]]
        inside[root] = False
        members = np.flatnonzero(inside)
        members = members[np.isfinite(self._scores[row, members - 1])]
        if not len(members):
            return None
        scores = self._scores[row, members - 1]
        chosen = np.sort(members[np.argsort(-scores, kind="stable")[: budget.max_nodes - 1]])
        above = parents[chosen - 1]
        places = np.where(above == root, 0, np.searchsorted(chosen, above) + 1)
        return DraftTree(
            tokens=(token, *self._draft_ids[self._tokens[row, chosen - 1]].tolist()),
            parents=(0, *places.tolist()),
            log_probs=(0.0, *(self._scores[row, chosen - 1] - self._scores[row, root - 1]).tolist()),
            grown_ahead=True,
        )


class AheadBlocks:
    """Implements Ahead: blocks of a one-pass head behind nodes of the trees that the target verifies.

    A block does not see the features of its path, and not the token behind it, which only chooses among what the block
    proposes. So a tree has to be there for any token behind any of the nodes.
    """

    def __init__(
        self, drafter: BlockDrafter, contexts: Sequence[DraftContext], trees: Sequence[DraftTree], num_nodes: int
    ) -> None:
        """trees: of the sessions, below their last commits. num_nodes: nodes of each that get a block."""
        self._drafter, self._contexts, self._trees = drafter, contexts, trees
        self._nodes = [_likeliest_ends(tree, num_nodes) for tree in trees]
        self._states: list[Tensor] | None = None

    def step(self) -> bool:
        is_waiting = self._states is None
        if is_waiting:
            self._states = self._drafter.states_behind(self._contexts, self._trees, self._nodes)
        return is_waiting

    def copy_to_host(self) -> None:
        """Nothing: the states of blocks stay on the device."""

    def trees(self, rows: Sequence[int], contexts: Sequence[DraftContext], paths: Sequence[Path]) -> list[DraftTree | None]:
        found: list[DraftTree | None] = [None] * len(rows)
        states = dict[int, Tensor]()
        for i, (row, path) in enumerate(zip(rows, paths, strict=True)):
            node: int | None = 0
            for token in path[:-1]:
                node = None if node is None else self._trees[row].child(node, token)
            if self._states is not None and node in self._nodes[row]:
                states[i] = self._states[row][self._nodes[row].index(node)]
        if states:
            grown = self._drafter.grow_behind([contexts[i] for i in states], torch.stack(list(states.values())))
            for i, tree in zip(states, grown, strict=True):
                found[i] = replace(tree, grown_ahead=True)
        return found


def _likeliest_ends(tree: DraftTree, count: int) -> list[int]:
    """The `count` nodes at which the accepted path most likely ends: their chance less that of their children."""
    chances = np.exp(np.array(tree.log_probs))
    ends = chances - [sum(chances[child] for child in tree.families.get(node, ())) for node in range(len(tree))]
    likeliest: list[int] = np.argsort(-ends, kind="stable")[:count].tolist()
    return likeliest


@dataclass
class _AheadSession:
    """A session that the drafter follows, perhaps some commits behind.

    last: its latest commit. tree: the answer to it. backlog: the commits that the drafter has not received. ahead: what was
    prepared, in `row`. path: the tokens committed since then.
    """

    last: DraftContext
    tree: DraftTree | None = None
    backlog: list[DraftContext] = field(default_factory=list)
    ahead: Ahead | None = None
    row: int = 0
    path: tuple[int, ...] = ()

    def continues_with(self, context: DraftContext) -> bool:
        """Whether the context starts where the latest commit ends."""
        return (self.last.epoch, self.last.committed_length) == (context.epoch, context.start_position)


class DraftAheadDrafter(LocalDrafter):
    """An EAGLE drafter, or one of one-pass heads, that prepares for the next commits whenever `draft_ahead` is called."""

    def __init__(self, drafter: EagleDrafter | BlockDrafter, config: DraftAheadConfig) -> None:
        """Raises ConfigError for more candidates than the draft vocabulary has tokens."""
        if config.num_candidates > len(drafter.draft_ids):
            raise ConfigError(
                f"draft_ahead.num_candidates is {config.num_candidates}, but the draft vocabulary has "
                f"{len(drafter.draft_ids)} tokens; set at most these"
            )
        self._drafter = drafter
        self._config = config
        self._draft_ids: Ints = drafter.draft_ids.cpu().numpy()
        self._sessions: dict[str, _AheadSession] = {}
        self._due: dict[str, None] = {}
        self._preparing: Ahead | None = None

    @property
    def needs(self) -> DrafterNeeds:
        return self._drafter.needs

    @property
    def can_sample(self) -> bool:
        return self._drafter.can_sample

    def warm_up(self) -> None:
        self._drafter.warm_up()

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        drafts: list[Draft] = list(self._take_ahead(contexts))
        missing = [i for i, draft in enumerate(drafts) if draft is None]
        answers = self._drafter.propose([self._with_backlog(contexts[i]) for i in missing]) if missing else []
        for i, draft in zip(missing, answers, strict=True):
            drafts[i] = draft
        for context, draft in zip(contexts, drafts, strict=True):
            if isinstance(draft, DraftTree) and draft.num_drafted and context.proposal == "deterministic":
                self._sessions[context.session].tree = draft
                self._due[context.session] = None
        return drafts

    def release(self, sessions: Sequence[str]) -> None:
        for key in sessions:
            self._sessions.pop(key, None)
            self._due.pop(key, None)
        self._drafter.release(sessions)

    @torch.inference_mode()
    def draft_ahead(self) -> bool:
        device = self._drafter.device
        with device.labelled("grow") if device else nullcontext():
            return self._go_on()

    def _go_on(self) -> bool:
        preparing = self._preparing
        if preparing:
            preparing.copy_to_host()  # the level of the call before, which the device has done by now
        if preparing is None or not self._is_awaited(preparing) or not preparing.step():
            self._preparing = self._begin()
        if self._preparing and not self.busy_s:
            self._preparing.copy_to_host()
        return self._preparing is not None

    @property
    def busy_s(self) -> float:
        return self._drafter.busy_s

    def _is_awaited(self, ahead: Ahead) -> bool:
        """Whether a session has not committed anything since `ahead` began."""
        return any(session.ahead is ahead and not session.path for session in self._sessions.values())

    def _take_ahead(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """The trees that are ready for the contexts' last tokens."""
        found: list[DraftTree | None] = [None] * len(contexts)
        foreseen = dict[int, tuple[Ahead, list[int]]]()
        for i, context in enumerate(contexts):
            session = self._sessions.get(context.session)
            wanted = context.budget.wants_tree and context.proposal == "deterministic"
            if wanted and session is not None and session.continues_with(context) and session.ahead is not None:
                foreseen.setdefault(id(session.ahead), (session.ahead, []))[1].append(i)
        for ahead, places in foreseen.values():
            sessions, own = [self._sessions[contexts[i].session] for i in places], [contexts[i] for i in places]
            paths = [(*session.path, *context.tokens) for session, context in zip(sessions, own, strict=True)]
            within_tree = [replace(context, budget=within(context.budget, self._drafter.tree)) for context in own]
            trees = ahead.trees([session.row for session in sessions], within_tree, paths)
            for i, session, path, tree in zip(places, sessions, paths, trees, strict=True):
                found[i] = tree
                if tree is not None:
                    session.path, session.last, session.tree = path, contexts[i], None
                    session.backlog.append(contexts[i])
        return found

    def _with_backlog(self, context: DraftContext) -> DraftContext:
        """The session's backlog and `context` as one commit for the drafter."""
        session = self._sessions.get(context.session)
        whole = _joined([*session.backlog, context]) if session and session.continues_with(context) else context
        self._sessions[context.session] = _AheadSession(context)
        return whole

    def _begin(self) -> Ahead | None:
        """Commit all backlogs to the drafter, and begin to prepare from where all due sessions are now."""
        keys, self._due = [key for key in self._due if key in self._sessions], {}
        behind = [key for key in keys if self._sessions[key].backlog]
        if behind:
            commits = [replace(_joined(self._sessions[key].backlog), budget=BOOKKEEPING) for key in behind]
            for key, answer in zip(behind, self._drafter.propose(commits), strict=True):
                if isinstance(answer, DraftTree):
                    self._sessions[key].backlog.clear()
                else:
                    del self._sessions[key]
        keys = [key for key in keys if key in self._sessions and self._drafter.can_grow(key)]
        sessions = {key: self._sessions[key] for key in keys[: self._drafter.max_growing]}
        self._due = dict.fromkeys(keys[len(sessions) :])
        if not sessions:
            return None
        if self._preparing:
            self._preparing.copy_to_host()  # the next trees may take their memory
        contexts = [session.last for session in sessions.values()]
        ahead = self._prepare(contexts, [session.tree for session in sessions.values()])
        for row, (key, session) in enumerate(sessions.items()):
            self._sessions[key] = _AheadSession(session.last, session.tree, ahead=ahead, row=row)
        return ahead

    def _prepare(self, contexts: Sequence[DraftContext], trees: Sequence[DraftTree | None]) -> Ahead:
        """trees: the answers to the contexts."""
        if isinstance(self._drafter, BlockDrafter):
            known = [tree or DraftTree.root_only(c.tokens[-1]) for tree, c in zip(trees, contexts, strict=True)]
            return AheadBlocks(self._drafter, contexts, known, self._config.top_k)
        return AheadTrees(self._drafter.growth(contexts, self._config), self._draft_ids, self._config.num_steps)


def _joined(contexts: Sequence[DraftContext]) -> DraftContext:
    """Successive commits of a session as one."""
    first, last = contexts[0], contexts[-1]
    features = [context.features for context in contexts if context.features is not None]
    tokens = tuple(token for context in contexts for token in context.tokens)
    return replace(
        last, start_position=first.start_position, tokens=tokens, features=torch.cat(features) if features else None
    )
