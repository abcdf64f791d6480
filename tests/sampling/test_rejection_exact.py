"""The rule `rejection` on a toy vocabulary: summed over all possible draws, the output distribution is the target's."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.protocol.tree import DraftProbs, DraftTree, SampledProposal
from eyas.sampling.rejection import Families, accept_probs
from tests.sampling.toy_probs import (
    CPU,
    Distribution,
    Drawn,
    emitted_probs,
    every_tree,
    random_distribution,
    total_variation,
)

VOCAB = 4
SHAPES = [(1,), (1, 1), (1, 1, 1), (2,), (3,), (4,), (2, 1), (2, 2), (1, 3)]


def fixed(*rows: float) -> Distribution:
    return lambda prefix: np.array(rows) / sum(rows)


CASES = {
    "whole": (random_distribution(1, VOCAB), random_distribution(2, VOCAB)),
    "filtered target": (random_distribution(3, VOCAB, zeros=2), random_distribution(4, VOCAB)),
    "equal": (random_distribution(7, VOCAB), random_distribution(7, VOCAB)),
    "nearly equal": (fixed(0.1, 0.2, 0.3, 0.4), fixed(0.1, 0.2, 0.3, 0.4 + 1e-13)),
    "certain target": (fixed(0, 1, 0, 0), random_distribution(8, VOCAB)),
    "rare in the draft": (fixed(0.4, 0.3, 0.2, 0.1), fixed(1e-12, 1e-9, 0.5, 0.5)),
    "disjoint": (fixed(0.3, 0.7, 0, 0), fixed(0, 0, 0.5, 0.5)),
}

# Shapes with many possible trees, and every case in the others.
PAIRS = [(case, widths) for case in ("whole", "filtered target") for widths in SHAPES]
PAIRS += [(case, widths) for case in CASES for widths in SHAPES[:5] if (case, widths) not in PAIRS]
# Each pair of case and shape with or without replacement in turn, so that both meet every case and every shape.
TRIPLES = [(*pair, (list(CASES).index(pair[0]) + SHAPES.index(pair[1])) % 2 == 0) for pair in PAIRS]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "widths", "replacement"), TRIPLES, ids=str)
def test_the_output_follows_the_target_probs(case: str, widths: tuple[int, ...], replacement: bool) -> None:
    target, draft = CASES[case]
    length = min(len(widths) + 1, 3)
    assert total_variation(emitted_probs(target, every_tree(draft, widths, replacement), length), target, length) < 1e-12


@pytest.mark.parametrize("replacement", [True, False], ids=["with replacement", "without"])
@pytest.mark.parametrize("widths", [(1,), (1, 1), (1, 1, 1), (2,), (2, 2)], ids=str)
@pytest.mark.parametrize("zeros", [1, 2])
def test_a_top_k_proposal_is_as_good(zeros: int, widths: tuple[int, ...], replacement: bool) -> None:
    target, draft = random_distribution(5, VOCAB), random_distribution(6, VOCAB, zeros=zeros)
    trees = every_tree(draft, widths, replacement)
    assert total_variation(emitted_probs(target, trees, 3), target, 3) < 1e-12


def test_equal_distributions_accept_every_first_draw() -> None:
    row = np.array([0.1, 0.2, 0.7, 0.0])
    tree = DraftTree.of(
        (0, 2), (0, 0), (0.0, 0.0), sampled=SampledProposal({0: DraftProbs((0, 1, 2), tuple(row[:3].tolist()))})
    )
    trial = accept_probs(torch.from_numpy(row)[None], Families.of([tree], CPU))
    assert trial.chances.item() == pytest.approx(1, abs=1e-15)
    assert trial.residual[0].sum() > 0
    assert trial.residual[0, 3] == 0


@pytest.mark.parametrize("replacement", [True, False], ids=["with replacement", "without"])
def test_reordered_siblings_change_the_output_distribution(replacement: bool) -> None:
    """The exact sums detect siblings that are ranked by their probabilities after the draw."""
    target, draft = random_distribution(1, VOCAB), random_distribution(2, VOCAB)
    ranked = [
        Drawn(DraftTree.of((0, *sorted(d.tree.tokens[1:], key=lambda t: -draft(())[t])), *_rest(d.tree)), d.chance)
        for d in every_tree(draft, (2,), replacement)
    ]
    assert total_variation(emitted_probs(target, ranked, 1), target, 1) > 0.01


def _rest(tree: DraftTree) -> tuple:
    return tree.parents, tree.log_probs, False, tree.sampled


def test_a_wrong_proposal_distribution_is_detected() -> None:
    target, draft, other = random_distribution(1, VOCAB), random_distribution(2, VOCAB), random_distribution(9, VOCAB)
    stated = {drawn.tree.tokens: drawn.tree for drawn in every_tree(other, (1,), False)}
    lying = [Drawn(stated[drawn.tree.tokens], drawn.chance) for drawn in every_tree(draft, (1,), False)]
    assert total_variation(emitted_probs(target, lying, 1), target, 1) > 0.01


@given(st.integers(0, 10**6), st.lists(st.sampled_from([(1, 1), (3,), (2, 1), (1, 2)]), min_size=2, max_size=5))
def test_accept_probs_do_not_depend_on_other_trees(seed: int, shapes: list[tuple[int, ...]]) -> None:
    rng = np.random.default_rng(seed)
    drawn = []
    for i, widths in enumerate(shapes):
        possible = every_tree(random_distribution(seed + i, VOCAB, zeros=i % 2), widths, replacement=bool(rng.integers(2)))
        drawn.append(possible[int(rng.integers(len(possible)))].tree)
    rows = [torch.from_numpy(rng.dirichlet(np.ones(VOCAB), len(tree.families))) for tree in drawn]
    together = accept_probs(torch.cat(rows), Families.of(drawn, CPU))
    start = 0
    for tree, probs in zip(drawn, rows, strict=True):
        alone, end = accept_probs(probs, Families.of([tree], CPU)), start + len(probs)
        width = alone.chances.shape[1]
        torch.testing.assert_close(together.chances[start:end, :width], alone.chances, atol=1e-14, rtol=1e-14)
        torch.testing.assert_close(together.residual[start:end], alone.residual, atol=1e-14, rtol=1e-14)
        assert not together.chances[start:end, width:].any()
        start = end


def test_logits_that_are_not_numbers_accept_nothing() -> None:
    tree = DraftTree.of((0, 2), (0, 0), (0.0, 0.0), sampled=SampledProposal({0: DraftProbs((2, 3), (0.5, 0.5))}))
    trial = accept_probs(torch.full((1, VOCAB), float("nan"), dtype=torch.float64), Families.of([tree], CPU))
    assert not (trial.chances > 0).any()
    assert trial.residual.isnan().all()
