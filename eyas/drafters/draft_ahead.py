"""Drafting ahead: EAGLE trees keep growing while the target verifies, and are cut where the committed path ends.

A commit that ends inside a tree grown ahead is answered from it at once. Such commits queue up and reach the EAGLE drafter
in one piece, when there is time or when a tree has to be grown on demand. Legend: S sessions, P candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from eyas.config import DraftAheadConfig
from eyas.draft_protocol import TreeBudget
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter, within, without_banned
from eyas.drafters.cuda_graphs import CapturedGrowth
from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.tree_growth import TreeGrowth
from eyas.errors import ConfigError
from eyas.tensors import Ints, download
from eyas.tree import DraftTree

BOOKKEEPING = TreeBudget(1, 0)


class AheadTrees:
    """The trees of one TreeGrowth on the host, as of the last copy."""

    def __init__(self, growth: TreeGrowth | CapturedGrowth, draft_ids: Ints) -> None:
        """draft_ids maps draft vocabulary ids to the target's."""
        self.growth = growth
        self._draft_ids = draft_ids
        self._num_copied = 0

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


@dataclass
class _AheadSession:
    """A session that the EAGLE drafter follows, perhaps some commits behind.

    last: its latest commit. backlog: the commits that the EAGLE drafter has not received. trees: what was grown ahead, in
    `row`. path: the tokens committed since then.
    """

    last: DraftContext
    backlog: list[DraftContext] = field(default_factory=list)
    trees: AheadTrees | None = None
    row: int = 0
    path: tuple[int, ...] = ()

    def continues_with(self, context: DraftContext) -> bool:
        """Whether the context starts where the latest commit ends."""
        return (self.last.epoch, self.last.committed_length) == (context.epoch, context.start_position)


class DraftAheadDrafter(LocalDrafter):
    """An EAGLE drafter that grows its last trees further whenever `draft_ahead` is called."""

    def __init__(self, drafter: EagleDrafter, config: DraftAheadConfig) -> None:
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
        self._growing: AheadTrees | None = None

    @property
    def needs(self) -> DrafterNeeds:
        return self._drafter.needs

    @property
    def can_sample(self) -> bool:
        return self._drafter.can_sample

    def warm_up(self) -> None:
        self._drafter.warm_up()

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        drafts: list[Draft] = [self._take_ahead(context) for context in contexts]
        missing = [i for i, draft in enumerate(drafts) if draft is None]
        answers = self._drafter.propose([self._with_backlog(contexts[i]) for i in missing]) if missing else []
        for i, draft in zip(missing, answers, strict=True):
            drafts[i] = draft
        grown = [c for c, draft in zip(contexts, drafts, strict=True) if isinstance(draft, DraftTree) and draft.num_drafted]
        self._due |= dict.fromkeys(context.session for context in grown if context.proposal == "deterministic")
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
            return self._grow_ahead()

    def _grow_ahead(self) -> bool:
        growing = self._growing
        if growing:
            growing.copy_to_host()  # the level of the call before, which the device has done by now
        if growing and growing.growth.num_levels < self._config.num_steps and self._is_awaited(growing):
            growing.growth.step()
        else:
            self._growing = self._begin()
        if self._growing and not self.busy_s:
            self._growing.copy_to_host()
        return self._growing is not None

    @property
    def busy_s(self) -> float:
        return self._drafter.busy_s

    def _is_awaited(self, trees: AheadTrees) -> bool:
        """Whether a session has not committed anything since `trees` began to grow."""
        return any(session.trees is trees and not session.path for session in self._sessions.values())

    def _take_ahead(self, context: DraftContext) -> DraftTree | None:
        """The tree grown ahead for the context's last token, if there is one."""
        session = self._sessions.get(context.session)
        wanted = context.budget.wants_tree and context.proposal == "deterministic"
        if not wanted or session is None or not session.continues_with(context) or session.trees is None:
            return None
        path = (*session.path, *context.tokens)
        tree = session.trees.below(session.row, path, within(context.budget, self._drafter.tree))
        if tree is not None:
            tree = without_banned(tree, context)
            session.path, session.last = path, context
            session.backlog.append(context)
        return tree

    def _with_backlog(self, context: DraftContext) -> DraftContext:
        """The session's backlog and `context` as one commit for the EAGLE drafter."""
        session = self._sessions.get(context.session)
        whole = _joined([*session.backlog, context]) if session and session.continues_with(context) else context
        self._sessions[context.session] = _AheadSession(context)
        return whole

    def _begin(self) -> AheadTrees | None:
        """Commit all backlogs to the EAGLE drafter, and start to grow from where all due sessions are now."""
        keys, self._due = [key for key in self._due if key in self._sessions], {}
        behind = [key for key in keys if self._sessions[key].backlog]
        if behind:
            commits = [replace(_joined(self._sessions[key].backlog), budget=BOOKKEEPING) for key in behind]
            for key, answer in zip(behind, self._drafter.propose(commits), strict=True):
                if not isinstance(answer, DraftTree):
                    del self._sessions[key]
        keys = [key for key in keys if key in self._sessions and self._drafter.can_grow(key)]
        contexts = [self._sessions[key].last for key in keys[: self._drafter.max_growing]]
        self._due = dict.fromkeys(keys[len(contexts) :])
        if not contexts:
            return None
        if self._growing:
            self._growing.copy_to_host()  # the next trees may take their memory
        trees = AheadTrees(self._drafter.growth(contexts, self._config), self._draft_ids)
        for row, context in enumerate(contexts):
            self._sessions[context.session] = _AheadSession(context, trees=trees, row=row)
        return trees


def _joined(contexts: Sequence[DraftContext]) -> DraftContext:
    """Successive commits of a session as one."""
    first, last = contexts[0], contexts[-1]
    features = [context.features for context in contexts if context.features is not None]
    tokens = tuple(token for context in contexts for token in context.tokens)
    return replace(
        last, start_position=first.start_position, tokens=tokens, features=torch.cat(features) if features else None
    )
