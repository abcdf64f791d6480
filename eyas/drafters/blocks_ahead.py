"""Drafting ahead with one-pass heads: trees behind likely ends of accepted paths, see `eyas.drafters.draft_ahead`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.config import DraftAheadConfig
from eyas.draft_protocol import TreeBudget
from eyas.drafters.base import Draft, DraftContext, Path, PreparedTrees, without_banned
from eyas.drafters.block import BlockDrafter
from eyas.drafters.on_demand import OnDemand, claim
from eyas.tree import DraftTree, PreparedTree, TreeArrays

# Trees behind likely ends: of all sessions together, the fewest and the most of one; and the tokens of a node that count.
MAX_TREES, MIN_TREES, MAX_SESSION_TREES, NUM_CHILDREN = 256, 8, 40, 16


class End(NamedTuple):
    """A way for an accepted path to end: the node, the token behind it, and the log-probability of both."""

    log_prob: float
    node: int
    token: int


class AheadBlocks:
    """Implements Ahead: blocks of a one-pass head behind nodes of the trees that the target verifies.

    A block does not see the features of its path, and not the token behind it, which only chooses among what the block
    proposes. So trees behind any likely token cost small products: those of the likeliest pairs of node and token are made
    at once, and sent. Trees of other tokens can be made when these come.
    """

    def __init__(self, drafter: BlockDrafter, config: DraftAheadConfig, demand: OnDemand) -> None:
        self._drafter, self._num_nodes, self._demand = drafter, config.top_k, demand
        self._due: dict[str, tuple[DraftContext, DraftTree]] = {}
        self._blocks: dict[str, _Blocks] = {}
        self._changed: dict[str, None] = {}

    def commit(self, contexts: Sequence[DraftContext], paths: Sequence[Path]) -> list[Draft]:
        return self._drafter.propose(contexts)

    def begin(self, contexts: Sequence[DraftContext], trees: Sequence[DraftTree | None]) -> None:
        for context, tree in zip(contexts, trees, strict=True):
            self._blocks.pop(context.session, None)
            self._due[context.session] = context, tree or DraftTree.root_only(context.tokens[-1])

    def step(self) -> bool:
        names = [name for name in self._due if self._drafter.can_grow(name)]
        names = names[: self._drafter.first_together([self._due[name][1] for name in names], self._num_nodes)]
        if not names:
            return False
        contexts, trees = zip(*(self._due.pop(name) for name in names), strict=True)
        nodes = [likeliest_ends(tree, self._num_nodes) for tree in trees]
        roots, states = self._drafter.states_behind(contexts, trees, nodes)
        made = [_Blocks(*each) for each in zip(contexts, trees, nodes, roots, states, strict=True)]
        self._blocks |= zip(names, made, strict=True)
        if (count := MAX_TREES // len(names)) >= MIN_TREES:
            self._prepare(made, min(count, MAX_SESSION_TREES))
        return True

    def _prepare(self, made: Sequence[_Blocks], count: int) -> None:
        """Grow trees behind the `count` likeliest ends of each session, and keep those that are worth it."""
        ends = self._likely_ends(made)
        places = [(own, end) for own, likely in zip(made, ends, strict=True) for end in likely[:count]]
        if not places:
            return
        states = torch.stack([own.states[own.nodes.index(end.node)] for own, end in places])
        whole = TreeBudget(self._drafter.tree.num_draft_tokens, self._drafter.tree.num_steps)  # the next budgets are unknown
        behind = [replace(own.after(end.node, end.token), budget=whole) for own, end in places]
        grown = self._drafter.grow_behind(behind, states)
        for own in made:
            found = [(end, tree, claim(tree)) for (of, end), tree in zip(places, grown, strict=True) if of is own]
            own.claims = {(end.node, end.token): claimed for end, _, claimed in found}
            kept = [
                (end, tree)
                for end, tree, claimed in found
                if self._demand.is_worth(claimed, True) and not self._demand.explores()
            ]
            own.prepared = TreeArrays.of(joined_trees(own.tree, kept))
            self._changed[own.context.session] = None

    def _likely_ends(self, made: Sequence[_Blocks]) -> list[list[End]]:
        """Where the accepted paths may end, the likeliest first. The block behind a node's parent says what follows it."""
        places = [(own, node) for own in made for node in own.nodes if not node or own.tree.parents[node] in own.nodes]
        if not places:
            return [[] for _ in made]
        states = [own.states[own.nodes.index(own.tree.parents[n])] if n else own.root for own, n in places]
        contexts = [own.after(node, own.tree.tokens[node]) for own, node in places]
        contexts = [replace(context, start_position=context.start_position - 1) for context in contexts]
        tokens, scores = self._drafter.next_tokens(contexts, torch.stack(states)[:, :1], NUM_CHILDREN)
        ends: dict[int, list[End]] = {id(own): [] for own in made}
        for (own, node), row, chances in zip(places, tokens.tolist(), scores.tolist(), strict=True):
            below, above = {own.tree.tokens[child] for child in own.tree.families.get(node, ())}, own.tree.log_probs[node]
            ends[id(own)] += [End(above + s, node, t) for t, s in zip(row, chances, strict=True) if t not in below]
        return [sorted(found, reverse=True) for found in ends.values()]

    def collect(self) -> None:
        """Nothing: the states of blocks stay on the device."""

    def trees(self, contexts: Sequence[DraftContext], paths: Sequence[Path]) -> list[DraftTree | None]:
        found: list[DraftTree | None] = [None] * len(contexts)
        states = dict[int, Tensor]()
        for i, (context, path) in enumerate(zip(contexts, paths, strict=True)):
            own = self._blocks.get(context.session)
            if own is None or (node := node_at(own.tree, path[:-1])) is None:
                continue
            tree = own.prepared.below(path, context.budget.max_nodes, context.budget.max_depth) if own.prepared else None
            if tree and tree.num_drafted >= PreparedTrees.enough(context.budget):
                found[i] = without_banned(tree, context)
            elif (node, path[-1]) not in own.claims and node in own.nodes and self._demand.is_worth_growing:
                states[i] = own.states[own.nodes.index(node)]
        if states:
            grown = self._drafter.grow_behind([contexts[i] for i in states], torch.stack(list(states.values())))
            for i, made in zip(states, grown, strict=True):
                found[i] = replace(made, grown_ahead=True)
        return found

    def draft(self, contexts: Sequence[DraftContext], paths: Sequence[Path]) -> list[Draft]:
        self.release([context.session for context in contexts])
        return self._drafter.propose(contexts)

    def claim(self, context: DraftContext, path: Path) -> float:
        own = self._blocks.get(context.session)
        node = node_at(own.tree, path[:-1]) if own else None
        return own.claims.get((node, path[-1]), 0.0) if own and node is not None else 0.0

    def take_prepared(self) -> list[PreparedTree]:
        made = [self._blocks[name] for name in self._changed if name in self._blocks]
        self._changed = {}
        contexts = [(own.context, own.prepared) for own in made if own.prepared]
        return [PreparedTree(c.session, c.epoch, c.committed_length, tree) for c, tree in contexts]

    def release(self, sessions: Sequence[str]) -> None:
        for name in sessions:
            for known in (self._due, self._blocks, self._changed):
                known.pop(name, None)


