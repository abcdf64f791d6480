"""Trees as arrays are those that lists of nodes make, and what is done with the arrays is what is done node by node."""

import copy
import pickle
import random

import numpy as np
import pytest

from eyas.engine.budget.costs import SurvivalModel
from eyas.errors import InvalidTree
from eyas.protocol.tree import DraftTree, DraftTrees

MOST = 20


def some_trees(rng: random.Random, count: int) -> list[DraftTree]:
    trees = []
    for _ in range(count):
        parents, scores = [0], [0.0]
        for node in range(1, rng.randrange(1, MOST)):
            parents.append(rng.randrange(node))
            scores.append(scores[parents[-1]] - 3 * rng.random())
        tokens = tuple(rng.randrange(50) for _ in parents)
        trees.append(DraftTree.of(tokens, tuple(parents), tuple(scores), grown_ahead=rng.random() < 0.5))
    return trees


def as_batch(trees: list[DraftTree]) -> list[DraftTree]:
    """The trees as a drafter with arrays makes them; cells that it does not fill hold anything."""

    def cells(name: str, anything: float) -> np.ndarray:
        return np.array([[*getattr(tree, name)[1:], *[anything] * (MOST - len(tree))] for tree in trees])

    columns = cells("tokens", -7), cells("parents", -7), cells("log_probs", np.nan)
    counts = np.array([tree.num_drafted for tree in trees])
    ahead = np.array([tree.grown_ahead for tree in trees])
    return list(DraftTrees.below([tree.tokens[0] for tree in trees], *columns, counts, ahead))


def mixed(trees: list[DraftTree], rng: random.Random) -> tuple[list[DraftTree], list[DraftTree]]:
    """Some of the trees in another order, in arrays of their own or those of all; and the same apart."""
    order = rng.sample(range(len(trees)), rng.randrange(1, len(trees) + 1))
    found = as_batch(trees), as_batch(trees), trees
    return [rng.choice(found)[i] for i in order], [trees[i] for i in order]


@pytest.fixture(params=range(40))
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.param)


def test_arrays_make_the_trees_of_lists(rng: random.Random) -> None:
    trees = some_trees(rng, 6)
    assert [len(tree) for tree in as_batch(trees)] == [len(tree) for tree in trees]
    assert as_batch(trees) == trees
    for again in (copy.deepcopy, lambda tree: pickle.loads(pickle.dumps(tree))):
        assert [again(tree) for tree in as_batch(trees)] == trees


def test_arrays_of_any_trees_are_their_nodes(rng: random.Random) -> None:
    found, trees = mixed(some_trees(rng, 6), rng)
    batch = DraftTrees.of(found)
    assert list(batch) == trees
    assert batch.counts.tolist() == list(map(len, trees))
    for name in ("tokens", "parents", "log_probs"):
        assert getattr(batch, name).tolist() == [value for tree in trees for value in getattr(tree, name)]


@pytest.mark.parametrize("has_sources", [False, True])
def test_cut_arrays_equal_cut_trees(has_sources: bool, rng: random.Random) -> None:
    found, trees = mixed(some_trees(rng, 6), rng)
    if has_sources:
        found = [tree.with_sources([i % 3 for i in range(len(tree))]) for tree in found]
        trees = [tree.with_sources([i % 3 for i in range(len(tree))]) for tree in trees]
    kept = list[list[bool]]()
    for tree in trees:
        own = [True]
        for parent in tree.parents[1:]:
            own.append(own[parent] and rng.random() < 0.7)
        kept.append(own)
    expected = [tree.pruned(np.flatnonzero(own).tolist()) for tree, own in zip(trees, kept, strict=True)]
    assert list(DraftTrees.of(found).cut(np.array([is_kept for own in kept for is_kept in own]))) == expected


def test_survival_is_learned_alike_from_tuples_and_arrays(rng: random.Random) -> None:
    found, trees = mixed(some_trees(rng, 6), rng)
    one, other = SurvivalModel(), SurvivalModel()
    for model, own in ((one, trees), (other, found)):
        model.observe(own, [tree.path(len(tree) - 1) for tree in trees])
    for a, b in zip(one.survival(trees), other.survival(found), strict=True):
        assert np.allclose(a, b)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (((), (), ()), "without nodes"),
        (((3, 4), (0,), (0.0, 0.0)), "2 tokens, 1 parents"),
        (((3, 4), (0, 0), (0.0, 0.0), False, None, (0,)), "sources of 1 nodes in a tree of 2"),
    ],
)
def test_lists_of_different_lengths_are_no_tree(nodes: tuple, reason: str) -> None:
    with pytest.raises(InvalidTree, match=reason):
        DraftTree.of(*nodes)
