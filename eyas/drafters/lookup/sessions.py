"""Sessions of a drafter without KV: commits in, the memory that each continues or the answer to give. Knows no tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from eyas.commit import Refusal
from eyas.drafters.base import Draft, DraftContext
from eyas.tree import DraftTree


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
    committed: int
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
        """What `Drafter.ask` promises. grow: makes the trees of all sessions that want one."""
        busy = {context.session for context in contexts}
        drafts: list[Draft] = []
        ready: list[int] = []
        memories: list[MemoryT] = []
        for i, context in enumerate(contexts):
            found = self._admit(context, busy)
            drafts.append(found if isinstance(found, Refusal) else DraftTree.root_only(context.tokens[-1]))
            if found is not None and not isinstance(found, Refusal) and context.budget.wants_tree:
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

    def _admit(self, context: DraftContext, busy: set[str]) -> MemoryT | Refusal | None:
        """The memory that the context continues, brought up to date; None where the session sleeps."""
        session = self._sessions.get(context.session)
        if session is None or session.epoch != context.epoch:
            self.release([context.session])
            session = self._sessions[context.session] = _Session(context.epoch, 0, self._start())
        if session.committed != context.base:
            return Refusal(context.session, context.epoch, session.committed)
        self._sessions.move_to_end(context.session)
        if session.memory is None and self._used + 2 * session.size <= self._bound:
            session.committed, session.size, session.memory = 0, 0, self._start()
            if context.base > 0:
                return Refusal(context.session, context.epoch, 0)
        session.committed = context.committed
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
