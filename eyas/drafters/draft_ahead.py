"""Drafting ahead: what a drafter does while the target verifies, so that the next tree costs no pass of the network.

An EAGLE tree keeps growing: when the committed path and the token behind it lie inside it, the subtree below is the answer,
and it grows on from round to round. For one-pass heads, blocks are run behind the likeliest nodes of the tree under
verification, all in one pass. Commits that were foreseen queue up and reach the drafter in one piece, when there is time or
when a tree has to be grown on demand.
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
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter, Path, PreparedTree, within, without_banned
from eyas.drafters.block import BlockDrafter
from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.grown_tree import GrownRows, GrownTree
from eyas.errors import ConfigError
from eyas.sampling.sampler import Ranked
from eyas.tensors import Ints, download
from eyas.tree import DraftTree

BOOKKEEPING = TreeBudget(1, 0)
# Passes of a tree after it has grown as deep as it may: its states come closer to those of a fresh tree.
NUM_REPAIRS = 4
# Nodes of prepared trees: of all sessions together, the fewest and the most of one.
MAX_PREPARED_NODES, MIN_PREPARED_NODES, MAX_SESSION_NODES = 1024, 128, 512
# Rows of a pass, of all sessions together, and the fewest of a session.
MAX_ROWS, MIN_ROWS = 512, 16


class Ahead(Protocol):
    """What is prepared for the next commits of sessions."""

    def begin(self, contexts: Sequence[DraftContext], trees: Sequence[DraftTree | None], paths: Sequence[Path]) -> None:
        """Prepare for what follows commits that the drafter has.

        trees: the answers to them. paths: tokens that were committed since the last `begin` of a session and were foreseen;
        empty if its last commit was not.
        """
        ...

    def step(self) -> bool:
        """Prepare more. Returns whether there was more to do."""
        ...

    def collect(self) -> None:
        """Take in what the last step computed. Waits for the device."""
        ...

    def trees(self, contexts: Sequence[DraftContext], paths: Sequence[Path]) -> list[DraftTree | None]:
        """Trees below paths of target tokens since `begin`, within the contexts' budgets; None where none is ready."""
        ...

    def draft(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Commit contexts that were not foreseen to the drafter, and draft for them on demand."""
        ...

    def take_prepared(self) -> list[PreparedTree]:
        """See LocalDrafter."""
        ...

    def release(self, sessions: Sequence[str]) -> None:
        """Forget sessions; unknown ones are ignored."""
        ...


class AheadTrees:
    """Implements Ahead: trees of an EAGLE drafter that grow from round to round."""

    def __init__(self, drafter: EagleDrafter, config: DraftAheadConfig) -> None:
        self._drafter, self._config = drafter, config
        self._draft_ids: Ints = drafter.draft_ids.cpu().numpy()
        self._trees: dict[str, GrownTree] = {}
        self._contexts: dict[str, DraftContext] = {}
        self._num_left: dict[str, int] = {}  # by session, passes until it has converged
        self._running: list[tuple[str, GrownTree, GrownRows, Ints]] = []
        self._found: tuple[Tensor, Ranked] | None = None
        self._changed: dict[str, None] = {}

    def begin(self, contexts: Sequence[DraftContext], trees: Sequence[DraftTree | None], paths: Sequence[Path]) -> None:
        self.collect()
        for context, path in zip(contexts, paths, strict=True):
            tree = self._trees.get(context.session)
            root = tree.find(path) if tree else None
            if tree and root:
                tree.move_root(root)
            elif path:  # given up since it was the answer
                self._trees.pop(context.session, None)
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
                self._trees[context.session] = GrownTree(context.tokens[-1], *found)
            self._contexts[context.session] = context
            self._num_left[context.session] = self._config.num_steps + NUM_REPAIRS

    def step(self) -> bool:
        names = [name for name, left in self._num_left.items() if left > 0]
        if not names:
            return False
        self._run(names)
        return True

    def _run(self, names: Sequence[str]) -> None:
        """Launch a pass over trees of sessions."""
        for name in names:
            self._num_left[name] -= 1
        most = min(self._config.top_k, max(MAX_ROWS // len(names), MIN_ROWS))
        planned = [(name, self._trees[name], *self._trees[name].next_rows(most, self._config.num_steps)) for name in names]
        self._running = [each for each in planned if len(each[2].tokens)]  # without numbers for scores there is no next row
        if self._running:
            contexts, rows = [self._contexts[name] for name, *_ in self._running], [rows for *_, rows, _ in self._running]
            self._found = self._drafter.run_rows(contexts, rows, self._config.num_candidates)

    def collect(self) -> None:
        if self._found is None:
            return
        states, best = self._found
        self._found = None
        ids, scores = download(best.ids, best.scores)
        candidates = self._draft_ids[ids.astype(np.int64)]
        for row, (name, tree, rows, parents) in enumerate(self._running):
            own = row, slice(len(rows.tokens))
            if self._trees.get(name) is tree:
                tree.apply(rows, parents, states[own], candidates[own], scores[own])
                self._changed[name] = None

    def take_prepared(self) -> list[PreparedTree]:
        names, self._changed = [name for name in self._changed if name in self._trees], {}
        count = MAX_PREPARED_NODES // max(len(names), 1)
        if count < MIN_PREPARED_NODES:
            return []
        budget, found = TreeBudget(min(count, MAX_SESSION_NODES), self._config.num_steps), list[PreparedTree]()
        for name in names:
            context, tree = self._contexts[name], self._trees[name].below((), budget)
            if tree:
                found.append(PreparedTree(name, context.epoch, context.committed_length, tree))
        return found

    def trees(self, contexts: Sequence[DraftContext], paths: Sequence[Path]) -> list[DraftTree | None]:
        found = list[DraftTree | None]()
        for context, path in zip(contexts, paths, strict=True):
            tree = self._trees.get(context.session)
            cut = tree.below(path, context.budget) if tree else None
            found.append(cut and without_banned(cut, context))
        return found

    def draft(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """contexts: of deterministic trees, as the drafter's next commits."""
        self.collect()
        self.release([context.session for context in contexts])
        drafts = self._drafter.propose([replace(context, budget=BOOKKEEPING) for context in contexts])
        grown = [
            i
            for i, c in enumerate(contexts)
            if isinstance(drafts[i], DraftTree) and c.budget.wants_tree and self._drafter.can_grow(c.session)
        ]
        if not grown:
            return drafts
        names = [contexts[i].session for i in grown]
        self._set_roots([contexts[i] for i in grown])
        for _ in range(min(self._config.miss_steps, self._drafter.tree.num_steps) - 1):
            self._run(names)
            self.collect()
        for i in grown:
            budget = within(contexts[i].budget, self._drafter.tree)
            if tree := self._trees[contexts[i].session].below((), budget):
                drafts[i] = without_banned(replace(tree, grown_ahead=False), contexts[i])
        return drafts

    def release(self, sessions: Sequence[str]) -> None:
        for name in sessions:
            for known in (self._trees, self._contexts, self._num_left, self._changed):
                known.pop(name, None)


class AheadBlocks:
    """Implements Ahead: blocks of a one-pass head behind nodes of the trees that the target verifies.

    A block does not see the features of its path, and not the token behind it, which only chooses among what the block
    proposes. So a tree has to be there for any token behind any of the nodes.
    """

    def __init__(self, drafter: BlockDrafter, config: DraftAheadConfig) -> None:
        self._drafter, self._num_nodes = drafter, config.top_k
        self._due: dict[str, tuple[DraftContext, DraftTree]] = {}
        self._blocks: dict[str, tuple[DraftTree, list[int], Tensor]] = {}

    def begin(self, contexts: Sequence[DraftContext], trees: Sequence[DraftTree | None], paths: Sequence[Path]) -> None:
        for context, tree in zip(contexts, trees, strict=True):
            self._blocks.pop(context.session, None)
            self._due[context.session] = context, tree or DraftTree.root_only(context.tokens[-1])

    def step(self) -> bool:
        names = list(self._due)[: self._drafter.max_growing]
        if not names:
            return False
        contexts, trees = zip(*(self._due.pop(name) for name in names), strict=True)
        nodes = [likeliest_ends(tree, self._num_nodes) for tree in trees]
        states = self._drafter.states_behind(contexts, trees, nodes)
        for name, *found in zip(names, trees, nodes, states, strict=True):
            self._blocks[name] = tuple(found)
        return True

    def collect(self) -> None:
        """Nothing: the states of blocks stay on the device."""

    def trees(self, contexts: Sequence[DraftContext], paths: Sequence[Path]) -> list[DraftTree | None]:
        found: list[DraftTree | None] = [None] * len(contexts)
        states = dict[int, Tensor]()
        for i, (context, path) in enumerate(zip(contexts, paths, strict=True)):
            if context.session not in self._blocks:
                continue
            tree, nodes, blocks = self._blocks[context.session]
            node: int | None = 0
            for token in path[:-1]:
                node = None if node is None else tree.child(node, token)
            if node in nodes:
                states[i] = blocks[nodes.index(node)]
        if states:
            grown = self._drafter.grow_behind([contexts[i] for i in states], torch.stack(list(states.values())))
            for i, tree in zip(states, grown, strict=True):
                found[i] = replace(tree, grown_ahead=True)
        return found

    def draft(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self.release([context.session for context in contexts])
        return self._drafter.propose(contexts)

    def take_prepared(self) -> list[PreparedTree]:
        return []

    def release(self, sessions: Sequence[str]) -> None:
        for name in sessions:
            self._due.pop(name, None)
            self._blocks.pop(name, None)


def likeliest_ends(tree: DraftTree, count: int) -> list[int]:
    """The `count` nodes at which the accepted path most likely ends: their chance less that of their children."""
    chances = np.exp(np.array(tree.log_probs))
    ends = chances - [sum(chances[child] for child in tree.families.get(node, ())) for node in range(len(tree))]
    likeliest: list[int] = np.argsort(-ends, kind="stable")[:count].tolist()
    return likeliest


@dataclass
class _AheadSession:
    """A session that the drafter follows, perhaps some commits behind.

    last: its latest commit. tree: the answer to it. backlog: the commits that the drafter has not received. path: the tokens
    committed since something was prepared. is_prepared: whether something is.
    """

    last: DraftContext
    tree: DraftTree | None = None
    backlog: list[DraftContext] = field(default_factory=list)
    path: tuple[int, ...] = ()
    is_prepared: bool = False

    def continues_with(self, context: DraftContext) -> bool:
        """Whether the context starts where the latest commit ends."""
        return (self.last.epoch, self.last.committed_length) == (context.epoch, context.start_position)


class DraftAheadDrafter(LocalDrafter):
    """An EAGLE drafter, or one of one-pass heads, that prepares for the next commits whenever `draft_ahead` is called."""

    def __init__(self, drafter: EagleDrafter | BlockDrafter, config: DraftAheadConfig) -> None:
        """Raises ConfigError for more candidates than the draft vocabulary has tokens."""
        if isinstance(drafter, EagleDrafter) and config.num_candidates > len(drafter.draft_ids):
            raise ConfigError(
                f"draft_ahead.num_candidates is {config.num_candidates}, but the draft vocabulary has "
                f"{len(drafter.draft_ids)} tokens; set at most these"
            )
        self._drafter = drafter
        self._ahead: Ahead = (
            AheadBlocks(drafter, config) if isinstance(drafter, BlockDrafter) else AheadTrees(drafter, config)
        )
        self._sessions: dict[str, _AheadSession] = {}
        self._due: dict[str, None] = {}

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
        whole = {i: self._with_backlog(contexts[i]) for i in missing}
        whole |= {i: replace(whole[i], budget=BOOKKEEPING) for i in missing if contexts[i].has_tree}
        for make, is_sampled in ((self._ahead.draft, False), (self._drafter.propose, True)):
            places = [i for i in missing if (contexts[i].proposal == "sampled") == is_sampled]
            for i, made in zip(places, make([whole[i] for i in places]) if places else (), strict=True):
                drafts[i] = made
        for context, draft in zip(contexts, drafts, strict=True):
            if not isinstance(draft, DraftTree) or context.proposal != "deterministic":
                continue
            if draft.num_drafted or context.has_tree:
                self._sessions[context.session].tree = draft
                self._due[context.session] = None
        return drafts

    def release(self, sessions: Sequence[str]) -> None:
        for key in sessions:
            self._sessions.pop(key, None)
            self._due.pop(key, None)
        self._ahead.release(sessions)
        self._drafter.release(sessions)

    @torch.inference_mode()
    def draft_ahead(self) -> bool:
        device = self._drafter.device
        with device.labelled("grow") if device else nullcontext():
            self._ahead.collect()  # the pass of the call before, which the device has done by now
            if self._due:
                self._begin()
            more = self._ahead.step()
            if not self.busy_s:
                self._ahead.collect()
            return more

    def take_prepared(self) -> list[PreparedTree]:
        return self._ahead.take_prepared()

    @property
    def busy_s(self) -> float:
        return self._drafter.busy_s

    def _take_ahead(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """The trees that are ready for the contexts' last tokens."""
        found: list[DraftTree | None] = [None] * len(contexts)
        places = []
        for i, context in enumerate(contexts):
            session = self._sessions.get(context.session)
            wanted = context.budget.wants_tree and context.proposal == "deterministic"
            if wanted and session is not None and session.continues_with(context) and session.is_prepared:
                places.append(i)
        if not places:
            return found
        sessions, own = [self._sessions[contexts[i].session] for i in places], [contexts[i] for i in places]
        paths = [(*session.path, *context.tokens) for session, context in zip(sessions, own, strict=True)]
        within_tree = [replace(context, budget=within(context.budget, self._drafter.tree)) for context in own]
        for i, session, path, tree in zip(places, sessions, paths, self._ahead.trees(within_tree, paths), strict=True):
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

    def _begin(self) -> None:
        """Commit all backlogs to the drafter, and prepare from where all due sessions are now."""
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
        if not keys:
            return
        sessions = [self._sessions[key] for key in keys]
        paths = [session.path for session in sessions]
        self._ahead.begin([session.last for session in sessions], [session.tree for session in sessions], paths)
        for session in sessions:
            session.path, session.is_prepared = (), True


def _joined(contexts: Sequence[DraftContext]) -> DraftContext:
    """Successive commits of a session as one."""
    first, last = contexts[0], contexts[-1]
    features = [context.features for context in contexts if context.features is not None]
    tokens = tuple(token for context in contexts for token in context.tokens)
    return replace(
        last, start_position=first.start_position, tokens=tokens, features=torch.cat(features) if features else None
    )
