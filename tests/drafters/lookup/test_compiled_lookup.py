"""The compiled prompt lookup proposes what the plain one proposes, and continues trees as it does."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.config import PromptLookupConfig, TreeConfig
from eyas.draft_protocol import KnownLogitBias, TreeBudget
from eyas.drafters.base import Draft
from eyas.drafters.prompt_lookup import NgramIndex, PromptLookupDrafter
from eyas.tree import DraftTree
from tests.drafters.lookup.corpora import commit, grown

lookups = pytest.importorskip("eyas.drafters.cpu_lookups", reason="numba is not installed")

TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=70), min_size=1, max_size=3)
CONFIGS = st.builds(
    lambda shortest, more, most: PromptLookupConfig(shortest + more, shortest, most),
    st.integers(1, 3), st.integers(0, 3), st.integers(1, 9),
)  # fmt: skip
BUDGETS = st.builds(TreeBudget, st.integers(2, 20), st.integers(1, 9))
BANS = st.lists(st.builds(KnownLogitBias, st.integers(0, 3), st.just(-math.inf), st.integers(1, 4)), max_size=2).map(tuple)
STEPS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.sampled_from([-0.25, -0.5, -1.5])), max_size=20)
SHAPE = TreeConfig(12, 6)


def are_equal(ours: Sequence[Draft], theirs: Sequence[Draft]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert isinstance(one, DraftTree)
        assert isinstance(other, DraftTree)
        assert (one.tokens, one.parents, one.grown_ahead) == (other.tokens, other.parents, other.grown_ahead)
        assert one.log_probs == pytest.approx(other.log_probs, rel=1e-6)


@given(TEXTS, CONFIGS, BUDGETS, BANS, st.sampled_from([b"", b"\x0b", b"\x00"]), STEPS)
def test_the_compiled_drafter_proposes_the_same_trees(
    texts: list[list[int]],
    config: PromptLookupConfig,
    budget: TreeBudget,
    bans: tuple[KnownLogitBias, ...],
    allowed: bytes,
    steps: list[tuple[int, int, float]],
) -> None:
    """Texts arrive in parts, so that hit rates, tables and rooms grow."""
    drafters = lookups.CompiledPromptLookup(SHAPE, config), PromptLookupDrafter(SHAPE, config)
    for end in (5, 40, 70):
        contexts = [
            commit(f"{i}", text[:end], base=min(len(text) - 1, {5: 0, 40: 5, 70: 40}[end]), budget=budget)
            for i, text in enumerate(texts)
            if end == 5 or len(text) > {40: 5, 70: 40}[end]
        ]
        contexts = [replace(context, logit_biases=bans, allowed=allowed) for context in contexts]
        are_equal(*(drafter.propose(contexts) for drafter in drafters))
        trees = [grown(context.tokens[-1], steps) for context in contexts]
        are_equal(*(drafter.continue_trees(contexts, trees) for drafter in drafters))
        leaf = trees[0].path(len(trees[0]) - 1) if trees else (0,)
        if leaf != (0,):
            path = tuple(trees[0].tokens[node] for node in leaf[1:])
            are_equal(*(drafter.continue_paths(contexts[:1], [path]) for drafter in drafters))


def test_a_long_text_keeps_all_of_its_matches() -> None:
    """Tables and texts move to larger ones several times."""
    tokens = [(7 * i * i + i // 3) % 50 for i in range(3000)]
    index, plain = lookups.CompiledIndex(PromptLookupConfig()), NgramIndex(1, 6)
    for start in range(0, len(tokens), 97):
        part = commit("a", tokens[: start + 97], base=start)
        index.extend(part)
        plain.extend(part)
    size, count = index.size, len(plain._previous)
    assert size == len(tokens)
    assert index.ngrams.previous[:size].T.tolist() == [previous.tolist() for previous in plain._previous]
    assert index.ngrams.trials.tolist() == plain.rates._trials.tolist()
    assert index.ngrams.hits.tolist() == plain.rates._hits.tolist()
    entries = index.ngrams.table[index.ngrams.table > 0]
    assert sorted(entries.tolist()) == sorted(
        place * count + number for number, latest in enumerate(plain._latest) for place in latest.values()
    )


def test_unknown_sessions_keep_their_trees() -> None:
    drafter = lookups.CompiledPromptLookup(SHAPE, PromptLookupConfig())
    text, tree = [1, 2, 3, 1, 2], grown(2, [(0, 3, -0.5)])
    drafter.propose([commit("known", text)])
    contexts = [commit("unknown", text), commit("known", text)]
    kept, more = drafter.continue_trees(contexts, [tree, tree])
    assert kept is tree
    assert more.tokens == (2, 3, 1, 2)
    assert drafter.continue_trees(contexts[:1], [tree]) == [tree]
