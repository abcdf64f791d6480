"""Values for tests: random draft trees, what plain walks accept of them, and sampling parameters that no client makes."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from eyas.api.request import SamplingParams
from eyas.protocol.tree import DraftTree
from eyas.sampling.acceptance import Accepted, StepOutputs


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 16, vocab_size: int = 8) -> DraftTree:
    """Any shape, duplicate siblings included."""
    size = draw(st.integers(1, max_nodes))
    tokens = tuple(draw(st.lists(st.integers(0, vocab_size - 1), min_size=size, max_size=size)))
    parents = (0, *(draw(st.integers(0, node - 1)) for node in range(1, size)))
    return DraftTree.of(tokens, parents, (0.0,) * size)


def accept(tree: DraftTree, sampled: Sequence[int]) -> Accepted:
    """The rule `match`, node by node. sampled[i]: the target's sample at node i."""
    path = [0]
    while (child := tree.child(path[-1], sampled[path[-1]])) is not None:
        path.append(child)
    return Accepted(tuple(path), tuple(sampled[node] for node in path))


def walk(tree: DraftTree, passed: Sequence[bool], drawn: Sequence[int]) -> Accepted:
    """Down to the first child that passed, node by node. drawn[i]: the bonus token if the walk ends at node i."""
    path, child = [0], next((node for node in tree.families.get(0, ()) if passed[node]), None)
    while child is not None:
        path.append(child)
        child = next((node for node in tree.families.get(child, ()) if passed[node]), None)
    return Accepted(tuple(path), (*(tree.tokens[node] for node in path[1:]), drawn[path[-1]]))


def unchecked(sampling: SamplingParams, **values: object) -> SamplingParams:
    """The parameters with values that were not checked, as another client may send them."""
    other = copy(sampling)
    vars(other).update(values)
    return other


def outputs_of(accepted: Sequence[Accepted | None]) -> StepOutputs:
    """Outputs of a step in which requests get these tokens and nothing else."""
    some = [each for each in accepted if each is not None]
    nodes, tokens = (np.array([value for each in some for value in each[field]], np.int64) for field in (0, 1))
    ends = np.cumsum([0 if each is None else len(each.path) for each in accepted], dtype=np.int64)
    return replace(StepOutputs.empty(len(accepted)), nodes=nodes, tokens=tokens, ends=ends)
