"""Draws where each rank holds a part of the vocabulary: with top-k from the likeliest tokens of all parts, with top-p and
min-p after a search for the last logit that is kept.

Legend: N rows, P tokens of a rank's part, S parts, k candidates. Comparisons are float32; ties go to the lowest id.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from eyas.device.transfer import upload
from eyas.kernels.arguments import MIN_TEMPERATURE, Draws, Kept, Scale
from eyas.kernels.by_device import rank, sampling_kernels
from eyas.kernels.noise import exponential_noise
from eyas.kernels.plain.sampling import ordered_bits, temperatures_of
from eyas.kernels.probabilities import exponential_race, filters_of, target_probs
from eyas.protocol.commit import NoiseKey

# Top-k up to which a draw from parts of the vocabulary takes the likeliest tokens of each.
MAX_CANDIDATES = 256
# Parts whose largest logit is further below that of the others, at the row's temperature, are never drawn.
MAX_BELOW = 80.0

# The search of `likely_logits`: each level divides the range in 16 parts, 2**shift wide. Ranks add up the mass above each of
# the 15 borders. In the end each rank needs two masses of its own: from the last kept logit on, and above it.
SEARCH_SHIFTS = range(28, -1, -4)
SEARCH_BORDERS = range(1, 16)
LAST_BORDERS = range(2)


def takes_candidates(key: NoiseKey) -> bool:
    """Return whether the key's draws look at few tokens, which the likeliest ones of each part of the vocabulary contain."""
    return key.temperature > 0 and 0 < key.top_k <= MAX_CANDIDATES


def best_of_races(found: Tensor, draws: Draws, vocab_size: int) -> Tensor:
    """Return what `sample` draws over the whole vocabulary without filters: int64 [N].

    found: int32 [parts, 3, N], `race` of each part in the order of their ids. A score of parts has a relative error of at
    most (3 g + 12) * 2**-24, g being how far the token's logit is below the row's largest, divided by the temperature; one
    part's has no larger one. So the two can differ only where the two best scores are closer than twice that, which has a
    probability of at most twice that: 6e-6 at g = 12.
    """
    tops, scores, ids = found[:, 0].view(torch.float32), found[:, 1].view(torch.float32), found[:, 2].long()
    largest, temperatures = tops.amax(0), temperatures_of(draws, found.device)
    is_random = upload(draws.by_row([key.temperature > 0 for key in draws.keys], np.bool_), found.device)
    below = ((largest - tops) / temperatures).clamp(max=MAX_BELOW)
    scaled = (scores * below.exp()).masked_fill(tops == -torch.inf, torch.inf)
    best = torch.where(is_random, scaled, scores).min(0)
    tokens = ids.gather(0, best.indices[None])[0]
    is_unusable = (ids == vocab_size).any(0) | (is_random & (largest == -torch.inf))
    return tokens.masked_fill(is_unusable, vocab_size)


def candidates(logits: Tensor, k: int, first_id: int) -> Tensor:
    """Return the k likeliest tokens of each row in one part of the vocabulary, for `draw_candidates`.

    logits: float32 [N, P] of the tokens from `first_id` on. Returns int32 [2, N, min(k, P)]: bits of logits, and ids. A part
    with NaN has NaN among its logits.
    """
    found = rank(logits, min(k, logits.shape[1]))
    scores = torch.cat([logits.amax(-1, keepdim=True), found.scores[:, 1:]], 1)
    return torch.stack([scores.view(torch.int32), (found.ids + first_id).int()])


def draw_candidates(found: Tensor, draws: Draws, vocab_size: int) -> Tensor:
    """Return what `sample` draws over the whole vocabulary with top-k, and top-p and min-p behind it: int64 [N].

    found: int32 [S, 2, N, k], `candidates` of each part in the order of their ids, with k not below any top-k of the draws
    or all tokens of a part. top-k keeps the same tokens. Their probabilities are not divided by those of others, so a draw
    can differ only where rounding decides: for the last token of top-p or min-p, or between the two best scores.
    """
    logits, ids = (found[:, place].transpose(0, 1).flatten(1) for place in (0, 1))
    ordered = torch.sort(logits.view(torch.float32), dim=-1, descending=True, stable=True)
    ids = ids.long().gather(1, ordered.indices)
    noise = exponential_noise([key.seed for key in draws.keys_of_rows], draws.positions.tolist(), ids)
    places = exponential_race(noise, target_probs(ordered.values, draws))
    return torch.cat([ids, torch.full_like(ids[:, :1], vocab_size)], 1).gather(1, places[:, None])[:, 0]


