"""Slot tables: the slots of each sequence, as ranks and devices keep them.

A table only grows: slots that change make it another table. So a receiver, which is a rank or a device, keeps each table in
a row of its memory, and gets new slots only. The work of that goes by segments and new slots, whatever the length of the
context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eyas.cache.prefix_cache import Slots

# The number of a sequence, and how often its earlier slots have changed.
TableId = tuple[int, int]


@dataclass(slots=True)
class KnownTable:
    """A table in `row` of the receiver's memory, which has `length` slots of it. used: number of the last pass with it."""

    row: int
    length: int
    used: int


class TableUpdate(NamedTuple):
    """Places at which the receiver keeps the prefix of each segment, and the number of its slots there. The others follow
    these.
    """

    rows: list[int]
    kept: list[int]


class TableRows:
    """The rows of one receiver. The table that was not used for the longest time makes room for another.

    most: rows of the receiver's memory. A table without an id takes a row for one pass.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._known: dict[TableId | None, KnownTable] = {}  # without None
        self._free: list[int] = []
        self._num_rows = self._num_passes = 0

    def place(self, tables: Sequence[TableId | None], prefixes: Sequence[Slots]) -> TableUpdate:
        """Find a row for each of at most `most` tables. From now on the receiver is taken to have all of these prefixes."""
        assert len(tables) <= self.most, f"{len(tables)} tables for {self.most} rows"
        self._num_passes += 1
        rows, kept, missing = list[int](), list[int](), list[int]()
        for index, (table, prefix) in enumerate(zip(tables, prefixes, strict=True)):
            known, length = self._known.get(table), len(prefix)
            if known is None:
                missing.append(index)
                rows.append(-1)
                kept.append(0)
                continue
            rows.append(known.row)
            kept.append(known.length if known.length < length else length)
            known.length, known.used = length, self._num_passes
        unnamed = []
        for index in missing:
            table, row = tables[index], self._take_row()
            rows[index] = row
            if table is None or table in self._known:
                unnamed.append(row)
            else:
                self._known[table] = KnownTable(row, len(prefixes[index]), self._num_passes)
        self._free += unnamed
        return TableUpdate(rows, kept)

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        if self._num_rows < self.most:
            self._num_rows += 1
            return self._num_rows - 1
        oldest = min(self._known, key=lambda table: self._known[table].used)
        return self._known.pop(oldest).row
