"""Draws and ranks rows on the CPU, by kernels compiled with numba that share functions with others; the rest is plain.

See docs/decisions/0038-compiled-cpu.md. Arrays are contiguous. Legend: N rows, V vocabulary, k candidates.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from eyas.kernels.arguments import (
    MASS_BITS,
    MAX_KERNEL_K,
    MIN_FILTER_TEMPERATURE,
    MIN_TEMPERATURE,
    UNREACHED,
    Draws,
    Ranked,
)
from eyas.kernels.cpu.compiling import kernel
from eyas.kernels.plain import sampling as plain
from eyas.kernels.plain.sampling import kept_logits as kept_logits
from eyas.kernels.plain.sampling import masses_from as masses_from
from eyas.kernels.plain.sampling import race as race
from eyas.protocol.commit import NoiseKey

LOG2_E = np.float32(1.4426950408889634)
# Bounds of the argument of `exp`: beyond them 2 to that power is no normal float32.
LOWEST, HIGHEST = np.float32(-87.3), np.float32(88.0)
# Added to a float32 and taken away again, it leaves the nearest whole number.
ROUNDER = np.float32(12582912.0)
# Scores whose highest is compared at once.
BLOCK = 64
# Of the hash of `eyas.kernels.noise`; the step from a token's counter to the next.
GOLDEN, MIX_1, MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
# Step between numbers of 52 bits, and the least of them; see `scaled_bits`.
STEP, LEAST_UNIFORM = 2.0**-52, 2.0**-53
# A lower bound of a score is not above it by more than this factor, whatever is rounded.
SLACK = 1.00001
# Filters sort the tokens of one bin: bins of logits below the highest one, BINS_OF_E for a factor of e in probability.
NUM_BINS, BINS_OF_E = 1024, np.float32(16.0)
# Unit of what a token counts for top-p, and how far below the likeliest token, in factors of e, a token counts nothing.
MASS, WEIGHTLESS = np.float32(2.0**MASS_BITS), np.float32(MASS_BITS * math.log(2) + 0.01)


@kernel(error_model="numpy", fastmath={"contract"}, inline="always")
def exp(x):
    """Return e to the power of x <= HIGHEST, to 2 units in the last place; e to LOWEST below that. Cephes' polynomial."""
    x = x if x > LOWEST else LOWEST
    # x = whole * ln 2 + r with |r| <= ln 2 / 2. Adding and subtracting ROUNDER rounds to a whole number.
    whole = (x * LOG2_E + ROUNDER) - ROUNDER
    # ln 2 in two parts, so that whole * 0.693359375 is exact.
    r = x - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * (r * r) + r + np.float32(1.0)
    # 2 ** whole by writing whole to the exponent bits of a float32.
    return y * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@kernel(error_model="numpy", fastmath={"contract"}, inline="always")
def ln(x):
    """Return the logarithm of a normal float32 above 0, to 2 units in the last place. Cephes' polynomial."""
    # x = 2 ** power * (1 + f) with 1 + f between sqrt(1/2), bits 0x3F3504F3, and sqrt(2).
    bits = np.float32(x).view(np.int32)
    power = np.int32((bits - np.int32(0x3F3504F3)) >> np.int32(23))
    f = np.int32(bits - np.int32(power << np.int32(23))).view(np.float32) - np.float32(1.0)
    y = np.float32(7.0376836292e-2)
    y = y * f - np.float32(1.1514610310e-1)
    y = y * f + np.float32(1.1676998740e-1)
    y = y * f - np.float32(1.2420140846e-1)
    y = y * f + np.float32(1.4249322787e-1)
    y = y * f - np.float32(1.6668057665e-1)
    y = y * f + np.float32(2.0000714765e-1)
    y = y * f - np.float32(2.4999993993e-1)
    y = y * f + np.float32(3.3333331174e-1)
    whole = np.float32(power)
    y = y * f * (f * f) - np.float32(2.12194440e-4) * whole - np.float32(0.5) * (f * f)
    return f + y + np.float32(0.693359375) * whole


