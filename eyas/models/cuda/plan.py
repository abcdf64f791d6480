"""How the forward passes of a target run, as integers that can be sent to every rank. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Way(IntEnum):
    """With plain attention; with the kernel, launched kernel by kernel; the same as captured graphs."""

    PLAIN = 0
    KERNEL = 1
    GRAPHS = 2


@dataclass(frozen=True)
class Limits:
    """The most that a pass can hold. rows: of all segments together; prefix: slots of all prefixes together."""

    rows: int
    segments: int
    prefix: int


@dataclass(frozen=True)
class Plan:
    """What rank 0 decides for all ranks: NCCL wants a sum to be captured on every rank or on none, and in the same order."""

    way: Way
    limits: Limits
