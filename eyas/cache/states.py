"""Rows of the pools of recurrent states, counted in ints: who holds a row, and what a pass reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eyas.arrays import NO_ROWS, Ints

# The row of a pool that stays zero: the state before the first token.
START = 0


class StateSizes(NamedTuple):
    """Rows of the pools of recurrent states, and nodes of the stash."""

    rows: int
    stashed: int


NO_STATES = StateSizes(0, 0)


class StateStep(NamedTuple):
    """Rows of the pools of recurrent states that a sequence's rows in a pass read and write.

    A pass never writes to the row that it reads, so one that fails can be run again.

    Attributes:
        read: the state before `pending`.
        write: for the state behind the rows of a prompt, or for the one before the root of a tree.
        pending: rows of the stash with the path that was accepted of the sequence's last tree; empty if `read` has it.
        stash: the row of the stash for the first node of a tree; -1 for rows that are sure to stay, such as a prompt's.
        marks: states to keep within a prompt: how many of its rows come before each, and the row to write it to.
    """

    read: int
    write: int
    pending: Ints = NO_ROWS
    stash: int = -1
    marks: tuple[tuple[int, int], ...] = ()


class StateRows:
    """Count of the holders of each row: sequences, and nodes of the prefix cache. Row START has no owner.

    Args:
        num_rows: of the pools, START among them.
        num_running: sequences that may run, each with a row to read and one to write.
    """

    def __init__(self, num_rows: int, num_running: int) -> None:
        self.most_marked = num_rows - 1 - 2 * num_running
        self.num_marked = 0  # rows that sequences hold until the prefix cache takes them
        self._holders = np.zeros(num_rows, dtype=np.int64)
        self._holders[START] = 1
        self._free = list(range(num_rows - 1, START, -1))
        assert self.most_marked >= 0, "there are fewer rows than running sequences need"

    @property
    def num_free(self) -> int:
        """Return the rows without a holder."""
        return len(self._free)

    def take(self) -> int:
        """Return a row that is now held once. There must be a free one."""
        row = self._free.pop()
        self._holders[row] = 1
        return row

    def hold(self, row: int) -> None:
        """Hold a row once more."""
        assert self._holders[row] > 0, f"state row {row} is held without having a holder"
        self._holders[row] += 1

    def release(self, row: int) -> None:
        """End one hold of a row."""
        assert self._holders[row] > 0, f"state row {row} is released without being held"
        self._holders[row] -= 1
        if not self._holders[row]:
            self._free.append(row)

    def is_shared(self, row: int) -> bool:
        """Return whether a row has several holders."""
        return bool(self._holders[row] > 1)

    def check(self, held: Sequence[int]) -> None:
        """Assert that `held`, one for each hold, are all holds of all rows."""
        found = np.bincount([START, *held], minlength=len(self._holders))
        assert (found == self._holders).all(), f"state rows {np.flatnonzero(found != self._holders)} are counted wrongly"
        assert sorted(self._free) == np.flatnonzero(self._holders == 0).tolist(), "a row is neither free nor held"
