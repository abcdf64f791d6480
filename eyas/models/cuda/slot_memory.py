"""Slot tables of running sequences in the memory of a device: a pass uploads the slots that are new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from eyas.models.inputs import Segment, prefixes_of, tables_of
from eyas.models.slot_tables import TableRows
from eyas.tensors import Ints


class TableWrites(NamedTuple):
    """What a pass adds. prefixes: the word at which each segment's prefix begins [B]. at, slots: what to write where."""

    prefixes: Ints
    at: Ints
    slots: Ints


class SlotMemory:
    """`words`, int32: a row of `row_length` words for each table. A pass sees what was written before it."""

    def __init__(self, num_rows: int, row_length: int, device: torch.device) -> None:
        self.words = torch.zeros(num_rows * row_length, dtype=torch.int32, device=device)
        self._num_rows, self._row_length = num_rows, row_length
        self._rows = TableRows(num_rows)

    def place(self, segments: Sequence[Segment]) -> TableWrites | None:
        """Find room for the prefixes of a pass; None if there is not enough. The caller must do the writes, or `forget`."""
        prefixes = prefixes_of(segments)
        if not prefixes or len(prefixes) > self._num_rows or max(map(len, prefixes)) > self._row_length:
            return None
        found = self._rows.place(tables_of(segments), prefixes)
        new = [prefix[count:] for prefix, count in zip(prefixes, found.kept, strict=True)]
        counts = np.array(list(map(len, new)))
        starts = np.array(found.rows) * self._row_length
        # of each new slot: where its table goes on, and its number among the new ones of its table
        at = np.repeat(starts + found.kept - counts.cumsum() + counts, counts) + np.arange(int(counts.sum()))
        return TableWrites(starts, at, np.concatenate(new))

    def forget(self) -> None:
        """Take all rows to be empty, as writes were lost."""
        self._rows = TableRows(self._num_rows)
