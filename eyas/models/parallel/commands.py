"""Commands that rank 0 sends the other ranks: the segments of a forward pass, and the size of the KV cache, as bytes.

The slots before a segment's rows are by far the most of it, and they hardly change from pass to pass. So ranks keep the slot
table of each sequence in a row, and a message says for each segment which row it is, how many slots of it stay, and what
follows them. Its bytes and the work on it do not depend on the context: at 64 sequences of 16 rows 22 kB. Where all
ranks draw, noise keys go along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from eyas.arrays import Ints
from eyas.cache.slot_tables import TableId, TableRows
from eyas.cache.states import NO_STATES, StateSizes, StateStep
from eyas.config.engine import KVCacheDtype
from eyas.kernels.arguments import NO_SLOTS
from eyas.models.backends.base import BackendKind, BackendPlan
from eyas.models.backends.cuda_graphs import CaptureLimits
from eyas.models.inputs import Segment, Segments
from eyas.protocol.commit import NoiseKey

# Of a segment: row of its table, kept and new slots, rows, wanted logits, whether it has a mask; 0 without a noise key, 1
# with one, 2 if top-p and min-p follow behind all keys.
HEADER_INTS = 7
KV_CACHE_DTYPES: tuple[KVCacheDtype, ...] = get_args(KVCacheDtype)
# What a rank other than 0 draws with.
_KEY = np.dtype([("seed", "<u8"), ("temperature", "<f8"), ("top_k", "<i4")])
_NO_FILTERS = (NoiseKey(0).top_p, NoiseKey(0).min_p)
FORWARD, INIT_KV_CACHE, FORWARD_STATES = 0, 1, 2
# Of a segment's StateStep: read, write and stashed rows, how many are pending, and marks.
STATE_INTS = 5


@dataclass(frozen=True)
class InitKVCache:
    """Allocate slots for keys and values and rows for states, drop those before, and build the planned backend."""

    num_slots: int
    plan: BackendPlan
    states: StateSizes = NO_STATES


# Segments are those of a forward pass to run.
Command = InitKVCache | Sequence[Segment]


class CommandEncoder:
    """Encoder that turns commands into messages of 32-bit integers; an empty one for None, the stop."""

    def __init__(self) -> None:
        self._tables = TableRows(0)

    def encode(self, command: Command | None) -> bytes:
        """Return the next message; a decoder must get all since an InitKVCache. The work does not depend on the context."""
        if command is None:
            return b""
        if isinstance(command, InitKVCache):
            plan, limits = command.plan, command.plan.limits
            self._tables = TableRows(limits.segments)
            dtype = KV_CACHE_DTYPES.index(plan.kv_cache_dtype)
            values = [INIT_KV_CACHE, command.num_slots, *command.states, plan.kind, dtype, limits.rows, limits.segments,
                      limits.prefix]  # fmt: skip
            return np.array(values).astype("<i4").tobytes()
        if not command:
            return np.array([FORWARD, 0], "<i4").tobytes()
        segments = Segments.of(command)
        prefixes, keys, packed = segments.prefixes, segments.noise_keys, segments.rows
        self._tables.most = max(self._tables.most, len(command))
        rows, kept = self._tables.place(segments.tables, prefixes)
        new = [prefix[count:] for prefix, count in zip(prefixes, kept, strict=True)]
        headers = np.empty((HEADER_INTS, len(command)), dtype=np.int64)
        headers[:4] = rows, kept, list(map(len, new)), packed.counts
        if segments.trees is not None:
            headers[4], headers[5] = packed.counts, True
        else:
            headers[4], headers[5] = zip(*[(len(s.logits_indices), s.visible is not None) for s in segments], strict=True)
        noise = np.array([(key.seed, key.temperature, key.top_k) for key in keys if key is not None], _KEY).view("<i4")
        filters_of_keys = [_NO_FILTERS if key is None else (key.top_p, key.min_p) for key in keys]
        headers[6] = [(key is not None) + (own != _NO_FILTERS) for key, own in zip(keys, filters_of_keys, strict=True)]
        filters = np.array([own for own in filters_of_keys if own != _NO_FILTERS], "<f8").ravel().view("<i4")
        states = _state_ints(segments.states)
        kind = FORWARD_STATES if len(states) else FORWARD
        parts = [[kind, len(command)], states, headers.ravel(), *new, packed.tokens, packed.positions, packed.slots]
        ints = np.concatenate([*parts, packed.logits_indices, noise, filters]).astype("<i4")
        return ints.tobytes() + _mask_bits(segments)


class CommandDecoder:
    """Decoder that turns the messages of one encoder into commands again. It may begin with any InitKVCache."""

    def __init__(self) -> None:
        self._tables: dict[int, ReceivedTable] = {}

    def decode(self, message: bytes) -> Command | None:
        """Return the command of the next message; None for the stop. Prefixes are valid until the next one."""
        if not message:
            return None
        kind, count = np.frombuffer(message, "<i4", 2).tolist()
        if kind == INIT_KV_CACHE:
            self._tables.clear()
            _, num_slots, rows, stashed, kind, dtype, *limits = np.frombuffer(message, "<i4").tolist()
            plan = BackendPlan(BackendKind(kind), CaptureLimits(*limits), kv_cache_dtype=KV_CACHE_DTYPES[dtype])
            return InitKVCache(num_slots, plan, StateSizes(rows, stashed))
        if not count:
            return []
        states: list[StateStep | None] = [None] * count
        start = 8
        if kind == FORWARD_STATES:
            states, start = _read_states(message, count, start)
        headers = np.frombuffer(message, "<i4", HEADER_INTS * count, start).reshape(HEADER_INTS, count).astype(np.int64)
        table_rows, kept, added, rows, logits, masked, keyed = headers
        sizes = np.concatenate([added, rows, rows, rows, logits])
        start += headers.size * 4
        ints = np.frombuffer(message, "<i4", int(sizes.sum()), start).astype(np.int64)
        ints[len(ints) - int(logits.sum()) :] -= np.repeat(rows.cumsum() - rows, logits)  # count within each segment
        parts = np.split(ints, np.cumsum(sizes)[:-1])
        new, tokens, positions, slots, logits_indices = (parts[i * count : (i + 1) * count] for i in range(5))
        end = start + 4 * len(ints)
        keys = np.frombuffer(message, _KEY, np.count_nonzero(keyed), end)
        filters = np.frombuffer(message, "<f8", 2 * np.count_nonzero(keyed == 2), end + keys.nbytes).reshape(-1, 2)
        bits = np.unpackbits(np.frombuffer(message, np.uint8, offset=end + keys.nbytes + filters.nbytes)).view(np.bool_)
        cells = np.cumsum(rows * rows * masked)
        masks = [
            bits[end - size * size : end].reshape(size, size) if is_masked else None
            for end, size, is_masked in zip(cells.tolist(), rows.tolist(), masked.tolist(), strict=True)
        ]
        tables = [self._tables.setdefault(row, ReceivedTable(row)) for row in table_rows.tolist()]
        prefixes = [t.append(length, own) for t, length, own in zip(tables, kept.tolist(), new, strict=True)]
        key, own_filters = iter(keys.tolist()), iter(filters.tolist())
        kinds = keyed.tolist()
        own_keys = [NoiseKey(*next(key), *(next(own_filters) if kind == 2 else ())) if kind else None for kind in kinds]
        ids = [table.id for table in tables]
        fields = (tokens, positions, slots, prefixes, masks, logits_indices, own_keys, [NO_SLOTS] * count, ids, states)
        return [Segment(*own) for own in zip(*fields, strict=True)]


class ReceivedTable:
    """The slots that a rank has in one row. id: of the table that they are; another one once slots are replaced."""

    def __init__(self, row: int) -> None:
        self.id: TableId = (row, 0)
        self._slots, self._length = NO_SLOTS, 0

    def append(self, kept: int, new: Ints) -> Ints:
        """Put slots behind the first `kept` ones. Returns all of them; a copy is made only when memory must grow."""
        if kept != self._length:
            self.id = (self.id[0], self.id[1] + 1)
        self._length = kept + len(new)
        if self._length > len(self._slots):
            grown = np.empty(2 * self._length, dtype=np.int64)
            grown[:kept] = self._slots[:kept]
            self._slots = grown
        self._slots[kept : self._length] = new
        return self._slots[: self._length]


def _state_ints(states: Sequence[StateStep | None]) -> Ints:
    """Return the steps of all segments of a pass over recurrent layers; nothing for other targets."""
    steps = [step for step in states if step is not None]
    if len(steps) < len(states):
        return NO_SLOTS
    headers = [(s.read, s.write, s.stash, len(s.pending), len(s.marks)) for s in steps]
    marks = np.array([mark for step in steps for mark in step.marks], np.int64)
    return np.concatenate([np.array(headers).ravel(), *(step.pending for step in steps), marks.ravel()])


def _read_states(message: bytes, count: int, start: int) -> tuple[list[StateStep | None], int]:
    """Return the steps of the segments of a message, and where what follows them begins."""
    headers = np.frombuffer(message, "<i4", STATE_INTS * count, start).reshape(count, STATE_INTS)
    start += headers.nbytes
    pending = np.frombuffer(message, "<i4", int(headers[:, 3].sum()), start).astype(np.int64)
    start += 4 * len(pending)
    marks = np.frombuffer(message, "<i4", 2 * int(headers[:, 4].sum()), start).reshape(-1, 2)
    paths = np.split(pending, headers[:, 3].cumsum()[:-1])
    kept = np.split(marks, headers[:, 4].cumsum()[:-1])
    steps: list[StateStep | None] = [
        StateStep(read, write, path, stash, tuple((after, row) for after, row in own.tolist()))
        for (read, write, stash, _, _), path, own in zip(headers.tolist(), paths, kept, strict=True)
    ]
    return steps, start + marks.nbytes


def _mask_bits(segments: Segments) -> bytes:
    """Return the bits of all masks, row by row."""
    if segments.trees is not None:
        return np.packbits(segments.trees.masks).tobytes()
    masks = [segment.visible.ravel() for segment in segments if segment.visible is not None]
    return np.packbits(np.concatenate(masks)).tobytes() if masks else b""
