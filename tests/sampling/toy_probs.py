"""Toy distributions over a small vocabulary, every tree that can be sampled from them, and the exact output distribution."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from eyas.protocol.tree import DraftProbs, DraftTree, SampledProposal
from eyas.sampling.rejection import Families, SiblingProbs, accept_probs

CPU = torch.device("cpu")

Prefix = tuple[int, ...]
Distribution = Callable[[Prefix], np.ndarray]


@dataclass(frozen=True)
class Drawn:
    """A tree and the probability to draw it."""

    tree: DraftTree
    chance: float


def random_distribution(seed: int, vocab: int, zeros: int = 0) -> Distribution:
    """A distribution for every prefix; after each prefix, `zeros` tokens have probability 0."""

    @functools.cache
    def distribution(prefix: Prefix) -> np.ndarray:
        rng = np.random.default_rng((seed, len(prefix), *prefix))
        weights = rng.dirichlet(np.full(vocab, 0.7)) + 1e-3
        weights[rng.permutation(vocab)[:zeros]] = 0
        return weights / weights.sum()

    return distribution


def draft_probs(row: np.ndarray) -> DraftProbs:
    ids = np.flatnonzero(row)
    return DraftProbs(tuple(ids.tolist()), tuple(row[ids].tolist()))


def draws(row: np.ndarray, count: int, replacement: bool) -> Iterator[tuple[Prefix, float]]:
    """Every ordered draw of `count` siblings with its probability."""
    for tokens in itertools.product(range(len(row)), repeat=count):
        left, chance = row.copy(), 1.0
        for token in tokens:
            chance *= left[token] / left.sum() if left[token] else 0.0
            left[token] *= replacement
        if chance > 0:
            yield tokens, chance


def every_tree(draft: Distribution, widths: tuple[int, ...], replacement: bool) -> list[Drawn]:
    """All trees with widths[d] children below each node of depth d."""
    found: list[Drawn] = []

    def grow(tokens: Prefix, parents: Prefix, sampled_from: dict[int, DraftProbs], node: int, chance: float) -> None:
        tree = DraftTree.of(tokens, parents, (0.0,) * len(tokens), sampled=SampledProposal(sampled_from, replacement))
        if node == len(tokens):
            found.append(Drawn(tree, chance))
            return
        if tree.depths[node] == len(widths):
            grow(tokens, parents, sampled_from, node + 1, chance)
            return
        row, width = draft(path_tokens(tree, node)), widths[tree.depths[node]]
        for siblings, share in draws(row, width, replacement):
            below = sampled_from | {node: draft_probs(row)}
            grow(tokens + siblings, parents + (node,) * width, below, node + 1, chance * share)

    grow((0,), (0,), {}, 0, 1.0)
    return found


def path_tokens(tree: DraftTree, node: int) -> Prefix:
    return tuple(tree.tokens[n] for n in tree.path(node)[1:])


def emitted_probs(target: Distribution, trees: list[Drawn], length: int) -> dict[Prefix, float]:
    """The distribution of the next `length` tokens over all trees; plain decoding follows after the step."""
    rows = [target(path_tokens(drawn.tree, node)) for drawn in trees for node in drawn.tree.families]
    trial = accept_probs(torch.from_numpy(np.stack(rows)), Families.of([drawn.tree for drawn in trees], CPU))
    probs: dict[Prefix, float] = {}
    first = 0
    for drawn in trees:
        for tokens, chance in _outcomes(target, drawn.tree, trial, first):
            for continued, share in _continued(target, tokens, length):
                probs[continued] = probs.get(continued, 0.0) + drawn.chance * chance * share
        first += len(drawn.tree.families)
    return probs


def _outcomes(target: Distribution, tree: DraftTree, trial: SiblingProbs, first: int) -> Iterator[tuple[Prefix, float]]:
    family_of = {node: first + i for i, node in enumerate(tree.families)}

    def visit(node: int, chance: float) -> Iterator[tuple[Prefix, float]]:
        tokens, rest = path_tokens(tree, node), target(path_tokens(tree, node))
        if node in family_of:
            row = family_of[node]
            for child, accepted in zip(tree.families[node], trial.chances[row].tolist(), strict=False):
                yield from visit(child, chance * accepted)
                chance *= 1 - accepted
            rest = trial.residual[row].numpy()
        if chance > 0:
            yield from (((*tokens, token), chance * share) for token, share in enumerate(rest / rest.sum()) if share > 0)

    yield from visit(0, 1.0)


def _continued(target: Distribution, tokens: Prefix, length: int) -> Iterator[tuple[Prefix, float]]:
    if len(tokens) >= length:
        yield tokens[:length], 1.0
        return
    for token, share in enumerate(target(tokens)):
        for continued, below in _continued(target, (*tokens, token), length):
            yield continued, share * below


def total_variation(probs: dict[Prefix, float], target: Distribution, length: int) -> float:
    """Half the sum of differences to the target's own distribution of the next `length` tokens."""
    expected = dict(_continued(target, (), length))
    return sum(abs(probs.get(tokens, 0.0) - expected.get(tokens, 0.0)) for tokens in probs.keys() | expected.keys()) / 2
