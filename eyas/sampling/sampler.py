"""From logits to tokens: temperature and filters, then one draw per row; and exact ranking.

Legend: N rows, V vocabulary, P tokens of a part of it, k candidates. Softmax and comparisons are float32; ties go to the
lowest id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.device.placement import runs_compiled, runs_triton
from eyas.device.transfer import upload
from eyas.kernels.arguments import MASS_BITS, MIN_TEMPERATURE, Draw, Draws, has_filters
from eyas.kernels.noise import exponential_noise, signed
from eyas.protocol.commit import NoiseKey

# Scores of a row up to which sorting is faster than torch.topk over packed integers.
MAX_SORTED = 256
# Candidates up to which the kernel, which finds one after the other, is faster than torch.topk.
MAX_KERNEL_K = 64
# Parts whose largest logit is further below that of the others, at the row's temperature, are never drawn.
MAX_BELOW = 80.0
# Top-k up to which a draw from parts of the vocabulary takes the likeliest tokens of each.
MAX_CANDIDATES = 256


def sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return one token id per row, int64 [N]; logits float32 [N, V]. V where logits are NaN. Does not wait for the device.

    Temperature 0 takes the likeliest token. Above it, argmin noise / probs: noise depends on (seed, position, token) alone.
    On CUDA kernels draw all rows in one pass over the logits, if Triton is installed. On the CPU with one thread and numba
    a kernel draws those without filters.
    """
    if draws and runs_triton(logits.device):
        from eyas.kernels.cuda.sampling import draw_rows

        return draw_rows(logits.contiguous(), draws)
    if draws and is_readable(logits) and runs_compiled(logits.device):
        return _sample_compiled(logits, draws)
    draws = Draws.of(draws)
    random = np.flatnonzero(draws.by_row([key.temperature > 0 for key in draws.keys], np.bool_)).tolist()
    if random and len(random) == len(draws):
        return draw_tokens(target_probs(logits, draws), draws)
    tokens = greedy(logits)
    if random:
        rows, drawn = upload(random, logits.device), [draws[row] for row in random]
        tokens[rows] = draw_tokens(target_probs(logits[rows], drawn), drawn)
    return tokens


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Prepare what `sample` runs on a device, so that the first requests do not wait for it."""
    if runs_triton(device):
        from eyas.kernels.cuda import sampling as kernels

        kernels.warm_up(vocab_size, device)
    elif device.type == "cpu":
        keys = (NoiseKey(0), NoiseKey(0, 1.0))
        sample(torch.zeros(2, vocab_size), [Draw(key, 0) for key in keys])


def is_readable(values: Tensor) -> bool:
    """Return whether kernels of the CPU can read the values now: not those of an emulated device, which
    they would wait for.
    """
    return type(values) is Tensor and not values.requires_grad


def _sample_compiled(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    from eyas.kernels.cpu.sampling import draw_rows

    draws = Draws.of(draws)
    keys, tokens = draws.keys, torch.empty(len(draws), dtype=torch.int64)
    seeds = draws.by_row([signed(key.seed) for key in keys], np.int64)
    heats = [max(key.temperature, MIN_TEMPERATURE) if key.temperature > 0 else 0.0 for key in keys]
    draw_rows(logits.contiguous().numpy(), seeds, draws.positions, draws.by_row(heats, np.float32), tokens.numpy())
    filtered = np.flatnonzero(draws.by_row(list(map(has_filters, keys)), np.bool_)).tolist()
    if filtered:
        rows, drawn = torch.tensor(filtered), [draws[row] for row in filtered]
        tokens[rows] = draw_tokens(target_probs(logits[rows], drawn), drawn)
    return tokens


def race(logits: Tensor, draws: Sequence[Draw], first_id: int, vocab_size: int) -> Tensor:
    """Return what each row's draw finds in one part of the vocabulary, for `best_of_races`; filters are not applied.

    Returns int32 [3, N]: bits of the part's largest logit, bits of its lowest score, and the token with it; vocab_size
    where the part holds NaN. Scores are those of an exponential race relative to the part's largest logit, or -logit.

    Args:
        logits: float32 [N, P] of the tokens from `first_id` on.
        vocab_size: of all parts.
    """
    if runs_triton(logits.device):
        from eyas.kernels.cuda import sampling as kernels

        return kernels.race(logits.contiguous(), draws, first_id, vocab_size)
    top, scores = logits.amax(-1), -logits
    random = [row for row, draw in enumerate(draws) if draw.key.temperature > 0]
    if random:
        rows, drawn = upload(random, logits.device), [draws[row] for row in random]
        base = top[rows].masked_fill(top[rows] == -torch.inf, 0.0)[:, None]
        weights = torch.exp((logits[rows] - base) / _temperatures(drawn, logits.device)[:, None])
        ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
        noise = exponential_noise([draw.key.seed for draw in drawn], [draw.position for draw in drawn], ids)
        scores[rows] = noise / weights
    best, ids = scores.min(-1)
    ids = _ids_or_nan(best, ids + first_id, vocab_size)
    return torch.stack([top.view(torch.int32), best.view(torch.int32), ids.int()])


def best_of_races(found: Tensor, draws: Sequence[Draw], vocab_size: int) -> Tensor:
    """Return what `sample` draws over the whole vocabulary: int64 [N].

    found: int32 [S, 3, N], `race` of each part in the order of their ids. A score of parts has a relative error of at most
    (3 g + 12) * 2**-24, g being how far the token's logit is below the row's largest, divided by the temperature; one part's
    has no larger one. So the two can differ only where the two best scores are closer than twice that, which has a
    probability of at most twice that: 6e-6 at g = 12.
    """
    if runs_triton(found.device):
        from eyas.kernels.cuda import sampling as kernels

        return kernels.best_of_races(found, draws, vocab_size)
    tops, scores, ids = found[:, 0].view(torch.float32), found[:, 1].view(torch.float32), found[:, 2].long()
    largest, temperatures = tops.amax(0), _temperatures(draws, found.device)
    is_random = upload(np.array([draw.key.temperature > 0 for draw in draws]), found.device)
    below = ((largest - tops) / temperatures).clamp(max=MAX_BELOW)
    scaled = (scores * below.exp()).masked_fill(tops == -torch.inf, torch.inf)
    best = torch.where(is_random, scaled, scores).min(0)
    tokens = ids.gather(0, best.indices[None])[0]
    is_unusable = (ids == vocab_size).any(0) | (is_random & (largest == -torch.inf))
    return tokens.masked_fill(is_unusable, vocab_size)


def takes_candidates(key: NoiseKey) -> bool:
    """Return whether the key's draws look at few tokens, which the likeliest ones of each part of the vocabulary contain."""
    return key.temperature > 0 and 0 < key.top_k <= MAX_CANDIDATES


