"""Which slot tables a receiver has already, so that a pass sends new slots only.

A slot table is the list of slots of one sequence. It only grows: slots that change make it another table. A receiver, which
is a rank or a device, keeps each table in a row of its memory. All work here is by segments and new slots, whatever the
length of the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from eyas.tree import Ints

# The number of a sequence, and how often its earlier slots have changed.
TableId = tuple[int, int]


class KnownTable(NamedTuple):
    """A table in `row` of the receiver's memory, which has `length` slots of it. last: the slot at the end, -1 for none."""

    row: int
    length: int
    last: int


class TableUpdate(NamedTuple):
    """Where the receiver keeps the prefix of each segment, and how many slots of it are there. The others follow these."""

    rows: list[int]
    kept: list[int]


class TableRows:
    """The rows of one receiver. Tables that were not used for the longest time make room for others.

    most: rows of the receiver's memory. A table without an id takes a row for one pass.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._known: dict[TableId, KnownTable] = {}  # the least recently used first
        self._free: list[int] = []
        self._num_rows = 0

    def place(self, tables: Sequence[TableId | None], prefixes: Sequence[Ints]) -> TableUpdate:
        """Find a row for each of at most `most` tables. From now on the receiver is taken to have all of these prefixes."""
        assert len(tables) <= self.most, f"{len(tables)} tables for {self.most} rows"
        known = [self._known.pop(table, None) if table is not None else None for table in tables]
        rows, kept, unnamed = list[int](), list[int](), list[int]()
        for table, prefix, had in zip(tables, prefixes, known, strict=True):
            length, count = len(prefix), 0
            row = self._take_row() if had is None else had.row
            if had is not None:
                count = min(had.length, length)
                if count and count == had.length and prefix[count - 1] != had.last:
                    count = 0  # only added slots keep the id, but wrong keys would go unseen
            rows.append(row)
            kept.append(count)
            if table is None:
                unnamed.append(row)
                continue
            if (twin := self._known.get(table)) is not None:
                unnamed.append(twin.row)
            self._known[table] = KnownTable(row, length, int(prefix[-1]) if length else -1)
        self._free += unnamed
        return TableUpdate(rows, kept)

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        if self._num_rows < self.most:
            self._num_rows += 1
            return self._num_rows - 1
        return self._known.pop(next(iter(self._known))).row
