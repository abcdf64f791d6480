"""The contract of every drafter: committed tokens (and features) in, draft trees out.

A drafter's state is a cache. It may drop a session at any time and then answers with ResyncRequired. Drafts change the
speed of generation, never its output; for sampled trees the stated draft probabilities must be the true ones.
What a drafter learns from a session's text serves this session, and those with an equal `tenant_key`: others may belong to
another tenant.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from eyas.arrays import Ints
from eyas.config import TreeConfig
from eyas.grammar.compiler import TokenBits
from eyas.protocol.commit import Commit, ResyncRequired, TreeBudget
from eyas.protocol.tree import DraftTree, PreparedTree

DraftContext: TypeAlias = Commit[Tensor]
Draft: TypeAlias = DraftTree | ResyncRequired | None
Pending: TypeAlias = Callable[[], list[Draft]]
Path: TypeAlias = tuple[int, ...]
# Starts to compute the bits of the tokens that may follow paths below the roots of sessions, and returns a function that
# waits for them; None where they are not known.
PathMasks: TypeAlias = Callable[[Mapping[str, Sequence[Path]]], Callable[[], Mapping[str, Sequence[TokenBits | None]]]]


class PreparedTrees:
    """A verifier's prepared trees by session. Next drafts are cut from them, without a round trip."""

    # Fewer drafted nodes are not worth a verify pass; the drafter is asked for more.
    MIN_DRAFTED = 4

    def __init__(self) -> None:
        self.by_session: dict[str, PreparedTree] = {}

    @classmethod
    def enough(cls, budget: TreeBudget) -> int:
        """Return the number of drafted nodes from which a tree is used."""
        return min(cls.MIN_DRAFTED, budget.max_nodes - 1)

    def put(self, prepared: PreparedTree) -> None:
        """Keep a tree, in place of an earlier one of its session."""
        self.by_session[prepared.session] = prepared

    def take(self, context: DraftContext) -> DraftTree | None:
        """Return the tree for a commit that was foreseen, within its budget; None if there is none. Uses up the session's
        tree.
        """
        found, budget = self.by_session.pop(context.session, None), context.budget
        if found is None or not budget.wants_tree or context.proposal != "deterministic":
            return None
        if (found.epoch, found.committed_length) != (context.epoch, context.start_position):
            return None
        tree = found.tree.below(context.tokens, budget.max_nodes, budget.max_depth)
        tree = tree and without_banned(tree, context)
        return tree if tree and tree.num_drafted >= self.enough(budget) else None

    def drop(self, sessions: Iterable[str]) -> None:
        """Forget sessions; unknown ones are ignored."""
        for session in sessions:
            self.by_session.pop(session, None)


@dataclass(frozen=True)
class DrafterNeeds:
    """Inputs that the engine must send with each commit.

    Attributes:
        features: fused target features [n, feature_size] of the new positions.
        samples: the target's sample at every node of the last tree.
    """

    features: bool = False
    samples: bool = False
    feature_size: int = 0


@dataclass(frozen=True)
class DraftWork:
    """Passes that a tree of all levels runs, one after another.

    Attributes:
        passes: forward passes of a network.
        layers: decoder layers in these; all heads of Medusa count as one, each of Hydra as one.
    """

    passes: int = 0
    layers: int = 0

    def __add__(self, other: DraftWork) -> DraftWork:
        return DraftWork(self.passes + other.passes, self.layers + other.layers)


NO_WORK = DraftWork()


class Drafter(Protocol):
    """Source of a tree below the last committed token of each session."""

    @property
    def needs(self) -> DrafterNeeds:
        """Return what contexts must carry."""
        ...

    @property
    def can_sample(self) -> bool:
        """Return whether it answers sampled proposals: trees drawn from its own probabilities, together with these."""
        ...

    @property
    def has_lookups(self) -> bool:
        """Return whether it is a network next to lookups, which can draft alone, see `Commit.lookups_alone`."""
        ...

    def can_draft(self, session: str) -> bool:
        """Return whether a request for this session can be served now."""
        ...

    def request(self, contexts: Sequence[DraftContext]) -> Pending:
        """Commit the accepted tokens and request the next trees, without waiting for them.

        Args:
            contexts: one commit for each session; session keys are distinct within a call.

        Returns:
            A function that waits for the answers; call it once, before the next `request`. There is one answer per
            context, in order:
            - a DraftTree whose root is the context's last token, within the context's budget and of its proposal kind;
              root-only if there is nothing to propose, or the budget asks for bookkeeping only;
            - ResyncRequired if the context does not continue the drafter's session;
            - None if no answer came in time.
            The state of a single session never raises.
        """
        ...

    def release(self, sessions: Sequence[str]) -> None:
        """Drop sessions; unknown ones are ignored."""
        ...

    def reject(self, sessions: Sequence[str]) -> None:
        """Note that the last answers for these sessions break the contract of `request`."""
        ...