@kernel(inline="always")
def mixed(z):
    """Return the finaliser of SplitMix64, as `eyas.kernels.noise` has it; uint64."""
    z = (z ^ (z >> np.uint64(30))) * MIX_1
    z = (z ^ (z >> np.uint64(27))) * MIX_2
    return z ^ (z >> np.uint64(31))


@kernel(inline="always")
def row_key(seed, position):
    """Return the key from which the noise of a seed and a position, both int64, is hashed; uint64."""
    return mixed(mixed(np.uint64(seed) + GOLDEN) + np.uint64(position) * GOLDEN)


@kernel(inline="always")
def noise_bits(key, token):
    """Return a token's number of 52 bits, int64."""
    return np.int64(mixed(key + np.uint64(token + 1) * GOLDEN) >> np.uint64(12))


@kernel(inline="always")
def scaled_bits(bits):
    """Return 52 bits as a number between 0 and 1, float64."""
    # Half a step more: never 0 or 1, so neither logarithm is infinite.
    return (np.float64(bits) + 0.5) * STEP


@kernel(inline="always")
def uniform(key, token):
    """Return a token's number between 0 and 1, float64. Its noise is -log1p(-uniform)."""
    return scaled_bits(noise_bits(key, token))


@kernel(inline="always")
def _ordered(bits):
    """Return the bits of a float32 as a number in the order of floats, and the other way round; int32."""
    # Floats with the sign bit set order backwards as integers: flip their other bits.
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@kernel()
def highest_of(x):
    """Return the highest of x [n], which may hold infinities but no NaN. Whole numbers are compared: LLVM makes vectors of
    that.
    """
    bits, highest = x.view(np.int32), np.int32(-(2**31))
    for i in range(len(bits)):
        highest = np.int32(max(highest, _ordered(bits[i])))
    return _ordered(highest).view(np.float32)


@kernel(fastmath={"reassoc"})
def sum_of(x):
    """Return the sum of x [n]."""
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i]
    return total


@kernel(error_model="numpy")
def best_of(row, maxima, values, ids):
    """Write the k highest of row [V], best first, the lowest id on a tie: to values and ids [k]. maxima: scratch
    [V / BLOCK].

    The k-th highest of the blocks' highest scores is at most the k-th highest score.
    """
    k, width, least = len(ids), len(row), -np.float32(np.inf)
    if k == 0:
        return
    # First pass: the k best of the blocks' maxima bound the k-th best score from below.
    blocks, count = (width + BLOCK - 1) // BLOCK, 0
    for b in range(blocks):
        highest = highest_of(row[b * BLOCK : (b + 1) * BLOCK])
        maxima[b] = highest
        if count == k and not highest > values[k - 1]:
            continue
        place = count if count < k else k - 1
        count = min(count + 1, k)
        while place and highest > values[place - 1]:
            values[place] = values[place - 1]
            place -= 1
        values[place] = highest
    if count == k:
        least = values[k - 1]
    # Second pass: only blocks whose maximum reaches the bound are read.
    count = 0
    for b in range(blocks):
        if maxima[b] < least or (count == k and not maxima[b] > values[k - 1]):
            continue
        for i in range(b * BLOCK, min((b + 1) * BLOCK, width)):
            score = row[i]
            if score < least or (count == k and not score > values[k - 1]):
                continue
            # Insertion into a sorted list; strict comparisons keep the lowest id on a tie.
            place = count if count < k else k - 1
            count = min(count + 1, k)
            while place and score > values[place - 1]:
                values[place], ids[place] = values[place - 1], ids[place - 1]
                place -= 1
            values[place], ids[place] = score, i


