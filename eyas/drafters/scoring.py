"""How a drafter scores children: draft logits in, log-scores out, perturbed by the noise of the target's own draw.

The target emits argmin e / p, where e is known from (seed, position, token). A drafter that knows e ranks children by
log softmax((log q / T - log e) / s), the distribution of its own draw under that noise, instead of log q. This changes
what is proposed, never what is emitted. Legend: S sessions, L levels, R rows per session, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.config import DraftingConfig
from eyas.drafters.base import DraftContext, Path, PathMasks, allowed_bits
from eyas.sampling.noise import exponential_noise_at, signed
from eyas.sampling.sampler import MIN_TEMPERATURE, Filters, filtered_probs, filtering, filters_of
from eyas.tensors import Ints, upload

if TYPE_CHECKING:
    from eyas.drafters.tree_growth import Expansion

# "plain": no session shares its noise; "noised": some do; "filtered": some of these have filters too.
ScorerKind = Literal["plain", "noised", "filtered"]
ProbsFunction = Callable[[Tensor, Filters], Tensor]

# Scores the children of nodes at a level (0 is the root): float32 [S, R, D] in and out.
Scorer = Callable[[Tensor, int], Tensor]

NUM_NOISE_WORDS = 8


def plain_scores(logits: Tensor, level: int) -> Tensor:
    """Plain log-softmax; a Scorer."""
    return _log_softmax(without_nan(logits))


def without_nan(logits: Tensor) -> Tensor:
    """The logits with minus infinity for what is no number: it is never drafted, and disturbs no other token."""
    return logits.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)


def _log_softmax(logits: Tensor) -> Tensor:
    """Log-softmax without NaN: minus infinity in rows that have nothing else."""
    return torch.log_softmax(logits, dim=-1).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)


def perturbed_scorer(words: Tensor, levels: int, draft_ids: Tensor, probs: ProbsFunction | None) -> Scorer:
    """Scores under the noise of the target's own draw.

    CUDA graphs capture it: its sizes depend on nothing that a tensor holds, and it copies nothing to the device.

    words: the output of `noise_words` on the device. probs: applies temperature and filters to logits; None if no session
    has filters.
    """
    seed, committed_length, shared, top_k = words[:4]
    temperature, scale, top_p, min_p = words[4:].contiguous().view(torch.float64).float()
    positions_SL = committed_length[:, None] + torch.arange(levels, device=draft_ids.device)
    seeds_SL = seed[:, None].expand_as(positions_SL)
    exponentials = exponential_noise_at(seeds_SL.flatten(), positions_SL.flatten(), draft_ids)
    gumbel_SLD = exponentials.log_().neg_().view(*positions_SL.shape, -1) * shared.float()[:, None, None]

    def scores(logits: Tensor, level: int) -> Tensor:
        logits = without_nan(logits)
        if probs is None:
            log_probs = logits / temperature[:, None, None]
        else:
            log_probs = _per_row(probs, logits, Filters(temperature, top_k, top_p, min_p)).log()
        return _log_softmax((log_probs + gumbel_SLD[:, None, level]) / scale[:, None, None])

    return scores


def masked_scorer(scorer: Scorer, contexts: Sequence[DraftContext], draft_ids: Tensor) -> Scorer:
    """A scorer that gives the root's children minus infinity, or probability 0, where a grammar does not allow them.

    A session whose draft vocabulary holds no allowed token is left as it is.
    """
    if not any(context.allowed for context in contexts):
        return scorer
    allowed_SD = allowed_tokens(contexts, draft_ids)

    def scores(logits: Tensor, level: int) -> Tensor:
        return scorer(logits if level else logits.masked_fill(~allowed_SD[:, None], -torch.inf), level)

    return scores


class MaskedExpansion:
    """An Expansion whose scores leave out what grammars do not allow below each node. The root's are masked already.

    Each level waits for the device once, for the tokens of its nodes. A node without allowed tokens in the draft vocabulary
    is left as it is, and so is one whose mask is not known.
    """

    def __init__(
        self,
        expansion: Expansion,
        contexts: Sequence[DraftContext],
        path_masks: PathMasks,
        draft_ids: Tensor,
        are_logs: bool,
    ) -> None:
        """are_logs: whether scores are log-probabilities, of which those of a node sum up to 1, or unnormalised ones."""
        self._expansion, self._contexts, self._path_masks = expansion, contexts, path_masks
        self._draft_ids, self._are_logs = draft_ids, are_logs
        self._paths: list[list[Path]] = [[()] for _ in contexts]

    def first(self) -> Tensor:
        """See Expansion."""
        return self._expansion.first()

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        """See Expansion. Float32 [S, W, D]."""
        scores = self._expansion.next(level, parents, tokens)
        rows, ids = parents.tolist(), self._draft_ids[tokens].tolist()
        self._paths = [
            [(*above[row], token) for row, token in zip(own_rows, own_ids, strict=True)]
            for above, own_rows, own_ids in zip(self._paths, rows, ids, strict=True)
        ]
        asked = {c.session: own for c, own in zip(self._contexts, self._paths, strict=True) if c.allowed}
        found, width = self._path_masks(asked), tokens.shape[1]
        masks = {
            session * width + place: bits
            for session, context in enumerate(self._contexts)
            for place, bits in enumerate(found.get(context.session, ()))
            if bits is not None
        }
        if not masks:
            return scores
        scores = scores.expand(-1, width, -1)
        index = upload(list(masks), scores.device)
        return self._masked(scores.flatten(0, 1), index, np.stack(list(masks.values()))).view_as(scores)

    def _masked(self, scores: Tensor, index: Tensor, bits: npt.NDArray[np.uint8]) -> Tensor:
        """scores [S * W, D] with masks of the rows `index`."""
        allowed = unpacked_bits(bits, self._draft_ids)
        if self._are_logs:
            chosen = torch.log_softmax(scores[index].masked_fill(~allowed, -torch.inf), -1).nan_to_num_(nan=-torch.inf)
        else:
            chosen = scores[index] * allowed
            chosen = torch.where(chosen.any(-1, keepdim=True), chosen, scores[index])
        return scores.index_copy(0, index, chosen)


def allowed_tokens(contexts: Sequence[DraftContext], draft_ids: Tensor) -> Tensor:
    """Which ids of the draft vocabulary may follow each root, bool [S, D]; all of them if none may."""
    return unpacked_bits(allowed_bits(contexts), draft_ids)


def unpacked_bits(bits: npt.NDArray[np.uint8], draft_ids: Tensor) -> Tensor:
    """Which ids of the draft vocabulary the masks [M, B] allow, bool [M, D]; all of them if none."""
    octets = upload(bits, draft_ids.device)[:, draft_ids >> 3]
    allowed = (octets >> (draft_ids & 7).to(torch.uint8) & 1).bool()
    return allowed | ~allowed.any(-1, keepdim=True)


def probs_scorer(contexts: Sequence[DraftContext], device: torch.device) -> Scorer:
    """Scores by unnormalised draft probabilities under each session's temperature and filters."""
    keys = [context.noise for context in contexts]
    filters, probs = filters_of(keys, device), filtered_probs_of(filtering(keys), len(keys), device)
    return lambda logits, level: _per_row(probs, without_nan(logits), filters).nan_to_num_(nan=0.0)


