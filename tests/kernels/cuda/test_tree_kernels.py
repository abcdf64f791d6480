"""Kernels of tree growth equal the plain scores and their ranking; without a GPU they run in Triton's interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from eyas.config import DraftingConfig
from eyas.drafters.trees.scoring import LevelLogits, noise_words
from eyas.kernels.arguments import Ranked
from eyas.kernels.by_device import rank
from eyas.kernels.plain import drafting as plain
from eyas.kernels.plain.drafting import child_scores, without_nan
from eyas.kernels.plain.layers import take_rows
from eyas.kernels.probabilities import filtered_probs
from eyas.models.heads.layers import rms_norm
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from tests.support.tiers import nightly

kernels = pytest.importorskip("eyas.kernels.cuda.drafting", reason="triton is not installed")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE, LEVELS = kernels.BLOCK + 500, 2


@pytest.mark.parametrize(("keys", "kind"), [
    ((NoiseKey(0), NoiseKey(1)), "plain"),
    ((NoiseKey(2**64 - 9, 0.8), NoiseKey(1)), "noised"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_best_children_are_the_ranked_plain_scores(keys: tuple[NoiseKey, NoiseKey], kind: str, dtype: torch.dtype) -> None:
    contexts = [Commit(f"{i}", 0, 0, (5,) * (7 + i), None, key, TreeBudget(9, 9)) for i, key in enumerate(keys)]
    words = torch.from_numpy(noise_words(contexts, DraftingConfig(), len(contexts)))
    draft_ids = torch.from_numpy(np.random.default_rng(0).permutation(3 * SIZE)[:SIZE].copy())
    logits = torch.randn(2, 2, SIZE, generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)
    logits[0, 0, 7] = torch.nan
    logits[0, 1, [4, kernels.BLOCK + 3]] = 30.0
    logits[1, 1, :] = -torch.inf
    own = words.to(DEVICE)
    plain_noise = plain.shared_noise(words, draft_ids, LEVELS)
    noise = kernels.shared_noise(own, draft_ids.to(DEVICE), LEVELS)
    torch.testing.assert_close(noise.cpu(), plain_noise, atol=2e-5, rtol=2e-5)
    for level in range(LEVELS):
        scores = child_scores(logits, words, plain_noise if kind == "noised" else None, level)
        inputs = logits.to(DEVICE), own, noise if kind == "noised" else None, level, 5
        expected = rank(scores, 5)
        found = kernels.best_children(*inputs)
        torch.testing.assert_close(found.scores.cpu(), expected.scores, atol=2e-5, rtol=2e-5)
        above = torch.tensor([[-1.0, -torch.inf], [0.5, -2.0]])
        below = kernels.best_children(*inputs, above.to(DEVICE)).scores.cpu()
        torch.testing.assert_close(below, expected.scores + above[:, :, None], atol=2e-5, rtol=2e-5)
        assert found.ids[:, 0].tolist() == expected.ids[:, 0].tolist()
        assert found.ids[0].tolist() == expected.ids[0].tolist()


FILTERS = {
    "top-k": {"top_k": 3}, "top-k with p": {"top_k": 40, "top_p": 0.7}, "top-p": {"top_p": 0.9}, "one": {"top_k": 1},
    "min-p": {"min_p": 0.02}, "all": {"top_k": 90, "top_p": 0.95, "min_p": 1e-3}, "deep": {"top_k": 700, "top_p": 0.999},
    "nearly all": {"top_p": 0.9999}, "floor": {"top_p": 0.99, "min_p": 0.3}, "weightless": {"top_k": 2000},
}  # fmt: skip

DAILY = ("all", "deep", "floor")  # each filter alone is in these too


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, torch.bfloat16) if name in DAILY else nightly(name, torch.bfloat16) for name in FILTERS),
    nightly("top-k with p", torch.float32), nightly("top-p", torch.float32),
])  # fmt: skip
def test_filtered_children_are_the_ranked_plain_scores(name: str, dtype: torch.dtype) -> None:
    """Of three sessions one has no filters, and one has the lowest temperature that filters know."""
    keys = NoiseKey(3, 0.9, **FILTERS[name]), NoiseKey(4, 0.9), NoiseKey(5, 0.05, **FILTERS[name])
    contexts = [Commit(f"{i}", 0, 0, (5,) * (7 + i), None, key, TreeBudget(9, 9)) for i, key in enumerate(keys)]
    words = torch.from_numpy(noise_words(contexts, DraftingConfig(), len(contexts)))
    draft_ids = torch.from_numpy(np.random.default_rng(0).permutation(3 * SIZE)[:SIZE].copy())
    logits = torch.randn(3, 3, SIZE, generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)
    logits[0, 0] /= 9  # flat: lists are not enough
    logits[0, 1, 7], logits[0, 1, 8] = torch.nan, torch.inf
    logits[0, 2, :], logits[2, 1, ::2] = -torch.inf, -torch.inf
    logits[2, 2, 5 : 5 + 600 : 2] = 9.0  # more equal tokens than are listed
    noise = plain.shared_noise(words, draft_ids, LEVELS)
    scores = child_scores(logits, words, noise, 1, filtered_probs)
    words, draft_ids, given = words.to(DEVICE), draft_ids.to(DEVICE), logits.to(DEVICE)
    on_device = LevelLogits(given, words, kernels.shared_noise(words, draft_ids, LEVELS), 1, filtered_probs)
    expected, found = rank(scores, 12), ranked(on_device, 12)
    assert found.ids.tolist() == expected.ids.tolist()
    torch.testing.assert_close(found.scores.cpu(), expected.scores, atol=2e-5, rtol=2e-5)
    if dtype == torch.float32:  # rows of other shapes do not depend on the kind of filter
        check_shapes(on_device, scores)
    best = kernels.lowest_keys(given, words).cpu()
    clean = without_nan(logits)
    token_keys = (ordered(clean).long() + 1) * 2**20 - 1 - torch.arange(SIZE)
    is_possible = torch.isfinite(clean)
    assert torch.equal((token_keys >= best[..., None]) & is_possible, torch.isfinite(scores))


def ranked(scores: LevelLogits, k: int, above: torch.Tensor | None = None) -> Ranked:
    """Rank scores with the kernels, which run in the interpreter without a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eyas.drafters.trees.scoring.drafting_kernels", lambda values: kernels)
        return scores.best(k, above)


