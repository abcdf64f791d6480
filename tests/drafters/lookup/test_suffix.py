"""Suffix decoding: drafts from the session and from its tenant's earlier outputs, and from no other tenant's."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.api.request import Request, SamplingParams
from eyas.config import SuffixConfig, TreeConfig
from eyas.drafters.base import DraftContext
from eyas.drafters.lookup.suffix import EMPTY_INDEX_TOKENS, SEPARATOR, SuffixDrafter, TenantOutputs, TextIndex
from eyas.errors import ConfigError
from eyas.protocol.commit import Commit, NoiseKey, ResyncRequired, TreeBudget
from eyas.protocol.tree import DraftTree

OUTPUT = (5, 6, 7, 8, 9, 10, 11)


def make(**config: int) -> SuffixDrafter:
    return SuffixDrafter(TreeConfig(12, 5), SuffixConfig(**config))


def commit(session: str, tokens: Sequence[int], start: int = 0, tenant: str = "a", wants_tree: bool = True) -> DraftContext:
    budget = TreeBudget(12, 5) if wants_tree else TreeBudget(1, 0)
    return Commit(session, 0, start, tuple(tokens), None, NoiseKey(0), budget, tenant_key=tenant)


def tree_of(drafter: SuffixDrafter, context: DraftContext) -> DraftTree:
    (draft,) = drafter.propose([context])
    assert isinstance(draft, DraftTree)
    draft.validate(context.tokens[-1], 100, 12, 5)
    return draft


def serve(
    drafter: SuffixDrafter, session: str, output: Sequence[int], tenant: str = "a", prompt: Sequence[int] = (40,)
) -> None:
    """A session with a prompt and an output, from its beginning to its end."""
    drafter.propose([commit(session, [*prompt, output[0]], tenant=tenant)])
    drafter.propose([commit(session, output[1:], len(prompt) + 1, tenant)])
    drafter.release([session])


def test_an_output_is_drafted_to_the_next_session_of_its_tenant() -> None:
    drafter = make()
    serve(drafter, "first", OUTPUT)
    assert tree_of(drafter, commit("second", [50, 51, 6, 7])).tokens == (7, 8, 9, 10, 11)
    assert tree_of(drafter, commit("third", [50, 51, 6, 8])).num_drafted == 0, "no two tokens match"


def test_an_output_is_kept_if_its_session_is_evicted() -> None:
    drafter = make(max_cached_tokens=20)
    drafter.propose([commit("evicted", [40, OUTPUT[0]])])
    drafter.propose([commit("evicted", OUTPUT[1:], 2)])
    drafter.propose([commit("large", range(60, 75))])
    assert drafter.propose([commit("evicted", [12], 8)]) == [ResyncRequired("evicted", 0, 0)]
    assert tree_of(drafter, commit("second", [50, 6, 7])).tokens == (7, 8, 9, 10, 11)


def test_an_output_is_kept_once_if_its_session_begins_again() -> None:
    drafter = make()
    drafter.propose([commit("again", [40, *OUTPUT[:1]])])
    drafter.propose([commit("again", OUTPUT[1:4], 2)])
    restarted = commit("again", [40, *OUTPUT[:4]])._replace(epoch=1)
    drafter.propose([restarted])
    drafter.propose([commit("again", OUTPUT[4:], 5)._replace(epoch=1)])
    drafter.release(["again"])
    (index,) = drafter.outputs.of("a")
    assert index.tokens.tolist() == [5, 6, 7, 8, SEPARATOR, 8, 9, 10, 11, SEPARATOR]


def test_no_output_is_drafted_to_another_tenant() -> None:
    drafter, fresh = make(), make()
    for number in range(5):
        serve(drafter, f"served {number}", OUTPUT, tenant="a")
    for tenant in ("b", ""):
        context = commit(f"of {tenant}", [6, 7, 50, 6, 7], tenant=tenant)
        assert tree_of(drafter, context) == tree_of(fresh, context)


def test_tenants_and_salts_have_different_keys() -> None:
    def key(tenant: str, salt: str) -> str:
        return Request("r", (1,), SamplingParams(), tenant=tenant, cache_salt=salt).tenant_key

    assert key("a", "b") == key("a", "b")
    assert len({key("a", ""), key("", "a"), key("a", "b"), key("b", "a"), key("", "")}) == 5


def test_prompts_and_running_sessions_are_not_drafted_to_others() -> None:
    drafter = make()
    drafter.propose([commit("running", [40, *OUTPUT])])
    serve(drafter, "ended", (30, 31), prompt=OUTPUT)
    assert tree_of(drafter, commit("other", [6, 7])).num_drafted == 0


def test_a_session_repeats_itself() -> None:
    assert tree_of(make(), commit("s", [5, 6, 7, 8, 5, 6])).tokens == (6, 7, 8, 5, 6)


def test_longer_matches_and_frequent_tokens_come_first() -> None:
    drafter = make()
    for number, output in enumerate([(1, 2, 3, 20), (9, 2, 3, 21), (9, 2, 3, 21), (8, 2, 3, 22)]):
        serve(drafter, f"s{number}", output)
    trees = [tree_of(drafter, commit(f"t{first}", [first, 2, 3])) for first in (1, 8, 7)]
    best = [max(zip(tree.log_probs[1:], tree.tokens[1:], strict=True))[1] for tree in trees]
    assert best == [20, 22, 21]


def test_texts_do_not_run_into_each_other() -> None:
    index = TextIndex(2)
    for text in ((1, 2, 3), (1, 2, 4)):
        index.extend(text)
        index.end_text()
    assert sorted(tuple(index.continuation(place, 9)) for place in index.places([1, 2])) == [(3,), (4,)]
    assert not list(index.places([3, 1]))


@given(st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=5), st.lists(st.integers(0, 2), min_size=2, max_size=6))
def test_all_places_of_an_ending_are_found(texts: list[list[int]], ending: list[int]) -> None:
    index, expected, start = TextIndex(2), [], 0
    for text in texts:
        index.extend(text)
        index.end_text()
        expected += [start + end for end in range(2, len(text) + 1) if text[end - 2 : end] == ending[-2:]]
        start += len(text) + 1
    places = list(index.places(ending))
    assert places == expected[::-1]
    for place in places:
        length = index.match_length(place, ending, 9)
        assert index.tokens[place - length : place].tolist() == ending[len(ending) - length :]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 300)), max_size=30), st.integers(200, 600))
def test_kept_outputs_are_bounded(outputs: list[tuple[str, int]], most: int) -> None:
    kept = TenantOutputs(2, most)
    for tenant, length in outputs:
        kept.add(tenant, range(length))
        held = [EMPTY_INDEX_TOKENS + len(index.tokens) for name in "abc" for index in kept.of(name)]
        assert kept.num_tokens == sum(held) <= most
        assert length <= 2 or kept.of(tenant), "the latest output is kept, if a match may have a token behind it"


def test_sessions_beyond_the_limit_are_evicted() -> None:
    drafter = make(max_cached_tokens=20)
    for number in range(4):
        drafter.propose([commit(f"s{number}", range(9))])
    assert drafter.propose([commit("s0", [3], 9)]) == [ResyncRequired("s0", 0, 0)]
    with pytest.raises(ConfigError, match="max_ngram is 1"):
        SuffixConfig(max_ngram=1)