@kernel(error_model="numpy")
def rank_rows(scores, values, ids):
    """Write the k highest of each row of scores [N, V], best first, the lowest id on a tie: to values and ids [N, k]."""
    assert ids.shape[1] <= scores.shape[1], "fewer scores than candidates"
    maxima = np.empty((scores.shape[1] + BLOCK - 1) // BLOCK, np.float32)
    for n in range(scores.shape[0]):
        best_of(scores[n], maxima, values[n], ids[n])


@kernel(error_model="numpy")
def _highest_by_block(row, maxima):
    """Write the highest of each BLOCK of row [V], which may hold infinities but no NaN, to maxima."""
    bits = row.view(np.int32)
    for b in range(len(maxima)):
        block = bits[b * BLOCK : (b + 1) * BLOCK]
        highest = np.int32(-(2**31))
        for i in range(len(block)):
            highest = np.int32(max(highest, _ordered(block[i])))
        maxima[b] = _ordered(highest).view(np.float32)


@kernel(error_model="numpy", fastmath={"contract"})
def _block_weights(maxima, by, top, weights):
    """Write the weight of each block's highest score, exp((score - top) * by)."""
    for b in range(len(maxima)):
        weights[b] = exp((maxima[b] - top) * by)


@kernel(error_model="numpy")
def _least_bits(key, start, end):
    """Return the least number that `uniform` makes of tokens from `start` to `end`, before it is scaled."""
    least = np.int64(1 << 52)
    for i in range(start, end):
        least = min(least, noise_bits(key, i))
    return least


@kernel(error_model="numpy", fastmath={"contract"})
def _score(row, key, by, top, token):
    """Return a token's noise over its weight, exp((logit - top) * by)."""
    below = (top - row[token]) * by
    return np.float32(-math.log1p(-uniform(key, token))) * exp(below if below < HIGHEST else HIGHEST)


@kernel(error_model="numpy")
def _race(row, key, by, top, maxima, weights, bounds):
    """Return the token of row [V] with the least score, see `_score`: in this exponential race it wins with probability
    weight / sum of weights. Scratch: weights and bounds by block, as maxima are.

    -log1p(-u) >= u for u in (0, 1), so that the least u of a block over its highest weight bounds its scores from below. Few
    blocks have a bound so low that scores are computed.
    """
    size = len(row)
    _block_weights(maxima, by, top, weights)
    first = maxima.argmax() * BLOCK
    limit = _score(row, key, by, top, first + row[first : first + BLOCK].argmax()) * SLACK
    for block in range(len(maxima)):
        bounds[block] = np.inf
        if limit * weights[block] >= LEAST_UNIFORM:  # else even the least noise loses
            least = _least_bits(key, block * BLOCK, min((block + 1) * BLOCK, size))
            bounds[block] = scaled_bits(least) / weights[block]
    # The scores of the block with the least bound bound the winner's from above.
    first = bounds.argmin() * BLOCK
    for i in range(first, min(first + BLOCK, size)):
        limit = min(limit, _score(row, key, by, top, i) * SLACK)
    winner = np.int64(size)
    least_score = np.float32(np.inf)
    for block in range(len(maxima)):
        if bounds[block] > limit:
            continue
        for i in range(block * BLOCK, min((block + 1) * BLOCK, size)):
            if uniform(key, i) <= limit * weights[block]:
                score = _score(row, key, by, top, i)
                if score < least_score:
                    winner, least_score = np.int64(i), score
    return winner


@kernel(error_model="numpy", fastmath={"contract"}, inline="always")
def _bin_of(logit, top, by):
    """Return the bin of a logit of at most `top`; a lower one has a higher bin, and equal ones share theirs."""
    return np.int64(min((top - logit) * by * BINS_OF_E, np.float32(NUM_BINS - 1)))


@kernel(error_model="numpy", fastmath={"contract"}, inline="always")
def _mass(logit, top, by):
    """Return what a token counts for top-p: a whole number, so that no sum of them depends on its order."""
    return np.int64(exp((logit - top) * by) * MASS)


@kernel(error_model="numpy")
def _sorted_bin(row, maxima, least, top, by, found, count):
    """Return the `count` tokens of row [V] in the bin `found`: the highest logit first, the lowest id on a tie."""
    places, below, num = np.empty(count, np.int64), np.empty(count, np.float32), 0
    for block in range(len(maxima)):
        if maxima[block] < least or _bin_of(maxima[block], top, by) > found:
            continue
        for i in range(block * BLOCK, min((block + 1) * BLOCK, len(row))):
            if row[i] >= least and _bin_of(row[i], top, by) == found:
                places[num], below[num] = i, -row[i]
                num += 1
    return places[np.argsort(below, kind="mergesort")]


@kernel(error_model="numpy", fastmath={"contract"})
def _count_bins(row, maxima, least, top, by):
    """Return how many tokens of row [V] with logits of at least `least` each bin has, and their masses."""
    counts, masses = np.zeros(NUM_BINS, np.int64), np.zeros(NUM_BINS, np.int64)
    bins, own = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.float32)
    for block in range(len(maxima)):
        if maxima[block] < least:
            continue
        logits = row[block * BLOCK : (block + 1) * BLOCK]
        for j in range(len(logits)):  # apart from the sums, so that LLVM uses vectors
            below = (top - logits[j]) * by
            own[j] = exp(-below) * MASS
            bins[j] = np.int32(min(below * BINS_OF_E, np.float32(NUM_BINS - 1)))
        for j in range(len(logits)):
            if logits[j] >= least:
                counts[bins[j]] += 1
                masses[bins[j]] += np.int64(own[j])
    return counts, masses