def candidates(logits: Tensor, k: int, first_id: int) -> Tensor:
    """Return the k likeliest tokens of each row in one part of the vocabulary, for `draw_candidates`.

    logits: float32 [N, P] of the tokens from `first_id` on. Returns int32 [2, N, min(k, P)]: bits of logits, and ids. A part
    with NaN has NaN among its logits.
    """
    found = rank(logits, min(k, logits.shape[1]))
    scores = torch.cat([logits.amax(-1, keepdim=True), found.scores[:, 1:]], 1)
    return torch.stack([scores.view(torch.int32), (found.ids + first_id).int()])


def draw_candidates(found: Tensor, draws: Sequence[Draw], vocab_size: int) -> Tensor:
    """Return what `sample` draws over the whole vocabulary with top-k, and top-p and min-p behind it: int64 [N].

    found: int32 [S, 2, N, k], `candidates` of each part in the order of their ids, with k not below any top-k of the draws
    or all tokens of a part. top-k keeps the same tokens. Their probabilities are not divided by those of others, so a draw
    can differ only where rounding decides: for the last token of top-p or min-p, or between the two best scores.
    """
    logits, ids = (found[:, place].transpose(0, 1).flatten(1) for place in (0, 1))
    ordered = torch.sort(logits.view(torch.float32), dim=-1, descending=True, stable=True)
    ids = ids.long().gather(1, ordered.indices)
    noise = exponential_noise([draw.key.seed for draw in draws], [draw.position for draw in draws], ids)
    places = exponential_race(noise, target_probs(ordered.values, draws))
    return torch.cat([ids, torch.full_like(ids[:, :1], vocab_size)], 1).gather(1, places[:, None])[:, 0]


