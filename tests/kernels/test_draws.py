"""The noise function, the probabilities that tokens are drawn from, and exact ranking, against straightforward versions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.api.request import SamplingParams
from eyas.api.validation import MAX_SEED
from eyas.device.placement import runs_compiled
from eyas.kernels.arguments import UNREACHED, Draws
from eyas.kernels.by_device import rank, sample
from eyas.kernels.noise import exponential_noise
from eyas.kernels.probabilities import Filters, filtered_probs, target_probs
from eyas.protocol.commit import NoiseKey
from tests.support import reference
from tests.support.devices.device_syncs import Waits


@given(st.integers(0, MAX_SEED), st.integers(0, 2**40), st.integers(0, 2**20))
def test_noise_equals_the_hash_in_unbounded_integers(seed: int, position: int, token: int) -> None:
    got = exponential_noise([seed], [position], torch.tensor([token]))
    assert got.item() == pytest.approx(reference.noise(seed, position, token), rel=1e-6)


def test_noise_is_exponential_and_never_zero() -> None:
    noise = exponential_noise([7] * 50, range(50), torch.arange(4096)).double().flatten()
    assert noise.min() > 0
    assert noise.mean().item() == pytest.approx(1.0, abs=0.01)
    edges = torch.tensor([-math.log1p(-q / 20) for q in range(1, 20)]).double()
    counts = torch.bincount(torch.bucketize(noise, edges), minlength=20).double()
    chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert chi_square < 43.8  # 99.9 % quantile of 19 degrees of freedom


def test_the_least_noise_is_as_exact_as_any_other() -> None:
    """It draws the rarest tokens. 32 bits would round it to multiples of 2**-32."""
    noise = exponential_noise([7] * 10**6, range(10**6), torch.tensor([5])).flatten()
    for position in noise.topk(20, largest=False).indices.tolist():
        assert noise[position].item() == pytest.approx(reference.noise(7, position, 5), rel=1e-6)


def test_neighbouring_seeds_and_positions_share_no_noise() -> None:
    noise = exponential_noise([1, 1, 2, 2], [5, 6, 5, 6], torch.arange(2048)).double()
    correlation = torch.corrcoef(noise) - torch.eye(4)
    assert correlation.abs().max() < 0.1


@settings(max_examples=50)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0, 1, 3, 7]),
    st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    st.floats(0.2, 2),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_a_draw_equals_the_naive_exponential_race(
    seed: int, top_k: int, top_p: float, temperature: float, min_p: float
) -> None:
    logits = torch.randn(1, 16, generator=torch.Generator().manual_seed(seed)) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, min_p=min_p)
    key = NoiseKey(seed, temperature, top_k, top_p, min_p)
    assert sample(logits, Draws([key], [11])).tolist() == [reference.draw(logits[0], params, 11)]


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 9}, {"top_k": 300}, {"top_k": 10**6, "top_p": 0.5}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
     {"top_p": 0.9}, {"top_p": 0.999, "min_p": 0.2}, {"min_p": 0.05}],
    ids=str,
)  # fmt: skip
def test_a_draw_among_many_tokens_is_the_naive_race(filters: dict[str, float], spread: float, temperature: float) -> None:
    logits = torch.randn(8, 700, generator=torch.Generator().manual_seed(5)) * spread
    logits[:, 64:192] = -math.inf
    params = SamplingParams(temperature=temperature, seed=9, **filters)  # type: ignore[arg-type]
    key = NoiseKey(9, temperature, **filters)  # type: ignore[arg-type]
    drawn = sample(logits, Draws([key], range(3, 11), 8))
    assert drawn.tolist() == [reference.draw(row, params, 3 + number) for number, row in enumerate(logits)]


def test_rows_of_different_requests_do_not_disturb_one_another() -> None:
    logits = torch.randn(4, 32, generator=torch.Generator().manual_seed(3))
    draws = Draws([NoiseKey(1), NoiseKey(2, 0.7), NoiseKey(3), NoiseKey(2, 1.3, 4, 0.8)], [5, 5, 9, 6])
    alone = torch.cat([sample(logits[i : i + 1], draws.taken([i])) for i in range(4)])
    assert torch.equal(sample(logits, draws), alone)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_nodes_that_no_drawn_token_leads_to_need_no_draw(temperature: float) -> None:
    numbers = np.random.default_rng(5)
    size = 40
    above = list[int]()
    for node in range(3 * size):  # in each of three trees a node's parent comes before it, a root is its own
        above.append(node - node % size + int(numbers.integers(0, max(node % size, 1))))
    drafted = numbers.integers(0, 3, 3 * size)
    draws = Draws([NoiseKey(1, temperature), NoiseKey(2), NoiseKey(3, 1.3, 4, 0.8)], numbers.integers(5, 9, 3 * size), size)
    logits = torch.randn(3 * size, 3, generator=torch.Generator().manual_seed(3))
    whole = sample(logits, draws).tolist()
    found = sample(logits, draws.along(np.array(above), drafted)).tolist()
    reached = set[int]()
    for node, parent in enumerate(above):
        if node == parent or (parent in reached and whole[parent] == drafted[node]):
            reached.add(node)
    left_out = [node for node in range(3 * size) if found[node] != whole[node]]
    assert {found[node] for node in left_out} <= {UNREACHED}
    assert not reached & set(left_out)
    assert bool(left_out) == runs_compiled(logits.device)


def test_draws_of_runs_of_rows_are_those_of_each_row() -> None:
    keys, counts = [NoiseKey(2**64 - 1, 0.8), NoiseKey(3), NoiseKey(4, 1.3, 4, 0.8)], [3, 2, 2]
    draws = Draws(keys, [9, 10, 10, 4, 5, 70, 71], counts)
    assert draws.keys_of_rows == [keys[owner] for owner in (0, 0, 0, 1, 1, 2, 2)]
    part = draws.taken([2, 3])
    assert (part.keys_of_rows, part.positions.tolist()) == (keys[:2], [10, 4])
    logits = torch.randn(7, 32, generator=torch.Generator().manual_seed(4))
    assert torch.equal(sample(logits, draws), sample(logits, draws.taken(range(7))))


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert sample(torch.tensor([[0.0, 2.0, 2.0, 2.0]]), Draws([NoiseKey(0)], [0])).tolist() == [1]


def test_filtered_probs_keep_at_least_the_likeliest_token() -> None:
    filters = Filters(torch.ones(1), torch.tensor([0]), torch.tensor([1e-6]), torch.ones(1))
    probs = filtered_probs(torch.tensor([[1.0, 1.0, 0.0]]), filters, torch.tensor([0]))
    assert probs[0].count_nonzero() == 1
    assert probs[0, 0] > 0


@given(st.lists(st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 0.5, 2.0]), min_size=4, max_size=24))
def test_rank_orders_exact_ties_by_lowest_id(values: list[float]) -> None:
    for many in (values, values * 100):  # few are sorted, many go through topk
        expected = sorted(range(len(many)), key=lambda i: (-many[i], i))[:4]
        ranked = rank(torch.tensor([many]), 4)
        assert ranked.ids[0].tolist() == expected
        assert ranked.scores[0].tolist() == [many[i] for i in expected]


def test_sampled_frequencies_follow_the_probs() -> None:
    """Chi-square over 20,000 positions of one seed."""
    logits = torch.tensor([1.5, 0.3, -0.5, -1.0, 0.0, -4.0])
    draws = Draws([NoiseKey(12345, 1.0)], range(20000), 20000)
    counts = torch.bincount(sample(logits.expand(len(draws), -1), draws), minlength=6)
    expected = torch.softmax(logits, -1) * len(draws)
    assert ((counts - expected) ** 2 / expected).sum() < 20.5  # 99.9 % quantile of 5 degrees of freedom


def test_probs_are_prepared_without_a_device_sync() -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(3))
    draws = Draws([NoiseKey(2, 0.7), NoiseKey(3, 1.3, 4, 0.8), NoiseKey(4, 1.0, min_p=0.1)], [5, 6, 6])
    with Waits() as waits:
        probs = target_probs(logits, draws)
    assert waits.names == []
    assert torch.equal(probs, torch.cat([target_probs(logits[i : i + 1], draws.taken([i])) for i in range(3)]))
