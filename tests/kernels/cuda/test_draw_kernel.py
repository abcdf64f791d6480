"""The sampler's kernels draw the tokens of the plain sampler. Without a GPU that of CUDA runs in triton's interpreter."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eyas.kernels.arguments import MASS_BITS, Draws, Kept, Scale
from eyas.kernels.by_device import rank, sample
from eyas.kernels.noise import exponential_noise, row_keys
from eyas.kernels.plain import sampling as plain_kernels
from eyas.protocol.commit import NoiseKey
from eyas.sampling import sharded as sharded_top_p
from eyas.sampling.sharded import MAX_BELOW, best_of_races, candidates, draw_candidates, likely_logits, takes_candidates
from tests.support.devices.rank_threads import RankThreads

pytest.importorskip("triton", reason="triton is not installed")

from eyas.kernels.cuda import sampling as kernels
from eyas.kernels.cuda.sampling import BLOCK, draw_rows, top_k

VOCAB = 2 * BLOCK + 700
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TEMPERATURES = (0.0, 1.0, 0.3, 2.0, 1e-9, 1.0)


DRAWS = Draws(
    [NoiseKey(2**64 - 1 - row, heat) for row, heat in enumerate(TEMPERATURES)],
    [2**40 * row for row in range(len(TEMPERATURES))],
)
FILTERED = Draws([
    NoiseKey(0, 1.0, top_k=20, top_p=0.9), NoiseKey(1, 1.0, top_p=0.8), NoiseKey(2, 0.7, min_p=0.1), NoiseKey(3, 1.0),
    NoiseKey(4, 0.5, top_k=3),
], [5] * 5)  # fmt: skip


def drawn(logits: torch.Tensor, asked: Draws = DRAWS) -> list[int]:
    with np.errstate(all="ignore"):  # of the interpreter
        found: list[int] = draw_rows(logits.to(DEVICE), asked).tolist()
    return found


class WithoutLogits:
    """The second kernel of a draw, which gets NaN instead of logits."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda logits, *rest, **options: self._kernel[grid](torch.full_like(logits, torch.nan), *rest, **options)


