"""Reads a corpus: files in, their documents out as token ids. Knows not what becomes of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

from eyas.errors import ConfigError

# Documents that are encoded together, on all cores.
BATCH = 256


def corpus_files(paths: Sequence[Path]) -> list[Path]:
    """The files named, and all below the folders named, in a fixed order. Raises ConfigError for what does not exist."""
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise ConfigError(f"no such file or folder: {missing[0]}")
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*"))) if file.is_file()]
    if not files:
        raise ConfigError(f"{', '.join(map(str, paths))} holds no files; name text or JSON Lines files, or folders of them")
    return files


def documents(file: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Token ids of each document, without special tokens: each line of a .jsonl file with `text` or `token_ids`, any other
    file as a whole. Raises ConfigError for a file that is none of these."""
    texts = _entries(file) if file.suffix == ".jsonl" else iter([_read(file)])
    while batch := list(islice(texts, BATCH)):
        encoded = iter(tokenizer.encode_batch([e for e in batch if isinstance(e, str)], add_special_tokens=False))
        for entry in batch:
            yield next(encoded).ids if isinstance(entry, str) else entry


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Digest of which token has which id."""
    vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:32]


def _entries(file: Path) -> Iterator[str | list[int]]:
    for number, line in enumerate(_read(file).splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if "token_ids" in entry:
                yield [int(token) for token in entry["token_ids"]]
            else:
                yield str(entry["text"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}, line {number}: {error!r}; expected a JSON object with text or token_ids") from error


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file} as text: {error}; leave it out") from error
