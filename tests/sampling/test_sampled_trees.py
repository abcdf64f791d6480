"""Validation of sampled trees, and the noise that keeps draft draws independent of target draws."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.api.validation import MAX_SEED
from eyas.errors import InvalidTree
from eyas.kernels.noise import draft_seed, uniform_noise
from eyas.protocol.tree import DraftProbs, DraftTree, SampledProposal
from tests.support import reference

WHOLE = DraftProbs((4, 5, 6), (0.5, 0.3, 0.2))
NAN = float("nan")


def family(*tokens: int, probs: DraftProbs = WHOLE, replacement: bool = False) -> DraftTree:
    """A root with children."""
    size = len(tokens) + 1
    return DraftTree.of((3, *tokens), (0,) * size, (0.0,) * size, sampled=SampledProposal({0: probs}, replacement))


@pytest.mark.parametrize(
    "tree",
    [
        family(5),
        family(6, 4, 5),
        family(4, 4, 4, replacement=True),
        family(4, probs=DraftProbs((4,), (1.0,))),
        family(4, probs=DraftProbs((4, 5), (0.2, 0.1))),
        family(4, probs=DraftProbs((4, 5), (0.6, 0.4 + 1e-6))),
    ],
)
def test_a_tree_that_states_a_possible_draw_passes(tree: DraftTree) -> None:
    tree.validate(3, 9, 8, 1)


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (family(7), "which its 3 draft probabilities do not hold"),
        (family(4, 4), "drawn twice"),
        (family(4, probs=DraftProbs((4, 5), (0.5, 0.6))), "with sum 1.1"),
        (family(4, probs=DraftProbs((4, 5), (0.5, 0.0))), "probabilities from 0.0"),
        (family(4, probs=DraftProbs((4, 5), (0.5, -0.1))), "probabilities from -0.1"),
        (family(4, probs=DraftProbs((4, 5), (0.5, NAN))), "with sum nan"),
        (family(4, probs=DraftProbs((4,), (float("inf"),))), "with sum inf"),
        (family(4, probs=DraftProbs((4, 4), (0.5, 0.5))), "for 2 ids, 1 of them distinct"),
        (family(4, probs=DraftProbs((4, 5), (0.5,))), "1 draft probabilities for 2 ids"),
        (family(4, probs=DraftProbs((), ())), "0 draft probabilities"),
        (family(4, probs=DraftProbs((4, 9), (0.5, 0.5))), "outside"),
        (family(4, probs=DraftProbs((-1, 4), (0.5, 0.5))), "outside"),
        (
            DraftTree.of((3, 4), (0, 0), (0.0, 0.0), sampled=SampledProposal({})),
            r"draft probabilities for nodes \[\], children below nodes \[0\]",
        ),
        (
            DraftTree.of((3, 4), (0, 0), (0.0, 0.0), sampled=SampledProposal({0: WHOLE, 1: WHOLE})),
            r"draft probabilities for nodes \[0, 1\]",
        ),
        (DraftTree.of((3,), (0,), (0.0,), sampled=SampledProposal({0: WHOLE})), "children below nodes"),
    ],
)
def test_a_broken_proposal_contract_is_named(tree: DraftTree, reason: str) -> None:
    with pytest.raises(InvalidTree, match=reason):
        tree.validate(3, 9, 8, 1)


@given(st.integers(0, MAX_SEED), st.integers(0, 2**40), st.integers(0, 100))
def test_trial_numbers_are_the_hash_below_all_token_ids(seed: int, position: int, index: int) -> None:
    golden = 0x9E3779B97F4A7C15
    key = reference.mix((reference.mix((seed + golden) & reference.MASK) + position * golden) & reference.MASK)
    bits = reference.mix((key + (-2 - index + 1) * golden) & reference.MASK) >> 12
    assert uniform_noise([seed], [position], torch.tensor([index])).item() == (bits + 0.5) / 2**52


def test_trial_numbers_are_uniform_and_never_0_or_1() -> None:
    numbers = uniform_noise([7] * 400, range(400), torch.arange(50)).flatten()
    assert numbers.min() > 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, 20, 0, 1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # 99.9 % quantile of 19 degrees of freedom


@given(st.integers(0, MAX_SEED))
def test_a_drafters_seed_is_a_seed_and_another_one(seed: int) -> None:
    assert 0 <= draft_seed(seed) <= MAX_SEED
    assert draft_seed(seed) != seed
    assert draft_seed(seed) == draft_seed(seed)