def check_shapes(on_device: LevelLogits, scores: torch.Tensor) -> None:
    """One row for all nodes of a level, and more children than the kernels rank."""
    shared, above = replace(on_device, logits=on_device.logits[:, 1:2]), torch.randn(3, 4)
    below, plain_below = ranked(shared, 5, above.to(DEVICE)), rank(scores[:, 1:2], 5)
    torch.testing.assert_close(below.scores.cpu(), plain_below.scores + above[:, :, None], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(ranked(on_device, 99).scores.cpu(), rank(scores, 99).scores, atol=2e-5, rtol=2e-5)


def ordered(values: torch.Tensor) -> torch.Tensor:
    """Integers in the order of floats."""
    bits = (values + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@pytest.mark.parametrize("has_parents", [False, True])
def test_the_frontier_is_the_plain_one(has_parents: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    scores, tokens = -torch.randint(0, 6, (3, 20), generator=generator).float(), torch.randperm(60, generator=generator)
    scores[1, :17] = -torch.inf
    inputs = scores, tokens.view(3, 20), 4, 5, 7, has_parents
    found = kernels.find_frontier(*(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in inputs))
    for ours, theirs in zip(found, plain.find_frontier(*inputs), strict=True):
        assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("num_above", [1, 3])
def test_pair_inputs_are_the_plain_ones(num_above: int) -> None:
    layer_kernels = pytest.importorskip("eyas.kernels.cuda.layers")
    generator = torch.Generator().manual_seed(3)
    states, embedding = torch.randn(2, num_above, 24, generator=generator), torch.randn(30, 24, generator=generator)
    norms = torch.rand(24, generator=generator), torch.rand(24, generator=generator)
    parents = torch.randint(0, num_above, (2, 4), generator=generator)
    tokens, draft_ids = torch.randint(0, 9, (2, 4), generator=generator), torch.arange(9) * 3
    given = [x.to(DEVICE) for x in (states, parents, tokens, draft_ids, embedding)]
    inputs, taken = layer_kernels.pair_inputs(*given, tuple(norm.to(DEVICE) for norm in norms), 1e-5)
    features = take_rows(states, parents).flatten(0, 1)
    embedded = embedding[draft_ids[tokens]].flatten(0, 1)
    expected = torch.cat([rms_norm(embedded, norms[0], 1e-5), rms_norm(features, norms[1], 1e-5)], -1)
    torch.testing.assert_close(taken.cpu(), features)
    torch.testing.assert_close(inputs.cpu(), expected)
