"""Chains that the EAGLE-3 drafter draws equal those of the obvious implementation."""

import pytest
import torch

from eyas.api.request import SamplingParams
from eyas.protocol.commit import NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.drafters.trees.test_eagle_trees import commit, make, naive, session
from tests.support import reference
from tests.support.naive_eagle import NaiveEagle, rms

PROPOSAL_TOP_K = 7
NOISES = [NoiseKey(9, 0.8), NoiseKey(2**64 - 1, 1.2, top_k=5, top_p=0.9), NoiseKey(3, 1.0, top_k=1)]


def naive_chain(
    eagle: NaiveEagle, tokens: list[int], features: torch.Tensor, noise: NoiseKey, length: int
) -> list[tuple[int, dict[int, float]]]:
    """Each drawn token and the probabilities that it was drawn from, cut to the likeliest tokens."""
    pairs, chain = list(zip(features, tokens[1:], strict=True)), []
    params = SamplingParams(temperature=noise.temperature, top_k=noise.top_k, top_p=noise.top_p)
    for level in range(length):
        state = eagle.state(pairs)
        probs = reference.target_probs(rms(state, eagle.w["norm.weight"]) @ eagle.w["lm_head.weight"].T, params)
        likeliest = sorted(range(len(probs)), key=lambda i: -probs[i])[:PROPOSAL_TOP_K]
        kept = {eagle.ids[i]: probs[i] for i in likeliest if probs[i] > 0}
        token = min(kept, key=lambda t: reference.noise(noise.seed, len(tokens) + level, t) / kept[t])
        chain.append((token, kept))
        pairs.append((state, token))
    return chain


@pytest.mark.parametrize("noise", NOISES, ids=["whole", "filtered", "certain"])
def test_chains_of_a_batch_equal_the_naive_ones(noise: NoiseKey, tiny_target: str, tiny_head: str) -> None:
    drafter, plain = make(tiny_target, tiny_head, proposal_top_k=PROPOSAL_TOP_K), naive(tiny_target, tiny_head)
    sessions = [session(i, 4 + 5 * i) for i in range(4)]
    contexts = [
        commit(f"{i}", t, f, 0, len(t), noise, TreeBudget(14, 4))._replace(proposal="sampled")
        for i, (t, f) in enumerate(sessions)
    ]
    for (tokens, features), tree in zip(sessions, drafter.propose(contexts), strict=True):
        assert isinstance(tree, DraftTree)
        tree.validate(tokens[-1], 48, 14, 4)
        assert tree.sampled is not None
        expected = naive_chain(plain, tokens, features, noise, 4)
        assert tree.tokens[1:] == tuple(token for token, _ in expected)
        for node, (_, probs) in enumerate(expected):
            stated = dict(zip(tree.sampled.draft_probs[node].ids, tree.sampled.draft_probs[node].probs, strict=True))
            assert stated == pytest.approx(probs, rel=1e-4)


def test_chains_stay_within_each_sessions_budget(tiny_target: str, tiny_head: str) -> None:
    drafter, (tokens, features) = make(tiny_target, tiny_head), session(4, 8)
    budgets = [TreeBudget(14, 4), TreeBudget(5, 1), TreeBudget(3, 3), TreeBudget(40, 9)]
    contexts = [
        commit(f"{i}", tokens, features, 0, 8, NOISES[0], b)._replace(proposal="sampled") for i, b in enumerate(budgets)
    ]
    trees = [tree for tree in drafter.propose(contexts) if isinstance(tree, DraftTree)]
    assert [tree.num_drafted for tree in trees] == [4, 1, 2, 4]
    assert len({tree.tokens[:2] for tree in trees}) == 1, "a budget cuts a chain; it does not change it"