@kernel(error_model="numpy")
def _last_kept(row, maxima, least, top, by, top_k, top_p):
    """Return the last token of row [V] that top-k and top-p keep, in the order of `_sorted_bin`.

    least: logits below this count for neither.
    """
    counts, masses = _count_bins(row, maxima, least, top, by)
    # The bin in which the last token of top-k lies, and what the tokens up to that one weigh.
    limit, end, before, total = top_k if top_k > 0 else counts.sum(), 0, 0, 0
    while before + counts[end] < limit:
        before += counts[end]
        total += masses[end]
        end += 1
    if top_k > 0 or top_p >= 1:
        places = _sorted_bin(row, maxima, least, top, by, end, counts[end])[: limit - before]
        if top_p >= 1:
            return places[-1]
        masses[end] = 0
        for place in places:
            masses[end] += _mass(row[place], top, by)
    total += masses[end]
    # A token is kept as long as all before it weigh less than the share.
    wanted, reached, found = math.ceil(np.float64(top_p) * np.float64(total)), 0, 0
    while found < end and reached + masses[found] < wanted:
        reached += masses[found]
        found += 1
    if found < end or top_k <= 0:
        places = _sorted_bin(row, maxima, least, top, by, found, counts[found])
    last = 0
    while last + 1 < len(places):
        reached += _mass(row[places[last]], top, by)
        if reached >= wanted:
            break
        last += 1
    return places[last]


@kernel(error_model="numpy", fastmath={"contract"})
def kept_tokens(row, maxima, top, by, top_k, top_p, min_p):
    """Return the tokens of row [V] that the filters of `eyas.kernels.probabilities` keep; the likeliest always is.

    Args:
        row: without NaN and infinity.
        maxima: see `_highest_by_block`.
        top: the highest logit, above minus infinity.
        by: inverse of the temperature.
        top_k: most tokens; 0 keeps all.
    """
    top_k = np.int64(0) if top_k >= len(row) else top_k
    least = edge = -np.float32(np.inf)
    last = np.int64(len(row))
    if top_k > 0 or top_p < 1:
        if 0 < top_k <= len(maxima):
            # The k-th highest of the blocks' highest logits is at most the k-th highest logit.
            least = np.partition(maxima, len(maxima) - top_k)[len(maxima) - top_k]
        elif top_k <= 0:
            least = top - WEIGHTLESS / by
        last = _last_kept(row, maxima, least, top, by, top_k, top_p)
        least = edge = row[last]
    if min_p > 0:  # a little below the bound, as the logarithm is rounded
        least = max(least, top + (ln(min_p) - np.float32(0.01)) / by)
    places, num = np.empty(len(row), np.int64), 0
    for block in range(len(maxima)):
        if maxima[block] < least:
            continue
        for i in range(block * BLOCK, min((block + 1) * BLOCK, len(row))):
            is_before = row[i] >= least and (row[i] > edge or i <= last)
            if is_before and exp((row[i] - top) * by) >= min_p:
                places[num] = i
                num += 1
    return places[:num]


