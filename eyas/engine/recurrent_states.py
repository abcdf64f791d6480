"""Rows for the recurrent states of running sequences: what a pass reads, writes and keeps for later. Integers only."""

from __future__ import annotations

from eyas.arrays import NO_ROWS, Ints
from eyas.cache.prefix_cache import CachedPrefix, PrefixCache
from eyas.cache.states import START, StateStep

# Tokens before the first state that is kept of a prompt in passing; the next ones are each twice as far. A state takes as
# much memory as the KV of about as many tokens.
FIRST_MARK = 1024


class SequenceStates:
    """Rows of one running sequence: one has its state, the next pass writes to another one.

    Behind a tree the row has the state before its root, and `pending` what the accepted path adds to it. States inside a
    prompt are marked for the prefix cache: before its last token, where its tokens leave a prefix that others have, and in
    passing after FIRST_MARK tokens, twice as many, and so on.

    Args:
        prefix: what the sequence goes on behind.
        prompt_length: tokens of its prompt.
        marks_until: tokens that the prefix cache may keep.
    """

    def __init__(self, cache: PrefixCache, prefix: CachedPrefix, prompt_length: int, marks_until: int) -> None:
        assert cache.states is not None, "the target has recurrent layers"
        self._cache = cache
        self._rows = cache.states
        self._row = prefix.node.state
        self._position = len(prefix.slots)
        self._pending = NO_ROWS
        self._rows.hold(self._row)
        self._next = START  # taken at the first pass
        self._likely = prompt_length - 1, prefix.num_known  # where others go on
        self._marks_until = marks_until
        self._marks: dict[int, int] = {}  # rows by position

    def prompt_step(self, first: int, count: int) -> StateStep:
        """Return the rows for tokens from position `first` on. All are sure to stay."""
        last = min(first + count, self._marks_until)
        in_passing = [FIRST_MARK << doubling for doubling in range((last // FIRST_MARK).bit_length())]
        for position in [*self._likely, *in_passing]:
            if first < position <= last and position not in self._marks and (row := self._cache.take_state(is_mark=True)):
                self._marks[position] = row
        marks = tuple((at - first, row) for at, row in sorted(self._marks.items()) if first < at <= first + count)
        return StateStep(self._row, self._next_row(), self._pending, -1, marks)

    def tree_step(self, stash: int) -> StateStep:
        """Return the rows for a tree whose first node is stashed in row `stash`; -1 for a lone root, which stays."""
        return StateStep(self._row, self._next_row(), self._pending, stash)

    def advance(self, position: int, pending: Ints = NO_ROWS) -> None:
        """Take what the latest step wrote. position: tokens before that state. pending: see StateStep."""
        read = self._row
        self._row = self._next
        self._next = START
        if read != START and not self._rows.is_shared(read):
            self._next = read
        else:
            self._rows.release(read)
        self._position = position
        self._pending = pending

    def share(self, prefix: CachedPrefix) -> None:
        """Give the marks inside a prefix of the sequence to the prefix cache."""
        for position in [at for at in self._marks if at <= len(prefix.slots)]:
            self._rows.num_marked -= 1
            self._cache.keep_state(prefix, position, self._marks.pop(position), position not in self._likely)

    def leave(self, prefix: CachedPrefix | None) -> None:
        """Give up all rows. The prefix cache gets the state, if it lies inside the prefix; None for a state of no use."""
        for row in self._marks.values():
            self._cache.release_mark(row)
        if self._next != START:
            self._rows.release(self._next)
        if self._row == START or prefix is None:
            self._rows.release(self._row)
        else:
            self._cache.keep_state(prefix, self._position, self._row)

    @property
    def held(self) -> list[int]:
        """Return the rows that it holds."""
        return [self._row, *self._marks.values(), *([self._next] if self._next != START else [])]

    def _next_row(self) -> int:
        if self._next == START:
            self._next = self._cache.take_state()
        return self._next
