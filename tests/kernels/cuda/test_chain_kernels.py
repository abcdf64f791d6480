"""The kernels of sampled chains draw what the plain path draws; without a GPU they run in Triton's interpreter."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.drafters.trees.scoring import chain_words
from eyas.kernels.plain import drafting as plain_kernels
from eyas.kernels.probabilities import filtered_probs
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from tests.kernels.cuda.test_tree_kernels import FILTERS
from tests.support.tiers import nightly

kernels = pytest.importorskip("eyas.kernels.cuda.drafting", reason="triton is not installed")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE, LEVELS = kernels.BLOCK + 500, 2
LIMITS = FILTERS | {"whole": {}, "most": {"top_k": 130, "top_p": 0.9}, "just": {"top_k": 129}}
DAILY = ("whole", "just", "all", "min-p", "top-k with p")


def both(logits: Tensor, keys: Sequence[NoiseKey], k: int, level: int) -> tuple[Tensor, Tensor]:
    """What the plain path and the kernels write for a level, [S, 2 k + 1] each. They draw the same tokens."""
    contexts = [Commit(f"{i}", 0, 0, (5,) * (7 + i), None, key, TreeBudget(9, 9)) for i, key in enumerate(keys)]
    words = torch.from_numpy(chain_words(contexts))
    draft_ids = torch.from_numpy(np.random.default_rng(0).permutation(3 * SIZE)[: logits.shape[-1]].copy())
    plain = torch.full((len(keys), LEVELS, 2 * k + 1), torch.nan, dtype=torch.float64)
    ours = plain.to(DEVICE)
    expected = plain_kernels.draw_children(logits, words, level, draft_ids, plain, filtered_probs)
    given = [x.to(DEVICE) for x in (logits, words, draft_ids)]
    drawn = kernels.draw_children(given[0], given[1], level, given[2], ours, filtered_probs).cpu()
    ours = ours.cpu()
    assert torch.isnan(ours[:, 1 - level]).all(), "another level was written"
    is_drawn = plain[:, level, k : 2 * k].amax(1) > 0
    assert drawn[is_drawn].tolist() == expected[is_drawn].tolist()
    return plain[:, level], ours[:, level]


def assert_same(plain: Tensor, ours: Tensor, k: int) -> None:
    """Equal tokens in the same order, up to the last with a probability, and the same place."""
    has_prob = plain[:, k : 2 * k] > 1e-30  # a GPU may flush smaller ones
    assert torch.equal(ours[:, k : 2 * k] > 1e-30, has_prob)
    assert ours[:, :k][has_prob].tolist() == plain[:, :k][has_prob].tolist()
    torch.testing.assert_close(ours[:, k : 2 * k], plain[:, k : 2 * k], atol=1e-9, rtol=2e-5)
    drawn = has_prob.any(1)
    assert ours[drawn, -1].tolist() == plain[drawn, -1].tolist()
    assert not ours[~drawn].any(), "a level without possible tokens"


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, torch.bfloat16) if name in DAILY else nightly(name, torch.bfloat16) for name in LIMITS),
    *((name, torch.float32) for name in ("whole", "most", "top-p")),
])  # fmt: skip
def test_kernels_draw_what_the_plain_path_draws(name: str, dtype: torch.dtype) -> None:
    keys = [NoiseKey(2**64 - 3, 0.9, **LIMITS[name]), NoiseKey(4, 1.3), NoiseKey(5, 0.05, **LIMITS[name])]
    logits = torch.randn(3, 1, SIZE, generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)
    logits[0, 0, 7], logits[0, 0, 8], logits[1, 0, ::3] = torch.nan, torch.inf, -torch.inf
    assert_same(*both(logits, keys, 128, 1), 128)


@pytest.mark.parametrize("name", ["whole", "top-p", "top-k with p", "min-p"])
def test_kernels_draw_from_flat_and_level_rows(name: str) -> None:
    """Lists are not enough for the first row, and more tokens than are listed are equal in the second."""
    keys = [NoiseKey(seed, 1.0, **LIMITS[name]) for seed in range(4)]
    logits = torch.randn(4, 1, SIZE, generator=torch.Generator().manual_seed(2))
    logits[0] /= 9
    logits[1, 0, 5 : 5 + 600 : 2] = 9.0
    logits[2, 0] = -torch.inf
    logits[3, 0], logits[3, 0, 40] = -torch.inf, 2.0
    assert_same(*both(logits, keys, 128, 0), 128)


@pytest.mark.parametrize(("size", "k"), [(24, 24), (100, 7), (2000, 300)])
def test_kernels_draw_from_small_vocabularies(size: int, k: int) -> None:
    keys = [NoiseKey(seed, 1.0, top_p=0.95 + 0.05 * (seed % 2)) for seed in range(6)]
    logits = torch.randn(6, 1, size, generator=torch.Generator().manual_seed(3))
    assert_same(*both(logits, keys, k, 0), k)
