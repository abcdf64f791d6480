"""Which requests have trees that only serve to learn: what such steps lose in, sizes by request out. Knows no costs."""

from __future__ import annotations

from collections.abc import Sequence as Seq

# Lessons, steps that serve to learn, one after the other: how many in 32 requests, rounded up, get the largest trees, while
# the others have what they would have. The first brings drafters up to date; beyond 16 requests the next two tell what one
# more costs, among fewer nothing but trees for all of them does; in the last nobody has a tree.
LEARNERS = (2, 2, 1, 0)
OF_REQUESTS = 32
# Of all time, what lessons may lose once everything is known.
LEARNING_SHARE = 0.03


class Lessons:
    """A round of lessons now and then: the more the last one lost, the later comes the next."""

    def __init__(self) -> None:
        self._next = len(LEARNERS)
        self._now = self._counted = False
        self._lost = self._spent = 0.0  # seconds: by the last round that was counted, and since the last one began

    def sizes(self, decoding: Seq[str], most: int, known: bool) -> dict[str, int]:
        """Sizes of the next step's trees that serve to learn, none if it is not time for that; the same requests are asked
        each time. known: whether all sizes up to `most` have been tried."""
        lessons = self._sizes(decoding, most, known)
        self._now = bool(lessons)
        return lessons

    def account(self, seconds: float, worth: float) -> None:
        """Of a step without prompt rows: how long it took, and how long its tokens would have taken otherwise."""
        if self._now:
            self._lost = (self._lost if self._counted else 0.0) + max(seconds - worth, 0.0)
            self._counted = True
        else:
            self._spent += seconds

    def _sizes(self, decoding: Seq[str], most: int, known: bool) -> dict[str, int]:
        if not decoding:
            return {}
        if self._next == len(LEARNERS):
            if most == 1 or (known and self._spent * LEARNING_SHARE <= self._lost):
                return {}
            self._next, self._counted, self._spent = 0, False, 0.0
        share = LEARNERS[self._next]
        self._next += 1
        learners = decoding[: -(-len(decoding) * share // OF_REQUESTS)]
        return dict.fromkeys(learners, most) if share else dict.fromkeys(decoding, 1)
