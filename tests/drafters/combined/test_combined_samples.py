"""A combined drafter passes samples to a side that needs them, for the side's own verified nodes."""

from collections.abc import Sequence
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from eyas.config import CombinedConfig, LookaheadConfig, PromptLookupConfig, TreeConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.drafters.combined import CombinedDrafter
from eyas.drafters.lookup.lookahead import LookaheadDrafter
from eyas.drafters.lookup.prompt_lookup import PromptLookupDrafter
from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftTree
from tests.support.corpora import commit, grown

SHAPE, BUDGET = TreeConfig(24, 6), TreeBudget(24, 6)
# What the target draws behind a token.
NEXT = {token: (7 * token + 3) % 40 for token in range(48)}


class Scripted(LocalDrafter):
    """Proposes given trees below any root; records samples and the nodes of the last tree that they belong to."""

    def __init__(self, trees: Sequence[DraftTree], needs_samples: bool) -> None:
        self.trees = list(trees)
        self.needs_samples = needs_samples
        self.nodes: list[Sequence[int]] = []
        self.samples: list[tuple[int, ...]] = []

    @property
    def needs(self) -> DrafterNeeds:
        return DrafterNeeds(samples=self.needs_samples)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self.samples += [context.samples for context in contexts]
        tree = self.trees.pop(0)
        return [DraftTree.of((c.tokens[-1], *tree.tokens[1:]), tree.parents, tree.log_probs) for c in contexts]

    def prune(self, session: str, nodes: Sequence[int]) -> None:
        self.nodes.append(nodes)

    def release(self, sessions: Sequence[str]) -> None:
        pass


STEPS = st.lists(st.tuples(st.integers(0, 20), st.integers(6, 8), st.sampled_from([0.0, -0.25, -1.5])), max_size=12)
TREES = STEPS.map(partial(grown, 0))


def path(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens[above] for above in tree.path(node))


@given(TREES, TREES, st.integers(1, 12))
def test_samples_belong_to_the_remaining_nodes(mine: DraftTree, other: DraftTree, nodes: int) -> None:
    sampled, plain = Scripted([mine, mine], True), Scripted([other, other], False)
    combined, budget = CombinedDrafter(plain, sampled, SHAPE, CombinedConfig()), TreeBudget(nodes, 3)
    (draft,) = combined.propose([commit("a", [1, 2, 0], budget=budget)])
    assert isinstance(draft, DraftTree)
    combined.propose([commit("a", [1, 2, 0, 5], 3, budget=budget, samples=tuple(range(100, 100 + len(draft))))])
    expected = {path(draft, node): 100 + node for node in range(len(draft))}
    own = {path(mine, node): node for node in range(len(mine))}
    if nodes > 1:
        kept = [node for line, node in own.items() if line in expected]
        assert list(sampled.nodes[0]) == sorted(kept)
        assert sampled.samples[1] == tuple(expected[path(mine, node)] for node in sorted(kept))
    assert plain.samples == [(), ()]


@given(TREES, TREES, st.integers(2, 12))
def test_sources_say_which_side_proposed_a_node(mine: DraftTree, other: DraftTree, nodes: int) -> None:
    for wants_sources in (True, False):
        sides = Scripted([mine], False), Scripted([other], False)
        context = commit("a", [1, 2, 0], budget=TreeBudget(nodes, 3))._replace(wants_sources=wants_sources)
        (draft,) = CombinedDrafter(*sides, SHAPE, CombinedConfig()).propose([context])
        assert isinstance(draft, DraftTree)
        first, second = ({path(tree, node) for node in range(1, len(tree))} for tree in (mine, other))
        lines = [path(draft, node) for node in range(1, len(draft))]
        expected = (0, *((line in first) + 2 * (line in second) for line in lines)) if wants_sources else ()
        assert draft.sources == expected


def rounds(drafter: LocalDrafter, num_verify_steps: int, budget: TreeBudget = BUDGET) -> list[DraftTree]:
    """A target that emits NEXT, whose text is the longest accepted path."""
    tokens, base, samples, trees = [30, 31, 32, 33], 0, (), list[DraftTree]()
    for _ in range(num_verify_steps):
        (tree,) = drafter.propose([commit("a", tokens, base, budget=budget, samples=samples)])
        assert isinstance(tree, DraftTree)
        tree.validate(tokens[-1], 48, budget.max_nodes, budget.max_depth)
        trees.append(tree)
        samples, base, node = tuple(NEXT[token] for token in tree.tokens), len(tokens), 0
        while (child := tree.child(node, samples[node])) is not None:
            tokens.append(samples[node])
            node = child
        tokens.append(samples[node])
    return trees


def lookahead() -> LookaheadDrafter:
    return LookaheadDrafter(SHAPE, LookaheadConfig(window_size=4, ngram_size=4))


def test_lookahead_beside_an_empty_part_equals_lookahead_alone() -> None:
    nothing = Scripted([DraftTree.root_only(0)] * 12, False)
    both = rounds(CombinedDrafter(nothing, lookahead(), SHAPE, CombinedConfig()), 12)
    alone = rounds(lookahead(), 12)
    assert [(tree.tokens, tree.parents) for tree in both] == [(tree.tokens, tree.parents) for tree in alone]
    assert max(len(tree) for tree in alone) > 12


def test_lookahead_continues_when_its_window_is_cut() -> None:
    """The other side takes nearly all of a small budget; the target's path is drafted nevertheless."""
    sure = grown(0, [(node, 40 + node, -0.01) for node in range(7)])
    combined = CombinedDrafter(Scripted([sure] * 30, False), lookahead(), SHAPE, CombinedConfig(min_share=0.5))
    trees = rounds(combined, 30, TreeBudget(12, 6))
    assert any(tree.child(0, NEXT[tree.tokens[0]]) is not None for tree in trees[10:])


def test_it_may_stand_beside_prompt_lookup() -> None:
    combined = CombinedDrafter(PromptLookupDrafter(SHAPE, PromptLookupConfig()), lookahead(), SHAPE, CombinedConfig())
    assert combined.needs == DrafterNeeds(samples=True)
    assert all(len(tree) > 1 for tree in rounds(combined, 10)[1:])
