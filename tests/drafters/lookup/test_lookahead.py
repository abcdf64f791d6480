"""Lookahead: the window is a tree whose ancestors are what Jacobi decoding attends to, and samples become guesses."""

import math
from collections.abc import Sequence

from eyas.config import LookaheadConfig, TreeConfig
from eyas.drafters.lookup.lookahead import LookaheadDrafter, NgramPool
from eyas.protocol.commit import KnownLogitBias, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.support.corpora import commit, paths_of

ROOMY = TreeConfig(64, 12)
BUDGET = TreeBudget(64, 12)


def drafter(window: int, ngram: int, tree: TreeConfig = ROOMY) -> LookaheadDrafter:
    return LookaheadDrafter(tree, LookaheadConfig(window_size=window, ngram_size=ngram))


def propose(lookahead: LookaheadDrafter, tokens: Sequence[int], base: int = 0, samples: tuple[int, ...] = ()) -> DraftTree:
    (draft,) = lookahead.propose([commit("a", tokens, base, budget=BUDGET, samples=samples)])
    assert isinstance(draft, DraftTree)
    return draft


def test_row_0_is_a_chain_and_each_column_hangs_from_its_cell() -> None:
    """Samples that encode where they were drawn: in the second step, row 1 is below the row that it was drawn above."""
    lookahead, tokens = drafter(window=3, ngram=4), [30, 31, 32, 33]
    first = propose(lookahead, tokens)
    assert paths_of(first).keys() == {(30,), (30, 31), (30, 31, 32)}
    second = propose(lookahead, [*tokens, 40], 4, samples=(40, 41, 42, 43))
    # the root moved by one: row 0 has lost its first column, row 1 holds what was drawn above the window
    assert {(31,), (31, 32)} <= paths_of(second).keys()
    assert {(31, 42), (31, 32, 43)} <= paths_of(second).keys()
    assert second.depth <= 3 + 2


def test_target_ngrams_become_guesses_after_their_first_token() -> None:
    lookahead, tokens = drafter(window=3, ngram=3), [30, 31, 32, 33]
    tree = propose(lookahead, tokens)
    assert tree.tokens == (33, 30, 31, 32)
    propose(lookahead, [*tokens, 9], 4, samples=(9, 50, 51, 52))
    # the paths 30 31 and 31 32 were continued with 51 and 52
    later = propose(lookahead, [*tokens, 9, 31], 5)
    assert (32, 52) in paths_of(later)
    assert later.child(0, 32) is not None


def test_guesses_and_window_share_a_small_budget() -> None:
    lookahead = drafter(window=4, ngram=3, tree=TreeConfig(9, 6))
    tokens = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2, 6, 1]
    tree = propose(lookahead, tokens)
    tree.validate(1, 48, 9, 6)
    guesses = {(2, 6), (2, 5), (2, 4)}
    assert guesses <= paths_of(tree).keys()
    assert len(tree) > 1 + len({prefix for path in guesses for prefix in (path[:1], path)}), "the window has nodes too"


def test_a_tree_that_was_never_verified_costs_the_window_only() -> None:
    lookahead, tokens = drafter(window=3, ngram=3), [30, 31, 32, 33]
    propose(lookahead, tokens)
    propose(lookahead, [*tokens, 9], 4, samples=(9, 50, 51, 52))
    renewed = propose(lookahead, [*tokens, 9, 10, 31], 5)
    assert {(32,), (32, 52)} <= paths_of(renewed).keys()
    assert not {token for path in paths_of(renewed) for token in path} & {50, 51}


def test_the_pool_keeps_the_latest_ngrams_of_each_first_token() -> None:
    pool = NgramPool(2)
    for ngram in ((1, 2), (1, 3), (1, 2), (1, 4), (5, 6)):
        pool.add(ngram)
    assert pool.after(1) == [(4,), (2,)]
    assert pool.after(7) == []
    assert pool.size == 6


def test_neither_guesses_nor_window_have_banned_tokens() -> None:
    tokens = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2, 6, 1]
    (free,) = drafter(window=4, ngram=3).propose([commit("a", tokens, budget=BUDGET)])
    bans = (KnownLogitBias(2, -math.inf, 1), KnownLogitBias(6, -math.inf, 2**31 - 1), KnownLogitBias(5, -3.0, 9))
    (bound,) = drafter(window=4, ngram=3).propose([commit("a", tokens, budget=BUDGET)._replace(logit_biases=bans)])
    assert isinstance(free, DraftTree)
    assert isinstance(bound, DraftTree)
    assert {(2, 6), (2, 5)} <= paths_of(free).keys()
    assert not [path for path in paths_of(bound) if path[0] == 2 or 6 in path]
    assert bound.depth >= 4, "the window is filled with other tokens"
    assert 2 in bound.tokens, "which is banned at the first level only"


def test_a_first_token_is_one_that_the_grammar_allows() -> None:
    tokens = [1, 2, 3, 1, 2, 4, 1, 3, 1]
    context = commit("a", tokens, budget=BUDGET)._replace(allowed=bytes([1 << 3 | 1 << 4]))
    (tree,) = drafter(window=3, ngram=3).propose([context])
    assert isinstance(tree, DraftTree)
    assert {path[0] for path in paths_of(tree)} <= {3, 4}
    assert tree.depth > 1
