"""Rows of files of text or token ids: JSON Lines, or a JSON list. A row that cannot be used is counted by its reason."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from eyas.errors import ConfigError

Row = TypeVar("Row")
FIELDS = "messages, conversations, prompt and completion, text or token_ids"
JSON_SUFFIXES = {".jsonl", ".json"}
UTF8_MARK = b"\xef\xbb\xbf"
# Rows that the log names for each reason to leave them out.
MAX_NAMED_ROWS = 3

log = logging.getLogger(__name__)


class BadRow(ValueError):
    """A row that cannot be used. Its text is the reason, and what is particular to the row after a colon."""

    @property
    def reason(self) -> str:
        return str(self).partition(": ")[0]


def usable_rows(file: Path, parse: Callable[[Mapping[str, Any]], Row | None], rejected: Counter[str]) -> Iterator[Row]:
    """Yield what `parse` makes of the rows of a file, without None.

    A row for which it raises BadRow is counted in `rejected`; the log names the first of each reason. Raises ConfigError for
    a file without a row that can be used, unless it is empty, and for one that cannot be read.
    """
    first, num_good = "", 0
    for number, row in read_entries(file):
        try:
            if isinstance(row, BadRow):
                raise row
            parsed = parse(row)
        except BadRow as error:
            rejected[error.reason] += 1
            first = first or f"line {number}: {error}"
            if rejected[error.reason] <= MAX_NAMED_ROWS:
                log.warning("%s, line %d is left out: %s", file, number, error)
            continue
        if parsed is not None:
            num_good += 1
            yield parsed
    if first and not num_good:
        raise ConfigError(f"no row of {file} can be used; {first}")


def token_ids_of(entry: Mapping[str, Any], vocab_size: int = 2**31) -> NDArray[np.int64]:
    """Return the token ids of a row, int64 [n]. Raises BadRow, also for one beyond the vocabulary."""
    ids = entry["token_ids"]
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise BadRow("wrong token_ids: expected a list of whole numbers")
    if wrong := [token for token in ids if not 0 <= token < vocab_size]:
        raise BadRow(f"wrong token_ids: {wrong[0]} is not in the vocabulary of {vocab_size}")
    return np.array(ids, np.int64)


def text_of(entry: Mapping[str, Any], expected: str = FIELDS) -> str:
    """Return the plain text of a row. expected: fields, for errors. Raises BadRow."""
    if "text" not in entry:
        raise BadRow(f"no known field: expected {expected}, found {', '.join(entry)[:80] or 'nothing'}")
    if not isinstance(entry["text"], str):
        raise BadRow(f"wrong text: expected a text, found a {type(entry['text']).__name__}")
    return str(entry["text"])


def check_text(text: str) -> None:
    """Raises BadRow for half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeError as error:
        raise BadRow(f"wrong text: {error}") from error


def read_entries(file: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Yield the objects of a JSON Lines file, or of a JSON list, with their numbers; or one with the text of any other file.

    A row that holds none is a BadRow in its place. Raises ConfigError for a file that cannot be read at all.
    """
    try:
        if file.suffix not in JSON_SUFFIXES:
            text = file.read_text(encoding="utf-8", errors="replace")
            if "\0" in text:
                raise ValueError("it holds zero bytes, so it is no text")
            yield 1, {"text": text}
            return
        with file.open("rb") as lines:
            start = lines.peek(64).lstrip(UTF8_MARK + b" \t\r\n")
            if start[:1] == b"[" and file.suffix == ".json":
                yield from enumerate(map(_object, json.loads(lines.read().decode("utf-8-sig"))), 1)
                return
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _parsed(line)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {file}: {error}; give JSON Lines, an object on each line, or a JSON list") from error


def _parsed(line: bytes) -> dict[str, Any] | BadRow:
    try:
        return _object(json.loads(line.decode("utf-8-sig")))
    except UnicodeError as error:
        return BadRow(f"no UTF-8: {error}")
    except (ValueError, RecursionError) as error:
        return BadRow(f"no JSON object: {error}")


def _object(entry: object) -> dict[str, Any] | BadRow:
    return entry if isinstance(entry, dict) else BadRow(f"no JSON object: found a {type(entry).__name__}")
