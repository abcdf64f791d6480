"""Scores of children: draft logits in, log-scores out, with the noise of the target's own draw.

The target emits argmax l + T g, where T is the temperature and the Gumbel noise g is known from (seed, position, token). A
drafter that knows g ranks children by log softmax((d + T g) / r). If its logits d differ from l by Gumbel noise of scale r,
these are the probabilities that the target emits each child. The ranking temperature r is therefore the scale of the
drafter's own errors, and at T = 0 likely children count more than their draft probabilities say. The ranking changes what is
proposed, never what is emitted. Legend: S sessions, L levels, R rows per session, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from eyas.device.placement import runs_triton
from eyas.device.transfer import Ints, upload
from eyas.drafters.base import DraftContext, Path, PathMasks
from eyas.drafters.trees.calibration import Ranking
from eyas.grammar.compiler import TokenBits
from eyas.kernels.arguments import MIN_FILTER_TEMPERATURE
from eyas.kernels.noise import exponential_noise_at, signed
from eyas.sampling.sampler import MAX_KERNEL_K, Filters, Ranked, filtered_probs, rank

if TYPE_CHECKING:
    from eyas.drafters.trees.growth import Expansion

# "plain": no session shares its noise; "noised": some do; "filtered": some of these have filters too.
ScorerKind = Literal["plain", "noised", "filtered"]
ProbsFunction = Callable[[Tensor, Filters], Tensor]

# float32 [S, R, D], or what a kernel makes the best of.
Scores: TypeAlias = "Tensor | UnrankedLogits"
# Scores the children of nodes at a level (0 is the root), from logits [S, R, D].
Scorer = Callable[[Tensor, int], Scores]

NUM_NOISE_WORDS = 8


def without_nan(logits: Tensor) -> Tensor:
    """Return the logits in float32 with minus infinity for what is no number: it is never drafted, and disturbs no other
    token.
    """
    return logits.float().nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)


@dataclass(frozen=True)
class UnrankedLogits:
    """Logits [S, R, D] of a level on a GPU; kernels make the best scores of them.

    Attributes:
        words: the output of `noise_words`.
        noise: of all levels, float32 [S, L, D], if there is some.
        probs: see `perturbed_scorer`; None if no session has filters.
    """

    logits: Tensor
    words: Tensor
    noise: Tensor | None
    level: int
    probs: ProbsFunction | None = None

    def rank(self, k: int, above: Tensor | None = None) -> Ranked:
        """Rank the scores as `rank_children` does."""
        if k > MAX_KERNEL_K:
            return rank_children(self.scores(), k, above)
        from eyas.kernels.cuda.drafting import best_children, lowest_keys

        lowest = None if self.probs is None else lowest_keys(self.logits, self.words)
        if above is not None and above.shape[1] != self.logits.shape[1]:  # one row of logits for all nodes
            best = best_children(self.logits, self.words, self.noise, self.level, k, None, lowest)
            return Ranked(best[0] + above[:, :, None], best[1])
        return Ranked(*best_children(self.logits, self.words, self.noise, self.level, k, above, lowest))

    def scores(self) -> Tensor:
        """Return all scores, float32 [S, R, D]."""
        scale = self.words[5].view(torch.float64).float()
        logits = without_nan(self.logits)
        perturbed = (logits if self.noise is None else logits + self.noise[:, None, self.level]) / scale[:, None, None]
        if self.probs is not None:
            perturbed = perturbed.masked_fill_(~_kept(logits, self.words, self.probs), -torch.inf)
        return _log_softmax(perturbed)


def rank_children(scores: Scores, k: int, above: Tensor | None = None) -> Ranked:
    """Return the k best children of each node, [S, R, k], see `rank`.

    above: scores of the nodes [S, W], added to those of their children.
    """
    if isinstance(scores, UnrankedLogits):
        return scores.rank(k, above)
    best = rank(scores, k)
    return best if above is None else Ranked(best.scores + above[:, :, None], best.ids)


def _log_softmax(logits: Tensor) -> Tensor:
    """Return the log-softmax without NaN: minus infinity in rows that have nothing else."""
    return torch.log_softmax(logits, dim=-1).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)


def _kept(logits: Tensor, words: Tensor, probs: ProbsFunction) -> Tensor:
    """Return which tokens the sessions' filters keep, bool [S, R, D]. logits: of `without_nan`."""
    temperature, _, top_p, min_p = words[4:].contiguous().view(torch.float64).float()
    filters = Filters(temperature.clamp(min=MIN_FILTER_TEMPERATURE), words[3], top_p, min_p)
    is_free_S = (words[3] == 0) & (top_p >= 1) & (min_p == 0)
    kept: Tensor = (_per_row(probs, logits, filters) > 0) | is_free_S[:, None, None]
    return kept