def _per_row(probs: ProbsFunction, logits: Tensor, filters: Filters) -> Tensor:
    """Apply filters [S] of sessions to logits [S, R, D] of their rows."""
    repeated = Filters(*(setting.repeat_interleave(logits.shape[1]) for setting in filters))
    return probs(logits.flatten(0, 1), repeated).view_as(logits)


def make_scorer(contexts: Sequence[DraftContext], config: DraftingConfig, levels: int, draft_ids: Tensor) -> Scorer:
    """The scorer of one round of deterministic trees: plain if no session has both shared noise and a temperature above 0.

    draft_ids maps draft vocabulary ids to the target's.
    """
    words = noise_words(contexts, config, len(contexts))
    kind = scorer_kind(words)
    if kind == "plain":
        return plain_scores
    device = draft_ids.device
    probs = None
    if kind == "filtered":
        probs = filtered_probs_of(np.flatnonzero((words[3] > 0) | (words[6].view(np.float64) < 1)), len(contexts), device)
    return perturbed_scorer(upload(words, device), levels, draft_ids, probs)


def noise_words(contexts: Sequence[DraftContext], config: DraftingConfig, num_rows: int) -> Ints:
    """What the scores of each session depend on besides logits, int64 [NUM_NOISE_WORDS, num_rows].

    The rows are seed, committed length, whether noise is shared, and top-k; then as bits of float64 temperature, scale,
    top-p and min-p. Without shared noise, as beyond the contexts, there are no filters, and temperature and scale are 1.
    """
    ints, reals = np.zeros((4, num_rows), dtype=np.int64), np.ones((4, num_rows))
    reals[3] = 0.0
    for row, context in enumerate(contexts):
        key = context.noise
        if config.shared_noise and key.temperature > 0:
            ints[:, row] = signed(key.seed), context.committed_length, 1, key.top_k
            reals[:, row] = max(key.temperature, MIN_TEMPERATURE), config.noise_scale, key.top_p, key.min_p
    return np.concatenate([ints, reals.view(np.int64)])


def scorer_kind(words: Ints) -> ScorerKind:
    """Which scorer the output of `noise_words` needs."""
    top_p, min_p = words[6:].view(np.float64)
    if not words[2].any():
        return "plain"
    return "filtered" if ((words[3] > 0) | (top_p < 1) | (min_p > 0)).any() else "noised"


def filtered_probs_of(filtered: Sequence[int] | Ints, num_sessions: int, device: torch.device) -> ProbsFunction:
    """`filtered_probs` for logits [S * R, D], where only the sessions `filtered` have top-k or top-p."""
    sessions = upload(filtered, device)

    def probs(logits: Tensor, filters: Filters) -> Tensor:
        num_rows = len(logits) // num_sessions
        rows = sessions[:, None] * num_rows + torch.arange(num_rows, device=device)
        return filtered_probs(logits, filters, rows.flatten())

    return probs
