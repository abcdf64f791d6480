"""Straight lines through measured times: sizes and seconds in, expected seconds out. Knows no steps and no drafts."""

from __future__ import annotations

# An observation counts as this multiple of what was expected at most: a pause of the machine is no cost of rows.
MOST_SURPRISE = 3.0
# Spread of sizes, as a share of their mean, from which on a slope can be told.
_LEAST_SPREAD = 0.01
_LEAST_SECONDS = 1e-9


class Line:
    """Least squares of seconds against size, exponentially forgotten; while sizes hardly differ the slope stays what it was.
    Neither slope nor intercept is below 0."""

    def __init__(self, forgetting: float) -> None:
        """forgetting: what an observation still weighs after the next one."""
        self._forgetting = forgetting
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._slope: float | None = None

    def add(self, size: float, seconds: float) -> None:
        """Count an observation."""
        if self._weight > 1:
            seconds = min(seconds, MOST_SURPRISE * self.at(size))
        observed = (1.0, size, seconds, size * size, size * seconds)
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        self._weight, self._x, self._y, self._xx, self._xy = (
            self._forgetting * total + new for total, new in zip(sums, observed, strict=True)
        )
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x**2
        if variance > (_LEAST_SPREAD * mean_x) ** 2:
            self._slope = max((self._xy / self._weight - mean_x * mean_y) / variance, 0.0)

    @property
    def empty(self) -> bool:
        """Whether nothing was observed yet."""
        return self._weight == 0

    @property
    def sloped(self) -> bool:
        """Whether sizes have ever differed enough to tell how seconds grow with them."""
        return self._slope is not None

    def at(self, size: float) -> float:
        """Expected seconds; their mean where sizes have hardly differed yet, 0 before the first observation."""
        if self.empty:
            return 0.0
        mean_x, mean_y, slope = self._x / self._weight, self._y / self._weight, self._slope or 0.0
        if slope * mean_x > mean_y:
            return max(self._xy / self._xx * size, _LEAST_SECONDS)
        return max(mean_y + slope * (size - mean_x), _LEAST_SECONDS)