def likely_logits(logits: Tensor, draws: Draws, rank: int, num_ranks: int) -> Tensor:
    """Return logits with minus infinity for what top-p and min-p of the whole vocabulary leave out, for `race`; float32
    [N, P].

    All ranks must call it at the same time.

    Tokens are ordered by logit, equal ones by id. Top-p keeps one if the mass before it is below the wanted mass. The last
    kept logit is searched among all values of float32, in the order of their bits. At each of 8 levels ranks add up the
    mass from each of 15 values on, and go on between two neighbours. Then one value is left, and the masses that ranks have
    at it say which of its tokens are kept. It can be another one than with `sample` only where rounding decides, as masses
    are not divided by their sum here.

    A row takes 980 bytes a rank: 4 for its largest logit, 120 at each level, 16 at the last logit. On CUDA a level takes 6
    launches, its exchange included, and all together take 81. They read the logits 11 times and write them once.

    Args:
        logits: of this rank's part, which may be overwritten.
        draws: of the rows, with temperatures above 0. NaN and infinity stay. Does not wait for the device.
    """
    logits = logits.contiguous()
    filters = filters_of(draws.keys_of_rows, logits.device)
    largest = largest_logits(logits)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    scale = Scale(largest, filters.temperature.clamp(min=MIN_TEMPERATURE))
    lowest = ordered_bits(largest).long() + (1 - 2**32)  # below all numbers
    before = wanted = torch.zeros_like(lowest)
    last = lowest
    if any(key.top_p < 1 for key in draws.keys):
        last, wanted = _last_kept(logits, scale, lowest, filters.top_p)
        own = sampling_kernels(logits).masses_from(logits, scale, last, 0, LAST_BORDERS)
        parts = [torch.empty_like(own) for _ in range(num_ranks)]
        dist.all_gather(parts, own)
        reached, above = torch.stack(parts).unbind(-1)
        before = above.sum(0) + (reached - above)[:rank].sum(0)
        last = torch.where(filters.top_p < 1, last, lowest)
    return sampling_kernels(logits).kept_logits(logits, scale, Kept(last, before, wanted, filters.min_p))


def warm_up_search(logits: Tensor) -> None:
    """Compile what a rank runs on rows like these [N, P], so that no request waits for that. Nothing is exchanged."""
    scale = Scale(largest_logits(logits), torch.ones_like(logits[:, 0]))
    none = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    for borders in (SEARCH_BORDERS, LAST_BORDERS):
        sampling_kernels(logits).masses_from(logits, scale, none, 0, borders)
    sampling_kernels(logits).kept_logits(logits, scale, Kept(none, none, none, scale.temperature))


def _last_kept(logits: Tensor, scale: Scale, lowest: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of the last logit that top-p keeps, and the wanted mass; int64 [N] each."""
    last, wanted = lowest, None
    for shift in SEARCH_SHIFTS:
        found = sampling_kernels(logits).masses_from(logits, scale, last, shift, SEARCH_BORDERS)
        dist.all_reduce(found)
        if wanted is None:
            # Nothing is below the first border, or it lies at -3e29 or lower and the largest logit above 3e29: without mass.
            wanted = (top_p.double() * found[:, 0].double()).ceil().long().clamp_(min=1)
        last = last.add((found >= wanted[:, None]).sum(1), alpha=1 << shift)
    assert wanted is not None
    return last, wanted


def largest_logits(logits: Tensor) -> Tensor:
    """Return the largest logit of each row [N]; infinity if the row holds NaN, and the lowest number if it holds none."""
    return logits.amax(-1).nan_to_num_(nan=torch.inf, posinf=torch.inf)
