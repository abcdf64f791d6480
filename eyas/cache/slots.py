"""Which token slots are free: counts in, slot numbers out. Integers only; knows no tensors, no sequences."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]


class SlotAllocator:
    """Hands out slots 0 .. num_slots-1, one per token. Last returned is first handed out again."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._stack: Slots = np.arange(num_slots, dtype=np.int64)[::-1].copy()
        self._num_free = num_slots
        self._owned = np.zeros(num_slots, dtype=np.bool_)

    @property
    def num_free(self) -> int:
        """Slots that nobody owns."""
        return self._num_free

    def take(self, count: int) -> Slots:
        """Own `count` slots. The caller must have made sure that they are there."""
        assert count <= self._num_free, f"{count} slots asked for, {self._num_free} free"
        start = self._num_free - count
        taken = self._stack[start : self._num_free][::-1].copy()
        self._num_free = start
        self._owned[taken] = True
        return taken

    def free(self, slots: Slots) -> None:
        """Give slots back; each must be owned."""
        assert self._owned[slots].all(), f"slots {slots[~self._owned[slots]]} are given back without being owned"
        self._owned[slots] = False
        self._stack[self._num_free : self._num_free + len(slots)] = slots[::-1]
        self._num_free += len(slots)

    def check(self) -> None:
        """Assert that every slot is either free, once, or owned."""
        free = self._stack[: self._num_free]
        assert len(np.unique(free)) == len(free), "a slot is free twice"
        assert not self._owned[free].any(), "a slot is free and owned"
        assert int(self._owned.sum()) + self._num_free == self.num_slots, "a slot is neither free nor owned"

    def check_owners(self, owners: list[Slots]) -> None:
        """Assert integrity, and that `owners` hold every owned slot exactly once."""
        self.check()
        held = np.concatenate([np.zeros(0, dtype=np.int64), *owners])
        assert len(np.unique(held)) == len(held), "a slot has two owners"
        assert self._owned[held].all(), "a slot is held without being owned"
        assert len(held) == int(self._owned.sum()), "an owned slot has no owner"
