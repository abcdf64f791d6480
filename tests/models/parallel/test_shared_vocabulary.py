"""Ranks that hold parts of the vocabulary draw what one process draws, whatever the filters, and exchange little for it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.api.request import Request, SamplingParams
from eyas.kernels.arguments import Draws
from eyas.kernels.by_device import sample
from eyas.models.inputs import Segment
from eyas.models.parallel.shards import Shard, SharedVocabulary
from eyas.protocol.commit import NoiseKey
from eyas.sampling.sharded import likely_logits
from eyas.sampling.verify import can_draw_in_parts
from tests.support.devices.device_syncs import Waits
from tests.support.devices.rank_threads import RankThreads
from tests.support.tiers import nightly

VOCAB = 256
TOP_P = (0.9, 1e-50, 0.3, 0.999999, 0.5, 1.0)
MIN_P = (0.0, 0.0, 0.05, 0.3, 1.0)
HEATS = (1.0, 0.6, 0.05, 3.0, 1e-9, 40.0, 1.3)
KEYS = [
    NoiseKey(seed, HEATS[seed % 7], top_p=TOP_P[seed % 6], min_p=MIN_P[seed % 5])
    for seed in range(840)
    if TOP_P[seed % 6] < 1 or MIN_P[seed % 5] > 0
]


def segments_of(draws: Draws) -> list[Segment]:
    """One row for each draw."""
    none, one = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    rows = zip(draws.keys_of_rows, draws.positions, strict=True)
    return [Segment(one, one + position - 1, one, none, None, one, key) for key, position in rows]


def drawn_over(parts: int, logits: Tensor, draws: Draws, threads: RankThreads | None = None) -> list[int]:
    """What rank 0 gets where each of `parts` ranks has its part of the logits."""
    segments, shards = segments_of(draws), [Shard(rank, parts) for rank in range(parts)]
    with torch.inference_mode():  # as a pass gives them
        own = [shard.cut(logits, 1) for shard in shards]
    outputs = (threads or RankThreads(parts)).run(
        lambda rank: SharedVocabulary(shards[rank], logits.shape[1]).collect(segments, own[rank])
    )
    assert outputs[0].tokens is not None
    assert outputs[0].is_drawn == (True,) * len(draws)
    assert not len(outputs[0].logits), "no whole row"
    return outputs[0].tokens.tolist()


def kinds_of_logits(rows: int) -> dict[str, Tensor]:
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(7))
    odd = 3 * logits
    odd[:, : VOCAB // 2] = -torch.inf
    odd[1], odd[2, VOCAB - 1], odd[3, 5], odd[4, 130], odd[5, ::7] = -torch.inf, torch.inf, torch.nan, -torch.nan, torch.inf
    peaked = logits.clone()
    peaked[:, 200] += 30
    zeros = (logits * 1e-30).where(logits > 0, -0.0)
    zeros[::2, 77] = 0.3
    return {
        "usual": 4 * logits, "near": 0.01 * logits, "peaked": peaked, "tied": logits.round(),
        "flat": torch.zeros_like(logits), "huge": 1e38 * logits.clamp(-3, 3), "zeros": zeros, "odd": odd,
        "shifted": 4 * logits - 1000, "copies": (4 * logits[:, : VOCAB // 4]).repeat(1, 4),
    }  # fmt: skip


@pytest.mark.parametrize("parts", [nightly(1), 2, nightly(4)])
@pytest.mark.parametrize("kind", sorted(kinds_of_logits(8)))
def test_ranks_draw_with_top_p_and_min_p_as_one_does(parts: int, kind: str) -> None:
    logits, draws = kinds_of_logits(len(KEYS))[kind], Draws(KEYS, [3 * key.seed + 1 for key in KEYS])
    expected = sample(logits, draws).tolist()
    assert drawn_over(parts, logits, draws) == expected
    assert len(set(expected)) > 10


def test_rows_of_all_kinds_share_a_step() -> None:
    """Plain ones, greedy ones, some with top-k, some with top-p: each gets the token that it would get alone."""
    own = [{}, {"top_p": 0.8}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1}, {"top_p": 0.7, "min_p": 0.1}]
    keys = [NoiseKey(seed, (0.0, 0.9, 1.4)[seed % 3], **own[seed % 5]) for seed in range(300)]  # type: ignore[arg-type]
    draws = Draws(keys, [9] * len(keys))
    logits = 3 * torch.randn(len(keys), VOCAB, generator=torch.Generator().manual_seed(1))
    assert drawn_over(2, logits, draws) == sample(logits, draws).tolist()


def test_a_row_without_top_p_keeps_tokens_without_mass() -> None:
    """Whatever rows it shares a step with: a draw depends on its own row alone."""
    logits = torch.tensor([[0.0, -3.0, -60.0, -torch.inf]] * 2)
    draws = Draws([NoiseKey(0, 1.0, top_p=0.5), NoiseKey(0, 1.0, min_p=1e-30)], [1, 1])
    (kept,) = RankThreads(1).run(lambda rank: likely_logits(logits, draws, rank, 1))
    assert (kept > -torch.inf).tolist() == [[True, False, False, False], [True, True, True, False]]


def test_the_last_kept_token_does_not_depend_on_the_ranks() -> None:
    """Sums of integers: not one of many borders that fall between equal masses moves."""
    logits = torch.randn(2000, VOCAB, generator=torch.Generator().manual_seed(3)).mul(2).round().div(2)
    draws = Draws([NoiseKey(row, 0.7, top_p=(row % 64 + 1) / 65) for row in range(2000)], range(2000))
    assert drawn_over(1, logits, draws) == drawn_over(2, logits, draws) == drawn_over(4, logits, draws)


def test_64_rows_with_top_p_take_at_most_64_kb_a_rank() -> None:
    """992 bytes a row in 11 exchanges, whatever the vocabulary, instead of its logits. With min-p alone 16 bytes suffice."""
    for size, top_p, min_p, per_row in ((VOCAB, 0.9, 0.0, 992), (8 * VOCAB, 0.9, 0.1, 992), (VOCAB, 1.0, 0.1, 16)):
        threads, draws = RankThreads(2), Draws([NoiseKey(row, 1.0, 0, top_p, min_p) for row in range(64)], range(1, 65))
        drawn_over(2, torch.randn(64, size), draws, threads)
        assert sum(threads.sent) == per_row * 64
        assert len(threads.sent) == (11 if top_p < 1 else 2)
        assert sum(threads.sent) <= 64_000


def test_the_host_does_not_wait_while_ranks_search(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_reduce", "all_gather", "gather"):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda *args: None)
    keys = NoiseKey(1, 1.0), NoiseKey(2, 1.0, top_p=0.9), NoiseKey(3, 1.0, 4), NoiseKey(4, 1.0, min_p=0.1), NoiseKey(5)
    draws = Draws(keys, [4] * len(keys))
    with Waits() as waits:
        SharedVocabulary(Shard(1, 2), VOCAB).collect(segments_of(draws), torch.randn(len(draws), VOCAB // 2))
    assert waits.names == []


@pytest.mark.parametrize(("params", "in_parts"), [
    (SamplingParams(4, 1.0, top_p=0.9), True), (SamplingParams(4, 1.0, min_p=0.1), True),
    (SamplingParams(4, 1.0, top_k=9, top_p=0.9), True), (SamplingParams(4, 0.0, top_p=0.9, top_k=999), True),
    (SamplingParams(4, 1.0, top_k=999), False), (SamplingParams(4, 1.0, top_p=0.9, logprobs=1), False),
])  # fmt: skip
def test_draws_in_parts_need_no_whole_rows(params: SamplingParams, in_parts: bool) -> None:
    rows: Any = SimpleNamespace(request=Request("r", (1, 2), replace(params, seed=1)), tree=None, prompt_tokens=())
    assert can_draw_in_parts(rows) == in_parts
