"""The sampler on CUDA: one pass over the logits draws every row's token, with the noise computed on the way; and ranking.

A program takes one row and one block of the vocabulary and keeps the block's best; a second kernel takes the best of all
blocks. Within a block probabilities are relative to the block's largest logit, so that no program waits for the row's.

A row with top-k, top-p or min-p keeps the tokens down to some rank. Its programs list the likeliest tokens of their blocks.
The second kernel looks for the last kept token among those, because a list says down to which logit it is complete. Only if
that is not enough, as in very flat distributions, it reads the row again. Lines of a block are spread over the vocabulary,
because likely tokens often have neighbouring ids. Legend: N rows, V vocabulary, B blocks.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.arrays import Ints
from eyas.device.transfer import on_device_of, upload
from eyas.kernels.arguments import (
    MASS_BITS,
    MAX_KERNEL_K,
    MIN_TEMPERATURE,
    Draws,
    Kept,
    Ranked,
    Scale,
    has_filters,
)
from eyas.kernels.noise import row_keys
from eyas.kernels.plain import sampling as plain
from eyas.protocol.commit import NoiseKey

BLOCK = 2048
# Tokens of a block that are listed at most, and neighbouring ids in a block of a row with filters.
LISTED, LINE = 32, 32
# Bits of a token's id in its key, whose higher bits are its logit; how many ids there can be.
ID_BITS = tl.constexpr(20)
IDS = tl.constexpr(1 << 20)
# The lowest logit of a token that can be drawn, in the order of `ordered`; a key below all others. What is behind all ids.
LOWEST = tl.constexpr(-2139095040)
NO_KEY = tl.constexpr(-9223372036854775807)
NO_ID = tl.constexpr(2147483647)
# Tokens that are looked at together when a row is read again, and what a probability of 1 counts.
TILE = tl.constexpr(2048)
MASS = tl.constexpr(2.0**MASS_BITS)
# Relative error of a mass that blocks sum up on their own, with some room.
MASS_ERROR = tl.constexpr(1e-5)


def draw_rows(logits: Tensor, draws: Draws) -> Tensor:
    """Return one token id per row, int64 [N]; logits float32 [N, V], contiguous. V where a row holds NaN.

    Temperature 0 takes the likeliest token, above it argmin noise / probs as `exponential_race`. Two launches.
    """
    rows, vocab_size = logits.shape
    blocks, is_filtered = triton.cdiv(vocab_size, BLOCK), any(map(has_filters, draws.keys))
    words, listed = upload(_words(draws), logits.device), LISTED if is_filtered else 0
    found = torch.empty((6 if listed else 3, rows, blocks), dtype=torch.int32, device=logits.device)
    lists = torch.empty((rows, blocks, listed), dtype=torch.int64, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    with on_device_of(logits):
        _race[(rows, blocks)](
            *(logits, words, found, lists, rows, vocab_size, 0, vocab_size),
            MIN=MIN_TEMPERATURE, BLOCK=BLOCK, LINE=LINE if listed else BLOCK, LISTED=listed, num_warps=8,
        )  # fmt: skip
        _winners[(rows,)](
            *(logits, words, found, lists, tokens, rows, blocks, vocab_size),
            MIN=MIN_TEMPERATURE, BLOCK=triton.next_power_of_2(blocks), LIST=triton.next_power_of_2(blocks * listed),
            LISTED=listed, IS_PART=False, num_warps=8 if listed else 1,
        )  # fmt: skip
    return tokens


def race(logits: Tensor, draws: Draws, first_id: int, vocab_size: int) -> Tensor:
    """Find the winner of each row in a part of the vocabulary, see SamplingKernels. Two launches."""
    rows, width = logits.shape
    logits = logits.contiguous()
    blocks, words = triton.cdiv(width, BLOCK), upload(_words(draws), logits.device)
    found = torch.empty((3, rows, blocks), dtype=torch.int32, device=logits.device)
    best = torch.empty((3, rows), dtype=torch.int32, device=logits.device)
    with on_device_of(logits):
        _race[(rows, blocks)](
            *(logits, words, found, found, rows, width, first_id, vocab_size),
            MIN=MIN_TEMPERATURE, BLOCK=BLOCK, LINE=BLOCK, LISTED=0, num_warps=8,
        )  # fmt: skip
        _winners[(rows,)](
            *(logits, words, found, found, best, rows, blocks, vocab_size),
            MIN=MIN_TEMPERATURE, BLOCK=triton.next_power_of_2(blocks), LIST=1, LISTED=0, IS_PART=True, num_warps=1,
        )  # fmt: skip
    return best


def masses_from(logits: Tensor, scale: Scale, low: Tensor, shift: int, borders: range) -> Tensor:
    """Sum the mass from each border on, see SamplingKernels. Two launches."""
    rows, width = logits.shape
    masses = torch.zeros(rows, len(borders), dtype=torch.int64, device=logits.device)
    with on_device_of(logits):
        _masses_from[(rows, triton.cdiv(width, BLOCK))](
            *(logits.contiguous(), scale.largest, scale.temperature, low, masses, width, shift),
            FIRST=borders.start, END=borders.stop, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return masses


def kept_logits(logits: Tensor, scale: Scale, kept: Kept) -> Tensor:
    """Leave out the tokens that are not kept, see SamplingKernels, in place. One launch; a program takes a row."""
    rows, width = logits.shape
    with on_device_of(logits):
        _keep[(rows,)](logits, *scale, *kept, width, TILE=BLOCK, num_warps=8)
    return logits


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Compile the kernels of `draw_rows`, so that no request waits for that."""
    for key in (NoiseKey(0, 1.0), NoiseKey(0, 1.0, top_p=0.9)):
        draw_rows(torch.zeros(1, vocab_size, device=device), Draws([key], [0]))