@dataclass
class _Blocks:
    """Blocks behind nodes of the tree that is verified, below a commit.

    root [G, H], states [number of nodes, G, H]: see `BlockDrafter.states_behind`. prepared: the tree, with trees behind its
    likely ends. claims: what these claim, by node and token, whether they are sent or not.
    """

    context: DraftContext
    tree: DraftTree
    nodes: list[int]
    root: Tensor
    states: Tensor
    prepared: TreeArrays | None = None
    claims: dict[tuple[int, int], float] = field(default_factory=dict)

    def after(self, node: int, token: int) -> DraftContext:
        """The commit of the path to a node and the token behind it."""
        start = self.context.committed_length + self.tree.depths[node]
        return replace(self.context, start_position=start, tokens=(token,), features=None, allowed=b"", logit_biases=())


def joined_trees(tree: DraftTree, ends: Sequence[tuple[End, DraftTree]]) -> DraftTree:
    """The tree with other trees behind its ends, whose tokens are not among its nodes.

    ends: the likeliest first. The rest is left out where the whole would have more nodes than a prepared tree may.
    """
    tokens, parents, scores = list(tree.tokens), list(tree.parents), list(tree.log_probs)
    for end, below in ends:
        start = len(tokens)
        if start + len(below) > PreparedTree.MAX_NODES:
            break
        tokens += below.tokens
        parents += [end.node, *(start + parent for parent in below.parents[1:])]
        scores += [end.log_prob + score for score in below.log_probs]
    return DraftTree(tuple(tokens), tuple(parents), tuple(scores))


def node_at(tree: DraftTree, path: Path) -> int | None:
    """The node behind a path of tokens below the root."""
    node: int | None = 0
    for token in path:
        node = None if node is None else tree.child(node, token)
    return node


def likeliest_ends(tree: DraftTree, count: int) -> list[int]:
    """The `count` nodes at which the accepted path most likely ends: their chance less that of their children."""
    chances = np.exp(np.array(tree.log_probs))
    ends = chances - [sum(chances[child] for child in tree.families.get(node, ())) for node in range(len(tree))]
    likeliest: list[int] = np.argsort(-ends, kind="stable")[:count].tolist()
    return likeliest
