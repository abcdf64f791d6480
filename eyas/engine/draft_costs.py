"""What verify passes and draft rounds cost, in seconds by size: tables that measurements correct."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class TreeSize(NamedTuple):
    """Most nodes of a tree, the root included, and its most levels below the root."""

    nodes: int
    depth: int


NO_TREE = TreeSize(1, 0)


class CostModel:
    """Seconds by size: a table, interpolated between its sizes and extended along its last slope beyond them.

    Seconds never fall with size. A table without sizes is empty: it expects 0 seconds until the first observation, and then
    the same for all sizes.
    """

    # A measurement counts as this multiple of the expected seconds at most: a pause of the machine is not a cost of size.
    MAX_SURPRISE = 3.0
    # Weight of a measurement at sizes far from its own, relative to its own: machines slow down for all sizes together.
    FAR_WEIGHT = 0.5
    FIRST_SIZES = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)  # of an empty table, once it is not empty
    LEAST_S = 1e-6
    SPACING = 0.14  # a size whose logarithm is as far from that of all others gets an entry of its own

    def __init__(self, sizes: Seq[float], seconds: Seq[float], rate: float) -> None:
        """sizes: ascending, above 0. rate: weight of a new measurement against what the table holds, in (0, 1]."""
        self._sizes: Floats = np.array(sizes, dtype=np.float64)
        self._seconds: Floats = np.maximum.accumulate(np.maximum(np.array(seconds, dtype=np.float64), self.LEAST_S))
        self._at_start = self._sizes, self._seconds
        self._rate = rate

    @property
    def sizes(self) -> list[float]:
        """Sizes that it holds seconds of, ascending."""
        return [float(size) for size in self._sizes]

    def at(self, size: npt.ArrayLike) -> Floats:
        """Expected seconds of each size."""
        sizes = np.asarray(size, dtype=np.float64)
        if not len(self._sizes):
            return np.zeros(sizes.shape)
        if len(self._sizes) == 1:
            return np.full(sizes.shape, self._seconds[0])
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._sizes[-1] - self._sizes[-2])
        inside: Floats = np.interp(sizes, self._sizes, self._seconds)
        extended: Floats = inside + slope * np.maximum(sizes - self._sizes[-1], 0.0)
        return extended

    def observe(self, size: float, seconds: float) -> None:
        """Move the table towards a measurement, by ratios, most near its size."""
        if not len(self._sizes):
            self._sizes = np.array(self.FIRST_SIZES)
            self._seconds = np.full(len(self._sizes), max(seconds, self.LEAST_S))
            return
        if np.abs(np.log(self._sizes / size)).min() > self.SPACING:
            at = int(np.searchsorted(self._sizes, size))
            self._seconds = np.insert(self._seconds, at, float(self.at(size)))
            self._sizes = np.insert(self._sizes, at, size)
        ratio = min(max(seconds, self.LEAST_S) / float(self.at(size)), self.MAX_SURPRISE)
        self.scale(size, ratio**self._rate)

    def scale(self, size: float, ratio: float) -> None:
        """Multiply the seconds, most near a size."""
        near: Floats = np.array([np.interp(size, self._sizes, unit) for unit in np.eye(len(self._sizes))])
        weights = self.FAR_WEIGHT + (1 - self.FAR_WEIGHT) * near
        self._seconds = np.maximum.accumulate(np.maximum(self._seconds * ratio**weights, self.LEAST_S))

    def relax(self, factor: float) -> None:
        """Multiply all seconds, but expect no less than a third of those at the start: a busy machine measures too much."""
        sizes, seconds = self._at_start
        least = np.interp(self._sizes, sizes, seconds) / self.MAX_SURPRISE if len(sizes) else self.LEAST_S
        self._seconds = np.maximum(self._seconds * factor, np.minimum(self._seconds, least))


class DraftCosts:
    """Seconds to wait for trees: those of a round with one level by number of trees, and of each further level by its rows.

    A level has a row for each drafted node of a tree, but `top_k` at most. A measurement corrects both tables, the more
    uncertain one more (a Kalman filter of their relative errors). So rounds of different depths show what a level costs:
    as much as the first one for EAGLE, next to nothing for one-pass heads.
    """

    RELAXING = 0.95  # what a retry multiplies all seconds by: a drafter that was slow may be fast again
    # Relative errors: of tables that were measured before, of those that were not, what rounds add, and of a measurement.
    MEASURED, UNKNOWN, DRIFT, NOISE = 0.3, 1.0, 0.02, 0.2

    def __init__(self, first: CostModel, level: CostModel, top_k: int) -> None:
        self._first, self._level, self._top_k = first, level, top_k
        self._spread: Floats = np.eye(2) * (self.MEASURED if first.sizes else self.UNKNOWN) ** 2

    def at(self, num_trees: int, size: TreeSize) -> float:
        """Expected seconds."""
        return float(self._parts(num_trees, size).sum())

    def observe(self, num_trees: int, size: TreeSize, seconds: float) -> None:
        """Correct the tables by a measurement. Into empty ones it goes in equal parts."""
        rows, further = self._rows(num_trees, size), size.depth - 1
        if not self._first.sizes:
            self._first.observe(num_trees, seconds / 2 if further else seconds)
            self._level.observe(rows, seconds / 2 / max(further, 1))
        parts = self._parts(num_trees, size)
        error = min(seconds, CostModel.MAX_SURPRISE * parts.sum()) - parts.sum()
        self._spread += self.DRIFT**2 * np.eye(2)
        gains = self._spread @ parts / (parts @ self._spread @ parts + (self.NOISE * parts.sum()) ** 2)
        self._spread -= np.outer(gains, parts @ self._spread)
        ratios = np.clip(1 + gains * error, 1 / CostModel.MAX_SURPRISE, CostModel.MAX_SURPRISE)
        self._first.scale(num_trees, float(ratios[0]))
        if further:
            self._level.scale(rows, float(ratios[1]))

    def relax(self) -> None:
        """Expect a little less, before a retry."""
        self._first.relax(self.RELAXING)
        self._level.relax(self.RELAXING)

    def _parts(self, num_trees: int, size: TreeSize) -> Floats:
        """Seconds of the first level, and of all further ones."""
        further = (size.depth - 1) * float(self._level.at(self._rows(num_trees, size)))
        return np.array([float(self._first.at(num_trees)), further] if size.depth else [0.0, 0.0])

    def _rows(self, num_trees: int, size: TreeSize) -> int:
        return num_trees * max(min(size.nodes - 1, self._top_k), 1)
