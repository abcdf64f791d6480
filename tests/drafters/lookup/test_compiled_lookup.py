"""The compiled prompt lookup proposes what the plain one proposes."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.config import PromptLookupConfig, TreeConfig
from eyas.drafters.base import Draft
from eyas.drafters.lookup.base import PRIOR_TRIALS
from eyas.drafters.lookup.prompt_lookup import NgramIndex, PromptLookupDrafter, prompt_lookup
from eyas.protocol.commit import KnownLogitBias, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.support.corpora import commit

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
SHAPE = TreeConfig(12, 6)


def check_equal(ours: Sequence[Draft], theirs: Sequence[Draft]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert isinstance(one, DraftTree)
        assert isinstance(other, DraftTree)
        assert (one.tokens, one.parents, one.grown_ahead) == (other.tokens, other.parents, other.grown_ahead)
        assert one.log_probs == pytest.approx(other.log_probs, rel=1e-6)


@settings(max_examples=150)
@given(st.lists(SESSIONS, min_size=1, max_size=3), CONFIGS)
def test_the_compiled_drafter_proposes_the_same_trees(sessions: list[Session], config: PromptLookupConfig) -> None:
    """Texts arrive in parts, so that hit rates, tables and rooms grow. Each session has its own budget and bans."""
    drafters = lookups.CompiledPromptLookup(SHAPE, config), PromptLookupDrafter(SHAPE, config)
    for start, end in ((0, 5), (5, 40), (40, 70)):
        contexts = [
            commit(f"{i}", text[:end], base=start, budget=budget)._replace(logit_biases=bans, allowed=allowed)
            for i, (text, budget, bans, allowed) in enumerate(sessions)
            if len(text) > start
        ]
        check_equal(*(drafter.propose(contexts) for drafter in drafters))
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


def test_without_numba_the_plain_drafter_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(prompt_lookup(SHAPE, PromptLookupConfig()), lookups.CompiledPromptLookup)
    monkeypatch.setattr("eyas.kernels.choice.has_numba", lambda: False)
    assert isinstance(prompt_lookup(SHAPE, PromptLookupConfig()), PromptLookupDrafter)
