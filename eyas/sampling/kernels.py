"""The sampler on CUDA: one pass over the logits draws every row's token, with the noise computed on the way; and ranking.

`draw_rows` is `eyas.sampling.sampler.sample` for rows without filters, `top_k` is `rank` there. A program takes one row and
one block of the vocabulary and keeps the block's best; a second kernel takes the best of all blocks. Within a block
probabilities are relative to the block's largest logit, so that no program waits for the row's. Legend: N rows, V
vocabulary, B blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.sampling.noise import row_keys
from eyas.sampling.sampler import MIN_TEMPERATURE, Draw
from eyas.tensors import upload

BLOCK = 2048


def draw_rows(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """One token id per row, int64 [N]; logits float32 [N, V], contiguous. V where a row holds NaN.

    Temperature 0 takes the likeliest token, above it argmin noise / probs as `exponential_race`. Two launches.
    """
    rows, vocab_size = logits.shape
    keys = row_keys([draw.key.seed for draw in draws], [draw.position for draw in draws])
    temperatures = np.array([draw.key.temperature for draw in draws], dtype=np.float64)
    words = upload(np.stack([keys, temperatures.view(np.int64)]), logits.device)
    blocks = triton.cdiv(vocab_size, BLOCK)
    found = torch.empty((3, rows, blocks), dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    with torch.cuda.device_of(logits):
        _race[(rows, blocks)](logits, words, found, rows, vocab_size, MIN=MIN_TEMPERATURE, BLOCK=BLOCK, num_warps=8)
        _winners[(rows,)](
            words, found, tokens, rows, blocks, vocab_size,
            MIN=MIN_TEMPERATURE, BLOCK=triton.next_power_of_2(blocks), num_warps=1,
        )  # fmt: skip
    return tokens


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest of each row of float32 scores [..., V] and their ids, best first, ties by lowest id. Two launches."""
    size = scores.shape[-1]
    rows, blocks = scores.numel() // size, triton.cdiv(size, BLOCK)
    keys = torch.empty((rows, blocks, k), dtype=torch.int64, device=scores.device)
    best = torch.empty((*scores.shape[:-1], k), dtype=torch.float32, device=scores.device)
    ids = torch.empty((*scores.shape[:-1], k), dtype=torch.int64, device=scores.device)
    with torch.cuda.device_of(scores):
        _block_keys[(rows, blocks)](scores.contiguous(), keys, size, K=k, BLOCK=BLOCK, num_warps=4)
        _best_keys[(rows,)](keys, best, ids, blocks * k, K=k, BLOCK=triton.next_power_of_2(blocks * k), num_warps=4)
    return best, ids


@triton.jit(do_not_specialize=["rows"])
def _race(logits, words, found, rows, vocab_size, MIN: tl.constexpr, BLOCK: tl.constexpr):
    """found [3, N, B]: the block's largest logit, its smallest score, and the bits of the winner's id."""
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    kept = ids < vocab_size
    x = tl.load(logits + row * vocab_size + ids, mask=kept, other=float("-inf"))
    temperature = tl.load(words + rows + row).to(tl.float64, bitcast=True).to(tl.float32)
    top = tl.max(x, 0)
    if temperature > 0:
        # splitmix64 of a counter, as eyas.sampling.noise has it
        z = tl.load(words + row).to(tl.uint64, bitcast=True) + (ids + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        z = z ^ (z >> 31)
        uniform = ((z >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
        noise = (-tl.log(1.0 - uniform)).to(tl.float32)  # 1 - uniform is exact
        weights = tl.exp((x - tl.where(top == float("-inf"), 0.0, top)) / tl.maximum(temperature, MIN))
        score, is_nan = noise / weights, (x != x) | (x == float("inf"))
    else:
        score, is_nan = -x, x != x
    score = tl.where(is_nan, float("-inf"), tl.where(kept, score, float("inf")))
    winner = tl.min(tl.where(score == tl.min(score, 0), ids, 2147483647), 0)
    winner = tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, vocab_size, winner)
    out = found + row * blocks + block
    tl.store(out, top)
    tl.store(out + rows.to(tl.int64) * blocks, tl.min(score, 0))
    tl.store(out + 2 * rows.to(tl.int64) * blocks, winner.to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["rows", "blocks"])
def _winners(words, found, tokens, rows, blocks, vocab_size, MIN: tl.constexpr, BLOCK: tl.constexpr):
    row, b = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    kept, at = b < blocks, found + row * blocks + b
    top = tl.load(at, mask=kept, other=float("-inf"))
    score = tl.load(at + rows.to(tl.int64) * blocks, mask=kept, other=float("inf"))
    bits = tl.load(at + 2 * rows.to(tl.int64) * blocks, mask=kept, other=0.0)
    ids = bits.to(tl.int32, bitcast=True)
    temperature = tl.load(words + rows + row).to(tl.float64, bitcast=True).to(tl.float32)
    largest = tl.max(top, 0)
    if temperature > 0:
        # a block's probabilities are exp((top - largest) / temperature) of what its scores were divided by
        below = (largest - tl.where(top == float("-inf"), largest, top)) / tl.maximum(temperature, MIN)
        score = score * tl.exp(tl.minimum(below, 80.0))
        score = tl.where(top == float("-inf"), float("inf"), score)
        if largest == float("-inf"):
            ids = tl.where(kept, vocab_size, ids)  # no token is possible
    winner = tl.min(tl.where(kept & (score == tl.min(score, 0)), ids, 2147483647), 0)
    winner = tl.where(tl.max(tl.where(kept, ids, 0), 0) == vocab_size, vocab_size, winner)
    tl.store(tokens + row, winner.to(tl.int64))


@triton.jit
def _block_keys(scores, keys, size, K: tl.constexpr, BLOCK: tl.constexpr):
    """The K largest keys of a block: an integer in the order of the score, then the id from the largest down."""
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    bits = (tl.load(scores + row * size + ids, mask=ids < size, other=0.0) + 0.0).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (bits.to(tl.int64) << 32) | (4294967295 - ids.to(tl.int64))
    key = tl.where(ids < size, key, -9223372036854775807)
    for place in range(K):
        best = tl.max(key, 0)
        tl.store(keys + (row * blocks + block) * K + place, best)
        key = tl.where(key == best, -9223372036854775807, key)


@triton.jit
def _best_keys(keys, best, ids, count, K: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    key = tl.load(keys + row * count + at, mask=at < count, other=-9223372036854775807)
    for place in range(K):
        top = tl.max(key, 0)
        bits = (top >> 32).to(tl.int32)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        tl.store(best + row * K + place, bits.to(tl.float32, bitcast=True))
        tl.store(ids + row * K + place, 4294967295 - (top & 4294967295))
        key = tl.where(key == top, -9223372036854775807, key)