def plain(logits: torch.Tensor, rows: Draws = DRAWS) -> list[int]:
    """What operations of torch draw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eyas.kernels.by_device.runs_compiled", lambda device: False)
        return sample(logits, rows).tolist()


@pytest.mark.parametrize("scale", [0.0, 1.0, 12.0])
def test_the_kernel_draws_what_plain_operations_draw(scale: float) -> None:
    logits = scale * torch.randn(len(TEMPERATURES), VOCAB, generator=torch.Generator().manual_seed(int(scale)))
    logits[:, ::3] = -torch.inf  # what a grammar does not allow
    assert drawn(logits) == plain(logits) == sample(logits, DRAWS).tolist()


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_of_the_vocabulary_draw_what_the_whole_draws(parts: int) -> None:
    """Each rank races over its own tokens; also where some or all of them are impossible, equal or not numbers."""
    logits = 5 * torch.randn(len(TEMPERATURES), VOCAB, generator=torch.Generator().manual_seed(parts))
    cases = [logits, logits.clone().fill_(1.0), logits.clone()]
    cases[0][:, : VOCAB // 2] = -torch.inf
    cases[2][1], cases[2][2, VOCAB - 1], cases[2][3, 5], cases[2][0, 7] = -torch.inf, torch.inf, torch.nan, torch.nan
    ids, rows = torch.arange(VOCAB).chunk(parts), DRAWS
    with np.errstate(all="ignore"):
        for case in cases:
            for own in (plain_kernels, kernels):
                found = [own.race(case[:, part].contiguous().to(DEVICE), rows, int(part[0]), VOCAB) for part in ids]
                assert best_of_races(torch.stack(found), rows, VOCAB).tolist() == plain(case)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_candidates_of_parts_draw_what_the_whole_draws(parts: int) -> None:
    """Also where logits are equal, impossible or not numbers, and where k exceeds what a part holds."""
    size, count = 64, 400
    keys = [
        NoiseKey(seed, 0.3 + 0.004 * seed, (1, 7, 40, 256)[seed % 4], (1.0, 0.9, 0.3)[seed % 3], (0.0, 0.1)[seed % 2])
        for seed in range(count)
    ]
    assert all(map(takes_candidates, keys))
    rows = Draws(keys, [5 * key.seed for key in keys])
    logits = 3 * torch.randn(count, size, generator=torch.Generator().manual_seed(parts))
    cases = [logits, logits.round(), logits.clone()]
    cases[2][:, : size // 2] = -torch.inf
    cases[2][1], cases[2][2, size - 1], cases[2][3, 5], cases[2][4, 40] = -torch.inf, torch.inf, torch.nan, torch.nan
    for case in cases:
        own = torch.arange(size).chunk(parts)
        found = [candidates(case[:, part].contiguous(), 256, int(part[0])) for part in own]
        assert draw_candidates(torch.stack(found), rows, size).tolist() == plain(case, rows)
    assert not any(map(takes_candidates, [NoiseKey(1, 1.0, 257), NoiseKey(1, 1.0, 0, 0.9), NoiseKey(1, 0.0, 5)]))


def hard_logits() -> torch.Tensor:
    """Usual rows, equal logits, and rows that hold what is no number."""
    logits = 3 * torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(2))
    logits[1] = logits[1].round()
    logits[2] = 0
    logits[3, ::2] = -torch.inf
    logits[4] = -torch.inf
    logits[5, 5], logits[6, VOCAB - 1], logits[7, 9] = torch.nan, torch.inf, -torch.nan
    return logits


@pytest.mark.parametrize("shift", [28, 20, 12, 0])
def test_kernels_find_the_mass_of_plain_operations(shift: int) -> None:
    logits = hard_logits()
    scale = Scale(sharded_top_p.largest_logits(logits), torch.tensor([1.0, 0.3, 1.0, 2.0, 1.0, 1.0, 1.0, 1e-6]))
    lowest = plain_kernels.ordered_bits(scale.largest).long() - (7 << shift)
    on_device = Scale(*(tensor.to(DEVICE) for tensor in scale))
    for borders in (sharded_top_p.SEARCH_BORDERS, sharded_top_p.LAST_BORDERS):
        expected = plain_kernels.masses_from(logits, scale, lowest, shift, borders)
        with np.errstate(all="ignore"):
            found = kernels.masses_from(logits.to(DEVICE), on_device, lowest.to(DEVICE), shift, borders)
        torch.testing.assert_close(found.cpu().double(), expected.double(), rtol=1e-6, atol=0)
        assert expected[:4].any()
        assert not expected[4:].any()


def test_kernels_keep_what_plain_operations_keep() -> None:
    """Also some of equal logits, as many as the wanted mass has room for."""
    logits, third = hard_logits(), torch.arange(8) / 3
    largest, unit = sharded_top_p.largest_logits(logits), 2.0**MASS_BITS
    last = plain_kernels.ordered_bits(torch.tensor([0.5, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])).long()
    wanted = (unit * torch.tensor([9.0, 1.0, 2100.5, 9.0, 9.0, 9.0, 9.0, 9.0])).long()
    scale = Scale(largest, torch.full((8,), 0.8))
    kept = Kept(last, (third * unit).long(), wanted, torch.tensor([0.0, 0.0, 0.0, 0.5, 0.1, 0.1, 0.1, 0.1]))
    on_device = logits.to(DEVICE, copy=True)
    with np.errstate(all="ignore"):
        kernels.kept_logits(on_device, Scale(*(x.to(DEVICE) for x in scale)), Kept(*(x.to(DEVICE) for x in kept)))
    logits = plain_kernels.kept_logits(logits, scale, kept)
    torch.testing.assert_close(on_device.cpu(), logits, rtol=0, atol=0, equal_nan=True)
    counts = (logits > -torch.inf).sum(1).tolist()
    assert counts[2] == 2100, "2,100 of equal logits fit, as two thirds come before them"
    assert logits[5, 5].isnan()
    assert logits[6, -1] == torch.inf
    assert logits[7, 9].isnan()


@pytest.mark.parametrize("parts", [1, 2])
def test_kernels_draw_with_top_p_over_parts(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs in one thread at a time."""
    logits, lock = hard_logits(), threading.Lock()
    rows = Draws([NoiseKey(seed, 0.9, 0, 0.5 + 0.05 * seed, 0.01 * (seed % 2)) for seed in range(8)], range(8))

    def locked(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with lock, np.errstate(all="ignore"):
                return kernel(*args)

        return run

    both = SimpleNamespace(masses_from=locked(kernels.masses_from), kept_logits=locked(kernels.kept_logits))
    monkeypatch.setattr(sharded_top_p, "sampling_kernels", lambda logits: both)
    own = [part.to(DEVICE, copy=True).contiguous() for part in logits.chunk(parts, 1)]
    found = RankThreads(parts).run(lambda rank: likely_logits(own[rank], rows, rank, parts))
    unfiltered = Draws([NoiseKey(seed, 0.9) for seed in range(8)], range(8))
    assert plain(torch.cat(found, 1).cpu(), unfiltered) == plain(logits, rows)


@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_scores_of_parts_keep_to_their_bound_of_rounding(scale: float) -> None:
    """The proven error of `best_of_races`: parts differ from the whole only where two scores are closer than twice that."""
    logits = scale * torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(int(scale)))
    rows = Draws([NoiseKey(seed, 0.3 + 0.01 * seed) for seed in range(200)], range(200))
    heat = torch.tensor([key.temperature for key in rows.keys], dtype=torch.float32)
    noise = exponential_noise(range(200), range(200), torch.arange(VOCAB))
    below = (logits.amax(-1, keepdim=True).double() - logits.double()) / heat.double()[:, None]
    exact = noise.double() * below.exp()
    for part in torch.arange(VOCAB).chunk(4):
        top, score, token = plain_kernels.race(logits[:, part].contiguous(), rows, int(part[0]), VOCAB)
        rest = (logits.amax(-1) - top.view(torch.float32)) / heat
        found = score.view(torch.float32) * rest.exp()
        wanted, distance = (x.gather(1, token.long()[:, None])[:, 0] for x in (exact, below))
        error, is_drawable = (found.double() / wanted - 1).abs(), distance < MAX_BELOW
        assert is_drawable.any()
        assert (error <= (3 * distance + 12) * 2.0**-24)[is_drawable].all()


