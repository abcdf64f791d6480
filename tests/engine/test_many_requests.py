"""Work for a request does not grow with the number of those that wait. Calls are counted, not seconds."""

import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from eyas import LLM, SamplingParams
from eyas.api.request import Request
from eyas.engine.sequence import QueueKey, Sequence
from eyas.engine.waiting_queue import SPARE_ENTRIES, WaitingQueue
from tests.support.tiny import DEMO

FILES = ("llm.py", "scheduler.py", "waiting_queue.py", "engine.py", "sequence.py")
# Growth of the work when there are four times as many requests: n log n, where squares would give 16.
FOURFOLD = 5.5


class Calls:
    """Calls of functions of FILES, and resumptions of their generators."""

    count = 0


@contextmanager
def counted() -> Iterator[Calls]:
    calls, before = Calls(), sys.getprofile()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code.co_filename
        calls.count += event == "call" and "/eyas/" in code and Path(code).name in FILES

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def sequence(number: int, due: float = 0.0, priority: int = 0, tenant: str = "") -> Sequence:
    request = Request(f"{number}", (1, 2), SamplingParams(1), priority=priority, tenant=tenant)
    return Sequence(request, QueueKey(due, number), [1, 2], np.empty(3, dtype=np.int64))


def admit_all(count: int) -> int:
    queue = WaitingQueue()
    for number in range(count):
        queue.add(sequence(number))
    with counted() as calls:
        for admitted in range(count):
            queue.remove(queue.next(admitted)[1])
    return calls.count


def remove_from_the_end(count: int) -> int:
    queue, waiting = WaitingQueue(), [sequence(number) for number in range(count)]
    for one in waiting:
        queue.add(one)
    with counted() as calls:
        for one in reversed(waiting):
            queue.remove(one)
    return calls.count


def generate_one_token_each(llm: LLM, count: int) -> int:
    params = SamplingParams(max_tokens=1, temperature=0)
    with counted() as calls:
        llm.generate([[5, 6]] * count, params, use_tqdm=False)
    return calls.count


@pytest.mark.parametrize("work", [admit_all, remove_from_the_end], ids=["admit", "cancel"])
def test_work_of_the_queue_is_linear_in_requests(work: Callable[[int], int]) -> None:
    assert work(2000) < FOURFOLD * work(500)


def test_the_queue_keeps_no_cancelled_requests() -> None:
    """An old request of low priority stays at the top of one heap while urgent ones come and go."""
    queue, cancelled = WaitingQueue(), list[weakref.ref[Sequence]]()
    queue.add(sequence(0, priority=0, due=1.0))
    for number in range(1, 1001):
        urgent = sequence(number, priority=1)
        queue.add(urgent)
        queue.remove(urgent)
        cancelled.append(weakref.ref(urgent))
    del urgent
    gc.collect()
    assert sum(kept() is not None for kept in cancelled) <= SPARE_ENTRIES + 2


def test_work_of_generate_is_linear_in_prompts() -> None:
    with LLM(str(DEMO / "target"), max_num_seqs=2) as llm:
        generate_one_token_each(llm, 4)  # what is imported and compiled once does not count
        assert generate_one_token_each(llm, 160) < FOURFOLD * generate_one_token_each(llm, 40)


def test_the_queue_orders_like_a_sorted_list() -> None:
    """Sequences come and go, and come back with other keys."""
    dice, queue, waiting, numbers = random.Random(0), WaitingQueue(), list[Sequence](), 0
    for turn in range(1200):
        if dice.random() < 0.55 or not waiting:
            waiting.append(sequence(numbers, dice.random(), dice.randrange(2), dice.choice("ab")))
            queue.add(waiting[-1])
            numbers += 1
        elif dice.random() < 0.5:
            queue.remove(waiting.pop(dice.randrange(len(waiting))))
        else:
            taken = waiting[dice.randrange(len(waiting))]
            queue.remove(taken)
            taken.key = QueueKey(-dice.random(), taken.key.number)
            queue.add(taken)
        assert len(queue) == len(waiting)
        assert queue.num_tokens == 3 * len(waiting)
        if waiting:
            heads = [
                min((s for s in waiting if s.request.tenant == name), key=lambda s: s.key, default=None) for name in "ab"
            ]
            first, last = queue.next(turn)
            assert first is min((s for s in heads if s), key=lambda s: (-s.request.priority, 0, s.key))
            if turn % 16 == 15:
                assert last is min(waiting, key=lambda s: s.key.number)