def _words(draws: Draws) -> Ints:
    """Return what the rows' draws depend on, int64 [5, N]: keys of the noise, temperatures, top-k, top-p, min-p; reals as
    bits.
    """
    keys = draws.keys
    words = np.empty((5, len(draws)), dtype=np.int64)
    words[0] = row_keys(draws.by_row([key.seed for key in keys], np.uint64), draws.positions)
    words[2] = draws.by_row([key.top_k for key in keys], np.int64)
    for word, name in ((1, "temperature"), (3, "top_p"), (4, "min_p")):
        words[word].view(np.float64)[:] = draws.by_row([getattr(key, name) for key in keys], np.float64)
    return words


def top_k(scores: Tensor, k: int) -> Ranked:
    """Rank each row of scores [..., V], see SamplingKernels. Two launches, where there are not too many candidates."""
    if k > MAX_KERNEL_K:
        return plain.top_k(scores, k)
    size = scores.shape[-1]
    rows, blocks = scores.numel() // size, triton.cdiv(size, BLOCK)
    keys = torch.empty((rows, blocks, k), dtype=torch.int64, device=scores.device)
    best = torch.empty((*scores.shape[:-1], k), dtype=torch.float32, device=scores.device)
    ids = torch.empty((*scores.shape[:-1], k), dtype=torch.int64, device=scores.device)
    with on_device_of(scores):
        _block_keys[(rows, blocks)](scores.contiguous(), keys, size, K=k, BLOCK=BLOCK, num_warps=4)
        _best_keys[(rows,)](keys, best, ids, blocks * k, K=k, BLOCK=triton.next_power_of_2(blocks * k), num_warps=4)
    return Ranked(best, ids)