def perturbed_scorer(words: Tensor, levels: int, draft_ids: Tensor, kind: ScorerKind, probs: ProbsFunction) -> Scorer:
    """Return scores under each session's ranking temperature and, where it is shared, the noise of the target's own draw.

    CUDA graphs capture it: its sizes depend on nothing that a tensor holds, and it copies nothing to the device.

    Args:
        words: the output of `noise_words` on the device.
        probs: applies temperature and filters to logits, for "filtered".
    """
    if runs_triton(draft_ids.device):
        return kernel_scorer(words.contiguous(), levels, draft_ids, kind, probs)
    seed, committed_length = words[:2]
    temperature, scale = words[4:6].contiguous().view(torch.float64).float()
    if kind == "plain":
        return lambda logits, level: _log_softmax(without_nan(logits) / scale[:, None, None])
    # Level l is drawn at position committed_length + l, with the noise of that position.
    positions_SL = committed_length[:, None] + torch.arange(levels, device=draft_ids.device)
    seeds_SL = seed[:, None].expand_as(positions_SL)
    exponentials = exponential_noise_at(seeds_SL.flatten(), positions_SL.flatten(), draft_ids)
    # gumbel = -log e with e exponential: argmax (logit + T gumbel) is what the target draws at temperature T.
    gumbel_SLD = exponentials.log_().neg_().view(*positions_SL.shape, -1).mul_(temperature[:, None, None])

    def scores(logits: Tensor, level: int) -> Tensor:
        logits = without_nan(logits)
        perturbed = (logits + gumbel_SLD[:, None, level]) / scale[:, None, None]
        if kind == "filtered":
            perturbed = perturbed.masked_fill_(~_kept(logits, words, probs), -torch.inf)
        return _log_softmax(perturbed)

    return scores


def kernel_scorer(words: Tensor, levels: int, draft_ids: Tensor, kind: ScorerKind, probs: ProbsFunction) -> Scorer:
    """Return a scorer that draws its noise in a kernel of CUDA."""
    from eyas.kernels.cuda.drafting import shared_noise

    noise = None if kind == "plain" else shared_noise(words, draft_ids, levels)
    used = probs if kind == "filtered" else None
    return lambda logits, level: UnrankedLogits(logits, words, noise, level, used)


def biased_scorer(scorer: Scorer, contexts: Sequence[DraftContext], draft_ids: Tensor) -> Scorer:
    """Return a scorer that adds to the logits what the target will add to its own, see Commit.logit_biases."""
    rows = [row for row, context in enumerate(contexts) if context.logit_biases]
    if not rows:
        return scorer
    cells = [(row, b.token, b.num_levels, b.bias) for row in rows for b in contexts[row].logit_biases]
    sessions, tokens, levels, biases = (np.array(column) for column in zip(*cells, strict=True))
    num_columns = int(tokens.max()) + 2  # the last is of all tokens beyond, which have no bias
    columns = draft_ids.clamp(max=num_columns - 1)

    def scores(logits: Tensor, level: int) -> Scores:
        # added [S, columns]: the bias of each token at this level; other draft ids read the last column, 0.
        applies = levels > level
        added = torch.zeros(len(contexts), num_columns, device=logits.device)
        where = upload(sessions[applies], logits.device), upload(tokens[applies], logits.device)
        added.index_put_(where, upload(biases[applies], logits.device).float(), accumulate=True)
        return scorer(logits + added[:, None, columns], level)

    return scores


