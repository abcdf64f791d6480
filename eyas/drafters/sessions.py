"""How many token slots a drafter has: its settings and what a token costs in, a number out. Knows no sessions.

Which token slots belong to which session of a drafter: commits in, slots or refusals out. Knows no tensors, no heads.

The one book of all drafters that cache something for each session. A drafter may keep a state of its own beside the slots.

Sessions of a drafter without KV: commits in, the memory that each continues or the answer to give. Knows no tokens.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from eyas.cache.kv_cache import bytes_per_slot
from eyas.cache.prefix_cache import SlotAllocator, Slots
from eyas.config import DraftingConfig
from eyas.draft_protocol import ResyncRequired
from eyas.drafters.base import Draft, DraftContext
from eyas.errors import ConfigError
from eyas.tree import DraftTree

DEFAULT_SLOTS = 65536
MIB = 2**20

log = logging.getLogger(__name__)


def count_slots(
    config: DraftingConfig,
    shapes: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    least: int = 1,
    what: str = "a token",
) -> int:
    """Token slots of draft KV; the log says how many, and what they take.

    shapes: (key-value heads, head width) of each layer. least: slots that a session needs to draft at all, which are for
    `what`. Raises ConfigError for a limit below that.
    """
    slot_bytes = bytes_per_slot(shapes, 0, dtype)
    given = (
        f"drafting.kv_cache_memory {config.kv_cache_memory}"
        if config.kv_cache_memory
        else f"drafting.max_kv_tokens {config.max_kv_tokens}"
    )
    # beside those that sessions have there is one more, see SlotPools
    num_slots = config.num_bytes // slot_bytes - 1 if config.kv_cache_memory else config.max_kv_tokens or DEFAULT_SLOTS
    if num_slots < least:
        needed = -(-(least + 1) * slot_bytes // 2**10)
        raise ConfigError(
            f"{given} cannot hold {what}: that takes {least} slots of {slot_bytes} bytes and a spare one; give at least "
            f"drafting.max_kv_tokens {least} or drafting.kv_cache_memory {needed}KiB"
        )
    size = (num_slots + 1) * slot_bytes / MIB
    log.info("draft KV: %d tokens, %.1f MiB on %s", num_slots, size, device)
    return num_slots


StateT = TypeVar("StateT")


def no_slots() -> Slots:
    """What a session that caches nothing holds."""
    return np.zeros(0, dtype=np.int64)


@dataclass
class Session(Generic[StateT]):
    """committed: tokens known. slots: of what is cached of them, in order; scratch: for the rows of a tree. A session that
    did not fit has neither: then it is dormant, until there is ample room, and for good if it is longer than a session may
    be. num_new: slots that it was given last. state: what the drafter keeps; it goes with the slots or the scratch that it
    is about."""

    epoch: int
    committed_length: int = 0
    slots: Slots = field(default_factory=no_slots)
    scratch: Slots = field(default_factory=no_slots)
    num_new: int = 0
    state: StateT | None = None
    dormant: bool = False


class SlotSessions(Generic[StateT]):
    """Sessions and their slots. When slots run out, trees of idle sessions give way first, then the session unused for
    longest is forgotten."""

    def __init__(self, num_slots: int, context_length: int, most_scratch: int = 0) -> None:
        """context_length: tokens of the longest session that gets slots. most_scratch: slots of the largest tree."""
        self._allocator = SlotAllocator(num_slots)
        self._context_length = context_length
        self._most_scratch = most_scratch
        self._sessions: OrderedDict[str, Session[StateT]] = OrderedDict()

    def __getitem__(self, key: str) -> Session[StateT]:
        return self._sessions[key]

    def get(self, key: str) -> Session[StateT] | None:
        """A session, if it is known."""
        return self._sessions.get(key)

    def follow(self, context: DraftContext) -> Session[StateT] | ResyncRequired:
        """The session that the context continues, now with its tokens; or a refusal where it continues none, or one that
        has slept and for which there is room now."""
        session = self._sessions.get(context.session)
        if session is None or session.epoch != context.epoch:
            self.release([context.session])
            session = self._sessions[context.session] = Session(context.epoch)
        if session.committed_length != context.start_position:
            return ResyncRequired(context.session, context.epoch, session.committed_length)
        self._sessions.move_to_end(context.session)
        if session.dormant and self._has_ample_room(context.committed_length):
            session.committed_length, session.dormant = 0, False
            return ResyncRequired(context.session, context.epoch, 0)
        session.committed_length = context.committed_length
        return session

    def claim(self, session: Session[StateT], count: int, num_scratch: int, busy: set[str]) -> bool:
        """Give a session `count` more slots, and others for a tree. Where they do not fit it is followed without any: it
        gets no trees, and costs nothing.

        busy: keys of the sessions of the same call, which nobody may forget.
        """
        fits = session.committed_length <= self._context_length and not session.dormant
        if not fits or not self._make_room(count + num_scratch, busy):
            self._drop_tree(session)
            self._allocator.free(session.slots)
            session.slots, session.num_new, session.state, session.dormant = no_slots(), 0, None, True
            return False
        session.slots = np.concatenate([session.slots, self._allocator.take(count)])
        session.scratch, session.num_new = self._allocator.take(num_scratch), count
        return True

    def keep(self, session: Session[StateT], accepted: Slots) -> None:
        """Move `accepted` from the scratch to the slots of a session; the rest of its tree goes."""
        session.slots = np.concatenate([session.slots, accepted])
        self._allocator.free(np.setdiff1d(session.scratch, accepted, assume_unique=True))
        session.scratch, session.state = no_slots(), None

    def release(self, keys: Sequence[str]) -> None:
        """Forget sessions; unknown ones are ignored."""
        for key in keys:
            session = self._sessions.pop(key, None)
            if session is not None:
                self._allocator.free(session.slots)
                self._allocator.free(session.scratch)

    def check(self) -> None:
        """Assert the integrity of slots and owners."""
        sessions = self._sessions.values()
        self._allocator.check_owners([slots for session in sessions for slots in (session.slots, session.scratch)])

    @property
    def num_free(self) -> int:
        """Slots that no session has."""
        return self._allocator.num_free

    def _has_ample_room(self, committed: int) -> bool:
        """Whether a session of so many tokens, told again from the start, would get slots."""
        return committed <= self._context_length and self._allocator.num_free >= 2 * committed + self._most_scratch

    def _drop_tree(self, session: Session[StateT]) -> None:
        if len(session.scratch):
            self._allocator.free(session.scratch)
            session.scratch, session.state = no_slots(), None

    def _make_room(self, count: int, busy: set[str]) -> bool:
        """Free slots until there are `count`, of sessions that are not busy; none if even all of them would not do."""
        idle = [key for key in self._sessions if key not in busy]
        held = sum(len(self[key].slots) + len(self[key].scratch) for key in idle)
        if self._allocator.num_free + held < count:
            return False
        for key in idle:
            if self._allocator.num_free < count:
                self._drop_tree(self[key])
        for key in idle:
            if self._allocator.num_free < count:
                self.release([key])
        return self._allocator.num_free >= count


def num_features(context: DraftContext) -> int:
    """Pairs of a feature and the token behind it that a context completes: the very first token has no feature before it."""
    return len(context.tokens) - (1 if context.start_position == 0 else 0)


class Memory(Protocol):
    """What a drafter remembers of one session."""

    @property
    def size(self) -> int:
        """How much of the bound it uses up."""
        ...

    def take(self, context: DraftContext) -> None:
        """Learn what a commit that continues it brings."""
        ...


MemoryT = TypeVar("MemoryT", bound=Memory)
Grow = Callable[[Sequence[DraftContext], Sequence[MemoryT]], Sequence[DraftTree]]


@dataclass
class _Session(Generic[MemoryT]):
    """committed: tokens known. memory: None while the session sleeps: it did not fit, and is followed without trees until
    twice its `size` is free."""

    epoch: int
    committed_length: int
    memory: MemoryT | None
    size: int = 0


class Sessions(Generic[MemoryT]):
    """Memories by session, `bound` in all; those unused for longest give way."""

    def __init__(self, start: Callable[[], MemoryT], bound: int) -> None:
        self._start = start
        self._bound = bound
        self._used = 0
        self._sessions: OrderedDict[str, _Session[MemoryT]] = OrderedDict()

    def answer(self, contexts: Sequence[DraftContext], grow: Grow[MemoryT]) -> list[Draft]:
        """What `Drafter.request` promises. grow: makes the trees of all sessions that want one."""
        busy = {context.session for context in contexts}
        drafts: list[Draft] = []
        ready: list[int] = []
        memories: list[MemoryT] = []
        for i, context in enumerate(contexts):
            found = self._admit(context, busy)
            drafts.append(found if isinstance(found, ResyncRequired) else DraftTree.root_only(context.tokens[-1]))
            if found is not None and not isinstance(found, ResyncRequired) and context.budget.wants_tree:
                ready.append(i)
                memories.append(found)
        trees = grow([contexts[i] for i in ready], memories) if ready else []
        for i, tree in zip(ready, trees, strict=True):
            drafts[i] = tree
        return drafts

    def memory(self, key: str) -> MemoryT | None:
        """Of a session, unless it is unknown or asleep."""
        session = self._sessions.get(key)
        return session.memory if session else None

    def release(self, sessions: Sequence[str]) -> None:
        """Forget sessions; unknown ones are ignored."""
        for key in sessions:
            session = self._sessions.pop(key, None)
            self._used -= session.size if session and session.memory else 0

    @property
    def used(self) -> int:
        """Size of all memories."""
        return self._used

    def _admit(self, context: DraftContext, busy: set[str]) -> MemoryT | ResyncRequired | None:
        """The memory that the context continues, brought up to date; None where the session sleeps."""
        session = self._sessions.get(context.session)
        if session is None or session.epoch != context.epoch:
            self.release([context.session])
            session = self._sessions[context.session] = _Session(context.epoch, 0, self._start())
        if session.committed_length != context.start_position:
            return ResyncRequired(context.session, context.epoch, session.committed_length)
        self._sessions.move_to_end(context.session)
        if session.memory is None and self._used + 2 * session.size <= self._bound:
            session.committed_length, session.size, session.memory = 0, 0, self._start()
            if context.start_position > 0:
                return ResyncRequired(context.session, context.epoch, 0)
        session.committed_length = context.committed_length
        if session.memory is not None:
            session.memory.take(context)
            self._used += session.memory.size - session.size
            session.size = session.memory.size
            self._make_room(session, busy)
        return session.memory

    def _make_room(self, session: _Session[MemoryT], busy: set[str]) -> None:
        """Forget others that are not of this call until all fits, or put the session to sleep where that does not do."""
        if self._used <= self._bound:
            return
        idle = [key for key, other in self._sessions.items() if key not in busy]
        freeable = sum(other.size for key in idle if (other := self._sessions[key]).memory)
        if self._used - freeable > self._bound:
            self._used -= session.size
            session.memory = None
            return
        while self._used > self._bound:
            self.release([idle.pop(0)])
