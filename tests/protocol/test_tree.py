"""Properties of draft trees."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import InvalidTree
from eyas.kernels.choice import tree_kernels
from eyas.kernels.plain import trees as plain
from eyas.protocol.tree import DraftTree
from eyas.sampling.acceptance import are_valid_trees, pack_trees
from tests.support.strategies import trees


@given(trees())
def test_ancestor_mask_rows_are_the_paths_to_the_root(tree: DraftTree) -> None:
    mask = tree.ancestor_mask()
    for node in range(len(tree)):
        assert set(mask[node].nonzero()[0].tolist()) == set(tree.path(node))
        assert tree.depths[node] == len(tree.path(node)) - 1


def test_the_mask_of_a_long_chain_is_causal() -> None:
    assert (DraftTree.chain(range(150)).ancestor_mask() == np.tri(150, dtype=np.bool_)).all()


@given(st.lists(trees(max_nodes=80), min_size=1, max_size=4))
def test_packed_trees_see_what_each_tree_sees(found: list[DraftTree]) -> None:
    packed, end = pack_trees(found), 0
    for tree in found:
        start, end = end, end + len(tree)
        assert tuple(packed.nodes.tokens[start:end]) == tree.tokens
        assert tuple(packed.depths[start:end]) == tree.depths
        assert (packed.visible[start:end, : len(tree)] == tree.ancestor_mask()).all()
        assert not packed.visible[start:end, len(tree) :].any()


@given(st.lists(trees(), min_size=1, max_size=4), st.data())
def test_packing_finds_every_fault_that_validation_finds(found: list[DraftTree], data: st.DataObject) -> None:
    """Values out of range, and trees that are too large or too deep."""
    some = st.integers(-1, 8)
    for index in range(len(found)):
        fault = data.draw(st.sampled_from(("none", "tokens", "parents")))
        tree, node = found[index], data.draw(st.integers(0, len(found[index]) - 1))
        columns = {"tokens": list(tree.tokens), "parents": list(tree.parents)}
        if fault != "none":
            columns[fault][node] = data.draw(some)
        found[index] = DraftTree.of(columns["tokens"], columns["parents"], tree.log_probs)
    roots = [data.draw(st.sampled_from((*tree.tokens[:1], 3))) for tree in found]
    most_nodes = [data.draw(st.sampled_from((len(tree), 16, 5))) for tree in found]
    limits = [(root, nodes, data.draw(st.integers(0, 16))) for root, nodes in zip(roots, most_nodes, strict=True)]
    faults = 0
    for tree, (root, nodes, depth) in zip(found, limits, strict=True):
        try:
            tree.validate(root, 8, nodes, depth)
        except InvalidTree:
            faults += 1
    assert are_valid_trees(found, limits, 8) == (faults == 0)


@given(trees())
def test_paths_step_from_parent_to_child(tree: DraftTree) -> None:
    for node in range(len(tree)):
        path = tree.path(node)
        assert path[0] == 0
        assert path[-1] == node
        assert all(tree.parents[below] == above for above, below in itertools.pairwise(path))


@given(trees())
def test_a_valid_tree_passes_and_its_limits_are_tight(tree: DraftTree) -> None:
    tree.validate(tree.tokens[0], 8, len(tree), tree.depth)
    with pytest.raises(InvalidTree, match="allowed"):
        tree.validate(tree.tokens[0], 8, len(tree) - 1, tree.depth)
    with pytest.raises(InvalidTree, match="expected 99"):
        tree.validate(99, 100, len(tree), tree.depth)
    if tree.depth > 0:
        with pytest.raises(InvalidTree, match="depth"):
            tree.validate(tree.tokens[0], 8, len(tree), tree.depth - 1)


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (DraftTree.of((3, 9), (0, 0), (0.0, 0.0)), "outside"),
        (DraftTree.of((3, -1), (0, 0), (0.0, 0.0)), "outside"),
        (DraftTree.of((3, 4, 5), (0, 2, 0), (0.0,) * 3), "come before"),
        (DraftTree.of((3, 4), (0, -1), (0.0,) * 2), "come before"),
    ],
)
def test_a_tree_that_breaks_the_contract_is_named(tree: DraftTree, reason: str) -> None:
    with pytest.raises(InvalidTree, match=reason):
        tree.validate(3, 9, 8, 4)


@given(trees(), st.data())
def test_a_tree_with_any_scores_is_cut_to_a_valid_one(tree: DraftTree, data: st.DataObject) -> None:
    scores = data.draw(st.lists(st.floats(width=32), min_size=len(tree), max_size=len(tree)))
    path = [tree.tokens[node] for node in tree.path(data.draw(st.integers(0, len(tree) - 1)))[1:]]
    max_nodes, max_depth = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 3))
    cut = DraftTree.of(tree.tokens, tree.parents, scores).below(path, max_nodes, max_depth)
    if cut is not None:
        cut.validate(cut.tokens[0], 8, max_nodes, max_depth)
        assert all(-math.inf < score <= cut.log_probs[cut.parents[node]] for node, score in enumerate(cut.log_probs))


@given(trees(), st.data())
def test_a_tree_below_a_path_has_its_best_descendants(tree: DraftTree, data: st.DataObject) -> None:
    scores = [0.0]
    for node in range(1, len(tree)):
        scores.append(scores[tree.parents[node]] - data.draw(st.sampled_from([0.0, 0.5, 1.0])))
    tree = DraftTree.of(tree.tokens, tree.parents, scores)
    path = [tree.tokens[node] for node in tree.path(data.draw(st.integers(0, len(tree) - 1)))[1:]]
    root: int | None = 0
    for token in path:
        root = None if root is None else tree.child(root, token)
    if root is None:  # an earlier sibling has the same token
        assert tree.below(path, 6, 3) is None
        return
    max_nodes, max_depth = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 3))
    below = [
        n for n in range(len(tree)) if root in tree.path(n)[:-1] and len(tree.path(n)) - len(tree.path(root)) <= max_depth
    ]
    best = sorted(sorted(below, key=lambda node: -scores[node])[: max_nodes - 1])
    cut = tree.below(path, max_nodes, max_depth)
    assert (cut is None) == (not best)
    if cut is not None:
        cut.validate(tree.tokens[root], 8, max_nodes, max_depth)
        assert cut.tokens[1:] == tuple(tree.tokens[node] for node in best)
        assert cut.log_probs[1:] == tuple(scores[node] - scores[root] for node in best)
    assert tree.below([*path, 99], max_nodes, max_depth) is None


@given(st.lists(trees(max_nodes=80, vocab_size=4), min_size=1, max_size=4), st.data())
def test_compiled_kernels_of_trees_equal_plain_ones(found: list[DraftTree], data: st.DataObject) -> None:
    pytest.importorskip("numba")
    compiled, packed = tree_kernels(), pack_trees(found)
    batch, parents = packed.nodes, packed.above - packed.roots
    for ours, theirs in zip(compiled.layout(batch.counts, parents), plain.layout(batch.counts, parents), strict=True):
        assert np.array_equal(ours, theirs)
    samples = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(parents), max_size=len(parents))))
    walk = batch.counts, batch.tokens, packed.above, samples
    for ours, theirs in zip(compiled.accepted_rows(*walk), plain.accepted_rows(*walk), strict=True):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(compiled.ranges(packed.roots, packed.depths), plain.ranges(packed.roots, packed.depths))
    row = data.draw(st.integers(0, len(parents) - 1))
    for column in (batch.tokens, parents):
        column[row] = data.draw(st.sampled_from((int(column[row]), -1, 3, 4)))
    bounds = np.array([[tree.tokens[0], 60, data.draw(st.integers(0, 9))] for tree in found]).T.copy()
    nodes = batch.counts, batch.tokens, parents, bounds, 4
    assert compiled.are_valid(*nodes) == plain.are_valid(*nodes)
