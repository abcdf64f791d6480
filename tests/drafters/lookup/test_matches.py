"""Matches of many sessions give the same nodes and trees as a loop over one match after the other."""

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eyas.drafters.lookup.base import Matches, Trie, build_trie, trie_trees
from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftTree

Path = tuple[int, ...]
FOUND = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=4)), min_size=1, max_size=30)
BUDGETS = st.lists(st.builds(TreeBudget, st.integers(1, 12), st.integers(0, 5)), min_size=4, max_size=4)


class Node(NamedTuple):
    """Sum of the weights of all matches through a node, and the first of these matches."""

    weight: float
    match: int


def matches_of(found: list[tuple[int, list[int]]]) -> Matches:
    """Each match weighs half as much as the one before."""
    found = sorted(found, key=lambda pair: pair[0])
    tokens = np.array([[*row, 9, 9, 9, 9][:4] for _, row in found])
    lengths = np.array([len(row) for _, row in found])
    return Matches(np.array([session for session, _ in found]), tokens, lengths, 0.5 ** np.arange(len(found)), lengths)


def naive_nodes(matches: Matches) -> list[dict[Path, Node]]:
    """The nodes of each session, by path."""
    sessions: list[dict[Path, Node]] = [{} for _ in range(4)]
    for match, (session, length) in enumerate(zip(matches.sessions, matches.lengths, strict=True)):
        for end in range(1, length + 1):
            path = tuple(matches.tokens[match, :end].tolist())
            known = sessions[session].get(path, Node(0.0, match))
            sessions[session][path] = Node(known.weight + float(matches.weights[match]), known.match)
    return sessions


def paths_of(trie: Trie) -> list[Path]:
    """The path of each node."""
    paths: list[Path] = []
    for node, parent in enumerate(trie.parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), int(trie.tokens[node])))
    return paths


@given(FOUND)
def test_nodes_are_the_paths_of_the_matches(found: list[tuple[int, list[int]]]) -> None:
    matches = matches_of(found)
    trie, naive = build_trie(matches), naive_nodes(matches)
    paths = paths_of(trie)
    columns = zip(trie.sessions.tolist(), paths, trie.weights.tolist(), trie.matches.tolist(), strict=True)
    got = [(session, path, Node(weight, match)) for session, path, weight, match in columns]
    assert sorted(got) == sorted((s, path, node) for s, nodes in enumerate(naive) for path, node in nodes.items())
    assert trie.depths.tolist() == [len(path) - 1 for path in paths]
    assert all(parent == -1 - session for parent, session in zip(trie.parents, trie.sessions, strict=True) if parent < 0)
    family = [(session, path[:-1]) for session, path in zip(trie.sessions.tolist(), paths, strict=True)]
    assert [family[start] for start in trie.starts] == list(dict.fromkeys(family))
    assert [family[trie.starts[number]] for number in trie.families] == family
    together = [sum(other.weight for path, other in naive[s].items() if path[:-1] == above) for s, above in family]
    assert np.allclose(np.exp(trie.log_shares()), trie.weights / np.array(together))


def naive_tree(nodes: list[tuple[float, Path]], budget: TreeBudget) -> DraftTree:
    """The best nodes, in order; equal ones keep their order."""
    allowed = [i for i, (score, path) in enumerate(nodes) if len(path) <= budget.max_depth and score > float("-inf")]
    chosen = sorted(sorted(allowed, key=lambda i: -nodes[i][0])[: budget.max_nodes - 1])
    numbers = {(): 0} | {nodes[i][1]: number for number, i in enumerate(chosen, 1)}
    parents = [numbers[nodes[i][1][:-1]] for i in chosen]
    tokens, scores = [nodes[i][1][-1] for i in chosen], [nodes[i][0] for i in chosen]
    return DraftTree.of((7, *tokens), (0, *parents), (0.0, *scores))


@given(FOUND, BUDGETS, st.integers(0, 1000))
def test_trees_are_the_best_nodes_within_each_budget(
    found: list[tuple[int, list[int]]], budgets: list[TreeBudget], seed: int
) -> None:
    """Many scores are equal, and some nodes are impossible."""
    trie = build_trie(matches_of(found))
    steps = np.random.default_rng(seed).choice([0.0, -0.5, -1.0, -np.inf], len(trie.tokens), p=[0.3, 0.3, 0.3, 0.1])
    scores: list[float] = []
    for parent, step in zip(trie.parents, steps.tolist(), strict=True):
        scores.append((scores[parent] if parent >= 0 else 0.0) + step)
    nodes = list(zip(trie.sessions.tolist(), scores, paths_of(trie), strict=True))
    expected = [
        naive_tree([(score, path) for s, score, path in nodes if s == session], budget)
        for session, budget in enumerate(budgets)
    ]
    assert list(trie_trees(trie, trie.along_paths(steps), [7] * 4, budgets)) == expected
