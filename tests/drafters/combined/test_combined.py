"""A combined drafter proposes the best of both sides, and resyncs a side that dropped a session without the other."""

import json
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eyas.api.request import SamplingParams
from eyas.config import CombinedConfig, DraftingConfig, PromptLookupConfig, TreeConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, DraftWork, LocalDrafter
from eyas.drafters.combined import CombinedDrafter, merge_trees
from eyas.drafters.draft_head import DraftHead
from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.lookup.prompt_lookup import PromptLookupDrafter
from eyas.drafters.registry import DEFAULT_NUM_STEPS
from eyas.errors import ConfigError
from eyas.kernels.plain import trees as plain_trees
from eyas.llm import LLM
from eyas.protocol.commit import ResyncRequired, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.drafters.combined.naive_combined import naive_merge
from tests.drafters.test_contract import commit as fed_commit
from tests.support.corpora import commit, grown
from tests.support.reference import forward
from tests.support.tiny import DEMO, fixed_config

ROOMY = TreeBudget(24, 5)


def tree(*nodes: tuple[int, int, float]) -> DraftTree:
    """A tree below token 7 of (parent, token, score)."""
    parents, tokens, scores = zip(*nodes, strict=True)
    return DraftTree.of((7, *tokens), (0, *parents), (0.0, *scores))


LEFT = tree((0, 1, -0.1), (1, 2, -0.2), (2, 3, -0.9), (0, 4, -2.0))
RIGHT = tree((0, 1, -0.5), (1, 5, -0.6), (0, 6, -0.7), (1, 2, -0.8))


def merged(trees: list[DraftTree], budget: TreeBudget, floor: float) -> DraftTree:
    """A draft of one session."""
    (tree,) = merge_trees([7], [trees], [budget], floor)
    return tree


STEPS = st.lists(st.tuples(st.integers(0, 20), st.integers(6, 8), st.sampled_from([0.0, -0.25, -0.5, -1.5])), max_size=12)
TREES = STEPS.map(partial(grown, 7))
SESSION = st.tuples(st.lists(TREES, max_size=2), st.builds(TreeBudget, st.integers(1, 16), st.integers(0, 5)))


TIED = [grown(7, [(0, 6, 0.0), (0, 8, 0.0)]), grown(7, [(0, 7, 0.0), (0, 6, 0.0)])]


@given(st.lists(SESSION, min_size=1, max_size=4), st.sampled_from([0.0, 0.2, 0.5]))
@example([(TIED, TreeBudget(3, 1))], 0.5)
def test_arrays_merge_as_nodes_one_by_one_do(sessions: list[tuple[list[DraftTree], TreeBudget]], floor: float) -> None:
    trees, budgets = [trees for trees, _ in sessions], [budget for _, budget in sessions]
    expected = [naive_merge(7, own, budget, floor) for own, budget in sessions]
    assert list(merge_trees([7] * len(sessions), trees, budgets, floor)) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eyas.drafters.combined.tree_kernels", lambda: plain_trees)
        assert list(merge_trees([7] * len(sessions), trees, budgets, floor)) == expected


def test_a_merged_tree_keeps_the_best_nodes_without_duplicates() -> None:
    both = merged([LEFT, RIGHT], ROOMY, 0.0)
    both.validate(7, 48, 24, 5)
    assert sorted(zip(both.tokens[1:], both.log_probs[1:], strict=True)) == [
        (1, -0.1), (2, -0.2), (3, -0.9), (4, -2.0), (5, -0.6), (6, -0.7)
    ]  # fmt: skip
    assert set(merged([LEFT, RIGHT], TreeBudget(4, 5), 0.0).tokens) == {7, 1, 2, 5}
    assert set(merged([LEFT, RIGHT], TreeBudget(24, 1), 0.0).tokens) == {7, 1, 6, 4}
    assert merged([LEFT, RIGHT], TreeBudget(1, 5), 0.0) == DraftTree.root_only(7)


def test_neither_side_starves() -> None:
    sure = tree(*((node, node + 10, -0.01 * (node + 1)) for node in range(4)))
    unsure = tree((0, 1, -5.0), (1, 2, -6.0))
    assert 1 not in merged([sure, unsure], TreeBudget(5, 5), 0.0).tokens
    assert 1 in merged([sure, unsure], TreeBudget(5, 5), 0.25).tokens


def test_ties_and_growing_scores_orphan_no_node() -> None:
    odd = tree((0, 1, -3.0), (1, 2, -1.0), (2, 3, -0.5), (0, 4, -2.0))
    for nodes in range(1, 8):
        for floor in (0.0, 0.3, 0.5):
            merged([odd, LEFT], TreeBudget(nodes, 5), floor).validate(7, 48, nodes, 5)


