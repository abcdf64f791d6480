"""A datastore on disk: context ends in, places of the corpus that continue them out. Memory-mapped, searched by bisection.

Legend: Q queries, L tokens of the longest, D depth, M places.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eyas.errors import ConfigError

VERSION = 1
HEADER, TOKENS, SUFFIXES, STARTS = "datastore.json", "tokens.npy", "suffixes.npy", "starts.npy"

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ranges:
    """Of each query the suffixes that begin with it: [first, last) in the suffix array; both [Q]."""

    first: Ints
    last: Ints


@dataclass(frozen=True)
class Datastore:
    """tokens: documents one after the other, each ended by the separator vocab_size. suffixes: where each suffix of tokens
    begins, in their order, without those that begin with the separator. starts [vocab_size + 1]: the first suffix that
    begins with a token. vocabulary: digest of which token has which id."""

    folder: Path
    vocab_size: int
    vocabulary: str
    num_documents: int
    tokens: npt.NDArray[np.integer]
    suffixes: npt.NDArray[np.integer]
    starts: npt.NDArray[np.integer]

    def search(self, queries: Ints, lengths: Ints) -> Ranges:
        """All queries at once: of row q of queries [Q, L] the first lengths[q] tokens, at least one, are looked for.

        Ids outside the vocabulary, of which there must be none in the first column, are not found."""
        first, last = self.starts[queries[:, 0]], self.starts[queries[:, 0] + 1]
        low = np.concatenate([first, first])
        high = np.concatenate([last, last])
        # the first half looks for the first suffix that is not below its query, the second for the first one above it
        rows = np.arange(len(low))
        after = rows >= len(first)
        asked, columns = np.concatenate([queries, queries]), np.arange(queries.shape[1])
        counted = columns < np.concatenate([lengths, lengths])[:, None]
        end = len(self.tokens) - 1
        for _ in range(int((last - first).max(initial=0)).bit_length()):
            open_ = low < high
            middle = (low + high) // 2
            places = self.suffixes[np.where(open_, middle, 0)].astype(np.int64)[:, None] + columns
            seen = self.tokens[np.minimum(places, end)].astype(np.int64)
            differs = (seen != asked) & counted
            at = differs.argmax(1)
            below = np.where(differs[rows, at], seen[rows, at] < asked[rows, at], after)
            low = np.where(open_ & below, middle + 1, low)
            high = np.where(open_ & ~below, middle, high)
        return Ranges(low[: len(first)], low[len(first) :])

    def continuations(self, numbers: Ints, skip: Ints, depth: int) -> Ints:
        """The tokens [M, D] that follow the first `skip` [M] tokens of suffixes; the separator from a document's end on."""
        places = self.suffixes[numbers].astype(np.int64) + skip
        found = self.tokens[np.minimum(places[:, None] + np.arange(depth), len(self.tokens) - 1)].astype(np.int64)
        return np.where(np.logical_or.accumulate(found == self.vocab_size, 1), self.vocab_size, found)


def open_datastore(folder: Path) -> Datastore:
    """Map a datastore into memory. Raises ConfigError for a folder that holds none, or one of another version."""
    try:
        header = json.loads((folder / HEADER).read_text())
        if header["version"] != VERSION:
            raise ConfigError(
                f"{folder} is a datastore of version {header['version']}, this is code for {VERSION}; build it anew"
            )
        tokens, suffixes, starts = (_mapped(folder / name) for name in (TOKENS, SUFFIXES, STARTS))
        store = Datastore(
            folder,
            int(header["vocab_size"]),
            str(header["vocabulary"]),
            int(header["num_documents"]),
            tokens,
            suffixes,
            starts,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"no datastore in {folder}: {error!r}; write one with eyas datastore build") from error
    if (
        len(starts) != store.vocab_size + 1
        or len(suffixes) != starts[-1]
        or len(tokens) != len(suffixes) + store.num_documents
    ):
        raise ConfigError(f"the files of the datastore {folder} do not belong together; build it anew")
    return store


def _mapped(file: Path) -> npt.NDArray[np.integer]:
    """A plain view: what numpy.memmap adds to an array costs more than a look-up."""
    plain: npt.NDArray[np.integer] = np.load(file, mmap_mode="r").view(np.ndarray)
    return plain
