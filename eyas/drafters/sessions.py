"""The ledger of a drafter's sessions: which are known, up to which token, and what is cached for them.

A commit that does not continue its session is answered with ResyncRequired. When the cache is full, the least recently
used sessions are evicted. A session that does not fit at all becomes dormant: it is followed without drafts and cached
data, until there is ample room; then ResyncRequired asks for all of its tokens.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from eyas.cache.kv_cache import KVCache, KVShape, bytes_per_slot
from eyas.cache.prefix_cache import SlotAllocator, Slots
from eyas.config import DraftingConfig
from eyas.drafters.base import DraftContext
from eyas.errors import ConfigError
from eyas.kernels.arguments import NO_SLOTS
from eyas.protocol.commit import ResyncRequired

DEFAULT_SLOTS = 65536
MIB = 2**20

log = logging.getLogger(__name__)


@dataclass
class Session:
    """A session as far as the drafter knows it. committed_length: number of its tokens."""

    epoch: int
    committed_length: int = 0
    dormant: bool = False


SessionT = TypeVar("SessionT", bound=Session)
StateT = TypeVar("StateT")


class SessionLedger(Generic[SessionT]):
    """Sessions by key, the least recently used first. Subclasses add a cache for them.

    Args:
        new_session: makes an empty session of an epoch.
    """

    def __init__(self, new_session: Callable[[int], SessionT]) -> None:
        self._new_session = new_session
        self._sessions: OrderedDict[str, SessionT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __getitem__(self, key: str) -> SessionT:
        return self._sessions[key]

    def get(self, key: str) -> SessionT | None:
        """Return a session, if it is known."""
        return self._sessions.get(key)

    def starts_epoch(self, context: DraftContext) -> bool:
        """Return whether the context's session is unknown, or known in another epoch."""
        session = self._sessions.get(context.session)
        return session is None or session.epoch != context.epoch

    def follow(self, context: DraftContext) -> SessionT | ResyncRequired:
        """Find or start the context's session and extend it by the context's tokens.

        Returns ResyncRequired if the context does not continue the session, and for a dormant session that fits now.
        """
        if self.starts_epoch(context):
            self.release([context.session])
            self._sessions[context.session] = self._new_session(context.epoch)
        session = self._sessions[context.session]
        if session.committed_length != context.start_position:
            return ResyncRequired(context.session, context.epoch, session.committed_length)
        self._sessions.move_to_end(context.session)
        if session.dormant and self._has_ample_room(session, context):
            session.committed_length, session.dormant = 0, False
            return ResyncRequired(context.session, context.epoch, 0)
        session.committed_length = context.committed_length
        return session

    def idle(self, busy: Collection[str]) -> Iterator[str]:
        """Return the keys of the sessions that are not busy, the least recently used first."""
        return (key for key in self._sessions if key not in busy)

    def release(self, keys: Sequence[str]) -> None:
        """Drop sessions; unknown ones are ignored."""
        for key in keys:
            session = self._sessions.pop(key, None)
            if session is not None:
                self._free(session)

    def _has_ample_room(self, session: SessionT, context: DraftContext) -> bool:
        """Return whether a dormant session would fit, with room to spare, if it were sent again."""
        return True

    def _free(self, session: SessionT) -> None:
        """Free what is cached for a session that is dropped."""


@dataclass
class KVSession(Session, Generic[StateT]):
    """A session with slots in a KV cache.

    Attributes:
        slots: of its cached tokens, in order.
        scratch: for the rows of its last tree.
        num_new: slots added by the last `claim`.
        state: what the drafter keeps beside the slots; it is dropped together with them.
    """

    slots: Slots = field(default_factory=NO_SLOTS.copy)
    scratch: Slots = field(default_factory=NO_SLOTS.copy)
    num_new: int = 0
    state: StateT | None = None


class KVLedger(SessionLedger[KVSession[StateT]]):
    """Sessions and their slots. When slots run out, the trees of idle sessions are dropped first, then whole sessions.

    Args:
        context_length: tokens of the longest session that gets slots.
        max_scratch: slots of the largest tree.
    """

    def __init__(self, num_slots: int, context_length: int, max_scratch: int = 0) -> None:
        super().__init__(KVSession)
        self._allocator = SlotAllocator(num_slots)
        self._num_slots, self._num_scratch = num_slots, 0  # all slots, and those of trees
        self.context_length = context_length
        self._max_scratch = max_scratch

    def claim(self, session: KVSession[StateT], count: int, num_scratch: int, busy: Collection[str]) -> bool:
        """Give a session `count` more slots, and `num_scratch` for a tree. If they do not fit it becomes dormant.

        busy: keys of sessions that must not be evicted.
        """
        fits = session.committed_length <= self.context_length and not session.dormant
        if not fits or not self._make_room(count + num_scratch, busy):
            self._free(session)
            session.slots, session.num_new, session.dormant = NO_SLOTS, 0, True
            return False
        session.slots = np.concatenate([session.slots, self._allocator.take(count)])
        session.scratch, session.num_new = self._allocator.take(num_scratch), count
        self._num_scratch += num_scratch
        return True

    def keep(self, session: KVSession[StateT], accepted: Slots) -> None:
        """Move `accepted` from a session's scratch to its slots, and free the rest of its scratch."""
        session.slots = np.concatenate([session.slots, accepted])
        self._allocator.free(np.setdiff1d(session.scratch, accepted, assume_unique=True))
        self._num_scratch -= len(session.scratch)
        session.scratch, session.state = NO_SLOTS, None

    def check(self) -> None:
        """Assert that every slot is free or belongs to exactly one session."""
        sessions = self._sessions.values()
        self._allocator.check_owners([slots for session in sessions for slots in (session.slots, session.scratch)])

    @property
    def num_free(self) -> int:
        """Slots without a session."""
        return self._allocator.num_free

    def _has_ample_room(self, session: KVSession[StateT], context: DraftContext) -> bool:
        length = context.committed_length
        return length <= self.context_length and self._allocator.num_free >= 2 * length + self._max_scratch

    def _free(self, session: KVSession[StateT]) -> None:
        self._drop_tree(session)
        self._allocator.free(session.slots)
        session.state = None

    def _drop_tree(self, session: KVSession[StateT]) -> None:
        if len(session.scratch):
            self._allocator.free(session.scratch)
            self._num_scratch -= len(session.scratch)
            session.scratch, session.state = NO_SLOTS, None

    def _make_room(self, count: int, busy: Collection[str]) -> bool:
        """Free slots of idle sessions until `count` are free. Frees nothing if all of them together are too few."""
        if self._allocator.num_free >= count:
            return True
        kept = [session for key in busy if (session := self.get(key))]
        if self._num_slots - sum(len(session.slots) + len(session.scratch) for session in kept) < count:
            return False
        for key in self.idle(busy) if self._num_scratch > sum(len(session.scratch) for session in kept) else ():
            self._drop_tree(self[key])
            if self._allocator.num_free >= count:
                return True
        while self._allocator.num_free < count:
            self.release([next(self.idle(busy))])
        return True


