"""JSON of responses, written in small parts from values that are made when they are written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

# Values of a response from which a thread prepares it, and which the JSON encoder gets at once.
LARGE_NUM_VALUES = 4096
_BLOCK_BYTES = 64 * 2**10
END_OF_EVENT = "\n\n"

ItemT = TypeVar("ItemT")


class LazyList(Sequence[Any], Generic[ItemT]):
    """A list of JSON whose entries are made from items when they are read: as objects they take ten times the memory."""

    def __init__(self, make: Callable[[ItemT], Any], items: Sequence[ItemT]) -> None:
        self._make = make
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, at: Any) -> Any:
        return list(map(self._make, self._items[at])) if isinstance(at, slice) else self._make(self._items[at])


_LISTS = (list, LazyList)
_HOLDERS = (dict, *_LISTS)
# UTF-8, in which half of a surrogate pair, of an echoed field, becomes JSON's escape \\ud800.
_UTF8 = ("utf-8", "backslashreplace")
_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=list).encode


def num_values(value: object) -> int:
    """Estimate how many values JSON has; those of a list by its first entries."""
    if type(value) is dict:
        inner = [each for each in value.values() if type(each) in _HOLDERS]
        return 1 + len(value) - len(inner) + sum(map(num_values, inner))
    if isinstance(value, _LISTS):
        return 1 + len(value) * max(map(num_values, value[:4]), default=0)
    return 1


async def encoded(event: dict[str, Any], before: str) -> list[bytes]:
    """Return an event of a stream as blocks, made in a thread if it is large. before: see `json_blocks`."""
    if num_values(event) > LARGE_NUM_VALUES:
        return await asyncio.to_thread(json_blocks, event, before, END_OF_EVENT)
    return [f"{before}{_dumps(event)[before.endswith(',') :]}{END_OF_EVENT}".encode(*_UTF8)]


def json_blocks(value: dict[str, Any], before: str = "", after: str = "") -> list[bytes]:
    """Return JSON in one line as UTF-8, in blocks that are sent one by one.

    Args:
        before: text to write first. If it ends with a comma, it already opens the object, and the value's brace is left out.
        after: text to write last.
    """
    blocks, parts, length = list[bytes](), [before], 0
    for number, piece in enumerate(pieces(value)):
        parts.append(piece[1:] if not number and before.endswith(",") else piece)
        length += len(piece)
        if length >= _BLOCK_BYTES:
            blocks.append("".join(parts).encode(*_UTF8))
            parts, length = [], 0
    return [*blocks, ("".join(parts) + after).encode(*_UTF8)]


def pieces(value: object) -> Iterator[str]:
    """Yield the parts of a JSON text. The encoder keeps the interpreter lock to its end, so it gets a part at a time."""
    size = num_values(value)
    if size > LARGE_NUM_VALUES and isinstance(value, dict):
        for number, (name, item) in enumerate(value.items()):
            yield f"{',' if number else '{'}{_dumps(name)}:"
            yield from pieces(item)
        yield "}"
    elif size > LARGE_NUM_VALUES and isinstance(value, list | LazyList):
        step = max(LARGE_NUM_VALUES * len(value) // size, 1)
        for start in range(0, len(value), step):
            yield "," if start else "["
            yield from pieces(value[start]) if step == 1 else [_dumps(value[start : start + step])[1:-1]]
        yield "]"
    else:
        yield _dumps(value)


def event_name(event: dict[str, Any]) -> str:
    """Return what comes before the JSON of an event in a stream that names it by its type."""
    return f"event: {event['type']}\ndata: "