def _temperatures(draws: Sequence[Draw], device: torch.device) -> Tensor:
    return upload(np.array([max(draw.key.temperature, MIN_TEMPERATURE) for draw in draws], np.float32), device)


def greedy(logits: Tensor) -> Tensor:
    """Return the argmax of each row, the lowest id on a tie; logits [N, V]. V where a row holds NaN."""
    return _ids_or_nan(*logits.max(-1), logits.shape[-1])


def target_probs(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return probabilities float32 [N, V] that each row's token is drawn from, not normalised; every filter has been
    applied.
    """
    keys = [draw.key for draw in draws]
    return filtered_probs(logits, filters_of(keys, logits.device), upload(filtering(keys), logits.device))


def draw_tokens(probs: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return one token id per row of probabilities [N, V], not necessarily normalised; int64 [N].

    V where a row holds NaN.
    """
    streams: dict[tuple[int, int], int] = {}
    rows = [streams.setdefault((d.key.seed, d.position), len(streams)) for d in draws]
    vocabulary = torch.arange(probs.shape[-1], device=probs.device)
    noise = exponential_noise([seed for seed, _ in streams], [position for _, position in streams], vocabulary)
    return exponential_race(noise.index_select(0, upload(rows, probs.device)), probs)


def exponential_race(noise: Tensor, probs: Tensor) -> Tensor:
    """Return argmin noise / probs of each row, the lowest id on a tie; both [N, V], probs not necessarily normalised.

    V where a row holds NaN.
    """
    return _ids_or_nan(*(noise / probs).min(-1), probs.shape[-1])


def _ids_or_nan(best: Tensor, ids: Tensor, otherwise: int) -> Tensor:
    """Return ids where `best` is a number; torch takes the first of equals, and NaN before all numbers."""
    return ids.masked_fill_(best.isnan(), otherwise)


class Filters(NamedTuple):
    """Filters of each row of logits. temperature float32 [N], taken as MIN_TEMPERATURE below that; top_k int64 [N], 0 keeps
    all; top_p float32 [N]; min_p float32 [N].
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def filters_of(keys: Sequence[NoiseKey], device: torch.device) -> Filters:
    """Return the filters of each key, one row each."""
    values = np.array([(key.temperature, key.top_k, key.top_p, key.min_p) for key in keys], dtype=np.float64)
    temperature, top_k, top_p, min_p = upload(values, device).unbind(1)
    return Filters(temperature.float(), top_k.long(), top_p.float(), min_p.float())


def filtering(keys: Sequence[NoiseKey]) -> list[int]:
    """Return the rows that have top-k or top-p."""
    return [row for row, key in enumerate(keys) if key.top_k > 0 or key.top_p < 1]


def filtered_probs(logits: Tensor, filters: Filters, rows: Tensor) -> Tensor:
    """Return probabilities [N, V] after temperature, top-k, top-p and min-p, in that order; top-p looks at what top-k left.

    The likeliest token is always kept. Filtered rows are not renormalised: `exponential_race` does not need it.

    Args:
        logits: float32 [N, V].
        rows: int64, those that have top-k or top-p; finding them here would wait for the device.
    """
    probs, top_k, top_p = _tempered(logits, filters.temperature), filters.top_k, filters.top_p
    if len(rows) > 0:
        probs[rows] = _filter(logits[rows], probs[rows], top_k[rows], top_p[rows])
    return _drop_below(probs, filters.min_p)


def filtered_probs_no_sync(logits: Tensor, filters: Filters) -> Tensor:
    """Return `filtered_probs` inside a CUDA graph, where the host does not know which rows have filters: all are sorted."""
    probs, top_k, top_p = _tempered(logits, filters.temperature), filters.top_k, filters.top_p
    has_filter = (top_k > 0) | (top_p < 1)
    return _drop_below(torch.where(has_filter[:, None], _filter(logits, probs, top_k, top_p), probs), filters.min_p)


def _tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    shifted = logits - logits.amax(-1, keepdim=True)
    return torch.softmax(shifted / temperature.clamp(min=MIN_TEMPERATURE)[:, None], dim=-1)


def _drop_below(probs: Tensor, min_p: Tensor) -> Tensor:
    return probs.masked_fill_(probs < min_p[:, None] * probs.amax(-1, keepdim=True), 0.0)


def _filter(logits: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    ordered, ranks = probs.gather(-1, ids), torch.arange(probs.shape[-1], device=probs.device)
    ordered = ordered.masked_fill((top_k[:, None] > 0) & (ranks >= top_k[:, None]), 0.0)
    masses = (ordered * 2.0**MASS_BITS).long()
    reached = masses.cumsum(-1)
    wanted = (top_p.double() * reached[:, -1].double()).ceil().long()
    ordered = ordered.masked_fill((reached - masses >= wanted[:, None]) & (ranks > 0), 0.0)
    return torch.zeros_like(probs).scatter_(-1, ids, ordered)


class Ranked(NamedTuple):
    """The k highest scores of each row, best first, and their ids."""

    scores: Tensor
    ids: Tensor


def rank(scores: Tensor, k: int) -> Ranked:
    """Return the k highest of each row of float32 scores [..., V], best first, exact ties ordered by lowest id.

    torch.topk leaves the order of ties open, so it gets integers that hold score and id at once. They are made in place,
    because allocation dominates with many rows.
    """
    if scores.shape[-1] <= MAX_SORTED:
        ordered = torch.sort(scores, dim=-1, descending=True, stable=True)
        return Ranked(ordered.values[..., :k], ordered.indices[..., :k])
    if k <= MAX_KERNEL_K and runs_triton(scores.device):
        from eyas.kernels.cuda.sampling import top_k

        return Ranked(*top_k(scores, k))
    if _can_rank_compiled(scores, k) and not np.isnan(scores.numpy().sum()):  # NaN ranks first, not in `top_k`
        return _rank_compiled(scores, k)
    bits = ordered_bits(scores)
    last = 0xFFFFFFFF - torch.arange(scores.shape[-1], device=scores.device)
    keys = bits.long().bitwise_left_shift_(32).bitwise_or_(last)
    chosen = 0xFFFFFFFF - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
    return Ranked(scores.gather(-1, chosen), chosen)


def ordered_bits(scores: Tensor) -> Tensor:
    """Integers in the order of floats, int32 of the same shape; zeros are equal. NaN is above or below all numbers."""
    bits = (scores + 0.0).contiguous().view(torch.int32)
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))


def _can_rank_compiled(scores: Tensor, k: int) -> bool:
    return is_readable(scores) and 0 < k <= min(MAX_KERNEL_K, scores.shape[-1]) and runs_compiled(scores.device)


def _rank_compiled(scores: Tensor, k: int) -> Ranked:
    from eyas.kernels.cpu.sampling import top_k

    shape = (*scores.shape[:-1], k)
    values, ids = torch.empty(shape), torch.empty(shape, dtype=torch.int64)
    top_k(scores.contiguous().view(-1, scores.shape[-1]).numpy(), values.view(-1, k).numpy(), ids.view(-1, k).numpy())
    return Ranked(values, ids)
