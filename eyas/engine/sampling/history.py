"""What came before each drawn row: committed tokens, then the node's own path in its tree. Integers; knows no logits.

A row without a tree is the root of one that has no other node. Legend: n drawn rows of one sequence, which are the nodes of
its tree, D different tokens, B bad words, L tokens looked back upon.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from eyas.models.inputs import Bools, Ints
from eyas.tree import DraftTree

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