@kernel(error_model="numpy")
def _race_of(row, places, key, by, top):
    """Return the one of a few tokens of row [V], in ascending order, that wins, as `_race` of all does."""
    winner, least = places[0], np.float32(np.inf)
    for place in places:
        score = _score(row, key, by, top, place)
        if score < least:
            winner, least = place, score
    return winner


@kernel(error_model="numpy")
def draw_each(logits, seeds, positions, temperatures, top_ks, top_ps, min_ps, above, drafted, tokens):
    """Draw one token of each row of float32 logits [N, V], to int64 tokens [N]; V where a row holds NaN.

    As `eyas.kernels.by_device.sample`: temperature 0 takes the likeliest token, above it argmin noise / probs.

    Args:
        seeds: the signed integers with the same bits.
        temperatures: float32, above 0 at least MIN_TEMPERATURE.
        top_ks, top_ps, min_ps: int64, float32 and float32; filters of rows with temperatures above 0.
        above, drafted: int64, see `Draws.along`; empty if every row counts.
    """
    num_rows, size = logits.shape
    maxima = np.empty((size + BLOCK - 1) // BLOCK, np.float32)
    weights, bounds = np.empty(len(maxima), np.float32), np.empty(len(maxima), np.float64)
    for n in range(num_rows):
        if len(above) and above[n] != n and tokens[above[n]] != drafted[n]:
            tokens[n] = UNREACHED
            continue
        row, num_unusable = logits[n], np.int32(0)
        for i in range(size):
            # NaN is the only number that differs from itself. Counting it without a branch lets LLVM use vectors.
            num_unusable += np.int32(row[i] != row[i])
        _highest_by_block(row, maxima)
        top = highest_of(maxima)
        is_drawn = temperatures[n] > 0
        if num_unusable or (is_drawn and np.isinf(top)):
            tokens[n] = size
        elif is_drawn:
            key, by = row_key(seeds[n], positions[n]), np.float32(1.0) / temperatures[n]
            if top_ks[n] > 0 or top_ps[n] < 1 or min_ps[n] > 0:
                places = kept_tokens(row, maxima, top, by, top_ks[n], top_ps[n], min_ps[n])
                tokens[n] = _race_of(row, places, key, by, top)
            else:
                tokens[n] = _race(row, key, by, top, maxima, weights, bounds)
        else:
            block = 0
            while maxima[block] != top:
                block += 1
            place = block * BLOCK
            while row[place] != top:
                place += 1
            tokens[n] = place


@kernel(inline="always")
def real_word(words, row, session):
    """Return a float32 among the output of `eyas.drafters.trees.scoring.noise_words`."""
    return np.float32(np.int64(words[row, session]).view(np.float64))


@kernel(error_model="numpy", fastmath={"contract"})
def shared_noise(words, draft_ids, noise):
    """Write to noise [S, L, D] the terms that the target's draws add to the logits; 0 in sessions at temperature 0.

    Args:
        words: see `eyas.drafters.trees.scoring.noise_words`.
        draft_ids: the target's ids, int64 [D].
    """
    uniforms = np.empty(len(draft_ids), np.float64)
    for s in range(noise.shape[0]):
        temperature = real_word(words, 4, s)
        for level in range(noise.shape[1]):
            row = noise[s, level]
            if temperature == 0:
                row[:] = np.float32(0.0)
                continue
            key = row_key(words[0, s], words[1, s] + level)
            for i in range(len(row)):
                uniforms[i] = uniform(key, draft_ids[i])
            for i in range(len(row)):
                # log1p in float32: the rounding of 1 - v is made up for by v / (1 - (1 - v))
                v, rest = np.float32(uniforms[i]), np.float32(1.0 - uniforms[i])
                lost = np.float32(1.0) - rest
                exponential = -ln(rest) * (v / lost) if lost > 0 else v
                # Gumbel noise times the temperature: argmax(logit + T * -log e) is the draw at that temperature.
                row[i] = -ln(exponential) * temperature


@kernel(error_model="numpy")
def filters_of(words, session):
    """Return top-k, the inverse of the temperature, top-p and min-p of a session's draws; words: as of `real_word`."""
    by = np.float32(1.0) / max(real_word(words, 4, session), np.float32(MIN_FILTER_TEMPERATURE))
    return words[3, session], by, real_word(words, 6, session), real_word(words, 7, session)


@kernel(error_model="numpy")
def kept_logits_of(logits, filters, kept, maxima):
    """Return logits [D], or `kept` [D] with minus infinity for what `filters_of` a session leave out.

    maxima: scratch, at least [D / BLOCK].
    """
    top_k, by, top_p, min_p = filters
    if not (top_k > 0 or top_p < 1 or min_p > 0):
        return logits
    for i in range(len(logits)):
        kept[i] = logits[i] if logits[i] < np.inf else -np.float32(np.inf)
    highest = maxima[: (len(logits) + BLOCK - 1) // BLOCK]
    _highest_by_block(kept, highest)
    top = highest_of(highest)
    if top > -np.inf:
        places = kept_tokens(kept, highest, top, by, top_k, top_p, min_p)
        found = kept[places]
        kept[:] = -np.float32(np.inf)
        kept[places] = found
    return kept


@kernel(error_model="numpy", fastmath={"contract"})
def shifted_scores(logits, noise, by, scores, weights):
    """Write logits [D] with noise [D], if there is some, times `by`, to scores; returns the logarithm of the sum of their
    exponentials. What is no number is never drafted. weights: scratch [D].
    """
    for i in range(len(logits)):
        scores[i] = logits[i] if logits[i] < np.inf else -np.float32(np.inf)
    if len(noise):
        for i in range(len(logits)):
            scores[i] += noise[i]
    for i in range(len(logits)):
        scores[i] *= by
    # Log-sum-exp around the highest score, so that no exponential overflows.
    top = highest_of(scores)
    if np.isinf(top):
        return np.float32(0.0)
    for i in range(len(logits)):
        weights[i] = exp(scores[i] - top)
    return top + ln(sum_of(weights))


def draw_rows(logits: Tensor, draws: Draws) -> Tensor:
    """Draw a token of each row of logits [N, V], see SamplingKernels."""
    keys = draws.keys
    tokens = torch.empty(len(logits), dtype=torch.int64)
    seeds = draws.by_row([key.seed for key in keys], np.uint64).view(np.int64)
    heats = [max(key.temperature, MIN_TEMPERATURE) if key.temperature > 0 else 0.0 for key in keys]
    top_ks = draws.by_row([key.top_k for key in keys], np.int64)
    reals = (draws.by_row(own, np.float32) for own in (heats, [key.top_p for key in keys], [key.min_p for key in keys]))
    temperatures, top_ps, min_ps = reals
    rows = logits.contiguous().numpy()
    paths = draws.above, draws.drafted
    draw_each(rows, seeds, draws.positions, temperatures, top_ks, top_ps, min_ps, *paths, tokens.numpy())
    return tokens


def top_k(scores: Tensor, k: int) -> Ranked:
    """Rank each row of scores [..., V], see SamplingKernels."""
    # The kernel neither knows NaN, which ranks first, nor many candidates.
    if not 0 < k <= min(MAX_KERNEL_K, scores.shape[-1]) or np.isnan(scores.numpy().sum()):
        return plain.top_k(scores, k)
    shape = (*scores.shape[:-1], k)
    best = Ranked(torch.empty(shape), torch.empty(shape, dtype=torch.int64))
    rows = scores.contiguous().view(-1, scores.shape[-1]).numpy()
    rank_rows(rows, best.scores.view(-1, k).numpy(), best.ids.view(-1, k).numpy())
    return best


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Load or compile the kernel of `draw_rows`."""
    draw_rows(torch.zeros(2, vocab_size), Draws([NoiseKey(0), NoiseKey(0, 1.0)], [0, 0]))
