"""Penalties on tokens that have occurred: logits and counts in, logits out. Knows no request.

Legend: N rows, D tokens that have occurred. All float32 and elementwise, so that no row's result depends on its neighbours.

What came before each drawn row: committed tokens, then the node's own path in its tree. Integers; knows no logits.

A row without a tree is the root of one that has no other node. Legend: n drawn rows of one sequence, which are the nodes of
its tree, D different tokens, B bad words, L tokens looked back upon.

What requests ask of their logits before the draw: biases, penalties, bans. Logits and work in, logits out.

Every row follows the history of its own node. Order: bias, repetition, frequency and presence penalty, bans.
Legend: N drawn rows of a step, n of one request, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.engine.sequence import ScheduledSequence
from eyas.request import Request, SamplingParams
from eyas.tensors import Bools, Ints, upload
from eyas.tree import DraftTree


@dataclass(frozen=True)
class Penalties:
    """How strong they are; 1, 0 and 0 do nothing."""

    repetition: float
    frequency: float
    presence: float


def penalised(logits: Tensor, output: Tensor, prompted: Tensor, by: Penalties) -> Tensor:
    """Logits [N, D] after repetition (Keskar et al. 2019, section 4.1), then frequency and presence penalty.

    output: how often the token is in the row's output so far, float32 [N, D]; prompted: whether it is in the prompt, [D].
    Repetition looks at both, the other two at the output alone.
    """
    emitted = output > 0
    weakened = (logits / by.repetition).where(logits > 0, logits * by.repetition)
    return weakened.where(emitted | prompted, logits) - by.frequency * output - by.presence * emitted


# Stands before a history's beginning; no token.
NOTHING = -1


@dataclass(frozen=True)
class Cells:
    """Places in the logits of a step, [m] each."""

    rows: Ints
    tokens: Ints

    @classmethod
    def every(cls, rows: Ints, tokens: Ints) -> Self:
        """Each of the tokens in each of the rows."""
        return cls(np.repeat(rows, len(tokens)), np.tile(tokens, len(rows)))

    @classmethod
    def joined(cls, parts: Seq[Cells]) -> Self:
        """All of them."""
        return cls(np.concatenate([p.rows for p in parts]), np.concatenate([p.tokens for p in parts]))

    def below(self, start: int) -> Cells:
        """The same with rows counted from `start`."""
        return Cells(self.rows + start, self.tokens)


@dataclass(frozen=True)
class Occurrences:
    """Tokens in the histories of one sequence's drawn rows. ids: which, [D]. prompted: whether in the prompt, [D].
    output: how often each is behind the prompt, by row, float32 [n, D]."""

    ids: Ints
    prompted: Bools
    output: npt.NDArray[np.float32]


class TokenCounts:
    """How often each token is in a sequence; committed tokens are counted once, as they come. num_prompt: tokens of its
    prompt."""

    def __init__(self, num_prompt: int, vocab_size: int) -> None:
        self._num_prompt = num_prompt
        self._num_counted = 0
        self._ids: Ints = np.zeros(0, dtype=np.int64)
        self._prompted = np.zeros(vocab_size, dtype=np.bool_)
        self._output = np.zeros(vocab_size, dtype=np.float32)

    def take(self, tokens: Seq[int]) -> None:
        """Count what is new of the committed tokens."""
        new = np.array(tokens[self._num_counted :], dtype=np.int64)
        num_prompt = max(self._num_prompt - self._num_counted, 0)
        self._prompted[new[:num_prompt]] = True
        np.add.at(self._output, new[num_prompt:], 1)
        self._ids = np.union1d(self._ids, new)
        self._num_counted = len(tokens)

    def along(self, tree: DraftTree) -> Occurrences:
        """Committed tokens, and for every node those on its path: the strict ancestor mask times the tree's tokens as
        one-hot rows, added up where it is not zero."""
        drafted = _drafted(tree)
        ids = np.union1d(self._ids, drafted.tokens)
        output = np.tile(self._output[ids], (len(tree), 1))
        np.add.at(output, (drafted.rows, np.searchsorted(ids, drafted.tokens)), 1)
        return Occurrences(ids, self._prompted[ids], output)


def _drafted(tree: DraftTree) -> Cells:
    """For every node, the tokens on its path below the root, its own included: the root is a committed token."""
    rows, nodes = np.nonzero(tree.ancestor_mask()[:, 1:])
    return Cells(rows, np.array(tree.tokens[1:], dtype=np.int64)[nodes])


def _tails(committed: list[int], tree: DraftTree, length: int) -> Ints:
    """The last `length` tokens of each row's history, the latest first; NOTHING before the beginning. [n, L]."""
    committed = committed[-length:]
    tokens = np.array([NOTHING] * length + committed + list(tree.tokens[1:]), dtype=np.int64)
    root = length + len(committed) - 1
    before = np.arange(-1, len(tokens) - 1)
    before[root + 1 :] = root + np.array(tree.parents[1:], dtype=np.int64)
    at = root + np.arange(len(tree))
    columns = []
    for _ in range(length):
        columns.append(tokens[at])
        at = before[at]
    return np.stack(columns, axis=1)


@dataclass(frozen=True)
class BadWords:
    """Sequences that must not be completed. heads: all but the last token of each, the latest first [B, L];
    free: where a head is shorter and anything fits [B, L]; lasts: the last tokens [B]."""

    heads: Ints
    free: Bools
    lasts: Ints

    @classmethod
    def of(cls, words: Seq[Seq[int]]) -> Self:
        longest = max(len(word) for word in words) - 1
        heads = np.full((len(words), max(longest, 1)), NOTHING, dtype=np.int64)
        for row, word in zip(heads, words, strict=True):
            row[: len(word) - 1] = word[-2::-1]
        return cls(heads, heads == NOTHING, np.array([word[-1] for word in words], dtype=np.int64))

    def completed(self, committed: list[int], tree: DraftTree) -> Cells:
        """For every node, the tokens that would complete a bad word."""
        histories = _tails(committed, tree, self.heads.shape[1])
        met = ((histories[:, None] == self.heads) | self.free).all(-1)
        rows, words = np.nonzero(met)
        return Cells(rows, self.lasts[words])


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

    work: ScheduledSequence
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

    def applied(self, logits: Tensor, works: Seq[ScheduledSequence]) -> Tensor:
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

    def _parts(self, works: Seq[ScheduledSequence], logits: Tensor) -> Iterator[_Rows]:
        start = 0
        for work in works:
            request = work.sequence.request
            if work.drawn and _asks(request.sampling):
                if request.id not in self._asked:
                    self._asked[request.id] = self._prepared(request, logits)
                yield _Rows(work, self._asked[request.id], start)
            start += len(work.drawn)

    def _prepared(self, request: Request, logits: Tensor) -> _Asked:
        sampling, num_prompt = request.sampling, len(request.prompt_ids) - request.num_emitted
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
