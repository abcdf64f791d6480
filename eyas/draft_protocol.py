"""What a verifier and a drafter say to each other each round. Knows neither how tensors are held nor how bytes travel.

The committed tokens of a session are t_0 .. t_n; t_n is the root of the next tree. A target that has processed
t_0 .. t_{n-1} has features f_0 .. f_{n-1}. A drafter whose committed length is b knows t_0 .. t_{b-1} and
f_0 .. f_{b-2}. A commit with base length b brings t_b .. t_n and f_max(b-1,0) .. f_{n-1}: while a prompt is prefilled in
chunks, t_n is simply the next *prompt* token, so that every pair (f_i, t_{i+1}) is complete when it arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from eyas.request import NoiseKey

FeaturesT = TypeVar("FeaturesT")
Proposal = Literal["deterministic", "sampled"]


@dataclass(frozen=True)
class TreeBudget:
    """How large a tree the verifier will look at. max_nodes counts the root; 1 asks for bookkeeping only."""

    max_nodes: int
    max_depth: int

    @property
    def wants_tree(self) -> bool:
        return self.max_nodes > 1 and self.max_depth > 0


@dataclass(frozen=True)
class TensorBytes:
    """A dense row-major tensor as bytes. dtype is torch's name without its prefix, such as float32 or bfloat16."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Commit(Generic[FeaturesT]):
    """Accepted tokens of one session, and a request for its next tree.

    epoch: raised by the verifier whenever it starts the session's drafting anew; older epochs are dropped.
    start_position: committed length before `tokens`.
    tokens: newly committed token ids, at least one; the last is the new root.
    features: fused features [n, H] of the positions max(base-1, 0) up to, not including, the root's; None if not asked for.
    noise: what the target's draws depend on; for a sampled proposal its seed is one for the drafter's own draws.
    samples: the target's sample at every node of the session's last tree, in node order; empty if there was none.
    proposal: "deterministic" asks for the likeliest nodes, "sampled" for nodes drawn from the drafter's law, with that law.
    traceparent: W3C trace context of the round, where it is traced.
    """

    session: str
    epoch: int
    start_position: int
    tokens: tuple[int, ...]
    features: FeaturesT | None
    noise: NoiseKey
    budget: TreeBudget
    samples: tuple[int, ...] = ()
    proposal: Proposal = "deterministic"
    traceparent: str = ""

    @property
    def committed_length(self) -> int:
        """Committed length after this commit: the absolute position that the tree's first level guesses."""
        return self.start_position + len(self.tokens)


@dataclass(frozen=True)
class ResyncRequired:
    """The drafter cannot use a commit: its committed length for the session is `have`. Resend from there."""

    session: str
    epoch: int
    committed_length: int