class MaskedScorer:
    """A Scorer that gives tokens which the sessions' grammars do not allow a logit of minus infinity.

    A node whose mask is not known, or allows nothing of the draft vocabulary, is left as it is.

    Args:
        path_masks: of the nodes below the roots, whose own masks the contexts have; None if they are not known.
    """

    def __init__(
        self, scorer: Scorer, contexts: Sequence[DraftContext], draft_ids: Tensor, path_masks: PathMasks | None
    ) -> None:
        self._scorer, self._contexts, self._path_masks = scorer, contexts, path_masks
        # Bit id & 7 of byte id >> 3 says whether the grammar allows a token.
        self._draft_ids, self._bytes = draft_ids, draft_ids >> 3
        self._flags = (1 << (draft_ids & 7)).to(torch.uint8)
        self._paths: list[list[Path]] = [[()] for _ in contexts]
        self._width = 1
        roots = {c.session: [np.frombuffer(c.allowed, dtype=np.uint8)] for c in contexts if c.allowed}
        self._wait: Callable[[], Mapping[str, Sequence[TokenBits | None]]] = lambda: roots

    def expand(self, parents: Tensor, tokens: Tensor) -> None:
        """Start to compute the masks of a frontier, see Expansion.next. Waits for the device, for the frontier's tokens."""
        if self._path_masks is None:
            self._wait = dict
            return
        rows, ids = parents.tolist(), self._draft_ids[tokens].tolist()
        self._paths = [
            [(*above[row], token) for row, token in zip(own_rows, own_ids, strict=True)]
            for above, own_rows, own_ids in zip(self._paths, rows, ids, strict=True)
        ]
        asked = {c.session: own for c, own in zip(self._contexts, self._paths, strict=True) if c.allowed}
        self._wait, self._width = self._path_masks(asked), tokens.shape[1]

    def __call__(self, logits: Tensor, level: int) -> Scores:
        found = self._wait()
        masks = {
            session * self._width + place: bits
            for session, context in enumerate(self._contexts)
            for place, bits in enumerate(found.get(context.session, ()))
            if bits is not None
        }
        return self._scorer(self._masked(logits, masks) if masks else logits, level)

    def _masked(self, logits: Tensor, masks: Mapping[int, TokenBits]) -> Tensor:
        """Return logits [S, R, D] as [S, W, D] with masks of some of these rows."""
        bits = upload(np.stack(list(masks.values())), logits.device)
        banned = (bits[:, self._bytes] & self._flags) == 0
        # A mask that bans the whole draft vocabulary would leave no scores: it is dropped.
        banned &= ~banned.all(-1, keepdim=True)
        logits = logits.expand(-1, self._width, -1)
        if len(masks) == len(logits) * self._width:
            return logits.masked_fill(banned.view_as(logits), -torch.inf)
        flat, index = logits.flatten(0, 1), upload(list(masks), logits.device)
        return flat.index_copy(0, index, flat[index].masked_fill_(banned, -torch.inf)).view_as(logits)


class MaskedExpansion:
    """An Expansion whose scorer gets the masks of the nodes. They are computed while the draft model runs.

    Args:
        scorer: that of the expansion.
    """

    def __init__(self, expansion: Expansion, scorer: MaskedScorer) -> None:
        self._expansion, self._scorer = expansion, scorer

    def first(self) -> Scores:
        """See Expansion."""
        return self._expansion.first()

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Scores:
        """See Expansion."""
        self._scorer.expand(parents, tokens)
        return self._expansion.next(level, parents, tokens)


