"""Commits and answers: the values that a verifier and a drafter exchange in each round.

The committed tokens of a session are t_0 .. t_n; t_n is the root of the next tree. A target that has processed
t_0 .. t_{n-1} has features f_0 .. f_{n-1}. A drafter whose committed length is b knows t_0 .. t_{b-1} and
f_0 .. f_{b-2}. A commit with start position b brings t_b .. t_n and f_max(b-1,0) .. f_{n-1}: while a prompt is prefilled in
chunks, t_n is simply the next *prompt* token, so that every pair (f_i, t_{i+1}) is complete when it arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

FeaturesT = TypeVar("FeaturesT")
Proposal = Literal["deterministic", "sampled"]
RefusalReason = Literal["overloaded", "too_many_sessions", "context_too_long"]


@dataclass(frozen=True)
class NoiseKey:
    """Inputs of a draw besides the logits and the position. A drafter that has it can predict the draw."""

    seed: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class TreeBudget(NamedTuple):
    """The largest tree that the verifier accepts.

    Attributes:
        max_nodes: most nodes, the root included; 1 requests no tree.
        max_depth: most levels below the root.
    """

    max_nodes: int
    max_depth: int

    @property
    def wants_tree(self) -> bool:
        return self.max_nodes > 1 and self.max_depth > 0


# Of commits that want no tree.
NO_TREE = TreeBudget(1, 0)


@dataclass(frozen=True)
class KnownLogitBias:
    """Bias that the target will add to the logit of a token at the next `num_levels` positions; minus infinity bans it."""

    token: int
    bias: float
    num_levels: int


@dataclass(frozen=True)
class TensorBytes:
    """A dense row-major tensor as bytes. dtype is torch's name without its prefix, such as float32 or bfloat16."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Commit(NamedTuple, Generic[FeaturesT]):
    """Accepted tokens of one session, and a request for its next tree.

    epoch: raised by the verifier whenever it restarts the session's drafting; older epochs are dropped.
    start_position: committed length before `tokens`.
    tokens: newly committed token ids, at least one; the last is the new root.
    features: fused features [n, H] of positions max(start_position-1, 0) up to the root's, exclusive; None if not needed.
    noise: what the target's draws depend on; for a sampled proposal its seed is one for the drafter's own draws.
    samples: the target's sample at every node of the session's last tree, in node order; empty if there was none.
    proposal: "deterministic" requests the likeliest nodes, "sampled" sampled nodes with the draft probabilities.
    traceparent: W3C trace context of the round, empty if it is not traced.
    wants_sources: whether the tree should have `DraftTree.sources`.
    allowed: the tokens that the target may draw after the root, where a grammar limits them: one bit per token id of its
        vocabulary, the lowest id in the lowest bit of the first byte. Empty if all may be drawn.
    logit_biases: what the target will do to logits, as far as it is known now. A token may occur several times.
    tenant_key: sessions with equal keys may be drafted each other's outputs, all others must not.
    has_tree: whether the verifier has cut the next tree from one that the drafter prepared, within the budget. Within that
        of a root it has no tree and does not wait for one.
    lookups_alone: whether lookups draft without the network that they stand next to. This lacks the tokens then, and the
        commit has no features. The next commit for both begins where the network is.
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
    wants_sources: bool = False
    allowed: bytes = b""
    logit_biases: tuple[KnownLogitBias, ...] = ()
    tenant_key: str = ""
    has_tree: bool = False
    lookups_alone: bool = False

    @property
    def committed_length(self) -> int:
        """Committed length after this commit: the absolute position that the tree's first level guesses."""
        return self.start_position + len(self.tokens)


@dataclass(frozen=True)
class ResyncRequired:
    """The drafter cannot use a commit: it has `committed_length` tokens of the session. Resend from there."""

    session: str
    epoch: int
    committed_length: int


@dataclass(frozen=True)
class Refusal:
    """The drafter takes no commit of this session: it has too much to do, too many sessions, or a shorter context."""

    session: str
    epoch: int
    reason: RefusalReason