class Forgetful(LocalDrafter):
    """Wraps another drafter, records the spans of its commits, and drops sessions on demand."""

    def __init__(self, drafter: LocalDrafter) -> None:
        self.drafter = drafter
        self.received: list[tuple[int, int]] = []

    @property
    def needs(self) -> DrafterNeeds:
        return self.drafter.needs

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self.received += [(context.start_position, context.committed_length) for context in contexts]
        return self.drafter.propose(contexts)

    def release(self, sessions: Sequence[str]) -> None:
        self.drafter.release(sessions)


def test_only_a_part_that_lost_its_state_gets_a_full_resend() -> None:
    sides = [Forgetful(PromptLookupDrafter(TreeConfig(num_steps=5), PromptLookupConfig())) for _ in range(2)]
    combined, tokens = CombinedDrafter(*sides, TreeConfig(num_steps=5), CombinedConfig()), [1, 2, 3] * 4
    combined.propose([commit("a", tokens[:5])])
    sides[1].release(["a"])
    assert combined.propose([commit("a", tokens[:7], base=5)]) == [ResyncRequired("a", 0, 0)]
    assert combined.propose([commit("a", tokens[:7], base=5)]) == [ResyncRequired("a", 0, 0)]
    (healed,) = combined.propose([commit("a", tokens[:9])])
    assert isinstance(healed, DraftTree)
    assert healed.num_drafted > 0
    assert sides[0].received == [(0, 5), (5, 7), (7, 9)]
    assert sides[1].received == [(0, 5), (5, 7), (0, 9)]


class Network(Forgetful):
    """A side that runs a network."""

    work = DraftWork(1, 1)


def test_lookups_draft_alone_and_the_network_catches_up() -> None:
    sides = [kind(PromptLookupDrafter(TreeConfig(num_steps=5), PromptLookupConfig())) for kind in (Network, Forgetful)]
    combined = CombinedDrafter(*sides, TreeConfig(num_steps=5), CombinedConfig())
    tokens = [1, 2, 3] * 4
    assert combined.has_lookups
    combined.propose([commit("a", tokens[:5])])
    (alone,) = combined.propose([commit("a", tokens[:7], base=5)._replace(lookups_alone=True)])
    assert isinstance(alone, DraftTree)
    assert alone.num_drafted > 0
    (both,) = combined.propose([commit("a", tokens[:9], base=5)])
    assert isinstance(both, DraftTree)
    assert [side.received for side in sides] == [[(0, 5), (5, 9)], [(0, 5), (5, 7), (7, 9)]]
    (first,) = combined.propose([commit("b", tokens[:4])._replace(lookups_alone=True)])
    assert isinstance(first, DraftTree)
    assert sides[0].received[2:] == []


def test_a_resend_keeps_the_tree_of_a_part_that_has_answered() -> None:
    sides = [Forgetful(PromptLookupDrafter(TreeConfig(num_steps=5), PromptLookupConfig())) for _ in range(2)]
    combined, tokens = CombinedDrafter(*sides, TreeConfig(num_steps=5), CombinedConfig()), [1, 2, 3] * 4
    combined.propose([commit("a", tokens[:5])])
    sides[1].release(["a"])
    combined.propose([commit("a", tokens[:7], base=5)])
    (healed,) = combined.propose([commit("a", tokens[:7])])
    (alone,) = sides[0].drafter.propose([commit("b", tokens[:7])])
    assert isinstance(healed, DraftTree)
    assert isinstance(alone, DraftTree)
    assert (healed.tokens, healed.parents) == (alone.tokens, alone.parents)
    assert sides[0].received == [(0, 5), (5, 7)]


def test_a_resend_to_one_part_may_come_in_chunks() -> None:
    sides = [Forgetful(PromptLookupDrafter(TreeConfig(num_steps=5), PromptLookupConfig())) for _ in range(2)]
    combined, tokens = CombinedDrafter(*sides, TreeConfig(num_steps=5), CombinedConfig()), [1, 2, 3] * 4
    combined.propose([commit("a", tokens[:8])])
    sides[1].release(["a"])
    assert combined.propose([commit("a", tokens[:9], base=8)]) == [ResyncRequired("a", 0, 0)]
    for base, end in ((0, 4), (4, 6), (6, 10)):
        (draft,) = combined.propose([commit("a", tokens[:end], base=base)])
        assert isinstance(draft, DraftTree)
        draft.validate(tokens[end - 1], 48, 24, 5)
    assert draft.num_drafted > 0
    assert sides[0].received == [(0, 8), (8, 9), (9, 10)]
    assert sides[1].received == [(0, 8), (8, 9), (0, 4), (4, 6), (6, 10)]


