"""Prompt lookup proposes what followed the same tokens before, compared with the obvious search."""

from hypothesis import given
from hypothesis import strategies as st

from eyas.config import PromptLookupConfig, TreeConfig
from eyas.drafters.lookup.prompt_lookup import NgramIndex, PromptLookupDrafter
from eyas.protocol.commit import ResyncRequired, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.support.corpora import commit


def naive_occurrences(tokens: list[int], shortest: int, longest: int, most: int) -> list[tuple[int, int]]:
    """Places and lengths of matches: the longest first, of equal length the latest."""
    found = []
    for place in range(1, len(tokens)):
        length = 0
        while length < longest and length < place and tokens[place - length - 1] == tokens[-length - 1]:
            length += 1
        if length >= shortest:
            found.append((place, length))
    return sorted(found, key=lambda match: (-match[1], -match[0]))[:most]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 3), st.integers(0, 3), st.integers(1, 9))
def test_occurrences_equal_a_naive_search(tokens: list[int], shortest: int, more: int, most: int) -> None:
    index = NgramIndex(shortest, shortest + more)
    for cut in range(0, len(tokens), 7):
        index.extend(commit("a", tokens[cut : cut + 7]))
    assert list(index.occurrences(most).items()) == naive_occurrences(tokens, shortest, shortest + more, most)


def test_confidence_is_the_hit_rate_of_the_longest_match() -> None:
    steady, erratic = NgramIndex(1, 2), NgramIndex(1, 2)
    steady.extend(commit("a", [1, 2, 3] * 20))
    erratic.extend(commit("a", [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2, 6, 1, 2, 7, 1, 2, 8]))
    assert steady.rates.logs()[1] > -0.05
    assert erratic.rates.logs()[1] < steady.rates.logs()[1] - 0.2


def drafter(**config: int) -> PromptLookupDrafter:
    return PromptLookupDrafter(TreeConfig(num_steps=5), PromptLookupConfig(**config))


def propose(prompt_lookup: PromptLookupDrafter, tokens: list[int], budget: TreeBudget) -> DraftTree:
    (draft,) = prompt_lookup.propose([commit(f"{tokens}{budget}", tokens, budget=budget)])
    assert isinstance(draft, DraftTree)
    return draft


def test_matches_with_a_common_prefix_share_nodes_longest_first() -> None:
    tokens = [1, 2, 3, 4, 9, 7, 2, 3, 4, 5, 0, 0, 1, 2, 3]
    tree = propose(drafter(min_ngram=2), tokens, TreeBudget(24, 2))
    assert set(zip(tree.parents[1:], tree.tokens[1:], strict=True)) == {(0, 4), (1, 9), (1, 5)}
    narrow = propose(drafter(min_ngram=2), tokens, TreeBudget(3, 2))
    assert narrow.tokens == (3, 4, 9), "the match of three tokens beats the later one of two"


def test_scores_never_grow_along_a_path_within_the_node_limit() -> None:
    tokens = [1, 2, 1, 3, 1, 2, 2, 1, 1, 2, 3, 1, 2, 1, 2]
    for budget in (TreeBudget(24, 5), TreeBudget(4, 5), TreeBudget(24, 1)):
        tree = propose(drafter(), tokens, budget)
        tree.validate(tokens[-1], 4, budget.max_nodes, budget.max_depth)
        assert all(tree.log_probs[node] <= tree.log_probs[tree.parents[node]] for node in range(len(tree)))


def test_sessions_over_the_limit_are_evicted_or_stay_dormant() -> None:
    lookup = drafter(max_cached_tokens=100)
    lookup.propose([commit("old", [1, 2] * 20), commit("new", [1, 2] * 20)])
    lookup.propose([commit("huge", [1, 2] * 60)])
    assert isinstance(lookup.propose([commit("old", [1, 2] * 21, base=40)])[0], DraftTree), "no session was evicted for it"
    assert lookup.propose([commit("huge", [1, 2] * 61, base=120)]) == [DraftTree.root_only(2)]
    lookup.propose([commit("third", [1, 2] * 20)])
    assert lookup.propose([commit("new", [1, 2] * 21, base=40)]) == [ResyncRequired("new", 0, 0)]


def test_a_dormant_session_is_resumed_when_slots_are_free() -> None:
    lookup = drafter(max_cached_tokens=100)
    lookup.propose([commit("a", [1, 2] * 20), commit("b", [1, 2] * 20), commit("c", [1, 2] * 20)])
    assert lookup.propose([commit("c", [1, 2] * 21, base=40)]) == [DraftTree.root_only(2)]
    lookup.release(["a", "b"])
    assert lookup.propose([commit("c", [1, 2] * 22, base=42)]) == [ResyncRequired("c", 0, 0)]
    (draft,) = lookup.propose([commit("c", [1, 2] * 22)])
    assert isinstance(draft, DraftTree)
    assert draft.num_drafted > 0
