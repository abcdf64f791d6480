"""What rank 0 tells the others, as bytes: an order in, a message out, and back. Knows no sockets.

A message holds 32-bit integers, the kind of the order first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from eyas.models.cuda.plan import Limits, Plan, Way
from eyas.models.inputs import Ints, Segment


@dataclass(frozen=True)
class Allot:
    """Make room for the keys and values of so many slots, forget those before, and prepare passes as planned."""

    num_slots: int
    plan: Plan


@dataclass(frozen=True)
class Forward:
    """Run one forward pass over these segments."""

    segments: Sequence[Segment]


@dataclass(frozen=True)
class Stop:
    """Nothing more will come."""


Order = Allot | Forward | Stop


class _Kind(IntEnum):
    ALLOT = 0
    FORWARD = 1
    STOP = 2


def order_to_bytes(order: Order) -> bytes:
    """The message of an order."""
    if isinstance(order, Allot):
        plan, limits = order.plan, order.plan.limits
        parts = [np.array([_Kind.ALLOT, order.num_slots, plan.way, limits.rows, limits.segments, limits.prefix])]
    elif isinstance(order, Forward):
        parts = [np.array([_Kind.FORWARD]), *(part for segment in order.segments for part in _parts(segment))]
    else:
        parts = [np.array([_Kind.STOP])]
    return np.concatenate(parts).astype("<i4").tobytes()


def order_from_bytes(message: bytes) -> Order:
    """The order of a message."""
    ints = np.frombuffer(message, "<i4").astype(np.int64)
    kind = ints[0]
    if kind == _Kind.ALLOT:
        num_slots, way, *limits = map(int, ints[1:])
        return Allot(num_slots, Plan(Way(way), Limits(*limits)))
    return Forward(list(_segments(ints[1:]))) if kind == _Kind.FORWARD else Stop()


def _parts(segment: Segment) -> Iterator[Ints]:
    masked = segment.visible is not None
    yield np.array([len(segment.tokens), len(segment.prefix), len(segment.wanted), masked], dtype=np.int64)
    yield from (segment.tokens, segment.positions, segment.slots, segment.prefix, segment.wanted)
    if segment.visible is not None:
        yield segment.visible.ravel().astype(np.int64)


def _segments(ints: Ints) -> Iterator[Segment]:
    while len(ints):
        rows, length, wanted, masked = map(int, ints[:4])
        ends = np.cumsum([4, rows, rows, rows, length, wanted, rows * rows * masked])
        _, tokens, positions, slots, prefix, chosen, visible, ints = np.split(ints, ends)
        mask = visible.astype(np.bool_).reshape(rows, rows) if masked else None
        yield Segment(tokens, positions, slots, prefix, mask, chosen)
