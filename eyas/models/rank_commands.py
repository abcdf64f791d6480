"""What rank 0 sends the other ranks: the segments of a forward pass, and the size of the KV cache, as bytes.

The slots before a segment's rows are by far the most of it, and they hardly change from pass to pass. So both sides remember
them, and a message names what to keep and what follows. It costs no matter how long the context is, at 64 sequences of 16
rows some 20 kB. Where all ranks draw, noise keys go along. Encoder and decoder see the same messages in the same order, so
they remember the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from eyas.config.engine import KVCacheDtype
from eyas.models.cuda.backend import BackendKind, BackendPlan
from eyas.models.cuda.graphs import CaptureLimits
from eyas.models.inputs import Segment
from eyas.request import NoiseKey
from eyas.tensors import Ints

# Passes after which a prefix that none of them has continued is forgotten.
KEPT_PASSES = 16
# Most slots at the end of a prefix that are searched for the end of a known one: more than a pass adds.
SEARCHED_SLOTS = 1 << 16
# Known prefix, kept slots of it, new slots, rows, wanted logits, whether there is a mask, whether there is a noise key.
HEADER_INTS = 7
KV_CACHE_DTYPES: tuple[KVCacheDtype, ...] = get_args(KVCacheDtype)
UNKNOWN = -1
_KEY = np.dtype([("seed", "<u8"), ("temperature", "<f8")])
FORWARD, INIT_KV_CACHE = 0, 1


@dataclass(frozen=True)
class InitKVCache:
    """Allocate `num_slots` slots for keys and values, drop those before, and build the planned backend."""

    num_slots: int
    plan: BackendPlan


# Segments are those of a forward pass to run.
Command = InitKVCache | Sequence[Segment]


class KnownPrefixes:
    """Prefixes of the last passes, by a number that rises with each of them."""

    def __init__(self) -> None:
        self._prefixes: dict[int, Ints] = {}
        self._passes: list[range] = []
        self._next = 0

    def __getitem__(self, number: int) -> Ints:
        return self._prefixes[number]

    def __contains__(self, number: int) -> bool:
        return number in self._prefixes

    @property
    def next_number(self) -> int:
        """The number of the first prefix of the next pass."""
        return self._next

    def end_pass(self, prefixes: Sequence[Ints], continued: Sequence[int]) -> None:
        """Remember the prefixes of a pass; forget those that it has continued, and old ones."""
        for number in continued:
            self._prefixes.pop(number, None)
        numbers = range(self._next, self._next + len(prefixes))
        self._prefixes.update(zip(numbers, prefixes, strict=True))
        self._next = numbers.stop
        self._passes.append(numbers)
        if len(self._passes) > KEPT_PASSES:
            for number in self._passes.pop(0):
                self._prefixes.pop(number, None)


class CommandEncoder:
    """Turns commands into messages of 32-bit integers; an empty one for None, the stop."""

    def __init__(self) -> None:
        self._known = KnownPrefixes()
        # Which known prefix ends with a slot.
        self._ends: Ints = np.full(0, UNKNOWN, dtype=np.int64)

    def encode(self, command: Command | None) -> bytes:
        """The next message. Every decoder must get it."""
        if command is None:
            return b""
        if isinstance(command, InitKVCache):
            self.__init__()  # type: ignore[misc]
            plan, limits = command.plan, command.plan.limits
            dtype = KV_CACHE_DTYPES.index(plan.kv_cache_dtype)
            values = [INIT_KV_CACHE, command.num_slots, plan.kind, dtype, limits.rows, limits.segments, limits.prefix]
            return np.array(values).astype("<i4").tobytes()
        prefixes = [segment.prefix.copy() for segment in command]  # the scheduler goes on writing to its own
        kept = [self._find(prefix) for prefix in prefixes]
        headers = [
            (number, count, len(s.prefix) - count, len(s.tokens), len(s.logits_indices), *_has(s))
            for s, (number, count) in zip(command, kept, strict=True)
        ]
        parts = [np.array([FORWARD, len(command)]), np.array(headers, dtype=np.int64).reshape(-1)]
        parts += [prefix[count:] for prefix, (_, count) in zip(prefixes, kept, strict=True)]
        parts += [getattr(s, name) for name in ("tokens", "positions", "slots", "logits_indices") for s in command]
        parts += [_key_words(s.noise_key) for s in command if s.noise_key is not None]
        self._remember(prefixes, [number for number, _ in kept])
        masks = [s.visible.ravel() for s in command if s.visible is not None]
        bits = np.packbits(np.concatenate(masks)).tobytes() if masks else b""
        return np.concatenate(parts).astype("<i4").tobytes() + bits

    def _find(self, prefix: Ints) -> tuple[int, int]:
        """The known prefix that ends the furthest in this one, and how many slots the two begin with; else UNKNOWN and 0."""
        tail = prefix[-SEARCHED_SLOTS:]
        inside = tail < len(self._ends)
        found = np.where(inside, self._ends[np.where(inside, tail, 0)] if len(self._ends) else UNKNOWN, UNKNOWN)
        for number in found[found != UNKNOWN][::-1].tolist():
            if number in self._known:
                known = self._known[number]
                count = min(len(known), len(prefix))
                differing = np.flatnonzero(known[:count] != prefix[:count])
                return number, int(differing[0]) if len(differing) else count
        return UNKNOWN, 0

    def _remember(self, prefixes: Sequence[Ints], continued: Sequence[int]) -> None:
        highest = max((int(prefix[-1]) for prefix in prefixes if len(prefix)), default=UNKNOWN)
        if highest >= len(self._ends):
            grown = np.full(2 * highest + 1 - len(self._ends), UNKNOWN, dtype=np.int64)
            self._ends = np.concatenate([self._ends, grown])
        for number, prefix in enumerate(prefixes, self._known.next_number):
            if len(prefix):
                self._ends[prefix[-1]] = number
        self._known.end_pass(prefixes, continued)


class CommandDecoder:
    """Turns the messages of one encoder into commands again."""

    def __init__(self) -> None:
        self._known = KnownPrefixes()

    def decode(self, message: bytes) -> Command | None:
        """The command of the next message; None for the stop."""
        if not message:
            return None
        kind, count = np.frombuffer(message, "<i4", 2).tolist()
        if kind == INIT_KV_CACHE:
            self._known = KnownPrefixes()
            _, num_slots, kind, dtype, *limits = np.frombuffer(message, "<i4").tolist()
            plan = BackendPlan(BackendKind(kind), CaptureLimits(*limits), kv_cache_dtype=KV_CACHE_DTYPES[dtype])
            return InitKVCache(num_slots, plan)
        headers = np.frombuffer(message, "<i4", HEADER_INTS * count, 8).reshape(count, HEADER_INTS).astype(np.int64)
        numbers, kept, added, rows, logits, masked, keyed = headers.T
        sizes = np.concatenate([added, rows, rows, rows, logits])
        start = 8 + headers.size * 4
        ints = np.frombuffer(message, "<i4", int(sizes.sum()), start).astype(np.int64)
        parts = np.split(ints, np.cumsum(sizes)[:-1]) if count else []
        new, tokens, positions, slots, logits_indices = (parts[i * count : (i + 1) * count] for i in range(5))
        end = start + 4 * len(ints)
        keys = np.frombuffer(message, _KEY, int(keyed.sum()), end).tolist()
        noise_keys = iter([NoiseKey(*key) for key in keys])
        bits = np.unpackbits(np.frombuffer(message, np.uint8, offset=end + _KEY.itemsize * len(keys)))
        cells = np.cumsum(rows * rows * masked)
        masks = [
            bits[end - size * size : end].astype(np.bool_).reshape(size, size) if is_masked else None
            for end, size, is_masked in zip(cells.tolist(), rows.tolist(), masked.tolist(), strict=True)
        ]
        prefixes = [
            np.concatenate([self._known[number][:length], own]) if number != UNKNOWN else own
            for number, length, own in zip(numbers.tolist(), kept.tolist(), new, strict=True)
        ]
        self._known.end_pass(prefixes, numbers.tolist())
        own_keys = [next(noise_keys) if has_key else None for has_key in keyed.tolist()]
        fields = (tokens, positions, slots, prefixes, masks, logits_indices, own_keys)
        return [Segment(*own) for own in zip(*fields, strict=True)]


def _has(segment: Segment) -> tuple[bool, bool]:
    """Whether there is a mask, and whether there is a noise key."""
    return segment.visible is not None, segment.noise_key is not None


def _key_words(key: NoiseKey) -> Ints:
    """A noise key without filters, as 32-bit integers."""
    return np.array([(key.seed, key.temperature)], _KEY).view("<i4").astype(np.int64)
