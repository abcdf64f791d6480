"""A combined drafter prepares trees by lookups below the leaves of its last tree, and goes on from those that were used."""

from collections.abc import Sequence

from eyas.config import CombinedConfig, PromptLookupConfig, SuffixConfig, TreeConfig
from eyas.drafters.base import Draft, DraftContext
from eyas.drafters.combined import CombinedDrafter, joined_arrays
from eyas.drafters.lookup.prompt_lookup import PromptLookupDrafter
from eyas.drafters.lookup.suffix import SuffixDrafter
from eyas.protocol.commit import ResyncRequired, TreeBudget
from eyas.protocol.tree import DraftTree, PreparedTree
from tests.support.corpora import commit

TREE = TreeConfig(num_draft_tokens=8, num_steps=7, top_k=1)
BUDGET = TreeBudget(8, 7)
TEXT = tuple(10 + i % 23 for i in range(400))  # goes on as it began


def combined(prepares: bool = True) -> CombinedDrafter:
    sides = PromptLookupDrafter(TREE, PromptLookupConfig()), SuffixDrafter(TREE, SuffixConfig())
    return CombinedDrafter(*sides, TREE, CombinedConfig(), prepares)


def prepared(drafter: CombinedDrafter) -> list[PreparedTree]:
    while drafter.draft_ahead():
        pass
    return drafter.take_prepared()


def test_what_follows_a_tree_is_prepared_and_used_on_and_on() -> None:
    drafter = combined()
    (tree,) = drafter.propose([commit("a", TEXT[:200], budget=BUDGET)])
    assert isinstance(tree, DraftTree)
    assert tree.tokens == TEXT[199:207]
    length = 200
    for _ in range(5):  # all of a tree and the token behind it are accepted
        (found,) = prepared(drafter)
        assert (found.session, found.epoch, found.committed_length) == ("a", 0, length)
        following = commit("a", TEXT[: length + 8], length, budget=BUDGET)
        below = found.tree.below(following.tokens, BUDGET.max_nodes, BUDGET.max_depth)
        assert below is not None
        assert below.tokens == TEXT[length + 7 : length + 7 + len(below)]
        assert len(below) > 4
        assert isinstance(drafter.propose([following._replace(has_tree=True)])[0], DraftTree)
        length += 8
        # only what was verified is accepted
        length_of_tree = below.num_drafted
        following = commit("a", TEXT[: length + length_of_tree + 1], length, budget=BUDGET)
        assert prepared(drafter)
        (tree,) = drafter.propose([following])
        length = following.committed_length
        assert isinstance(tree, DraftTree)
        assert tree.tokens == TEXT[length - 1 : length + 7]


def test_a_session_that_used_a_prepared_tree_drafts_as_any_other() -> None:
    drafter, other = combined(), combined(prepares=False)
    for each in (drafter, other):
        each.propose([commit("a", TEXT[:200], budget=BUDGET)])
    assert prepared(drafter)
    assert prepared(other) == []
    drafter.propose([commit("a", TEXT[:208], 200, budget=BUDGET)._replace(has_tree=True)])
    other.propose([commit("a", TEXT[:208], 200, budget=BUDGET)])
    following = commit("a", (*TEXT[:208], 5, *TEXT[:3]), 208, budget=BUDGET)
    assert drafter.propose([following]) == other.propose([following])


def test_nothing_is_prepared_for_sessions_that_ended_or_went_on() -> None:
    drafter = combined()
    drafter.propose([commit("a", TEXT[:200], budget=BUDGET), commit("b", TEXT[:200], budget=BUDGET)])
    drafter.release(["a"])
    drafter.propose([commit("b", TEXT[:201], 200, budget=TreeBudget(1, 0))])
    assert prepared(drafter) == []
    (found,) = drafter.propose([commit("a", TEXT[:208], 200, budget=BUDGET)._replace(has_tree=True)])
    assert isinstance(found, ResyncRequired)
    assert found.committed_length == 0


class Preparing(SuffixDrafter):
    """A side that also drafts ahead: each step sends a longer chain for each session, of tokens that no lookup finds."""

    def __init__(self) -> None:
        super().__init__(TREE, SuffixConfig())
        self._last: dict[str, DraftContext] = {}
        self._num_steps = 0

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self._last |= {context.session: context for context in contexts}
        self._num_steps = 0
        return super().propose(contexts)

    def draft_ahead(self) -> bool:
        self._num_steps += 1
        return self._num_steps < 4

    def take_prepared(self) -> list[PreparedTree]:
        chains = {name: (context.tokens[-1], *range(40, 41 + self._num_steps)) for name, context in self._last.items()}
        return [
            PreparedTree(name, 0, self._last[name].committed_length, DraftTree.chain(chain))
            for name, chain in chains.items()
        ]


def test_what_a_side_sends_later_keeps_what_was_looked_up() -> None:
    """A later tree replaces an earlier one of its session: each holds the best of both sides."""
    drafter = CombinedDrafter(PromptLookupDrafter(TREE, PromptLookupConfig()), Preparing(), TREE, CombinedConfig(), True)
    drafter.propose([commit(name, TEXT[:200], budget=BUDGET) for name in "ab"])
    sent, following = dict[str, PreparedTree](), TEXT[200:208]
    for number in range(4):
        drafter.draft_ahead()
        sent |= {prepared.session: prepared for prepared in drafter.take_prepared()}
        assert len(sent) == 2
        for prepared in list(sent.values())[: number + 1]:  # each step looks up what follows one session's tree
            looked_up = prepared.tree.below(following, BUDGET.max_nodes, BUDGET.max_depth)
            grown = prepared.tree.below((40,), BUDGET.max_nodes, BUDGET.max_depth)
            assert looked_up is not None
            assert grown is not None
            assert looked_up.num_drafted > 4
            assert grown.num_drafted == number + 1


def test_prepared_trees_hold_no_path_twice_and_are_bounded() -> None:
    """Both sides find the same here. A verifier takes a larger tree as a failure of its drafter."""
    drafter = combined()
    drafter.propose([commit("a", TEXT[:200], budget=BUDGET)])
    (found,) = prepared(drafter)
    pairs = list(zip(found.tree.parents[1:], found.tree.tokens[1:], strict=True))
    assert len(set(pairs)) == len(pairs) > 10
    long = DraftTree.chain(range(PreparedTree.MAX_NODES + 9))
    assert len(joined_arrays([long])) == PreparedTree.MAX_NODES
