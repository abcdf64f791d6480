"""Values for tests: random draft trees, and sampling parameters that no client of ours can make."""

from copy import copy

from hypothesis import strategies as st

from eyas.api.request import SamplingParams
from eyas.protocol.tree import DraftTree


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 16, vocab_size: int = 8) -> DraftTree:
    """Any shape, duplicate siblings included."""
    size = draw(st.integers(1, max_nodes))
    tokens = tuple(draw(st.lists(st.integers(0, vocab_size - 1), min_size=size, max_size=size)))
    parents = (0, *(draw(st.integers(0, node - 1)) for node in range(1, size)))
    return DraftTree(tokens, parents, (0.0,) * size)


def unchecked(sampling: SamplingParams, **values: object) -> SamplingParams:
    """The parameters with values that were not checked, as another client may send them."""
    other = copy(sampling)
    vars(other).update(values)
    return other
