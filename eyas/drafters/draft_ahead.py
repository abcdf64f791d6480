"""Drafting ahead: what a drafter does while the target verifies, so that the next tree costs no pass of the network.

An EAGLE tree keeps growing: when the committed path and the token behind it lie inside it, the subtree below is the answer,
and it grows on from round to round. For one-pass heads, blocks are run behind the likeliest nodes of the tree under
verification, all in one pass, and trees are made from them. Both are sent before the commit. Foreseen commits queue up and
reach the drafter in one piece, when there is time or when a tree has to be grown on demand.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from eyas.cache.prefix_cache import SlotAllocator
from eyas.config import DraftAheadConfig
from eyas.draft_protocol import TreeBudget
from eyas.drafters.base import (
    Draft,
    DraftContext,
    DrafterNeeds,
    LocalDrafter,
    Path,
    PreparedTree,
    within,
    without_banned,
)
from eyas.drafters.block import BlockDrafter
from eyas.drafters.blocks_ahead import AheadBlocks
from eyas.drafters.eagle import NUM_GROWN_SLOTS, EagleDrafter
from eyas.drafters.grown_tree import GrownRows, GrownTree
from eyas.drafters.on_demand import AheadTrial, Average, OnDemand, SentTree
from eyas.errors import ConfigError
from eyas.sampling.sampler import Ranked
from eyas.tensors import Ints, download
from eyas.tree import DraftTree

BOOKKEEPING = TreeBudget(1, 0)
# Nodes of prepared trees: of all sessions together, the fewest and the most of one.
MAX_PREPARED_NODES, MIN_PREPARED_NODES, MAX_SESSION_NODES = 2048, 128, 1024
# Rows of a pass, of all sessions together, and the fewest of a session.
MAX_ROWS, MIN_ROWS = 512, 16
# Nodes of a tree that were run through the network, at most; fewer if many sessions share the slots.
MAX_GROWN_NODES = 1024


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

    def claim(self, context: DraftContext, path: Path) -> float:
        """The tokens that a tree below a path claims to yield, if it is ready and is not to be verified; else 0."""
        ...

    def draft(self, contexts: Sequence[DraftContext], paths: Sequence[Path]) -> list[Draft]:
        """Commit contexts to the drafter, and draft for them on demand. paths: as for `trees`."""
        ...

    def take_prepared(self) -> list[PreparedTree]:
        """See LocalDrafter."""
        ...

    def release(self, sessions: Sequence[str]) -> None:
        """Forget sessions; unknown ones are ignored."""
        ...


class AheadTrees:
    """Implements Ahead: trees of an EAGLE drafter that grow from round to round."""

    def __init__(self, drafter: EagleDrafter, config: DraftAheadConfig, demand: OnDemand) -> None:
        self._drafter, self._config, self._demand = drafter, config, demand
        self._draft_ids: Ints = drafter.draft_ids.cpu().numpy()
        self._trees: dict[str, GrownTree] = {}
        self._free = SlotAllocator(NUM_GROWN_SLOTS)
        self._contexts: dict[str, DraftContext] = {}
        self._num_passes: dict[str, int] = {}  # by session, since its last commit
        self._ended: set[str] = set()  # sessions whose trees have all that they may have until the next commit
        self._running: list[tuple[str, GrownTree, GrownRows]] = []
        self._found: tuple[Tensor, Ranked] | None = None
        self._changed: dict[str, None] = {}
        self._pass_s = Average()  # of a pass that the verifier waits for

    def begin(self, contexts: Sequence[DraftContext], trees: Sequence[DraftTree | None], paths: Sequence[Path]) -> None:
        self.collect()
        for context, path in zip(contexts, paths, strict=True):
            tree = self._trees.get(context.session)
            root = tree.find(path) if tree else None
            if tree and root:
                tree.move_root(root)
            elif path:  # given up since it was the answer
                self.release([context.session])
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
        self._run([name for name in self._trees if name not in self._ended and self._drafter.can_grow(name)])
        return bool(self._running)

    def _run(self, names: Sequence[str]) -> None:
        """Launch a pass over trees of sessions."""
        most, max_depth = min(self._config.top_k, max(MAX_ROWS // max(len(names), 1), MIN_ROWS)), self._config.num_steps
        self._running = []
        for name in names:
            if rows := self._trees[name].next_rows(most, max_depth, self._max_nodes):
                self._num_passes[name] += 1
                self._running.append((name, self._trees[name], rows))
            else:
                self._ended.add(name)
                self._changed |= {} if _sends(self._num_passes[name]) else {name: None}
        if self._running:
            contexts = [self._contexts[name] for name, *_ in self._running]
            self._found = self._drafter.run_rows(contexts, [rows for *_, rows in self._running], self._config.num_candidates)

    @property
    def _max_nodes(self) -> int:
        """Most nodes of a tree: each session has an equal part of the slots, and room for the rows of a pass."""
        return min(MAX_GROWN_NODES, max(NUM_GROWN_SLOTS // len(self._trees) - self._config.top_k, MIN_ROWS))

    def collect(self) -> None:
        if self._found is None:
            return
        states, best = self._found
        self._found, end = None, 0
        ids, scores = download(best.ids, best.scores)
        candidates = self._draft_ids[ids.astype(np.int64)]
        for name, tree, rows in self._running:
            own, end = slice(end, end + len(rows.tokens)), end + len(rows.tokens)
            if self._trees.get(name) is tree:
                tree.apply(rows, states[own], candidates[own], scores[own], self._max_nodes)
                self._changed[name] = None
            else:
                tree.give_up(rows)

    def take_prepared(self) -> list[PreparedTree]:
        """The trees that have changed, after some of the passes: a later tree replaces an earlier one."""
        names = [name for name in self._changed if name in self._ended or _sends(self._num_passes[name])]
        self._changed = {}
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
            grows = cut and not context.has_tree and self._next_level(cut) > self._cost(2) > 0
            found.append(None if grows else cut and without_banned(cut, context))
        return found

    def _next_level(self, tree: DraftTree) -> float:
        """Tokens that a step would yield more with another level: it loses as large a share of nodes as the last one."""
        if tree.depth >= self._drafter.tree.num_steps:
            return 0.0
        chances = [0.0] * (tree.depth + 1)
        for depth, score in zip(tree.depths, tree.log_probs, strict=True):
            chances[depth] += math.exp(score)
        above = max(chances[-2:])
        return chances[-1] ** 2 / above if above else 0.0

    def _cost(self, num_passes: int) -> float:
        """Tokens that a session loses while the verifier waits for passes."""
        return self._demand.rate * self._pass_s.value * num_passes

    def claim(self, context: DraftContext, path: Path) -> float:
        return 0.0

    def draft(self, contexts: Sequence[DraftContext], paths: Sequence[Path]) -> list[Draft]:
        """contexts: of deterministic trees, as the drafter's next commits."""
        self.collect()
        for context, path in zip(contexts, paths, strict=True):
            tree, root = self._trees.get(context.session), None
            if tree and path and (context.budget.wants_tree or context.has_tree) and (root := tree.find(path)):
                tree.move_root(root)
            else:
                self.release([context.session])
        drafts = self._drafter.propose([replace(context, budget=BOOKKEEPING) for context in contexts])
        can_grow = [
            i for i, c in enumerate(contexts) if isinstance(drafts[i], DraftTree) and self._drafter.can_grow(c.session)
        ]
        self.release([context.session for i, context in enumerate(contexts) if i not in can_grow])
        places = [i for i in can_grow if contexts[i].budget.wants_tree]
        if not places:
            return drafts
        self._set_roots([contexts[i] for i in places])
        for i, cut in zip(places, self._grown([contexts[i] for i in places], len(contexts)), strict=True):
            drafts[i] = without_banned(replace(cut, grown_ahead=False), contexts[i])
        return drafts

    def _grown(self, contexts: Sequence[DraftContext], num_waiting: int) -> list[DraftTree]:
        """Grow trees by passes as long as these pay. num_waiting: sessions whose verifier waits for them."""
        names, clock = [context.session for context in contexts], self._demand.clock
        budgets = [within(context.budget, self._drafter.tree) for context in contexts]
        for _ in range(min(self._config.miss_steps, self._drafter.tree.num_steps) - 1):
            cuts = [self._cut(*each) for each in zip(contexts, budgets, strict=True)]
            if math.fsum(map(self._next_level, cuts)) < num_waiting * self._cost(1):
                return cuts
            began = clock()
            self._run(names)
            if not self._running:
                return cuts
            self.collect()
            self._pass_s.add(clock() - began)
        return [self._cut(*each) for each in zip(contexts, budgets, strict=True)]

    def _cut(self, context: DraftContext, budget: TreeBudget) -> DraftTree:
        return self._trees[context.session].below((), budget) or DraftTree.root_only(context.tokens[-1])

    def release(self, sessions: Sequence[str]) -> None:
        for name in sessions:
            if tree := self._trees.pop(name, None):
                tree.release()
            for known in (self._contexts, self._num_passes, self._changed):
                known.pop(name, None)
            self._ended.discard(name)