def test_each_part_gets_features_from_its_own_position(tiny_target: str, tiny_head: str) -> None:
    """After a resync the EAGLE side of a combined drafter proposes what EAGLE alone proposes."""
    eagle, lookup = (
        DraftHead(tiny_head, name).build_drafter(
            tiny_target, "float32", "cpu", TreeConfig(16, 3, 3), DraftingConfig(max_kv_tokens=512)
        )
        for name in ("eagle3", "prompt_lookup")
    )
    combined = CombinedDrafter(eagle, lookup, TreeConfig(16, 3), CombinedConfig(min_share=0.5))
    combined.propose([fed_commit("a", 8)])
    lookup.release(["a"])
    assert combined.propose([fed_commit("a", 12, base=8)]) == [ResyncRequired("a", 0, 0)]
    (healed,) = combined.propose([fed_commit("a", 15)])
    (alone,) = eagle.propose([fed_commit("b", 15)._replace(budget=TreeBudget(5, 3))])
    assert isinstance(healed, DraftTree)
    assert isinstance(alone, DraftTree)
    assert set(alone.tokens) <= set(healed.tokens)


def test_lookups_are_as_deep_as_trees_have_nodes(tiny_target: str, tiny_head: str) -> None:
    """A head keeps its own levels beside them: each of its levels costs a pass."""
    for name in ("prompt_lookup", "suffix", "rest", "lookahead", "eagle3+prompt_lookup"):
        assert DraftHead(tiny_head if "eagle3" in name else "", name).resolve_tree(TreeConfig(16)).num_steps == 15
    assert DraftHead(tiny_head, "eagle3+prompt_lookup").resolve_tree(TreeConfig(16, 4)).num_steps == 4
    assert DraftHead("", "prompt_lookup").resolve_tree(TreeConfig(1)).num_steps == 1

    def sides(tree: TreeConfig) -> tuple[int, DraftTree]:
        union = DraftHead(tiny_head, "eagle3+prompt_lookup").build_drafter(
            tiny_target, "float32", "cpu", tree, DraftingConfig(max_kv_tokens=512)
        )
        assert isinstance(union, CombinedDrafter)
        head, lookup = union.sides
        assert isinstance(head, EagleDrafter)
        (tree_found,) = lookup.propose([commit("a", [*range(20)] * 2, budget=TreeBudget(16, 15))])
        assert isinstance(tree_found, DraftTree)
        return head.tree.num_steps, tree_found

    levels, chain = sides(TreeConfig(16))
    assert (levels, chain.depth) == (DEFAULT_NUM_STEPS, 15)
    levels, chain = sides(TreeConfig(16, 7))
    assert (levels, chain.depth) == (7, 7)


def test_combined_method_names_parse_or_give_a_reason(tiny_target: str, tiny_head: str) -> None:
    def build(name: str, head: str = tiny_head) -> LocalDrafter:
        return DraftHead(head, name).build_drafter(
            tiny_target, "float32", "cpu", TreeConfig(16, 3, 3), DraftingConfig(max_kv_tokens=64)
        )

    assert build("prompt_lookup+eagle3").needs == DrafterNeeds(features=True, feature_size=32)
    assert (
        DraftHead(tiny_head, "prompt_lookup+eagle3").features_fingerprint()
        == DraftHead(tiny_head, "eagle3").features_fingerprint()
    )
    assert DraftHead(tiny_head, "prompt_lookup+eagle3").build_fuser(tiny_target, "float32", "cpu") is not None
    for name, reason in {
        "eagle3+nothing": "unknown drafter 'nothing'; known: eagle1, ",
        "eagle3+eagle3": "two different methods",
        "eagle3+prompt_lookup+rest": "two different methods",
        "eagle3+sps": "combine either with one that needs none: prompt_lookup, suffix, rest, lookahead",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            build(name)
    with pytest.raises(ConfigError, match="needs a draft head"):
        build("eagle3+prompt_lookup", head="")


@pytest.mark.slow
def test_on_repetitive_text_combined_is_as_good_as_each_part() -> None:
    prompts = [json.loads(line)["token_ids"] for line in (DEMO / "prompts.jsonl").read_text().splitlines()[:2]]
    sampling = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    taus, outputs = {}, {}
    for name in ("eagle3", "prompt_lookup", "eagle3+prompt_lookup"):
        head = str(DEMO / "eagle3") if "eagle3" in name else None
        llm = LLM(str(DEMO / "target"), head, name, engine=fixed_config(max_kv_tokens=1024), validate_head="never")
        results = [request.outputs[0] for request in llm.generate(prompts, sampling)]
        taus[name] = sum(r.stats.num_emitted for r in results) / sum(r.stats.num_verify_steps for r in results)
        outputs[name] = [result.token_ids for result in results]
    for prompt, output in zip(prompts, outputs["eagle3"], strict=True):
        logits = forward(str(DEMO / "target"), [*prompt, *output])
        assert output == logits[len(prompt) - 1 : -1].argmax(-1).tolist(), "each token is the target's choice"
    assert outputs == dict.fromkeys(outputs, outputs["eagle3"])
    assert taus["eagle3+prompt_lookup"] >= max(taus.values())
