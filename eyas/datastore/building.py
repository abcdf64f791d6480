"""Builds a datastore: documents in, a folder with their tokens and suffix array out. Knows no text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eyas.datastore.store import HEADER, STARTS, SUFFIXES, TOKENS, VERSION
from eyas.errors import ConfigError


def build_datastore(documents: Iterable[Sequence[int]], vocab_size: int, vocabulary: str, folder: Path) -> int:
    """Write a datastore and give back its number of tokens. vocabulary: digest of which token has which id.

    Every document ends with a separator, the id vocab_size. The header is written last: without it the folder is none.
    Raises ConfigError for token ids outside the vocabulary, for no tokens at all, and where pydivsufsort is missing.
    """
    dtype = np.uint16 if vocab_size <= np.iinfo(np.uint16).max else np.uint32
    parts = [_ended(document, vocab_size).astype(dtype) for document in documents if len(document)]
    if not parts:
        raise ConfigError("the corpus holds no tokens; name files with text in them")
    tokens = np.concatenate(parts)
    suffixes = _sorted_suffixes(tokens)
    # the separator is the highest id, and suffixes that begin with it are never asked for
    starts = np.concatenate([[0], np.cumsum(np.bincount(tokens, minlength=vocab_size + 1)[:vocab_size])]).astype(np.int64)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HEADER).unlink(missing_ok=True)
    np.save(folder / TOKENS, tokens)
    np.save(folder / SUFFIXES, suffixes[: starts[-1]])
    np.save(folder / STARTS, starts)
    header = {"version": VERSION, "vocab_size": vocab_size, "vocabulary": vocabulary, "num_documents": len(parts)}
    (folder / HEADER).write_text(json.dumps(header))
    return len(tokens) - len(parts)


def _ended(document: Sequence[int], vocab_size: int) -> npt.NDArray[np.int64]:
    """The document and its separator."""
    ids = np.asarray(document, dtype=np.int64)
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ConfigError(
            f"a document holds token ids {ids.min()} to {ids.max()}, outside [0, {vocab_size}); "
            "encode it with the target's own tokenizer"
        )
    return np.append(ids, vocab_size)


def _sorted_suffixes(tokens: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.integer]:
    """Where each suffix begins, in the order of the suffixes; uint32 where that is enough."""
    try:
        from pydivsufsort import divsufsort
    except ImportError as error:
        raise ConfigError("building a datastore needs pydivsufsort; install eyas[rest]") from error
    suffixes: npt.NDArray[np.integer] = divsufsort(tokens)
    return suffixes.astype(np.uint32 if len(tokens) <= np.iinfo(np.uint32).max else np.int64)
