"""What came before each drawn row: committed tokens, then the node's own path in its tree. Knows no logits.

Legend: n drawn rows of one sequence, B bad words, L tokens looked back upon, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from eyas.engine.sequence import Work
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


class TokenCounts:
    """How often each token is in a sequence, where its logits are. Committed tokens are counted once, as they come.

    num_prompt: tokens of the prompt. output: occurrences behind the prompt, float32 [V]. prompted: which are in it, [V].
    """

    def __init__(self, num_prompt: int, vocab_size: int, device: torch.device) -> None:
        self.output: Tensor = torch.zeros(vocab_size, device=device)
        self.prompted: Tensor = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._num_prompt = num_prompt
        self._num_counted = 0

    def take(self, tokens: Seq[int]) -> None:
        """Count what is new of a sequence's committed tokens."""
        new = torch.tensor(tokens[self._num_counted :], dtype=torch.int64, device=self.output.device)
        num_prompt = max(self._num_prompt - self._num_counted, 0)
        self.prompted.index_fill_(0, new[:num_prompt], True)
        self.output.index_add_(0, new[num_prompt:], torch.ones(len(new[num_prompt:]), device=new.device))
        self._num_counted = len(tokens)


def drafted(tree: DraftTree | None) -> Cells:
    """For every node, the tokens on its path below the root, its own included: the root is a committed token."""
    if tree is None or len(tree) == 1:
        return Cells(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    rows, nodes = np.nonzero(tree.ancestor_mask()[:, 1:])
    return Cells(rows, np.array(tree.tokens, dtype=np.int64)[nodes + 1])


def tails(work: Work, length: int) -> Ints:
    """The last `length` tokens of each drawn row's history, the latest first; NOTHING before the beginning. [n, L]."""
    tree = work.tree or DraftTree.root_only(work.sequence.tokens[-1])
    committed = work.sequence.tokens[-length:]
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

    def completing(self, work: Work) -> Cells:
        """For every drawn row, the tokens that would complete a bad word."""
        histories = tails(work, self.heads.shape[1])
        met = ((histories[:, None] == self.heads) | self.free).all(-1)
        rows, words = np.nonzero(met)
        return Cells(rows, self.lasts[words])
