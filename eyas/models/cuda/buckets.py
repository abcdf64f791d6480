"""Which captured size a pass is padded to. Integers only; knows no tensors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SPARE_LOGITS = 64  # rows whose logits may be computed in vain, however few are wanted


def row_buckets(most: int) -> tuple[int, ...]:
    """Row counts to capture, ascending up to `most`: powers of two, from 16 on also half way between them."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    halves = [3 * power // 2 for power in powers if power >= 16]
    return (*sorted(rows for rows in (*powers, *halves) if rows < most), most)


def padded(count: int, least: int) -> int:
    """The smallest size that holds `count`, at least `least`: powers of two, and half way between them from 4 on."""
    power = 1 << max(count - 1, 0).bit_length()
    half = 3 * power // 4
    return max(least, half if power > 4 and half >= count else power)


def largest_size(count: int) -> int:
    """The largest size of `padded` that is not above `count`, at least 1."""
    power = 1 << max(count.bit_length() - 1, 0)
    half = 3 * power // 2
    return half if power >= 4 and half <= count else power


def choose_bucket(buckets: Sequence[int], rows: int, wanted: int) -> int | None:
    """The smallest bucket that holds a pass. None where a graph is of no use: too many rows, or mostly rows whose logits
    nobody wants, for a graph computes them all."""
    if rows > buckets[-1] or rows - wanted > max(wanted, SPARE_LOGITS):
        return None
    return buckets[bisect_left(buckets, rows)]
