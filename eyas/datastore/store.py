"""A datastore on disk, memory-mapped and searched by bisection: ends of contexts in, their continuations in a corpus out.

Legend: Q queries, L tokens of the longest query, M suffixes, D depth.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from eyas.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VERSION = 1
HEADER, TOKENS, SUFFIXES, STARTS = "datastore.json", "tokens.npy", "suffixes.npy", "starts.npy"

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ranges:
    """For each query the suffixes that begin with it: [first, last) in the suffix array; both [Q]."""

    first: Ints
    last: Ints


@dataclass(frozen=True)
class Datastore:
    """Tokens of a corpus and their suffix array.

    vocabulary: digest of the mapping from tokens to ids.
    tokens: the documents one after the other, each followed by the separator, the id vocab_size.
    suffixes: where each suffix of `tokens` begins, in sorted order, without those that begin with the separator.
    starts: index in `suffixes` of the first suffix that begins with each token id [vocab_size + 1].

        documents [1 0] [0], vocab_size 2:   tokens [1 0 2 0 2], suffixes [3 1 0], starts [0 2 3]
    """

    folder: Path
    vocab_size: int
    vocabulary: str
    num_documents: int
    tokens: npt.NDArray[np.integer]
    suffixes: npt.NDArray[np.integer]
    starts: npt.NDArray[np.integer]

    def search(self, queries: Ints, lengths: Ints) -> Ranges:
        """Search for the first lengths[q] >= 1 tokens of each row q of queries [Q, L], all at once.

        Ids outside the vocabulary are not found; the first column must hold none.
        """
        first, last = self.starts[queries[:, 0]], self.starts[queries[:, 0] + 1]
        low = np.concatenate([first, first])
        high = np.concatenate([last, last])
        # bisect twice: the first half finds the first suffix not below its query, the second half the first one above it
        rows = np.arange(len(low))
        after = rows >= len(first)
        wanted, columns = np.concatenate([queries, queries]), np.arange(queries.shape[1])
        counted = columns < np.concatenate([lengths, lengths])[:, None]
        end = len(self.tokens) - 1
        for _ in range(int((last - first).max(initial=0)).bit_length()):
            open_ = low < high
            middle = (low + high) // 2
            places = self.suffixes[np.where(open_, middle, 0)].astype(np.int64)[:, None] + columns
            seen = self.tokens[np.minimum(places, end)].astype(np.int64)
            differs = (seen != wanted) & counted
            at = differs.argmax(1)
            below = np.where(differs[rows, at], seen[rows, at] < wanted[rows, at], after)
            low = np.where(open_ & below, middle + 1, low)
            high = np.where(open_ & ~below, middle, high)
        return Ranges(low[: len(first)], low[len(first) :])

    def continuations(self, numbers: Ints, skip: Ints, depth: int) -> Ints:
        """The tokens [M, D] behind the first skip [M] tokens of suffixes; the separator from the document's end on.

        numbers: of the suffixes in sorted order [M].
        """
        places = self.suffixes[numbers].astype(np.int64) + skip
        found = self.tokens[np.minimum(places[:, None] + np.arange(depth), len(self.tokens) - 1)].astype(np.int64)
        return np.where(np.logical_or.accumulate(found == self.vocab_size, 1), self.vocab_size, found)


def open_datastore(folder: Path) -> Datastore:
    """Map a datastore into memory. Raises ConfigError for a folder without one, or with one of another version."""
    try:
        header = json.loads((folder / HEADER).read_text())
        if header["version"] != VERSION:
            raise ConfigError(
                f"{folder} is a datastore of version {header['version']}, this is code for {VERSION}; build it again"
            )
        store = Datastore(
            folder,
            int(header["vocab_size"]),
            str(header["vocabulary"]),
            int(header["num_documents"]),
            *(_mapped(folder / name) for name in (TOKENS, SUFFIXES, STARTS)),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"no datastore in {folder}: {error!r}; write one with eyas datastore build") from error
    if (
        len(store.starts) != store.vocab_size + 1
        or len(store.suffixes) != store.starts[-1]
        or len(store.tokens) != len(store.suffixes) + store.num_documents
    ):
        raise ConfigError(f"the files of the datastore {folder} do not belong together; build it again")
    return store


def _mapped(file: Path) -> npt.NDArray[np.integer]:
    """A plain view of the mapped file: numpy.memmap adds more to each access than a look-up costs."""
    plain: npt.NDArray[np.integer] = np.load(file, mmap_mode="r").view(np.ndarray)
    return plain


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Digest of the mapping from tokens to ids."""
    vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:32]
