"""Threads that clients share: no caller has all of them, queues take turns, and what runs on counts."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from eyas.errors import Overloaded
from eyas.services.router import client_threads
from eyas.services.router.client_threads import ClientThreads


def blocking() -> tuple[threading.Event, threading.Semaphore, Callable[[], None]]:
    """Return what lets calls end, what counts those that began, and the call."""
    released, begun = threading.Event(), threading.Semaphore(0)

    def call() -> None:
        begun.release()
        released.wait(30)

    return released, begun, call


async def until_begun(begun: threading.Semaphore, number: int = 1) -> None:
    for _ in range(number):
        await asyncio.to_thread(begun.acquire)


async def test_a_caller_never_holds_all_threads() -> None:
    threads = ClientThreads(2)
    released, begun, call = blocking()
    held = [asyncio.create_task(threads.run("greedy", call)) for _ in range(50)]
    await until_begun(begun)
    assert await asyncio.wait_for(threads.run("other", int, "7"), 10) == 7
    assert not begun.acquire(blocking=False), "the second call of the same caller waits"
    released.set()
    await asyncio.gather(*held)


async def test_callers_take_turns() -> None:
    threads, order = ClientThreads(2), list[str]()
    released, begun, call = blocking()
    holders = [asyncio.create_task(threads.run(name, call)) for name in ("a", "b")]
    await until_begun(begun, 2)
    calls = [asyncio.create_task(threads.run(name, order.append, name)) for name in ("a",) * 20 + ("c",) * 2]
    await asyncio.sleep(0)
    released.set()
    await asyncio.gather(*holders, *calls)
    assert "c" in order[:4], "not after all calls of another caller that came first"


async def test_a_call_that_is_not_awaited_counts_on() -> None:
    threads = ClientThreads(2)
    released, begun, call = blocking()
    left = asyncio.create_task(threads.run("greedy", call))
    await until_begun(begun)
    left.cancel()
    waiting = [asyncio.create_task(threads.run("greedy", call)) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert not begun.acquire(blocking=False)
    waiting[0].cancel()
    released.set()
    await asyncio.gather(*waiting[1:])
    assert await threads.run("greedy", int, "1") == 1


async def test_a_queue_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_threads, "MAX_WAITING", 3)
    threads = ClientThreads(2)
    released, begun, call = blocking()
    held = [asyncio.create_task(threads.run("greedy", call)) for _ in range(4)]
    await until_begun(begun)
    with pytest.raises(Overloaded, match="send fewer"):
        await threads.run("greedy", int, "1")
    assert await threads.run("other", int, "2") == 2
    released.set()
    await asyncio.gather(*held)


async def test_errors_reach_the_caller() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        await ClientThreads().run("a", int, "x")