class LocalDrafter(ABC):
    """A Drafter in this process: it computes its answers when they are collected. Not safe for use from several threads."""

    @property
    def needs(self) -> DrafterNeeds:
        return DrafterNeeds()

    @property
    def can_sample(self) -> bool:
        return False

    @property
    def work(self) -> DraftWork:
        """Return what a round runs; nothing for lookups."""
        return NO_WORK

    @property
    def has_lookups(self) -> bool:
        return False

    @abstractmethod
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Return the answers of `Drafter.request`."""

    @abstractmethod
    def release(self, sessions: Sequence[str]) -> None:
        """See Drafter."""

    def can_draft(self, session: str) -> bool:
        return True

    def request(self, contexts: Sequence[DraftContext]) -> Pending:
        return partial(self.propose, contexts)

    def reject(self, sessions: Sequence[str]) -> None:
        """See Drafter; the log has the reason."""
        return

    def use_path_masks(self, path_masks: PathMasks) -> None:
        """Take the masks of grammars at the nodes of a tree from `path_masks` while it grows; lookups do without."""
        return

    def warm_up(self) -> None:
        """Do once what the first steps would otherwise wait for; most drafters have nothing to do."""
        return

    def prune(self, session: str, nodes: Sequence[int]) -> None:
        """Note that only `nodes` of the session's last tree are verified: ascending, the root first, all with their parents.
        The next samples belong to these nodes."""
        return

    def draft_ahead(self) -> bool:
        """Do one step of work in advance, while no request waits. Returns whether there is more to do."""
        return False

    def take_prepared(self) -> list[PreparedTree]:
        """Return trees to send before the commits that they are for, as far as they are new."""
        return []

    @property
    def takes_prepared(self) -> bool:
        """Return whether commits with `has_tree` keep their budgets: it knows the tree that it has sent, and goes on from
        there.
        """
        return False

    @property
    def busy_s(self) -> float:
        """Seconds for which the device still computes what `draft_ahead` began, as far as known; a request need not wait."""
        return 0.0


def allowed_bits(contexts: Sequence[DraftContext]) -> npt.NDArray[np.uint8]:
    """Return `Commit.allowed` of each context, all ones where it is empty, uint8 [S, B]."""
    bits = np.full((len(contexts), max(len(context.allowed) for context in contexts)), 0xFF, dtype=np.uint8)
    for row, context in enumerate(contexts):
        if context.allowed:
            bits[row] = np.frombuffer(context.allowed, dtype=np.uint8)
    return bits


def bans_of(context: DraftContext) -> dict[int, int]:
    """Return the tokens that the target cannot draw, with the number of levels below the root that cannot have them."""
    bans: dict[int, int] = {}
    for bias in context.logit_biases:
        if bias.bias == -math.inf:
            bans[bias.token] = max(bans.get(bias.token, 0), bias.num_levels)
    return bans


def drawable(context: DraftContext) -> Callable[[int, int], bool]:
    """Return whether the target can draw a token at a level, as far as the context says; 0 is the root's children."""
    bans = bans_of(context)

    def can_draw(token: int, level: int) -> bool:
        is_allowed = level > 0 or not context.allowed or context.allowed[token >> 3] >> (token & 7) & 1
        return bool(is_allowed) and level >= bans.get(token, 0)

    return can_draw


def without_banned(tree: DraftTree, context: DraftContext) -> DraftTree:
    """Return the deterministic tree without nodes that the target cannot draw, and without what stands below them."""
    if not context.allowed and not bans_of(context):
        return tree
    can_draw, kept = drawable(context), {0: None}
    for node in range(1, len(tree)):
        if tree.parents[node] in kept and can_draw(tree.tokens[node], tree.depths[node] - 1):
            kept[node] = None
    return tree if len(kept) == len(tree) else tree.pruned(list(kept))


def within(budget: TreeBudget, tree: TreeConfig) -> TreeBudget:
    """Return a verifier's budget, cut to the size of a drafter's trees."""
    if budget.max_nodes <= tree.num_draft_tokens and budget.max_depth <= tree.num_steps:
        return budget
    max_nodes, max_depth = min(budget.max_nodes, tree.num_draft_tokens), min(budget.max_depth, tree.num_steps)
    return budget._replace(max_nodes=max_nodes, max_depth=max_depth)


def limits_of(budgets: Sequence[TreeBudget]) -> tuple[Ints, Ints]:
    """Return most drafted nodes and most levels of each session's tree, int64 [S] each."""
    limits, depths = np.array([(max(budget.max_nodes - 1, 0), budget.max_depth) for budget in budgets]).T.copy()
    return limits, depths
