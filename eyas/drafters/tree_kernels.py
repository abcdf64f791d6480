"""The growth of a draft tree's level on CUDA: scores and best children in one pass over the logits.

`best_children` is a scorer of `eyas.drafters.scoring` with `rank` behind it, without a copy of the logits. A program takes
one row and one block of the draft vocabulary. It keeps its best tokens and its part of the softmax; a second one joins
the blocks. `shared_noise` is the noise of all levels of a round. Legend: S sessions, R rows of a session, L levels, D draft
vocabulary, B blocks, k children.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.drafters.tree_growth import Frontier

BLOCK = 2048


def shared_noise(words: Tensor, draft_ids: Tensor, levels: int) -> Tensor:
    """What the target's draws add to the logits, float32 [S, L, D]; zero in sessions at temperature 0. One launch.

    words: see `eyas.drafters.scoring.noise_words`. draft_ids: the target's ids, int64 [D].
    """
    sessions, size = words.shape[1], len(draft_ids)
    noise = torch.empty((sessions, levels, size), dtype=torch.float32, device=draft_ids.device)
    with torch.cuda.device_of(draft_ids):
        _gumbel[(sessions * levels, triton.cdiv(size, BLOCK))](
            words, draft_ids, noise, sessions, size, LEVELS=levels, BLOCK=BLOCK, num_warps=8
        )
    return noise


def best_children(
    logits: Tensor, words: Tensor, noise: Tensor | None, level: int, k: int, above: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-scores float32 and ids int64 [S, R, k] of the best children, best first, ties by lowest id. Two launches.

    logits: [S, R, D] in any float type. noise: the output of `shared_noise`; None adds nothing. above: scores [S, R] of the
    nodes, added to their children's.
    """
    sessions, rows, size = logits.shape
    count, blocks = sessions * rows, triton.cdiv(size, BLOCK)
    keys = torch.empty((count, blocks, k), dtype=torch.int64, device=logits.device)
    sums = torch.empty((2, count, blocks), dtype=torch.float32, device=logits.device)
    scores = torch.empty((sessions, rows, k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((sessions, rows, k), dtype=torch.int64, device=logits.device)
    here = words if noise is None else noise[:, level]
    with torch.cuda.device_of(logits):
        _score_blocks[(count, blocks)](
            *(logits.contiguous(), words, here, keys, sums, sessions, size, count),
            ROWS=rows, NOISE_STRIDE=0 if noise is None else noise.shape[1], K=k, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        _join_blocks[(count,)](
            *(keys, sums, scores if above is None else above, scores, ids, blocks, count), HAS_ABOVE=above is not None,
            K=k, BLOCK_B=triton.next_power_of_2(blocks), BLOCK=triton.next_power_of_2(blocks * k), num_warps=4,
        )  # fmt: skip
    return scores, ids


def find_frontier(scores: Tensor, tokens: Tensor, top_k: int, num_children: int, before: int, has_parents: bool) -> Frontier:
    """As `eyas.drafters.tree_growth.find_frontier`. One launch."""
    sessions, count = scores.shape
    best = torch.empty((sessions, top_k), dtype=torch.float32, device=scores.device)
    ids = torch.empty((2, sessions, top_k), dtype=torch.int64, device=scores.device)
    parents = torch.empty((sessions, top_k * num_children), dtype=torch.int64, device=scores.device)
    with torch.cuda.device_of(scores):
        _frontier[(sessions,)](
            *(scores, tokens, best, ids[0], ids[1], parents, count, before),
            K=top_k, CHILDREN=num_children, HAS_PARENTS=has_parents,
            BLOCK_C=triton.next_power_of_2(num_children), BLOCK=triton.next_power_of_2(count), num_warps=4,
        )  # fmt: skip
    return Frontier(best, ids[0], ids[1], parents)


@triton.jit(do_not_specialize=["before"], do_not_specialize_on_alignment=["frontier", "rows"])
def _frontier(
    scores, tokens, best, frontier, rows, parents, count, before,
    K: tl.constexpr, CHILDREN: tl.constexpr, HAS_PARENTS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best candidates of a level of one session."""
    session, at, child = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, BLOCK_C)
    bits = (tl.load(scores + session * count + at, mask=at < count, other=0.0) + 0.0).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (bits.to(tl.int64) << 32) | (4294967295 - at.to(tl.int64))
    key = tl.where(at < count, key, -9223372036854775807)
    for place in range(K):
        top = tl.max(key, 0)
        found, high = 4294967295 - (top & 4294967295), (top >> 32).to(tl.int32)
        high = high ^ ((high >> 31) & 0x7FFFFFFF)
        out = session * K + place
        tl.store(best + out, high.to(tl.float32, bitcast=True))
        tl.store(frontier + out, tl.load(tokens + session * count + found))
        tl.store(rows + out, found // CHILDREN if HAS_PARENTS else found * 0)
        tl.store(parents + out * CHILDREN + child, before + 1 + found + child * 0, mask=child < CHILDREN)
        key = tl.where(key == top, -9223372036854775807, key)


@triton.jit(do_not_specialize=["sessions"])
def _gumbel(words, draft_ids, noise, sessions, size, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    """One block of the noise of one level of one session, times the temperature."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    session, kept = row // LEVELS, at < size
    temperature = tl.load(words + 4 * sessions + session).to(tl.float64, bitcast=True).to(tl.float32)
    scaled = tl.zeros([BLOCK], tl.float32)
    if temperature > 0:
        seed = tl.load(words + session).to(tl.uint64, bitcast=True)
        position = (tl.load(words + sessions + session) + row % LEVELS).to(tl.uint64)
        key = _mixed(_mixed(seed + 0x9E3779B97F4A7C15) + position * 0x9E3779B97F4A7C15)
        ids = tl.load(draft_ids + at, mask=kept, other=0)
        z = _mixed(key + (ids + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
        uniform = ((z >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
        scaled = -tl.log((-tl.log(1.0 - uniform)).to(tl.float32)) * temperature  # 1 - uniform is exact
    tl.store(noise + row * size + at, scaled, mask=kept)


@triton.jit
def _mixed(z):
    """`eyas.sampling.noise._mix_`."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=["sessions", "count"], do_not_specialize_on_alignment=["noise"])
def _score_blocks(
    logits, words, noise, keys, sums, sessions, size, count,
    ROWS: tl.constexpr, NOISE_STRIDE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """keys [N, B, k]: the block's best, an integer in the order of score, then id from the largest down. sums [2, N, B]: its
    highest score and its sum of exponentials relative to that."""
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    session, at = row // ROWS, block * BLOCK + tl.arange(0, BLOCK)
    kept = at < size
    scale = tl.load(words + 5 * sessions + session).to(tl.float64, bitcast=True).to(tl.float32)
    x = tl.load(logits + row * size + at, mask=kept, other=float("-inf")).to(tl.float32)
    x = tl.where((x == x) & (x != float("inf")), x, float("-inf"))
    if NOISE_STRIDE > 0:
        x = x + tl.load(noise + session * NOISE_STRIDE * size + at, mask=kept, other=0.0)
    x = x / scale
    top = tl.max(x, 0)
    total = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0)
    tl.store(sums + row * blocks + block, top)
    tl.store(sums + (count.to(tl.int64) + row) * blocks + block, total)
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (bits.to(tl.int64) << 32) | (4294967295 - at.to(tl.int64))
    key = tl.where(kept, key, -9223372036854775807)
    for place in range(K):
        best = tl.max(key, 0)
        tl.store(keys + (row * blocks + block) * K + place, best)
        key = tl.where(key == best, -9223372036854775807, key)


@triton.jit(do_not_specialize=["blocks", "count"])
def _join_blocks(
    keys, sums, above, scores, ids, blocks, count,
    HAS_ABOVE: tl.constexpr, K: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, b, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_B), tl.arange(0, BLOCK)
    tops = tl.load(sums + row * blocks + b, mask=b < blocks, other=float("-inf"))
    totals = tl.load(sums + (count.to(tl.int64) + row) * blocks + b, mask=b < blocks, other=0.0)
    top = tl.max(tops, 0)
    some = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(totals * tl.exp(tops - some), 0)
    log_sum = some + tl.log(tl.where(total == 0, 1.0, total))
    key = tl.load(keys + row * blocks * K + at, mask=at < blocks * K, other=-9223372036854775807)
    for place in range(K):
        best = tl.max(key, 0)
        bits = (best >> 32).to(tl.int32)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        score = bits.to(tl.float32, bitcast=True)
        score = tl.where(score == float("-inf"), score, score - log_sum)
        if HAS_ABOVE:
            score = score + tl.load(above + row)
        tl.store(scores + row * K + place, score)
        tl.store(ids + row * K + place, 4294967295 - (best & 4294967295))
        key = tl.where(key == best, -9223372036854775807, key)
