"""The acceptance rule `match`: a draft tree and the target's sample at each node in, accepted tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.tree import DraftTree


@dataclass(frozen=True)
class Accepted:
    """path: nodes whose KV stays, the root first. tokens: the accepted drafted tokens, then the bonus token."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]


def accept(tree: DraftTree, sampled: Sequence[int]) -> Accepted:
    """Walk down while the sampled token was drafted; sampled[i] is the target's sample at node i.

    Every emitted token is a fresh draw from the target's law, so the output law is the target's for any tree. It is
    rejection sampling with a proposal of one point (Leviathan et al. 2023, q = 1 at the drafted child).
    """
    node, path, tokens = 0, [0], []
    while (child := tree.child(node, sampled[node])) is not None:
        tokens.append(sampled[node])
        path.append(child)
        node = child
    return Accepted(tuple(path), (*tokens, sampled[node]))