def test_the_compiled_sampler_draws_as_operations_do() -> None:
    pytest.importorskip("numba")
    logits = 4 * torch.randn(300, 997, generator=torch.Generator().manual_seed(5))
    keys = [NoiseKey(seed, 0.2 + 0.01 * seed, top_k=7 * (seed % 9 == 0)) for seed in range(300)]
    rows = Draws(keys, [3 * key.seed for key in keys])
    assert sample(logits, rows).tolist() == plain(logits, rows)


def test_filtered_rows_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_winners", WithoutLogits(kernels._winners))
    logits = 3 * torch.randn(len(FILTERED), BLOCK + 300, generator=torch.Generator().manual_seed(1))
    logits[1] *= 2
    assert drawn(logits, FILTERED) == plain(logits, FILTERED) == sample(logits, FILTERED).tolist()


def test_filters_keep_what_plain_operations_keep_of_equals() -> None:
    """No list of likely tokens holds them all, so the rows are read again."""
    logits = torch.zeros(3, BLOCK + 300)
    logits[0, ::2], logits[1, 5] = -torch.inf, torch.nan
    first = FILTERED.taken(range(3))
    assert drawn(logits, first) == plain(logits, first)


def test_rows_without_numbers_draw_no_token() -> None:
    logits = torch.randn(len(TEMPERATURES), VOCAB, generator=torch.Generator().manual_seed(3))
    logits[0, BLOCK + 1] = logits[1, 5] = torch.nan
    logits[2] = -torch.inf
    logits[3, VOCAB - 1] = torch.inf
    expected = plain(logits)
    assert expected[:4] == [VOCAB] * 4
    assert drawn(logits) == expected == sample(logits, DRAWS).tolist()


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(len(TEMPERATURES), VOCAB)
    logits[:, [BLOCK - 1, BLOCK + 3, VOCAB - 1]] = 200.0
    assert drawn(logits)[0] == BLOCK - 1
    assert drawn(logits) == plain(logits) == sample(logits, DRAWS).tolist()


def test_the_host_hashes_rows_as_the_device_does() -> None:
    """A token's noise is hashed from the row's key; the first 52 bits decide."""
    seeds, positions = [0, 1, 2**63, 2**64 - 1], [0, 2**62, 5, 2**63 - 1]
    with np.errstate(over="ignore"):
        z = row_keys(np.array(seeds, np.uint64), np.array(positions)).view(np.uint64)[:, None] + np.arange(
            1, 9, dtype=np.uint64
        ) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    noise = -np.log1p(-((z >> np.uint64(12)) + 0.5) * 2.0**-52)
    torch.testing.assert_close(exponential_noise(seeds, positions, torch.arange(8)).double(), torch.from_numpy(noise))


@pytest.mark.parametrize("k", [1, 10])
def test_the_kernel_ranks_as_plain_operations_do(k: int) -> None:
    scores = torch.randint(-3, 3, (2, 2, BLOCK + 300), generator=torch.Generator().manual_seed(k)).float()
    scores[0, 0] = -torch.inf
    scores[0, 1, 7:9] = torch.nan
    scores[1, 0] = torch.linspace(-1, 1, BLOCK + 300)
    scores[1, 1, ::2] = -0.0
    best, ids = top_k(scores.to(DEVICE), k)
    expected = rank(scores, k)
    assert torch.equal(ids.cpu(), expected.ids)
    torch.testing.assert_close(best.cpu(), expected.scores, rtol=0, atol=0, equal_nan=True)
