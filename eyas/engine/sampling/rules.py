"""What requests ask of their logits before the draw: biases, penalties, bans. Logits and work in, logits out.

Every row follows the history of its own node. Order: bias, repetition, frequency and presence penalty, bans.
Legend: N drawn rows of a step, n of one request, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eyas.engine.sampling.history import BadWords, Cells, TokenCounts
from eyas.engine.sequence import Work
from eyas.models.inputs import Ints
from eyas.models.sampling.penalties import Penalties, penalised
from eyas.models.tensors import upload
from eyas.request import Request, SamplingParams
from eyas.tree import DraftTree


@dataclass(frozen=True)
class _Asked:
    """What one request asks of its logits, made ready once. end_ids: banned while the output is too short."""

    bias_ids: Ints
    biases: Tensor
    end_ids: Ints
    bad_words: BadWords | None
    counts: TokenCounts | None


@dataclass(frozen=True)
class _Rows:
    """The drawn rows of a request that asks something: n of them from `start` on."""

    work: Work
    asked: _Asked
    start: int

    @property
    def rows(self) -> Ints:
        return np.arange(self.start, self.start + len(self.work.drawn))

    @property
    def tree(self) -> DraftTree:
        return self.work.tree or DraftTree.root_only(self.work.sequence.tokens[-1])

    @property
    def sampling(self) -> SamplingParams:
        return self.work.sequence.request.sampling


class LogitRules:
    """Keeps what running requests ask, and how often each token has occurred where a penalty needs it. A request that asks
    nothing costs nothing."""

    def __init__(self, eos_ids: frozenset[int]) -> None:
        self._eos_ids = eos_ids
        self._asked: dict[str, _Asked] = {}

    def applied(self, logits: Tensor, works: Seq[Work]) -> Tensor:
        """The logits float32 [N, V] that are drawn from; the given ones stay as they are."""
        parts = list(self._parts(works, logits))
        if not parts:
            return logits
        logits = logits.clone()
        for part in parts:
            cells = Cells.every(part.rows, part.asked.bias_ids)
            logits[_at(cells, logits)] += part.asked.biases.repeat(len(part.rows))
            _penalise(logits, part)
        logits[_at(Cells.joined([_banned(part) for part in parts]), logits)] = -torch.inf
        return logits

    def release(self, request_ids: Seq[str]) -> None:
        """Forget requests that have ended; unknown ones are ignored."""
        for request_id in request_ids:
            self._asked.pop(request_id, None)

    def _parts(self, works: Seq[Work], logits: Tensor) -> Iterator[_Rows]:
        start = 0
        for work in works:
            request = work.sequence.request
            if work.drawn and _asks(request.sampling):
                if request.id not in self._asked:
                    self._asked[request.id] = self._prepared(request, logits)
                yield _Rows(work, self._asked[request.id], start)
            start += len(work.drawn)

    def _prepared(self, request: Request, logits: Tensor) -> _Asked:
        sampling, num_prompt = request.sampling, len(request.prompt_ids) - request.emitted
        return _Asked(
            bias_ids=np.array([token for token, _ in sampling.logit_bias], dtype=np.int64),
            biases=upload(np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32), logits.device),
            end_ids=np.array(sorted(sampling.end_ids(self._eos_ids)), dtype=np.int64),
            bad_words=BadWords.of(sampling.bad_token_ids) if sampling.bad_token_ids else None,
            counts=TokenCounts(num_prompt, logits.shape[1]) if _penalises(sampling) else None,
        )


def _penalises(sampling: SamplingParams) -> bool:
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1, 0, 0)


def _asks(sampling: SamplingParams) -> bool:
    return bool(sampling.logit_bias or sampling.bad_token_ids or sampling.min_tokens) or _penalises(sampling)


def _penalise(logits: Tensor, part: _Rows) -> None:
    """Penalise, in place, what has occurred in a request's rows."""
    if part.asked.counts is None:
        return
    part.asked.counts.take(part.work.sequence.tokens)
    occurred, asked = part.asked.counts.along(part.tree), part.sampling
    ids, output, prompted = (upload(array, logits.device) for array in (occurred.ids, occurred.output, occurred.prompted))
    rows = logits[part.start : part.start + len(part.tree)]
    by = Penalties(asked.repetition_penalty, asked.frequency_penalty, asked.presence_penalty)
    rows[:, ids] = penalised(rows[:, ids], output, prompted, by)


def _banned(part: _Rows) -> Cells:
    """Tokens that would complete a bad word, and those that would end the output before min_tokens."""
    index = np.array(part.work.drawn) - len(part.work.sequence.request.prompt_ids)
    early = Cells.every(part.rows[index < part.sampling.min_tokens], part.asked.end_ids)
    if part.asked.bad_words is None:
        return early
    return Cells.joined([early, part.asked.bad_words.completed(part.work.sequence.tokens, part.tree).below(part.start)])


def _at(cells: Cells, logits: Tensor) -> tuple[Tensor, Tensor]:
    return upload(cells.rows, logits.device), upload(cells.tokens, logits.device)