def chain_scorer(words: Tensor, probs: ProbsFunction) -> Scorer:
    """Return scores by unnormalised draft probabilities under each session's temperature and filters.

    Args:
        words: the output of `chain_words` on the device.
        probs: applies filters to logits. On CUDA the scores are the logits themselves, and kernels do the rest.
    """
    if runs_triton(words.device):
        return lambda logits, level: logits
    temperature, _, top_p, min_p = words[4:].contiguous().view(torch.float64).float()
    filters = Filters(temperature, words[3], top_p, min_p)
    return lambda logits, level: _per_row(probs, without_nan(logits), filters).nan_to_num_(nan=0.0)


def _per_row(probs: ProbsFunction, logits: Tensor, filters: Filters) -> Tensor:
    """Apply filters [S] of sessions to logits [S, R, D] of their rows."""
    repeated = Filters(*(setting.repeat_interleave(logits.shape[1]) for setting in filters))
    return probs(logits.flatten(0, 1), repeated).view_as(logits)


def make_scorer(contexts: Sequence[DraftContext], ranking: Ranking, levels: int, draft_ids: Tensor) -> Scorer:
    """Return the scorer of one round of deterministic trees. draft_ids maps draft vocabulary ids to the target's."""
    words, device = noise_words(contexts, ranking, len(contexts)), draft_ids.device
    filtered = np.flatnonzero((words[3] > 0) | (words[6].view(np.float64) < 1))
    probs = filtered_probs_of(filtered, len(contexts), device)
    return perturbed_scorer(upload(words, device), levels, draft_ids, scorer_kind(words), probs)


def noise_words(contexts: Sequence[DraftContext], ranking: Ranking, num_rows: int) -> Ints:
    """Return what the scores of each session depend on besides logits, int64 [NUM_NOISE_WORDS, num_rows].

    The rows are seed, committed length, whether noise is shared, and top-k; then as bits of float64 temperature, ranking
    temperature, top-p and min-p. Without shared noise, as beyond the contexts, the temperature is 0, and no filters apply.
    """
    ints, reals = np.zeros((4, num_rows), dtype=np.int64), np.ones((4, num_rows))
    reals[[0, 3]] = 0.0
    for row, context in enumerate(contexts):
        key = context.noise
        reals[1, row] = ranking.temperature(key)
        if ranking.shares_noise(key):
            ints[:, row] = signed(key.seed), context.committed_length, 1, key.top_k
            reals[[0, 2, 3], row] = key.temperature, key.top_p, key.min_p
    return np.concatenate([ints, reals.view(np.int64)])


def chain_words(contexts: Sequence[DraftContext]) -> Ints:
    """Return what the drawn tokens of sampled chains depend on besides logits, in the rows of `noise_words`."""
    keys = [context.noise for context in contexts]
    ints = [(signed(key.seed), c.committed_length, 1, key.top_k) for key, c in zip(keys, contexts, strict=True)]
    reals = [(key.temperature, 1.0, key.top_p, key.min_p) for key in keys]
    return np.concatenate([np.array(ints, np.int64), np.array(reals).view(np.int64)], 1).T.copy()


def scorer_kind(words: Ints) -> ScorerKind:
    """Return which scorer the output of `noise_words` needs."""
    top_p, min_p = words[6:].view(np.float64)
    if not words[2].any():
        return "plain"
    return "filtered" if ((words[3] > 0) | (top_p < 1) | (min_p > 0)).any() else "noised"


def filtered_probs_of(filtered: Sequence[int] | Ints, num_sessions: int, device: torch.device) -> ProbsFunction:
    """Return `filtered_probs` for logits [S * R, D], where only the sessions `filtered` have top-k or top-p."""
    sessions = upload(filtered, device)

    def probs(logits: Tensor, filters: Filters) -> Tensor:
        num_rows = len(logits) // num_sessions
        # Rows of a session stand together: row r of session s is s * R + r.
        rows = sessions[:, None] * num_rows + torch.arange(num_rows, device=device)
        return filtered_probs(logits, filters, rows.flatten())

    return probs