@triton.jit(do_not_specialize=["rows", "first_id"])
def _race(
    logits, words, found, lists, rows, width, first_id, vocab_size,
    MIN: tl.constexpr, BLOCK: tl.constexpr, LINE: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Write to found [3, N, B] the block's largest logit, its smallest score, and the winner's id; V if there is NaN.

    width: tokens of a row; `first_id` is the first one.
    """
    row, block, blocks, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1), tl.arange(0, BLOCK)
    ids = (i // LINE * blocks + block) * LINE + i % LINE
    kept = ids < width
    x = tl.load(logits + row * width + ids, mask=kept, other=float("-inf"))
    ids += first_id
    temperature = real(words, rows, row, 1)
    top = tl.max(x, 0)
    is_nan = (x != x) | (x == tl.where(temperature > 0, float("inf"), float("nan")))
    out, stride = found + row * blocks + block, rows.to(tl.int64) * blocks
    tl.store(out, top.to(tl.int32, bitcast=True))
    if LISTED > 0 and _is_filtered(words, rows, row):
        tl.store(out + 2 * stride, tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, vocab_size, 0))
        own_list = lists + (row * blocks + block) * LISTED
        list_best(x, ids, top, tl.maximum(temperature, MIN), out + 3 * stride, stride, own_list, LISTED)
        return
    if temperature > 0:
        weights = tl.exp((x - tl.where(top == float("-inf"), 0.0, top)) / tl.maximum(temperature, MIN))
        score = noise_of(tl.load(words + row), ids) / weights
    else:
        score = -x
    score = tl.where(is_nan, float("-inf"), tl.where(kept, score, float("inf")))
    winner = tl.min(tl.where(score == tl.min(score, 0), ids, NO_ID), 0)
    winner = tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, vocab_size, winner)
    tl.store(out + stride, tl.min(score, 0).to(tl.int32, bitcast=True))
    tl.store(out + 2 * stride, winner)


@triton.jit
def list_best(x, ids, top, temperature, out, stride, keys, LISTED: tl.constexpr):
    """List a block's likeliest tokens.

    out [3], `stride` apart: the block's sum of weights, the lowest ordered bits down to which its list is complete, and the
    list's length. keys: of the block's list, in any order.
    """
    weights = tl.exp((x - tl.where(top == float("-inf"), 0.0, top)) / temperature)
    bits = ordered(x)
    held = tl.sum((bits >= LOWEST).to(tl.int32), 0)
    low, high = tl.min(tl.maximum(bits, LOWEST), 0).to(tl.int64), tl.max(bits, 0).to(tl.int64) + 1
    if held <= LISTED:
        high = low * 0 + LOWEST
    else:
        held = held * 0
        # more than LISTED tokens are not below `low`, `held` tokens are not below `high`
        while (high - low > 1) & (held * 2 < LISTED):
            middle = low + (high - low) // 2
            count = tl.sum((bits >= middle).to(tl.int32), 0)
            if count > LISTED:
                low = middle
            else:
                high, held = middle, count
    chosen = bits >= high
    tl.store(keys + tl.cumsum(chosen.to(tl.int32), 0) - 1, key_of(bits, ids), mask=chosen)
    tl.store(out, tl.sum(weights, 0).to(tl.int32, bitcast=True))
    tl.store(out + stride, high.to(tl.int32))
    tl.store(out + 2 * stride, held)


@triton.jit(do_not_specialize=["rows", "blocks"])
def _winners(
    reread, words, found, lists, tokens, rows, blocks, vocab_size,
    MIN: tl.constexpr, BLOCK: tl.constexpr, LIST: tl.constexpr, LISTED: tl.constexpr, IS_PART: tl.constexpr,
):  # fmt: skip
    """Find the winners. `reread`: the logits, for rows whose lists are not enough. IS_PART: of the vocabulary; tokens gets
    `found` [3, N].
    """
    row, b = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    kept, at, stride = b < blocks, found + row * blocks + b, rows.to(tl.int64) * blocks
    top = tl.load(at, mask=kept, other=-8388608).to(tl.float32, bitcast=True)
    ids = tl.load(at + 2 * stride, mask=kept, other=0)
    temperature = real(words, rows, row, 1)
    largest = tl.max(top, 0)
    # a block's probabilities are exp((top - largest) / temperature) of what its scores were divided by
    is_level = (top == largest) | (top == float("-inf"))
    below = tl.where(is_level, 0.0, (largest - top) / tl.maximum(temperature, MIN))
    if LISTED > 0 and _is_filtered(words, rows, row):
        winner = vocab_size
        if (tl.max(ids, 0) < vocab_size) & (largest > float("-inf")):
            sums = tl.load(at + 3 * stride, mask=kept, other=0).to(tl.float32, bitcast=True) * tl.exp(-below)
            total = (tl.sum(tl.where(top == float("-inf"), 0.0, sums), 0) * MASS).to(tl.int64)
            limit = tl.max(tl.load(at + 4 * stride, mask=kept, other=LOWEST), 0)
            i = tl.arange(0, LIST)
            counts = tl.load(found + 5 * stride + row * blocks + i // LISTED, mask=i < blocks * LISTED, other=0)
            keys = tl.load(lists + row * blocks * LISTED + i, mask=i % LISTED < counts, other=NO_KEY)
            settings = (words, rows, row, largest, tl.maximum(temperature, MIN))
            winner, is_certain = _draw_kept(keys, reread, vocab_size, settings, limit, total, False)
            if not is_certain:
                whole = reread + row * vocab_size
                winner, is_certain = _draw_kept(keys, whole, vocab_size, settings, limit * 0 + LOWEST, total, True)
        tl.store(tokens + row, winner.to(tl.int64))
        return
    score = tl.load(at + stride, mask=kept, other=2139095040).to(tl.float32, bitcast=True)
    if temperature > 0:
        score = score * tl.exp(tl.minimum(below, 80.0))
        score = tl.where(top == float("-inf"), float("inf"), score)
        if not IS_PART and largest == float("-inf"):
            ids = tl.where(kept, vocab_size, ids)  # no token is possible
    winner = tl.min(tl.where(kept & (score == tl.min(score, 0)), ids, NO_ID), 0)
    winner = tl.where(tl.max(tl.where(kept, ids, 0), 0) == vocab_size, vocab_size, winner)
    if IS_PART:
        tl.store(tokens + row, largest.to(tl.int32, bitcast=True))
        tl.store(tokens + rows + row, tl.min(score, 0).to(tl.int32, bitcast=True))
        tl.store(tokens + 2 * rows + row, winner)
    else:
        tl.store(tokens + row, winner.to(tl.int64))


@triton.jit
def _draw_kept(keys, logits, size, settings, limit, total, IN_ROW: tl.constexpr):
    """Return the winner among the tokens that the filters keep, and whether it is certain: always, if the whole row is read.

    `keys`: of listed tokens; down to `limit`, in ordered bits, all of the row's are listed. `total`: the row's mass, about.
    Kept are the tokens with keys from `low` on, if they weigh enough.
    """
    words, rows, row, largest, scale = settings
    top_k, top_p, min_p = tl.load(words + 2 * rows + row), real(words, rows, row, 3), real(words, rows, row, 4)
    masses = (tl.exp((logit_of(keys >> ID_BITS) - largest) / scale) * MASS).to(tl.int64)
    source = (keys, masses, logits, size, largest, scale, MASS)
    low, is_certain = lowest_kept(source, top_k, top_p, limit, total, IN_ROW)
    least = key_of(limit, IDS - 1)
    is_certain = is_certain & ((low >= least) | (tl.exp((logit_of(limit) - largest) / scale) < min_p))
    best, winner = tl.full([], float("inf"), tl.float32), tl.full([], NO_ID, tl.int32)
    for start in range(0, size if IN_ROW else 1, TILE):
        some = _keys_of_row(logits, start, size) if IN_ROW else keys
        weights, ids = tl.exp((logit_of(some >> ID_BITS) - largest) / scale), _id(some)
        kept = (some >= low) & (weights >= min_p)
        score = tl.where(kept, noise_of(tl.load(words + row), ids) / weights, float("inf"))
        lowest = tl.min(score, 0)
        found = tl.min(tl.where(kept & (score == lowest), ids, NO_ID), 0)
        winner = tl.where(lowest < best, found, tl.where(lowest == best, tl.minimum(found, winner), winner))
        best = tl.minimum(best, lowest)
    return winner, is_certain


@triton.jit
def lowest_kept(source, top_k, top_p, limit, total, IN_ROW: tl.constexpr):
    """Return the lowest key that top-k and top-p keep, and whether it is certain; see `_draw_kept`.

    source: keys and masses of listed tokens; the row's logits, their number, the largest; the temperature; the mass of the
    likeliest token. The key is below all others if the filters keep more than is listed.
    """
    least = key_of(limit, IDS - 1)
    low, is_certain = key_of(limit * 0 + LOWEST, IDS - 1), limit == limit
    if top_k > 0:
        low = _search(source, least, top_k, False, IN_ROW)
        is_certain = low >= least
    if top_p < 1:
        if (top_k > 0) | IN_ROW:
            total = _reached(source, low, True, IN_ROW)
        wanted = tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
        low = _search(source, least, wanted, True, IN_ROW)
        if not IN_ROW and (top_k == 0) & (low >= least):
            room = (wanted.to(tl.float32) * MASS_ERROR).to(tl.int64)
            reached, before = _reached(source, low, True, IN_ROW), _reached(source, low + 1, True, IN_ROW)
            is_certain = (before < wanted - room) & (reached > wanted + room)
    return low, is_certain


@triton.jit
def _search(source, least, wanted, BY_MASS: tl.constexpr, IN_ROW: tl.constexpr):
    """Return the key of the last of the fewest best tokens that together reach `wanted`, a number or a mass.

    The lowest of all keys if those from `least` on do not reach it.
    """
    low, high = least, key_of(ordered(source[4]), 0)
    if _reached(source, low, BY_MASS, IN_ROW) < wanted:
        low = key_of(high * 0 + LOWEST, IDS - 1)
        high = low
    while low < high:
        middle = low + (high - low + 1) // 2
        if _reached(source, middle, BY_MASS, IN_ROW) >= wanted:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _reached(source, low, BY_MASS: tl.constexpr, IN_ROW: tl.constexpr):
    """Return the number or mass of the tokens with keys from `low` on, int64."""
    keys, masses, logits, size, largest, scale, unit = source
    if not IN_ROW:
        return tl.sum(tl.where(keys >= low, masses if BY_MASS else 1, 0).to(tl.int64), 0)
    reached = tl.zeros([TILE], tl.int64)
    for start in range(0, size, TILE):
        some = _keys_of_row(logits, start, size)  # another name, because lists have other sizes
        counts = (tl.exp((logit_of(some >> ID_BITS) - largest) / scale) * unit).to(tl.int64) if BY_MASS else 1
        reached += tl.where(some >= low, counts, 0)
    return tl.sum(reached, 0)


@triton.jit
def _keys_of_row(logits, start, size):
    ids = start + tl.arange(0, TILE)
    return key_of(ordered(without_nan(tl.load(logits + ids, mask=ids < size, other=float("-inf")))), ids)


@triton.jit
def without_nan(x):
    """Return logits in float32 with minus infinity for what is no number."""
    x = x.to(tl.float32)
    return tl.where((x == x) & (x != float("inf")), x, float("-inf"))


@triton.jit
def key_of(bits, ids):
    """Return the key of a token: the higher, the better its rank."""
    return (bits.to(tl.int64) + 1) * IDS - 1 - ids


@triton.jit
def _id(keys):
    return ((keys & (IDS - 1)) ^ (IDS - 1)).to(tl.int32)


@triton.jit
def _mixed(z):
    """Mix as `eyas.kernels.noise` does."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def row_key(seed, position):
    """Return what the noise of a seed and a position, both int64, is hashed from, as `eyas.kernels.noise` has it."""
    z = _mixed(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    return _mixed(z + position.to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def noise_of(key, ids):
    """Return exponential noise of tokens: splitmix64 of a counter, as eyas.kernels.noise has it. key: of `row_key`."""
    z = _mixed(key.to(tl.uint64, bitcast=True) + (ids + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    uniform = ((z >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return (-tl.log(1.0 - uniform)).to(tl.float32)  # 1 - uniform is exact


@triton.jit
def real(words, rows, row, word):
    """Return a real number of a row's words, see `_words`."""
    return tl.load(words + word * rows + row).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _is_filtered(words, rows, row):
    """Return whether a row is not greedy and has top-k, top-p or min-p."""
    has_filters = (tl.load(words + 2 * rows + row) > 0) | (real(words, rows, row, 3) < 1) | (real(words, rows, row, 4) > 0)
    return has_filters & (real(words, rows, row, 1) > 0)


@triton.jit
def ordered(x):
    """Return integers in the order of floats; zeros are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of(bits):
    """Return the float of `ordered`."""
    bits = bits.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def rank_key(x, ids, kept):
    """Return integers in the order of scores, of equal ones the lowest id first; NO_KEY where they are not kept."""
    return tl.where(kept, (ordered(x).to(tl.int64) << 32) | (4294967295 - ids.to(tl.int64)), NO_KEY)


@triton.jit
def ranked_id(key):
    """Return the id in a `rank_key`, whose score is `logit_of(key >> 32)`."""
    return 4294967295 - (key & 4294967295)


@triton.jit(do_not_specialize=["width", "shift"])
def _masses_from(
    logits, largest, temperatures, low, masses, width, shift, FIRST: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Fill masses [N, END - FIRST], zeros before: each block adds its tokens' mass from each border on."""
    row, ids = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * width + ids, mask=ids < width, other=float("-inf"))
    mass = (tl.exp((without_nan(x) - tl.load(largest + row)) / tl.load(temperatures + row)) * MASS).to(tl.int64)
    places = tl.where(mass > 0, (ordered(x).to(tl.int64) - tl.load(low + row)) >> shift, FIRST - 1)
    if tl.max(places, 0) >= FIRST:
        for border in tl.static_range(FIRST, END):
            found = tl.sum(tl.where(places >= border, mass, 0), 0)
            tl.atomic_add(masses + row * (END - FIRST) + border - FIRST, found, mask=found > 0)


@triton.jit(do_not_specialize=["width"])
def _keep(logits, largest, temperatures, last, before, wanted, min_p, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top, temperature, reached = tl.load(largest + row), tl.load(temperatures + row), tl.load(before + row)
    lowest, most, least = tl.load(last + row), tl.load(wanted + row), tl.load(min_p + row)
    for start in range(0, width, TILE):
        ids = start + tl.arange(0, TILE)
        x = tl.load(logits + row * width + ids, mask=ids < width, other=float("-inf"))
        bits = ordered(x).to(tl.int64)
        weights = tl.exp((without_nan(x) - top) / temperature)
        mass, is_last = (weights * MASS).to(tl.int64), bits == lowest
        is_below = reached + (tl.cumsum(is_last.to(tl.int32), 0) - 1) * mass < most
        is_kept = ((bits > lowest) | (is_last & is_below)) & (weights >= least)
        tl.store(logits + row * width + ids, float("-inf"), mask=(x < float("inf")) & ~is_kept & (ids < width))
        reached += tl.sum(tl.where(is_last, mass, 0), 0)


@triton.jit
def _block_keys(scores, keys, size, K: tl.constexpr, BLOCK: tl.constexpr):
    """Write the K largest of a block's `rank_key`."""
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    key = rank_key(tl.load(scores + row * size + ids, mask=ids < size, other=0.0), ids, ids < size)
    for place in range(K):
        best = tl.max(key, 0)
        tl.store(keys + (row * blocks + block) * K + place, best)
        key = tl.where(key == best, NO_KEY, key)


@triton.jit
def _best_keys(keys, best, ids, count, K: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    key = tl.load(keys + row * count + at, mask=at < count, other=NO_KEY)
    for place in range(K):
        top = tl.max(key, 0)
        tl.store(best + row * K + place, logit_of(top >> 32))
        tl.store(ids + row * K + place, ranked_id(top))
        key = tl.where(key == top, NO_KEY, key)