class Memory(Protocol):
    """Memory of one session in a drafter without a KV cache."""

    @property
    def size(self) -> int:
        """Return how much of the ledger's limit it uses."""
        ...

    def extend(self, context: DraftContext) -> None:
        """Add a commit that continues it."""
        ...


MemoryT = TypeVar("MemoryT", bound=Memory)


@dataclass
class MemorySession(Session, Generic[MemoryT]):
    """A session with a memory; None while it is dormant. size: of its memory, or of the one that did not fit."""

    memory: MemoryT | None = None
    size: int = 0


class MemoryLedger(SessionLedger[MemorySession[MemoryT]]):
    """Sessions and their memories, `max_size` in all.

    Args:
        on_drop: called with each memory that is dropped: its session has ended, was evicted, or begins again.
    """

    def __init__(
        self, new_memory: Callable[[], MemoryT], max_size: int, on_drop: Callable[[MemoryT], object] = lambda memory: None
    ) -> None:
        super().__init__(MemorySession)
        self._new_memory = new_memory
        self._max_size = max_size
        self._on_drop = on_drop
        self._used = 0

    def extend(self, context: DraftContext, busy: Collection[str]) -> MemoryT | ResyncRequired | None:
        """Return the memory that the context continues, extended by it; None for a dormant session.

        busy: keys of sessions that must not be evicted.
        """
        session = self.follow(context)
        if isinstance(session, ResyncRequired):
            return session
        if session.dormant:
            return None
        if session.memory is None:
            session.memory, session.size = self._new_memory(), 0
        session.memory.extend(context)
        self._used += session.memory.size - session.size
        session.size = session.memory.size
        self._make_room(session, busy)
        return session.memory

    def _has_ample_room(self, session: MemorySession[MemoryT], context: DraftContext) -> bool:
        return self._used + 2 * session.size <= self._max_size

    def _free(self, session: MemorySession[MemoryT]) -> None:
        if session.memory is not None:
            self._used -= session.size
            self._on_drop(session.memory)
        session.memory = None

    def _make_room(self, session: MemorySession[MemoryT], busy: Collection[str]) -> None:
        """Evict idle sessions until all fit. If that is not enough, make the session dormant instead."""
        if self._used <= self._max_size:
            return
        kept = [other for key in busy if (other := self.get(key))]
        if sum(other.size for other in kept if not other.dormant) > self._max_size:
            self._free(session)
            session.dormant = True
            return
        while self._used > self._max_size:
            self.release([next(self.idle(busy))])


def make_kv_cache(
    config: DraftingConfig,
    shapes: Sequence[KVShape],
    dtype: torch.dtype,
    device: torch.device,
    min_slots: int = 1,
    contents: str = "a token",
    num_tree_slots: int = 0,
) -> KVCache:
    """Return a draft KV cache; logs its size. Raises ConfigError for a smaller limit.

    Args:
        shapes: of each layer.
        min_slots: slots that a session needs to draft at all, to hold `contents`.
        num_tree_slots: for the rows of trees, behind those of sessions.
    """
    slot_bytes = bytes_per_slot(shapes, 0, dtype)
    given = (
        f"drafting.kv_cache_memory {config.kv_cache_memory}"
        if config.kv_cache_memory
        else f"drafting.max_kv_tokens {config.max_kv_tokens}"
    )
    # KVCache adds one spare slot
    num_slots = config.num_bytes // slot_bytes - 1 if config.kv_cache_memory else config.max_kv_tokens or DEFAULT_SLOTS
    if num_slots < min_slots:
        needed = -(-(min_slots + 1) * slot_bytes // 2**10)
        raise ConfigError(
            f"{given} cannot hold {contents}: that takes {min_slots} slots of {slot_bytes} bytes and a spare one; give at "
            f"least drafting.max_kv_tokens {min_slots} or drafting.kv_cache_memory {needed}KiB"
        )
    log.info("draft KV: %d tokens, %.1f MiB on %s", num_slots, (num_slots + 1) * slot_bytes / MIB, device)
    return KVCache(num_slots + num_tree_slots, shapes, 0, dtype, device)


def num_features(context: DraftContext) -> int:
    """Return the number of pairs (feature, next token) that a context completes: no feature precedes
    the very first token.
    """
    return len(context.tokens) - (1 if context.start_position == 0 else 0)