def _sends(number: int) -> bool:
    """Whether trees are sent after this pass: if its number is a power of two or three times one, half of 16."""
    return any(of and of & (of - 1) == 0 for of in (number, number // 3 if number % 3 == 0 else 0))


@dataclass
class _AheadSession:
    """A session that the drafter follows, perhaps some commits behind.

    last: its latest commit. tree: the answer to it. sent: the same with its times. backlog: the commits that the drafter has
    not received. path: the tokens committed since something was prepared. is_prepared: whether something is.
    """

    last: DraftContext
    tree: DraftTree | None = None
    sent: SentTree | None = None
    backlog: list[DraftContext] = field(default_factory=list)
    path: tuple[int, ...] = ()
    is_prepared: bool = False

    def continues_with(self, context: DraftContext) -> bool:
        """Whether the context starts where the latest commit ends."""
        return (self.last.epoch, self.last.committed_length) == (context.epoch, context.start_position)


class DraftAheadDrafter(LocalDrafter):
    """An EAGLE drafter, or one of one-pass heads, that prepares for the next commits whenever `draft_ahead` is called."""

    def __init__(
        self, drafter: EagleDrafter | BlockDrafter, config: DraftAheadConfig, trial: AheadTrial | None = None
    ) -> None:
        """trial: decides when to draft ahead, with at most the draft vocabulary's candidates; None always does.

        Raises ConfigError for more candidates than the draft vocabulary has tokens, without a trial.
        """
        if isinstance(drafter, EagleDrafter) and config.num_candidates > len(drafter.draft_ids):
            if trial is None:
                raise ConfigError(
                    f"draft_ahead.num_candidates is {config.num_candidates}, but the draft vocabulary has "
                    f"{len(drafter.draft_ids)} tokens; set at most these"
                )
            config = replace(config, num_candidates=len(drafter.draft_ids))
        self._drafter = drafter
        self._demand = OnDemand(self._now, drafter.tree.num_steps + 1)
        self._ahead: Ahead = (
            AheadBlocks(drafter, config, self._demand)
            if isinstance(drafter, BlockDrafter)
            else AheadTrees(drafter, config, self._demand)
        )
        self._sessions: dict[str, _AheadSession] = {}
        self._due: dict[str, None] = {}
        self._trial, self._busy, self._ended = trial, Average(), 0.0  # busy: share of the time; ended: of the last batch

    @property
    def needs(self) -> DrafterNeeds:
        return self._drafter.needs

    @property
    def can_sample(self) -> bool:
        return self._drafter.can_sample

    def warm_up(self) -> None:
        self._drafter.warm_up()

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        began = self._demand.clock()
        self._observe(contexts, began)
        if self._is_ahead:
            return self._propose_ahead(contexts, began)
        whole = [self._with_backlog(context) for context in contexts]
        whole = [replace(c, budget=BOOKKEEPING) if c.has_tree else c for c in whole]
        drafts = self._drafter.propose(whole)
        self._note(contexts, drafts, began, any(not context.has_tree for context in contexts), {})
        return drafts

    @property
    def _is_ahead(self) -> bool:
        return self._trial is None or self._trial.is_ahead

    def _observe(self, contexts: Sequence[DraftContext], now: float) -> None:
        """Take in what sessions have committed since their last answers."""
        for context in contexts:
            session = self._sessions.get(context.session)
            if not session or not session.sent or not session.continues_with(context):
                continue
            sent, num_tokens = session.sent, len(context.tokens)
            self._demand.committed(sent, num_tokens, now)
            load, busy = len(self._sessions), self._busy.value
            if self._trial and self._trial.observe(sent.block, num_tokens, now - sent.asked, load, busy):
                self._stop()

    def _stop(self) -> None:
        """Forget what is prepared."""
        self._due = {}
        self._ahead.release(list(self._sessions))
        for session in self._sessions.values():
            session.path, session.is_prepared = (), False

    def _propose_ahead(self, contexts: Sequence[DraftContext], began: float) -> list[Draft]:
        drafts: list[Draft] = list(self._take_ahead(contexts))
        missing = [i for i, draft in enumerate(drafts) if draft is None]
        paths = {i: self._path(contexts[i]) for i in missing}
        claims = {contexts[i].session: self._ahead.claim(contexts[i], path) for i, path in paths.items() if path}
        whole = {i: self._with_backlog(contexts[i]) for i in missing}
        whole |= {i: replace(whole[i], budget=BOOKKEEPING) for i in missing if contexts[i].has_tree}
        sampled = [i for i in missing if contexts[i].proposal == "sampled"]
        others = [i for i in missing if contexts[i].proposal != "sampled"]
        made = self._ahead.draft([whole[i] for i in others], [paths[i] for i in others]) if others else []
        made += self._drafter.propose([whole[i] for i in sampled]) if sampled else []
        for i, draft in zip((*others, *sampled), made, strict=True):
            drafts[i] = draft
        is_waiting = any(not contexts[i].has_tree for i in missing)
        self._due |= dict.fromkeys(self._note(contexts, drafts, began, is_waiting, claims))
        return drafts

    def _note(
        self,
        contexts: Sequence[DraftContext],
        drafts: Sequence[Draft],
        began: float,
        is_waiting: bool,
        claims: Mapping[str, float],
    ) -> list[str]:
        """Keep what sessions have as their trees now. claims: see SentTree. Returns the sessions."""
        ended, noted = self._demand.clock(), list[str]()
        self._busy.add((ended - began) / (ended - self._ended) if ended > self._ended else 1.0)
        self._ended = ended
        for context, draft in zip(contexts, drafts, strict=True):
            if not isinstance(draft, DraftTree) or context.proposal != "deterministic":
                continue
            if draft.num_drafted or context.has_tree:
                name, block = context.session, self._trial.stamp(context.session) if self._trial else 0
                has_tree, claimed = context.has_tree, claims.get(name, 0.0)
                session = self._sessions[name]
                session.tree = draft
                session.sent = SentTree(draft, began, ended, has_tree, is_waiting, claimed, block)
                noted.append(name)
        return noted

    def release(self, sessions: Sequence[str]) -> None:
        for key in sessions:
            self._sessions.pop(key, None)
            self._due.pop(key, None)
        if self._trial:
            self._trial.release(sessions)
        self._ahead.release(sessions)
        self._drafter.release(sessions)

    @torch.inference_mode()
    def draft_ahead(self) -> bool:
        if not self._is_ahead:
            return False
        try:
            return self._go_on()
        except Exception:
            if self._trial:
                self._trial.fail()
            raise

    def _go_on(self) -> bool:
        """Prepare more; see `draft_ahead`."""
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

    def _now(self) -> float:
        return self._drafter.device.clock() if self._drafter.device else time.perf_counter()

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

    def _path(self, context: DraftContext) -> Path:
        """The tokens since the session's trees were prepared; empty if none were, or the context does not go on there."""
        session = self._sessions.get(context.session)
        is_known = session and session.is_prepared and session.continues_with(context)
        return (*session.path, *context.tokens) if session and is_known else ()

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
