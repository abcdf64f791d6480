"""A small model's dynamic tree, the obvious way: one node at a time, whole sequences, transformers' own forward."""

from dataclasses import dataclass

import torch

from eyas.config import TreeConfig
from eyas.protocol.commit import NoiseKey
from tests.support import reference


@dataclass
class Node:
    """A candidate. path: the tokens from below the root to here."""

    token: int
    depth: int
    score: float
    path: list[int]


def scores(model: str, tokens: list[int], noise: NoiseKey, scale: float) -> list[float]:
    """Log-scores of the token that follows `tokens`."""
    with torch.inference_mode():
        logits = reference.load_reference(model)(input_ids=torch.tensor([tokens])).logits[0, -1]
    return reference.draft_scores(logits, noise, len(tokens), range(len(logits)), scale)


def candidates(model: str, tokens: list[int], noise: NoiseKey, shape: TreeConfig, scale: float = 1.0) -> list[Node]:
    """Every child of every expanded node, by level, then by order of their parents."""
    nodes: list[Node] = []
    frontier = [Node(tokens[-1], 0, 0.0, [])]
    for depth in range(1, shape.num_steps + 1):
        level = []
        for node in frontier:
            found = scores(model, tokens + node.path, noise, scale)
            best = sorted(range(len(found)), key=lambda t: (-found[t], t))[: shape.top_k]
            level += [Node(token, depth, node.score + found[token], [*node.path, token]) for token in best]
        nodes += level
        frontier = sorted(level, key=lambda node: -node.score)[: shape.top_k]  # stable: ties keep their order
    return nodes
