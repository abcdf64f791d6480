"""The contract of every drafter: committed tokens (and features) in, draft trees out.

A drafter's state is a cache: it may forget a session at any moment and say so with a Refusal. Nothing a drafter does can
change what is generated, only how fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from eyas.commit import Commit, Refusal
from eyas.tree import DraftTree

DraftContext: TypeAlias = Commit[Tensor]
Draft: TypeAlias = DraftTree | Refusal | None


@dataclass(frozen=True)
class DrafterNeeds:
    """What the engine must hand a drafter with each commit.

    features: fused target features of the new positions.
    samples: the target's sample at every node of the last tree.
    """

    features: bool = False
    samples: bool = False


class Drafter(Protocol):
    """Grows a tree below the last committed token of each session."""

    @property
    def needs(self) -> DrafterNeeds:
        """What `propose` wants to be told."""
        ...

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """One answer per context, in order; session keys are distinct within a call.

        A DraftTree within the context's budget whose root is the context's last token (root-only where there is nothing
        to guess or the budget asks for bookkeeping only); a Refusal when the context does not continue what the drafter
        has; None when no answer came in time. Never raises for the state of one session.
        """
        ...

    def release(self, sessions: Sequence[str]) -> None:
        """Forget sessions; unknown ones are ignored."""
        ...
