"""The contract of every drafter: committed tokens (and features) in, draft trees out.

A drafter's state is a cache: it may forget a session at any moment and say so with a Refusal. Nothing a drafter does can
change what is generated, only how fast; but where it is asked for sampled trees, their law has to be the true one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from torch import Tensor

from eyas.draft_protocol import Commit, ResyncRequired
from eyas.tensors import upload
from eyas.tree import DraftTree

DraftContext: TypeAlias = Commit[Tensor]
Draft: TypeAlias = DraftTree | ResyncRequired | None
Pending: TypeAlias = Callable[[], list[Draft]]


@dataclass(frozen=True)
class DrafterNeeds:
    """What the engine must hand a drafter with each commit.

    features: fused target features of the new positions, feature_size wide.
    samples: the target's sample at every node of the last tree.
    """

    features: bool = False
    samples: bool = False
    feature_size: int = 0


class Drafter(Protocol):
    """Grows a tree below the last committed token of each session."""

    @property
    def needs(self) -> DrafterNeeds:
        """What contexts must carry."""
        ...

    @property
    def can_sample(self) -> bool:
        """Whether it answers sampled proposals, with trees drawn from its own law and that law."""
        ...

    def can_draft(self, session: str) -> bool:
        """Whether telling it of a session is worth the work now."""
        ...

    def request(self, contexts: Sequence[DraftContext]) -> Pending:
        """Commit what was accepted and ask for the next trees; session keys are distinct within a call.

        Does not wait. The answers are collected once, before the next `request`: one per context, in order. A DraftTree
        within the context's budget whose root is the context's last token, proposed in the way that the context asks for
        (root-only where there is nothing to guess or the budget asks for bookkeeping only); a Refusal when the context does
        not continue what the drafter has; None when no answer came in time. Never raises for the state of one session.
        """
        ...

    def release(self, sessions: Sequence[str]) -> None:
        """Forget sessions; unknown ones are ignored."""
        ...


class LocalDrafter(ABC):
    """A Drafter that works where it is called, when its answers are collected."""

    @property
    @abstractmethod
    def needs(self) -> DrafterNeeds:
        """See Drafter."""

    @property
    def can_sample(self) -> bool:
        return False

    @abstractmethod
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """The answers that `Drafter.request` promises."""

    @abstractmethod
    def release(self, sessions: Sequence[str]) -> None:
        """See Drafter."""

    def can_draft(self, session: str) -> bool:
        return True

    def warm_up(self) -> None:
        """Do once what the first rounds would otherwise wait for; most have nothing to do."""
        return

    def prune(self, session: str, nodes: Sequence[int]) -> None:
        """Of the session's last tree only `nodes` are verified, in order, the root first and all with their parents: the
        samples that come are theirs."""
        return

    def draft_ahead(self) -> bool:
        """Do a little that nobody waits for yet, between two calls; whether there is more to do."""
        return False

    def request(self, contexts: Sequence[DraftContext]) -> Pending:
        return partial(self.propose, contexts)


TreeMaker: TypeAlias = Callable[[list[DraftContext], Tensor], list[DraftTree]]


def fill_in_trees(
    drafts: list[Draft],
    contexts: Sequence[DraftContext],
    rows: Sequence[int],
    states: Tensor,
    grow: TreeMaker,
    draw: TreeMaker,
) -> None:
    """Put trees into `drafts` for those of `contexts` that want one, each made in the way that it asks for.

    rows: the contexts that states [R, ...] belong to. grow, draw: make deterministic and sampled proposals, from some of
    them and their states.
    """
    for proposal, make_trees in (("deterministic", grow), ("sampled", draw)):
        asked = [k for k, row in enumerate(rows) if contexts[row].budget.wants_tree and contexts[row].proposal == proposal]
        trees = make_trees([contexts[rows[k]] for k in asked], states[upload(asked, states.device)]) if asked else []
        for k, tree in zip(asked, trees, strict=True):
            drafts[rows[k]] = tree
