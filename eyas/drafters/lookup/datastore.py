"""The corpora of drafter `rest`: tokens and their suffix array on disk, built by `eyas datastore build`, memory-mapped and
searched by bisection.

Legend: Q queries, L tokens of the longest query, M suffixes, D depth.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from tokenizers import Tokenizer

from eyas.arrays import Ints
from eyas.errors import ConfigError, MissingPackage
from eyas.progress import Progress, progress
from eyas.text.rows import check_text, text_of, token_ids_of, usable_rows

VERSION = 1
HEADER, TOKENS, SUFFIXES, STARTS = "datastore.json", "tokens.npy", "suffixes.npy", "starts.npy"
# Documents that are tokenized together, on all cores.
BATCH = 256

datastore = typer.Typer(add_completion=False, no_args_is_help=True)


@dataclass(frozen=True)
class Ranges:
    """Ranges of suffixes that begin with each query: [first, last) in the suffix array; both [Q]."""

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
        """Return the tokens [M, D] behind the first skip [M] tokens of suffixes; the separator from the document's end on.

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
    """Return a plain view of the mapped file: numpy.memmap adds more to each access than a look-up costs."""
    plain: npt.NDArray[np.integer] = np.load(file, mmap_mode="r").view(np.ndarray)
    return plain


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Return the digest of the mapping from tokens to ids."""
    vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:32]


@datastore.callback()
def _datastore() -> None:
    """Corpora in which drafter `rest` looks up continuations."""


@datastore.command()
def build(
    corpus: Annotated[
        list[Path], typer.Argument(help="Text files, .jsonl files with text or token_ids, or folders with such files.")
    ],
    model: Annotated[
        str, typer.Option("--model", "--tokenizer", help="Folder or hub id that holds the target's tokenizer.json.")
    ],
    out: Annotated[Path, typer.Option(help="Folder that is written.")],
    exclude: Annotated[Path | None, typer.Option(help="JSON list of names or ends of paths to leave out.")] = None,
) -> None:
    """Tokenize CORPUS and sort its suffixes."""
    from eyas.text.tokenizer import load_tokenizer

    tokenizer, files = load_tokenizer(model).tokenizer, corpus_files(corpus, exclude)
    rejected = Counter[str]()
    with progress() as shown:
        documents = _tokenized(files, corpus, tokenizer, shown, rejected)
        num_tokens = build_datastore(documents, _vocab_size(tokenizer), vocabulary_digest(tokenizer), out)
    print(f"{num_tokens} tokens written to {out}")
    for reason, count in rejected.most_common():
        print(f"{count} rows left out: {reason}")


def _tokenized(
    files: Sequence[Path], named: Sequence[Path], tokenizer: Tokenizer, shown: Progress, rejected: Counter[str]
) -> Iterator[list[int]]:
    shown.show("tokenizing", total=sum(file.stat().st_size for file in files))
    for file in files:
        yield from documents_of(file, file in named, tokenizer, rejected)
        shown.advance(file.stat().st_size)
    shown.show("sorting suffixes")


def corpus_files(paths: Sequence[Path], exclude: Path | None = None, suffixes: Collection[str] = ()) -> list[Path]:
    """Return the files named, and those below the folders named, in a fixed order. None is read.

    Raises ConfigError for missing paths, and if nothing is left.

    Args:
        exclude: see `excluded_ends`.
        suffixes: of files to take from folders, such as .py; empty takes all.
    """
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise ConfigError(f"no such file or folder: {missing[0]}")
    ends = excluded_ends(exclude)
    found = [file for path in paths for file in ([path] if path.is_file() else _files_below(path, suffixes))]
    files = [file for file in found if not str(file.absolute()).endswith(ends)]
    if not files:
        raise ConfigError(f"{', '.join(map(str, paths))} holds no files; name text or JSON Lines files, or folders of them")
    return files


def excluded_ends(exclude: Path | None) -> tuple[str, ...]:
    """Return ends of absolute paths, from a JSON list of names or ends of paths. Raises ConfigError for a file that holds
    none.
    """
    if exclude is None:
        return ()
    try:
        names = json.loads(exclude.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {exclude}: {error}; give a JSON list of paths") from error
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f'{exclude} holds no list of paths; give a JSON list such as ["setup.py", "docs/index.md"]')
    return tuple(f"/{name}" for name in names)


def _files_below(folder: Path, suffixes: Collection[str]) -> Iterator[Path]:
    return (file for file in sorted(folder.rglob("*")) if file.is_file() and (not suffixes or file.suffix in suffixes))


def _read(file: Path, is_named: bool) -> str | None:
    """Return the text of a file; None for one in a folder that is no UTF-8 text. Raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) or is_named:
            raise ConfigError(f"cannot read {file} as text: {error}; leave it out") from error
        return None


