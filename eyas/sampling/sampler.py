"""From logits to tokens: one draw per row, from the whole vocabulary or from its parts.

Legend: N rows, V vocabulary, P tokens of a part of it, S parts, k candidates. Comparisons are float32; ties go to the lowest
id.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.kernels.arguments import Draws
from eyas.kernels.by_device import rank, sampling_kernels
from eyas.kernels.noise import exponential_noise
from eyas.kernels.probabilities import exponential_race, target_probs
from eyas.protocol.commit import NoiseKey

# Top-k up to which a draw from parts of the vocabulary takes the likeliest tokens of each.
MAX_CANDIDATES = 256


def sample(logits: Tensor, draws: Draws) -> Tensor:
    """Return one token id per row, int64 [N]; logits float32 [N, V]. V where logits are NaN. Does not wait for the device.

    Temperature 0 takes the likeliest token. Above it, argmin noise / probs: noise depends on (seed, position, token) alone.
    """
    if not len(draws):
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    return sampling_kernels(logits).draw_rows(logits.contiguous(), draws)


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
