"""The growth of a draft tree's level on CUDA: scores and best children in one pass over the logits.

`best_children` makes no copy of the logits. A program takes one row and one block of the draft vocabulary. It keeps its best
tokens and its part of the softmax; a second one joins the blocks. `shared_noise` is the noise of all levels of a round.

Under top-k, top-p or min-p two more kernels come first. They find each row's last kept token from lists of the likeliest
ones, as the sampler's do. `draw_children` is a level of sampled chains: it lists the likeliest tokens of blocks, puts
together those that filters and K keep, and ranks and draws.

Legend: S sessions, R rows of a session, N rows of all sessions, L levels, D draft vocabulary, B blocks, k children, K most
tokens of a proposal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.device.transfer import on_device_of
from eyas.kernels.arguments import (
    MAX_KERNEL_K,
    MIN_FILTER_TEMPERATURE,
    MIN_TEMPERATURE,
    Frontier,
    ProbsFunction,
    Ranked,
)
from eyas.kernels.cuda.sampling import (
    ID_BITS,
    IDS,
    LINE,
    LISTED,
    LOWEST,
    MASS,
    MASS_ERROR,
    NO_KEY,
    TILE,
    _id,
    _keys_of_row,
    _reached,
    _search,
    key_of,
    list_best,
    logit_of,
    lowest_kept,
    noise_of,
    ordered,
    rank_key,
    ranked_id,
    real,
    row_key,
    without_nan,
)
from eyas.kernels.plain import drafting as plain

BLOCK = 2048
# The lowest weight of a token that can be drawn.
MIN_WEIGHT = tl.constexpr(1e-45)
# Blocks of a draft vocabulary up to which twice as many tokens of each are listed: each has more of the likeliest ones.
FEW_BLOCKS = 32
# A token below this probability is never drawn: its score may be no number, and the likeliest one's is far lower.
LEAST_DRAWN = tl.constexpr(1e-30)
# Keys that each key is compared with at a time.
COMPARED = tl.constexpr(16)


def shared_noise(words: Tensor, draft_ids: Tensor, levels: int) -> Tensor:
    """Compute the noise of all levels, see DraftingKernels. One launch."""
    words = words.contiguous()
    sessions, size = words.shape[1], len(draft_ids)
    noise = torch.empty((sessions, levels, size), dtype=torch.float32, device=draft_ids.device)
    with on_device_of(draft_ids):
        _gumbel[(sessions * levels, triton.cdiv(size, BLOCK))](
            words, draft_ids, noise, sessions, size, LEVELS=levels, BLOCK=BLOCK, num_warps=8
        )
    return noise


def best_children(
    logits: Tensor,
    words: Tensor,
    noise: Tensor | None,
    level: int,
    k: int,
    above: Tensor | None = None,
    probs: ProbsFunction | None = None,
) -> Ranked:
    """Score and rank children, see DraftingKernels. Two launches, and two more with filters."""
    if k > MAX_KERNEL_K:
        return plain.best_children(logits, words, noise, level, k, above, probs)
    words = words.contiguous()
    lowest = None if probs is None else lowest_keys(logits, words)
    sessions, rows, size = logits.shape
    count, blocks = sessions * rows, triton.cdiv(size, BLOCK)
    keys = torch.empty((count, blocks, k), dtype=torch.int64, device=logits.device)
    sums = torch.empty((2, count, blocks), dtype=torch.float32, device=logits.device)
    scores = torch.empty((sessions, rows, k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((sessions, rows, k), dtype=torch.int64, device=logits.device)
    here = words if noise is None else noise[:, level]
    with on_device_of(logits):
        _score_blocks[(count, blocks)](
            *(logits.contiguous(), words, here, words if lowest is None else lowest, keys, sums, sessions, size, count),
            ROWS=rows, NOISE_STRIDE=0 if noise is None else noise.shape[1], HAS_LOWEST=lowest is not None,
            K=k, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        _join_blocks[(count,)](
            *(keys, sums, scores if above is None else above.contiguous(), scores, ids, blocks, count),
            HAS_ABOVE=above is not None, K=k, BLOCK_B=triton.next_power_of_2(blocks),
            BLOCK=triton.next_power_of_2(blocks * k), num_warps=4,
        )  # fmt: skip
    return Ranked(scores, ids)


def lowest_keys(logits: Tensor, words: Tensor) -> Tensor:
    """Return the lowest key that the filters of each row keep, int64 [S, R], see `best_children`. Two launches."""
    sessions, rows, size = logits.shape
    count, blocks, logits = sessions * rows, triton.cdiv(size, BLOCK), logits.contiguous()
    found = torch.empty((4, count, blocks), dtype=torch.int32, device=logits.device)
    lists = torch.empty((count, blocks, LISTED), dtype=torch.int64, device=logits.device)
    lowest = torch.empty((sessions, rows), dtype=torch.int64, device=logits.device)
    with on_device_of(logits):
        _list_blocks[(count, blocks)](
            *(logits, words, found, lists, sessions, size, count),
            ROWS=rows, MIN=MIN_FILTER_TEMPERATURE, BLOCK=BLOCK, LINE=LINE, LISTED=LISTED, ALL=False, num_warps=8,
        )  # fmt: skip
        _lowest_keys[(count,)](
            *(logits, words, found, lists, lowest, sessions, size, blocks, count),
            ROWS=rows, MIN=MIN_FILTER_TEMPERATURE, BLOCK=triton.next_power_of_2(blocks),
            LIST=triton.next_power_of_2(blocks * LISTED), LISTED=LISTED, num_warps=4,
        )  # fmt: skip
    return lowest


def find_frontier(scores: Tensor, tokens: Tensor, top_k: int, num_children: int, before: int, has_parents: bool) -> Frontier:
    """Find the best candidates of a level, see DraftingKernels. One launch, where there are not too many."""
    if top_k > MAX_KERNEL_K:
        return plain.find_frontier(scores, tokens, top_k, num_children, before, has_parents)
    sessions, count = scores.shape
    best = torch.empty((sessions, top_k), dtype=torch.float32, device=scores.device)
    ids = torch.empty((2, sessions, top_k), dtype=torch.int64, device=scores.device)
    parents = torch.empty((sessions, top_k * num_children), dtype=torch.int64, device=scores.device)
    with on_device_of(scores):
        _frontier[(sessions,)](
            *(scores, tokens, best, ids[0], ids[1], parents, count, before),
            K=top_k, CHILDREN=num_children, HAS_PARENTS=has_parents,
            BLOCK_C=triton.next_power_of_2(num_children), BLOCK=triton.next_power_of_2(count), num_warps=4,
        )  # fmt: skip
    return Frontier(best, ids[0], ids[1], parents)


def draw_children(
    logits: Tensor, words: Tensor, level: int, draft_ids: Tensor, drawn: Tensor, probs: ProbsFunction
) -> Tensor:
    """Draw one level of chains, see DraftingKernels. Three launches."""
    k = drawn.shape[2] // 2
    sessions, _, size = logits.shape
    blocks, logits, device = triton.cdiv(size, BLOCK), logits.contiguous(), logits.device
    listed = 2 * LISTED if blocks <= FEW_BLOCKS else LISTED
    found = torch.empty((4, sessions, blocks), dtype=torch.int32, device=device)
    lists = torch.empty((sessions, blocks, listed), dtype=torch.int64, device=device)
    kept = torch.empty((sessions, k), dtype=torch.int64, device=device)
    sums = torch.empty((3, sessions), dtype=torch.int32, device=device)
    tokens = torch.empty((sessions, 1), dtype=torch.int64, device=device)
    with on_device_of(logits):
        _list_blocks[(sessions, blocks)](
            *(logits, words, found, lists, sessions, size, sessions),
            ROWS=1, MIN=MIN_TEMPERATURE, BLOCK=BLOCK, LINE=LINE, LISTED=listed, ALL=True, num_warps=8,
        )  # fmt: skip
        _keep_best[(sessions,)](
            *(logits, words, found, lists, kept, sums, sessions, size, blocks),
            MIN=MIN_TEMPERATURE, K=k, BLOCK=triton.next_power_of_2(blocks), LIST=triton.next_power_of_2(blocks * listed),
            LISTED=listed, num_warps=4,
        )  # fmt: skip
        _draw[(sessions,)](
            *(words, kept, sums, draft_ids, drawn, tokens, sessions, level),
            MIN=MIN_TEMPERATURE, LEVELS=drawn.shape[1], K=k, BLOCK=max(triton.next_power_of_2(k), 16), num_warps=4,
        )  # fmt: skip
    return tokens


@triton.jit(do_not_specialize=["before"], do_not_specialize_on_alignment=["frontier", "rows"])
def _frontier(
    scores, tokens, best, frontier, rows, parents, count, before,
    K: tl.constexpr, CHILDREN: tl.constexpr, HAS_PARENTS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the best candidates of a level of one session."""
    session, at, child = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, BLOCK_C)
    key = rank_key(tl.load(scores + session * count + at, mask=at < count, other=0.0), at, at < count)
    for place in range(K):
        top = tl.max(key, 0)
        found, out = ranked_id(top), session * K + place
        tl.store(best + out, logit_of(top >> 32))
        tl.store(frontier + out, tl.load(tokens + session * count + found))
        tl.store(rows + out, found // CHILDREN if HAS_PARENTS else found * 0)
        tl.store(parents + out * CHILDREN + child, before + 1 + found + child * 0, mask=child < CHILDREN)
        key = tl.where(key == top, NO_KEY, key)


@triton.jit(do_not_specialize=["sessions"])
def _gumbel(words, draft_ids, noise, sessions, size, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute one block of the noise of one level of one session, times the temperature."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    session, kept = row // LEVELS, at < size
    temperature = real(words, sessions, session, 4)
    scaled = tl.zeros([BLOCK], tl.float32)
    if temperature > 0:
        key = row_key(tl.load(words + session), tl.load(words + sessions + session) + row % LEVELS)
        scaled = -tl.log(noise_of(key, tl.load(draft_ids + at, mask=kept, other=0))) * temperature
    tl.store(noise + row * size + at, scaled, mask=kept)


@triton.jit
def _has_filters(words, sessions, session):
    """Return whether a session has top-k, top-p or min-p."""
    has_limit = (tl.load(words + 3 * sessions + session) > 0) | (real(words, sessions, session, 6) < 1)
    return has_limit | (real(words, sessions, session, 7) > 0)


@triton.jit(do_not_specialize=["sessions", "count"])
def _list_blocks(
    logits, words, found, lists, sessions, size, count,
    ROWS: tl.constexpr, MIN: tl.constexpr, BLOCK: tl.constexpr, LINE: tl.constexpr, LISTED: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """List in found [4, N, B] the block's largest logit, then what `list_best` finds.

    Args:
        lists: int64 [N, B, LISTED].
        ALL: also of sessions without filters.
    """
    row, block, blocks, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1), tl.arange(0, BLOCK)
    session, ids = row // ROWS, (i // LINE * blocks + block) * LINE + i % LINE
    is_listed = _has_filters(words, sessions, session)
    if ALL:
        is_listed = is_listed | (sessions > 0)
    if is_listed:
        x = without_nan(tl.load(logits + row * size + ids, mask=ids < size, other=float("-inf")))
        top, temperature = tl.max(x, 0), tl.maximum(real(words, sessions, session, 4), MIN)
        out, stride = found + row * blocks + block, count.to(tl.int64) * blocks
        tl.store(out, top.to(tl.int32, bitcast=True))
        list_best(x, ids, top, temperature, out + stride, stride, lists + (row * blocks + block) * LISTED, LISTED)


@triton.jit(do_not_specialize=["sessions", "blocks", "count"])
def _lowest_keys(
    reread, words, found, lists, lowest, sessions, size, blocks, count,
    ROWS: tl.constexpr, MIN: tl.constexpr, BLOCK: tl.constexpr, LIST: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Apply the filters of `eyas.kernels.probabilities.filtered_probs`. `reread`: the logits, for rows whose lists are not
    enough.
    """
    row, b, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, LIST)
    session, at, stride = row // ROWS, found + row * blocks + b, count.to(tl.int64) * blocks
    low = tl.full([], NO_KEY, tl.int64)
    if _has_filters(words, sessions, session):
        top = tl.load(at, mask=b < blocks, other=-8388608).to(tl.float32, bitcast=True)
        largest, scale = tl.max(top, 0), tl.maximum(real(words, sessions, session, 4), MIN)
        if largest > float("-inf"):
            top_k, top_p = tl.load(words + 3 * sessions + session), real(words, sessions, session, 6)
            sums = tl.load(at + stride, mask=b < blocks, other=0).to(tl.float32, bitcast=True)
            total = tl.sum(sums * tl.exp((top - largest) / scale), 0)
            limit = tl.max(tl.load(at + 2 * stride, mask=b < blocks, other=LOWEST), 0)
            counts = tl.load(found + 3 * stride + row * blocks + i // LISTED, mask=i < blocks * LISTED, other=0)
            keys = tl.load(lists + row * blocks * LISTED + i, mask=i % LISTED < counts, other=NO_KEY)
            unit, has_limit = MASS / total, (top_k > 0) | (top_p < 1)
            masses = (tl.exp((logit_of(keys >> ID_BITS) - largest) / scale) * unit).to(tl.int64)
            # the sum of masses, which top-k and top-p end at, leaves out what weighs less than one unit
            least_weight = tl.maximum(tl.where(has_limit, 1 / unit, MIN_WEIGHT), real(words, sessions, session, 7))
            floor, least = _lowest_of_weight(least_weight, largest, scale), key_of(limit, IDS - 1)
            source = (keys, masses, reread + row * size, size, largest, scale, unit)
            low, is_certain = lowest_kept(source, top_k, top_p, limit, tl.full([], MASS, tl.float32).to(tl.int64), False)
            if has_limit & ((not is_certain) | (tl.maximum(low, floor) < least)):
                low, is_certain = lowest_kept(source, top_k, top_p, limit * 0 + LOWEST, least, True)
            low = tl.maximum(low, floor)
    tl.store(lowest + row, low)


@triton.jit
def _lowest_of_weight(least, largest, scale):
    """Return the lowest key of tokens whose weight exp((logit - largest) / scale) is not below `least`,
    which is at most 1.
    """
    low, high = largest.to(tl.int64) * 0 + LOWEST, ordered(largest).to(tl.int64)
    while low < high:
        middle = low + (high - low) // 2
        if tl.exp((logit_of(middle) - largest) / scale) >= least:
            high = middle
        else:
            low = middle + 1
    return key_of(high, IDS - 1)


@triton.jit(do_not_specialize=["sessions", "count"], do_not_specialize_on_alignment=["noise"])
def _score_blocks(
    logits, words, noise, lowest, keys, sums, sessions, size, count,
    ROWS: tl.constexpr, NOISE_STRIDE: tl.constexpr, HAS_LOWEST: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write to keys [N, B, k] the block's best `rank_key`. sums [2, N, B]: its highest score and its sum of exponentials
    relative to that.
    """
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    session, at = row // ROWS, block * BLOCK + tl.arange(0, BLOCK)
    kept = at < size
    scale = real(words, sessions, session, 5)
    x = without_nan(tl.load(logits + row * size + at, mask=kept, other=float("-inf")))
    if HAS_LOWEST:
        x = tl.where(key_of(ordered(x), at) >= tl.load(lowest + row), x, float("-inf"))
    if NOISE_STRIDE > 0:
        x = x + tl.load(noise + session * NOISE_STRIDE * size + at, mask=kept, other=0.0)
    x = x / scale
    top = tl.max(x, 0)
    total = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0)
    tl.store(sums + row * blocks + block, top)
    tl.store(sums + (count.to(tl.int64) + row) * blocks + block, total)
    key = rank_key(x, at, kept)
    for place in range(K):
        best = tl.max(key, 0)
        tl.store(keys + (row * blocks + block) * K + place, best)
        key = tl.where(key == best, NO_KEY, key)


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
    key = tl.load(keys + row * blocks * K + at, mask=at < blocks * K, other=NO_KEY)
    for place in range(K):
        best = tl.max(key, 0)
        score = logit_of(best >> 32)
        score = tl.where(score == float("-inf"), score, score - log_sum)
        if HAS_ABOVE:
            score = score + tl.load(above + row)
        tl.store(scores + row * K + place, score)
        tl.store(ids + row * K + place, ranked_id(best))
        key = tl.where(key == best, NO_KEY, key)


@triton.jit(do_not_specialize=["sessions", "blocks"])
def _keep_best(
    reread, words, found, lists, kept, sums, sessions, size, blocks,
    MIN: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, LIST: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Write to kept [S, K] the keys of the tokens that filters and K keep, in any order.

    Args:
        sums [3, S]: their number; the largest logit and the sum of all tokens' weights relative to it, as bits. `reread`:
            the logits, for rows whose lists are not enough.
    """
    row, b, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, LIST)
    at, stride, out = found + row * blocks + b, sessions.to(tl.int64) * blocks, kept + row * K
    top = tl.load(at, mask=b < blocks, other=-8388608).to(tl.float32, bitcast=True)
    largest, scale = tl.max(top, 0), tl.maximum(real(words, sessions, row, 4), MIN)
    number, total = 0, tl.full([], 0.0, tl.float32)
    if largest > float("-inf"):
        parts = tl.load(at + stride, mask=b < blocks, other=0).to(tl.float32, bitcast=True)
        total = tl.sum(parts * tl.exp((top - largest) / scale), 0)
        limit = tl.max(tl.load(at + 2 * stride, mask=b < blocks, other=LOWEST), 0)
        counts = tl.load(found + 3 * stride + row * blocks + i // LISTED, mask=i < blocks * LISTED, other=0)
        keys = tl.load(lists + row * blocks * LISTED + i, mask=i % LISTED < counts, other=NO_KEY)
        masses = (tl.exp((logit_of(keys >> ID_BITS) - largest) / scale) * (MASS / total)).to(tl.int64)
        source = (keys, masses, reread + row * size, size, largest, scale, MASS / total)
        least = key_of(limit, IDS - 1)
        low, is_certain = _lowest_of_best(source, words, sessions, row, limit, K, False)
        if (not is_certain) | (low < least):
            low, is_certain = _lowest_of_best(source, words, sessions, row, limit * 0 + LOWEST, K, True)
        if low >= least:
            chosen = keys >= low
            place = tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(out + place, keys, mask=chosen & (place < K))
            number += tl.sum(chosen.to(tl.int32), 0)
        else:
            for start in range(0, size, TILE):
                some = _keys_of_row(reread + row * size, start, size)
                is_kept = some >= low
                slot = number + tl.cumsum(is_kept.to(tl.int32), 0) - 1
                tl.store(out + slot, some, mask=is_kept & (slot < K))
                number += tl.sum(is_kept.to(tl.int32), 0)
    tl.store(sums + row, number)
    tl.store(sums + sessions + row, largest.to(tl.int32, bitcast=True))
    tl.store(sums + 2 * sessions + row, total.to(tl.int32, bitcast=True))


@triton.jit
def _lowest_of_best(source, words, sessions, row, limit, K: tl.constexpr, IN_ROW: tl.constexpr):
    """Return the lowest key among the K best tokens that the filters keep, and whether it is certain; see `lowest_kept`."""
    top_k, top_p = tl.load(words + 3 * sessions + row), real(words, sessions, row, 6)
    has_limit, least = (top_k > 0) | (top_p < 1), key_of(limit, IDS - 1)
    best = _search(source, least, K, False, IN_ROW)
    low, is_certain = best, limit == limit
    if has_limit:
        low, is_certain = lowest_kept(source, top_k, top_p, limit, tl.full([], MASS, tl.float32).to(tl.int64), IN_ROW)
        # top-k and top-p keep more than K, and it does not matter how many
        reached = _reached(source, best, True, IN_ROW).to(tl.float32)
        keeps_more = (top_p >= 1) | ((top_k == 0) & (reached < top_p * MASS * (1 - 2 * MASS_ERROR)))
        keeps_more = keeps_more & (best >= least) & ((top_k == 0) | (top_k >= K))
        low, is_certain = tl.where(keeps_more, best, low), is_certain | keeps_more
    # the sum of masses, which top-k and top-p end at, leaves out what weighs less than one unit
    weight = tl.maximum(tl.where(has_limit, 1 / source[6], MIN_WEIGHT), real(words, sessions, row, 7))
    return tl.maximum(tl.maximum(low, best), _lowest_of_weight(weight, source[4], source[5])), is_certain


@triton.jit(do_not_specialize=["sessions", "level"])
def _draw(
    words, kept, sums, draft_ids, drawn, tokens, sessions, level,
    MIN: tl.constexpr, LEVELS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rank the kept tokens of one session, write their ids and probabilities, and draw one by an exponential race."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    number = tl.load(sums + row)
    largest = tl.load(sums + sessions + row).to(tl.float32, bitcast=True)
    total = tl.load(sums + 2 * sessions + row).to(tl.float32, bitcast=True)
    key = tl.load(kept + row * K + i, mask=i < number, other=NO_KEY)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, BLOCK, COMPARED):
        other = start + tl.arange(0, COMPARED)
        above = tl.load(kept + row * K + other, mask=other < number, other=NO_KEY)
        rank += tl.sum((above[None, :] > key[:, None]).to(tl.int32), 1)
    is_kept, ids = i < number, _id(key)
    rank = tl.where(is_kept, rank, i)
    scale = tl.maximum(real(words, sessions, row, 4), MIN)
    probs = tl.where(is_kept, tl.exp((logit_of(key >> ID_BITS) - largest) / scale) / total, 0.0)
    target = tl.load(draft_ids + ids, mask=is_kept, other=0)
    key = row_key(tl.load(words + row), tl.load(words + sessions + row) + level)
    noise, can_win = noise_of(key, target), probs > LEAST_DRAWN
    score = tl.where(can_win, noise / tl.where(can_win, probs, 1.0), float("inf"))
    place = tl.min(tl.where(score == tl.min(score, 0), rank, K), 0)
    out = drawn + (row * LEVELS + level) * (2 * K + 1)
    tl.store(out + rank, target.to(tl.float64), mask=i < K)
    tl.store(out + K + rank, probs.to(tl.float64), mask=i < K)
    tl.store(out + 2 * K, place.to(tl.float64))
    tl.store(tokens + row, tl.sum(tl.where(is_kept & (rank == place), ids, 0), 0).to(tl.int64))