def documents_of(file: Path, is_named: bool, tokenizer: Tokenizer, rejected: Counter[str]) -> Iterator[list[int]]:
    """Return the token ids of each document of a file, without special tokens.

    A document is a line of a .jsonl file with `text` or `token_ids`, or any other file as a whole. rejected: counts lines
    that cannot be used. Raises ConfigError for a .jsonl file of such lines only.
    """
    if file.suffix == ".jsonl":
        vocab_size = _vocab_size(tokenizer)
        entries: Iterator[str | list[int]] = usable_rows(file, lambda row: _entry(row, vocab_size), rejected)
    else:
        entries = iter([] if (text := _read(file, is_named)) is None else [text])
    while batch := list(islice(entries, BATCH)):
        encoded = iter(tokenizer.encode_batch([e for e in batch if isinstance(e, str)], add_special_tokens=False))
        for entry in batch:
            yield next(encoded).ids if isinstance(entry, str) else entry


def _entry(row: Mapping[str, Any], vocab_size: int) -> str | list[int]:
    """Return a row's token ids, or else its text; raises BadRow."""
    if "token_ids" in row:
        ids: list[int] = token_ids_of(row, vocab_size).tolist()
        return ids
    text = text_of(row, "text or token_ids")
    check_text(text)
    return text


def _vocab_size(tokenizer: Tokenizer) -> int:
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values())) + 1


def build_datastore(documents: Iterable[Sequence[int]], vocab_size: int, vocabulary: str, folder: Path) -> int:
    """Write a datastore and return its number of tokens, see `Datastore`.

    Every document ends with a separator, the id vocab_size. The header is written last: a folder without it is no datastore.
    Raises ConfigError for token ids outside the vocabulary, for an empty corpus, and if pydivsufsort is not installed.
    """
    dtype = np.uint16 if vocab_size <= np.iinfo(np.uint16).max else np.uint32
    parts = [_with_separator(document, vocab_size).astype(dtype) for document in documents if len(document)]
    if not parts:
        raise ConfigError("the corpus holds no tokens; name files with text in them")
    tokens = np.concatenate(parts)
    suffixes = _sorted_suffixes(tokens)
    # the separator is the highest id, and suffixes that begin with it are never searched for
    starts = np.concatenate([[0], np.cumsum(np.bincount(tokens, minlength=vocab_size + 1)[:vocab_size])]).astype(np.int64)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HEADER).unlink(missing_ok=True)
    np.save(folder / TOKENS, tokens)
    np.save(folder / SUFFIXES, suffixes[: starts[-1]])
    np.save(folder / STARTS, starts)
    header = {"version": VERSION, "vocab_size": vocab_size, "vocabulary": vocabulary, "num_documents": len(parts)}
    (folder / HEADER).write_text(json.dumps(header))
    return len(tokens) - len(parts)


def _with_separator(document: Sequence[int], vocab_size: int) -> npt.NDArray[np.int64]:
    ids = np.asarray(document, dtype=np.int64)
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ConfigError(
            f"a document holds token ids {ids.min()} to {ids.max()}, outside [0, {vocab_size}); "
            "encode it with the target's own tokenizer"
        )
    return np.append(ids, vocab_size)


def _sorted_suffixes(tokens: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.integer]:
    """Return where each suffix begins, in the order of the suffixes; uint32 if that is enough."""
    try:
        from pydivsufsort import divsufsort
    except ImportError as error:
        raise MissingPackage("building a datastore", "pydivsufsort", "rest") from error
    suffixes: npt.NDArray[np.integer] = divsufsort(tokens)
    return suffixes.astype(np.uint32 if len(tokens) <= np.iinfo(np.uint32).max else np.int64)
