"""Drafting ahead: what an EAGLE drafter does while the target verifies, so that the next tree costs no pass of the network.

A tree keeps growing: when the committed path and the token after it lie inside it, the subtree below is the answer, and it
grows on from round to round. It is sent before the commit. Foreseen commits queue up and reach the drafter in one piece,
when there is time or when a tree has to be grown on demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from eyas.config import DraftAheadConfig
from eyas.drafters.ahead.eagle import AheadTrees
from eyas.drafters.base import (
    Draft,
    DraftContext,
    DrafterNeeds,
    DraftWork,
    LocalDrafter,
    Path,
    PathMasks,
    within,
)
from eyas.drafters.eagle import EagleDrafter
from eyas.protocol.commit import NO_TREE
from eyas.protocol.tree import DraftTree, PreparedTree


@dataclass
class _AheadSession:
    """A session that the drafter follows, perhaps some commits behind.

    Attributes:
        last: its latest commit.
        backlog: the commits that the drafter has not received.
        path: the tokens committed since a tree grows.
        is_prepared: whether one does.
    """

    last: DraftContext
    backlog: list[DraftContext] = field(default_factory=list)
    path: tuple[int, ...] = ()
    is_prepared: bool = False

    def continues_with(self, context: DraftContext) -> bool:
        """Return whether the context starts where the latest commit ends."""
        return (self.last.epoch, self.last.committed_length) == (context.epoch, context.start_position)


class DraftAheadDrafter(LocalDrafter):
    """An EAGLE drafter that prepares for the next commits whenever `draft_ahead` is called."""

    def __init__(self, drafter: EagleDrafter, config: DraftAheadConfig) -> None:
        self.drafter = drafter
        num_candidates = min(config.num_candidates, len(drafter.draft_ids))
        self.ahead = AheadTrees(drafter, replace(config, num_candidates=num_candidates))
        self.sessions: dict[str, _AheadSession] = {}
        self._due: dict[str, None] = {}

    @property
    def needs(self) -> DrafterNeeds:
        return self.drafter.needs

    @property
    def can_sample(self) -> bool:
        return self.drafter.can_sample

    @property
    def work(self) -> DraftWork:
        return self.drafter.work

    def use_path_masks(self, path_masks: PathMasks) -> None:
        self.drafter.use_path_masks(path_masks)  # for sampled chains: prepared trees are cut at the root's mask alone

    def warm_up(self) -> None:
        self.drafter.warm_up()

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        drafts: list[Draft] = list(self._take_ahead(contexts))
        missing = [i for i, draft in enumerate(drafts) if draft is None]
        paths = {i: self._path(contexts[i]) for i in missing}
        whole = {i: self._with_backlog(contexts[i]) for i in missing}
        whole |= {i: whole[i]._replace(budget=NO_TREE) for i in missing if contexts[i].has_tree}
        sampled = [i for i in missing if contexts[i].proposal == "sampled"]
        others = [i for i in missing if contexts[i].proposal != "sampled"]
        made = self.ahead.draft([whole[i] for i in others], [paths[i] for i in others]) if others else []
        made += self.drafter.propose([whole[i] for i in sampled]) if sampled else []
        for i, draft in zip((*others, *sampled), made, strict=True):
            drafts[i] = draft
        if missing:
            self._drop_evicted()
        for context, draft in zip(contexts, drafts, strict=True):
            has_tree = isinstance(draft, DraftTree) and (draft.num_drafted > 0 or context.has_tree)
            if has_tree and context.proposal == "deterministic":
                self._due[context.session] = None
        return drafts

    def release(self, sessions: Sequence[str]) -> None:
        for key in sessions:
            self.sessions.pop(key, None)
            self._due.pop(key, None)
        self.ahead.release(sessions)
        self.drafter.release(sessions)

    @torch.inference_mode()
    def draft_ahead(self) -> bool:
        device = self.drafter.device
        with device.labelled("grow") if device else nullcontext():
            self.ahead.collect()  # the pass of the call before, which the device has done by now
            if self._due:
                self._begin()
            more = self.ahead.step()
            if not self.busy_s:
                self.ahead.collect()
            return more

    @property
    def takes_prepared(self) -> bool:
        return True

    def take_prepared(self) -> list[PreparedTree]:
        return self.ahead.take_prepared()

    @property
    def busy_s(self) -> float:
        return self.drafter.busy_s

    def _take_ahead(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """Return the trees that are ready for the contexts' last tokens."""
        found: list[DraftTree | None] = [None] * len(contexts)
        places = []
        for i, context in enumerate(contexts):
            session, wants_tree = self.sessions.get(context.session), context.budget.wants_tree
            if session is None or not session.is_prepared or not session.continues_with(context):
                continue
            if wants_tree and context.proposal == "deterministic":
                places.append(i)
            elif context.has_tree and not wants_tree:  # not waited for: it joins the next pass of commits
                found[i] = DraftTree.root_only(context.tokens[-1])
                session.path, session.last = (*session.path, *context.tokens), context
                session.backlog.append(context)
        if not places:
            return found
        sessions, own = [self.sessions[contexts[i].session] for i in places], [contexts[i] for i in places]
        paths = [(*session.path, *context.tokens) for session, context in zip(sessions, own, strict=True)]
        within_tree = [context._replace(budget=within(context.budget, self.drafter.tree)) for context in own]
        for i, session, path, tree in zip(places, sessions, paths, self.ahead.trees(within_tree, paths), strict=True):
            found[i] = tree
            if tree is not None:
                session.path, session.last = path, contexts[i]
                session.backlog.append(contexts[i])
        return found

    def _path(self, context: DraftContext) -> Path:
        """Return the tokens since the session's trees were prepared; empty if none were or is wanted now, or the context
        does not go on there.
        """
        session = self.sessions.get(context.session)
        goes_on = session and session.is_prepared and session.continues_with(context)
        wants_tree = context.budget.wants_tree or context.has_tree
        return (*session.path, *context.tokens) if session and goes_on and wants_tree else ()

    def _with_backlog(self, context: DraftContext) -> DraftContext:
        """Return the session's backlog and `context` as one commit for the drafter."""
        session = self.sessions.get(context.session)
        whole = _joined([*session.backlog, context]) if session and session.continues_with(context) else context
        self.sessions[context.session] = _AheadSession(context)
        return whole

    def _drop_evicted(self) -> None:
        """Forget what is prepared for sessions whose cached tokens the drafter has dropped: their trees cannot grow on."""
        evicted = [k for k, session in self.sessions.items() if session.is_prepared and not self.drafter.is_cached(k)]
        self.ahead.release(evicted)
        for key in evicted:
            self._due.pop(key, None)
            self.sessions[key].path, self.sessions[key].is_prepared = (), False

    def _begin(self) -> None:
        """Commit all backlogs to the drafter, and prepare from where all due sessions are now."""
        keys, self._due = [key for key in self._due if key in self.sessions], {}
        behind = [key for key in keys if self.sessions[key].backlog]
        if behind:
            commits = [_joined(self.sessions[key].backlog) for key in behind]
            answers = self.ahead.commit(commits, [self.sessions[key].path for key in behind])
            for key, answer in zip(behind, answers, strict=True):
                if isinstance(answer, DraftTree):
                    self.sessions[key].backlog.clear()
                else:
                    del self.sessions[key]
            self._drop_evicted()
        keys = [key for key in keys if key in self.sessions and self.drafter.can_grow(key)]
        if not keys:
            return
        sessions = [self.sessions[key] for key in keys]
        self.ahead.begin([session.last for session in sessions])
        for session in sessions:
            session.path, session.is_prepared = (), True


def _joined(contexts: Sequence[DraftContext]) -> DraftContext:
    """Return successive commits of a session as one."""
    first, last = contexts[0], contexts[-1]
    features = [context.features for context in contexts if context.features is not None]
    tokens = tuple(token for context in contexts for token in context.tokens)
    whole = torch.cat(features) if features else None
    return last._replace(start_position=first.start_position, tokens=tokens, features=whole)
