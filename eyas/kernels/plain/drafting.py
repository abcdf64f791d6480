"""Scores, ranks and draws the children of a draft tree's nodes in operations of torch.

Legend: S sessions, L levels, R rows of a session, D draft vocabulary, K most tokens of a proposal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.kernels.arguments import MIN_FILTER_TEMPERATURE, Frontier, ProbsFunction, Ranked
from eyas.kernels.by_device import rank
from eyas.kernels.noise import exponential_noise_at
from eyas.kernels.probabilities import Filters, exponential_race


def shared_noise(words: Tensor, draft_ids: Tensor, levels: int) -> Tensor:
    """Compute the noise of all levels, see DraftingKernels."""
    seed, committed_length = words[:2]
    temperature = words[4].view(torch.float64).float()
    # Level l is drawn at position committed_length + l, with the noise of that position.
    positions_SL = committed_length[:, None] + torch.arange(levels, device=draft_ids.device)
    seeds_SL = seed[:, None].expand_as(positions_SL)
    exponentials = exponential_noise_at(seeds_SL.flatten(), positions_SL.flatten(), draft_ids)
    # gumbel = -log e with e exponential: argmax (logit + T gumbel) is what the target draws at temperature T.
    return exponentials.log_().neg_().view(*positions_SL.shape, -1).mul_(temperature[:, None, None])


def best_children(
    logits: Tensor,
    words: Tensor,
    noise: Tensor | None,
    level: int,
    k: int,
    above: Tensor | None = None,
    probs: ProbsFunction | None = None,
) -> Ranked:
    """Score and rank children, see DraftingKernels."""
    best = rank(child_scores(logits, words, noise, level, probs), k)
    return best if above is None else Ranked(best.scores + above[:, :, None], best.ids)


def child_scores(
    logits: Tensor, words: Tensor, noise: Tensor | None, level: int, probs: ProbsFunction | None = None
) -> Tensor:
    """Return the log-scores of all children, float32 [S, R, D]; arguments as `best_children`."""
    scale = words[5].view(torch.float64).float()
    logits = without_nan(logits)
    perturbed = (logits if noise is None else logits + noise[:, None, level]) / scale[:, None, None]
    if probs is not None:
        perturbed = perturbed.masked_fill_(~_kept(logits, words, probs), -torch.inf)
    # Rows that have nothing but minus infinity get no NaN.
    return torch.log_softmax(perturbed, dim=-1).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)


def without_nan(logits: Tensor) -> Tensor:
    """Return the logits in float32 with minus infinity for what is no number: it is never drafted, and disturbs no other
    token.
    """
    return logits.float().nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)


def _kept(logits: Tensor, words: Tensor, probs: ProbsFunction) -> Tensor:
    """Return which tokens the sessions' filters keep, bool [S, R, D]. logits: of `without_nan`."""
    temperature, _, top_p, min_p = words[4:].contiguous().view(torch.float64).float()
    filters = Filters(temperature.clamp(min=MIN_FILTER_TEMPERATURE), words[3], top_p, min_p)
    is_free_S = (words[3] == 0) & (top_p >= 1) & (min_p == 0)
    kept: Tensor = (_per_row(probs, logits, filters) > 0) | is_free_S[:, None, None]
    return kept


def _per_row(probs: ProbsFunction, logits: Tensor, filters: Filters) -> Tensor:
    """Apply filters [S] of sessions to logits [S, R, D] of their rows."""
    repeated = Filters(*(setting.repeat_interleave(logits.shape[1]) for setting in filters))
    return probs(logits.flatten(0, 1), repeated).view_as(logits)


def find_frontier(scores: Tensor, tokens: Tensor, top_k: int, num_children: int, before: int, has_parents: bool) -> Frontier:
    """Find the best candidates of a level, see DraftingKernels."""
    best = rank(scores, top_k)
    # Candidate c of the level before is a child of frontier row c // num_children.
    rows = best.ids // num_children if has_parents else torch.zeros_like(best.ids)
    # Candidate numbers begin at 1, and 0 is the root: parents of the children to come, [S, top_k * num_children].
    parents = (before + 1 + best.ids).repeat_interleave(num_children, dim=1)
    return Frontier(best.scores, tokens.gather(1, best.ids), rows, parents)


def draw_children(
    logits: Tensor, words: Tensor, level: int, draft_ids: Tensor, drawn: Tensor, probs: ProbsFunction
) -> Tensor:
    """Draw one level of chains, see DraftingKernels."""
    temperature, _, top_p, min_p = words[4:].contiguous().view(torch.float64).float()
    filters = Filters(temperature, words[3], top_p, min_p)
    likely = _per_row(probs, without_nan(logits), filters).nan_to_num_(nan=0.0)
    kept = rank(likely[:, 0], drawn.shape[2] // 2)
    ids = draft_ids[kept.ids]
    # An exponential race with a seed of the drafter's own: argmin noise / prob.
    noise = exponential_noise_at(words[0], words[1] + level, ids)
    place = exponential_race(noise, kept.scores).clamp_(max=ids.shape[1] - 1)[:, None]
    drawn[:, level] = torch.cat([ids.double(), kept.scores.double(), place.double()], 1)
    return kept.ids.gather(1, place)
