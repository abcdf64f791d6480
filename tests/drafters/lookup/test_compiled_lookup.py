"""The compiled prompt lookup proposes what the plain one proposes, and continues trees as it does."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.config import PromptLookupConfig, TreeConfig
from eyas.drafters.base import Draft
from eyas.drafters.lookup.base import PRIOR_TRIALS, tokens_to
from eyas.drafters.lookup.prompt_lookup import NgramIndex, PromptLookupDrafter, prompt_lookup
from eyas.protocol.commit import KnownLogitBias, TreeBudget
from eyas.protocol.tree import DraftTree, DraftTrees
from tests.support.corpora import commit, grown

lookups = pytest.importorskip("eyas.drafters.lookup.compiled", reason="numba is not installed")

TOKENS = st.sampled_from([0, 1, 2, 9, 150_000])
CONFIGS = st.builds(
    lambda shortest, more, most: PromptLookupConfig(shortest + more, shortest, most),
    st.integers(1, 3), st.integers(0, 3), st.integers(1, 9),
)  # fmt: skip
BUDGETS = st.builds(TreeBudget, st.integers(1, 20), st.integers(0, 9))
BANS = st.lists(st.builds(KnownLogitBias, TOKENS, st.just(-math.inf), st.integers(1, 4)), max_size=2).map(tuple)
BITS = st.sampled_from([b"", b"\x05\x02" + bytes(18748) + b"\x01", bytes(18751)])
SESSIONS = st.tuples(st.lists(TOKENS, min_size=1, max_size=70), BUDGETS, BANS, BITS)
Session = tuple[list[int], TreeBudget, tuple[KnownLogitBias, ...], bytes]
STEPS = st.lists(st.tuples(st.integers(0, 9), TOKENS, st.sampled_from([-0.25, -0.5, -1.5])), max_size=20)
SHAPE = TreeConfig(12, 6)


def check_equal(ours: Sequence[Draft], theirs: Sequence[Draft]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert isinstance(one, DraftTree)
        assert isinstance(other, DraftTree)
        assert (one.tokens, one.parents, one.grown_ahead) == (other.tokens, other.parents, other.grown_ahead)
        assert one.log_probs == pytest.approx(other.log_probs, rel=1e-6)


@settings(max_examples=150)
@given(st.lists(SESSIONS, min_size=1, max_size=3), CONFIGS, st.lists(STEPS, min_size=3, max_size=3))
def test_the_compiled_drafter_proposes_the_same_trees(
    sessions: list[Session], config: PromptLookupConfig, steps: list[list[tuple[int, int, float]]]
) -> None:
    """Texts arrive in parts, so that hit rates, tables and rooms grow. Each session has its own budget and bans."""
    drafters = lookups.CompiledPromptLookup(SHAPE, config), PromptLookupDrafter(SHAPE, config)
    for start, end in ((0, 5), (5, 40), (40, 70)):
        contexts = [
            commit(f"{i}", text[:end], base=start, budget=budget)._replace(logit_biases=bans, allowed=allowed)
            for i, (text, budget, bans, allowed) in enumerate(sessions)
            if len(text) > start
        ]
        check_equal(*(drafter.propose(contexts) for drafter in drafters))
        trees = [grown(context.tokens[-1], own) for context, own in zip(contexts, steps, strict=False)]
        lazy = list(DraftTrees.of(trees)) if trees else []
        check_equal(*(drafter.continue_trees(contexts, own) for drafter, own in zip(drafters, (lazy, trees), strict=True)))
        paths = [tokens_to(tree, len(tree) - 1) for tree in trees]
        asked = [place for place, path in enumerate(paths) if path]
        behind = [contexts[place] for place in asked], [paths[place] for place in asked]
        check_equal(*(drafter.continue_paths(*behind) if asked else [] for drafter in drafters))
    for kernel in (lookups.extend_ngrams, lookups.move_entries, lookups.grow_tree):
        assert len(kernel.signatures) <= 1, "calls have the types that kernels are compiled for"


def test_a_long_text_keeps_all_of_its_matches() -> None:
    """Tables and texts move to larger ones several times."""
    tokens = [(7 * i * i + i // 3) % 50 * 3001 for i in range(3000)]
    index, plain = lookups.CompiledIndex(PromptLookupConfig()), NgramIndex(1, 6)
    for start in range(0, len(tokens), 97):
        part = commit("a", tokens[: start + 97], base=start)
        index.extend(part)
        plain.extend(part)
    size, count = index.size, len(plain.previous_places)
    assert size == len(tokens)
    assert index.ngrams.previous[:size].T.tolist() == [previous.tolist() for previous in plain.previous_places]
    assert (index.ngrams.trials - PRIOR_TRIALS).tolist() == plain.rates.trials.tolist()
    assert index.ngrams.hits.tolist() == plain.rates.hits.tolist()
    entries = index.ngrams.table[index.ngrams.table > 0]
    assert sorted(entries.tolist()) == sorted(
        place * count + number for number, latest in enumerate(plain.latest) for place in latest.values()
    )


def test_of_equal_leaves_the_first_eight_are_continued() -> None:
    text = [token for leaf in range(1, 12) for token in (leaf, 100 + leaf)] + [0]
    tree = DraftTree.of((0, *range(1, 12)), (0,) * 12, (0.0, *[-0.5] * 8, -0.25, -0.5, -0.5))
    for kind in (lookups.CompiledPromptLookup, PromptLookupDrafter):
        drafter, context = kind(TreeConfig(40, 2), PromptLookupConfig()), commit("a", text, budget=TreeBudget(40, 2))
        drafter.propose([context])
        (more,) = drafter.continue_trees([context], [tree])
        assert sorted(token for token in more.tokens if token > 100) == [101, 102, 103, 104, 105, 106, 107, 109]


def test_without_numba_the_plain_drafter_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(prompt_lookup(SHAPE, PromptLookupConfig()), lookups.CompiledPromptLookup)
    monkeypatch.setattr("eyas.kernels.choice.has_numba", lambda: False)
    assert isinstance(prompt_lookup(SHAPE, PromptLookupConfig()), PromptLookupDrafter)


def test_unknown_sessions_keep_their_trees() -> None:
    drafter = lookups.CompiledPromptLookup(SHAPE, PromptLookupConfig())
    text, tree = [1, 2, 3, 1, 2], grown(2, [(0, 3, -0.5)])
    drafter.propose([commit("known", text)])
    contexts = [commit("unknown", text), commit("known", text)]
    kept, more = drafter.continue_trees(contexts, [tree, tree])
    assert kept is tree
    assert more.tokens == (2, 3, 1, 2)
    assert drafter.continue_trees(contexts[:1], [tree]) == [tree]
