"""Who waits, in which order, what each needs to begin, and how the rows of a step are shared out. Integers only; knows no
tensors.

A request's place is the time of its arrival, moved ahead by what its priority is worth. It never changes, so that of equal
priority the first comes first, and whoever waits long enough is ahead of every newcomer, however urgent.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import NamedTuple

from eyas.config import EngineConfig
from eyas.engine.sequence import Place, Sequence
from eyas.errors import Overloaded
from eyas.request import Request
from eyas.tree import DraftTree

# Tokens that an admitted sequence should be able to grow by before slots run out: less would preempt it at once.
GROWTH = 16
# The shortest and the longest time after which a refused client is told to try again, in seconds.
SHORTEST_RETRY, LONGEST_RETRY = 0.1, 60.0
_PACE = 32

_place = attrgetter("place")


def slots_needed(sequence: Sequence, nodes: int) -> int:
    """Slots that a sequence needs soon: for its tokens without KV, and for trees of `nodes`, or some growth.

    Never more than it needs to its end, so that a sequence alone always fits.
    """
    return len(sequence.tokens) - sequence.computed + min(sequence.num_remaining, max(nodes, GROWTH))


class Share(NamedTuple):
    """A sequence's part of a step: so many rows of its prompt, or a tree."""

    sequence: Sequence
    num_rows: int
    tree: DraftTree | None


def share_out(running: Seq[Sequence], trees: Mapping[str, DraftTree], prompt_rows: int, num_slots: int) -> list[Share]:
    """Rows for the running sequences, in order of place, as many as there are slots; there must be one for each.

    Every sequence that decodes gets a row, whatever the prompts ask for. What is left goes to trees, by request id, and to
    prompts, up to `prompt_rows`.
    """
    spare = num_slots - len(running)
    shares = []
    for sequence in running:
        tree = None
        if sequence.prefilling:
            num_rows = min(len(sequence.tokens) - sequence.computed, prompt_rows, spare + 1)
            prompt_rows -= num_rows
        else:
            tree = trees.get(sequence.request.id)
            if tree is None or len(tree) > spare + 1:
                tree = DraftTree.root_only(sequence.tokens[-1])
            num_rows = len(tree)
        if num_rows:
            spare -= num_rows - 1
            shares.append(Share(sequence, num_rows, tree))
    return shares


def insert(sequences: list[Sequence], sequence: Sequence) -> None:
    """Keep a list in order of place."""
    bisect.insort(sequences, sequence, key=_place)


def gives_way(running: Seq[Sequence], sequence: Sequence, nodes: int, config: EngineConfig) -> bool:
    """Whether the last in line runs behind the place of a waiting sequence, and that one is certain to be admitted once all
    such have left: nobody gives way in vain. Places do not change, so that nobody gives way twice to the same."""
    ahead = running[: bisect.bisect_left(running, sequence.place, key=_place)]
    if len(ahead) >= min(len(running), config.max_running):
        return False
    held = sum(s.computed + slots_needed(s, nodes) for s in ahead)
    return held + slots_needed(sequence, nodes) <= config.num_slots


def remove(sequences: list[Sequence], sequence: Sequence) -> None:
    """Take a sequence out of a list in order of place."""
    index = bisect.bisect_left(sequences, sequence.place, key=_place)
    assert sequences[index] is sequence, "a sequence is not where its place says"
    del sequences[index]


class Waiting:
    """The bounded queue of requests, in order of place. clock: the present time in seconds.

    num_slots: what the requests need together to their ends.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._queue: list[Sequence] = []
        self.num_slots = 0
        self._num_arrived = 0
        self._admitted: deque[float] = deque(maxlen=_PACE)

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def first(self) -> Sequence:
        """Whose turn it is."""
        return self._queue[0]

    def add(self, request: Request, num_open: int) -> Sequence:
        """Queue a new request. num_open: how many of the queue may start with the next step; they do not count.

        Raises Overloaded, with a time to try again, if the queue is full.
        """
        if len(self._queue) >= self._config.max_waiting + num_open:
            seconds = self._retry_after()
            raise Overloaded(f"{len(self._queue)} requests are waiting already; try again in {seconds:.1f} s", seconds)
        due = self._clock() - request.priority * self._config.ageing_seconds
        sequence = Sequence.start(request, Place(due, self._num_arrived))
        self._num_arrived += 1
        self.put_back(sequence)
        return sequence

    def put_back(self, sequence: Sequence) -> None:
        """Queue a sequence that has run already; its place puts it before all that came later."""
        self.num_slots += sequence.num_slots
        insert(self._queue, sequence)

    def admit(self) -> Sequence:
        """Take out the first."""
        self._admitted.append(self._clock())
        sequence = self._queue.pop(0)
        self.num_slots -= sequence.num_slots
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that is to wait no longer."""
        remove(self._queue, sequence)
        self.num_slots -= sequence.num_slots

    def _retry_after(self) -> float:
        """How often the queue got shorter of late."""
        if not self._admitted:
            return 1.0
        pace = (self._clock() - self._admitted[0]) / len(self._admitted)
        return min(max(pace, SHORTEST_RETRY), LONGEST_RETRY)
