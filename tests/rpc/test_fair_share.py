"""Amounts and slots are shared: no caller has all, those that wait take turns, and one that leaves holds none."""

import asyncio

from eyas.rpc.fair_share import FairLimit, FairSlots


def test_callers_that_want_all_leave_a_share_for_the_next() -> None:
    limit, taken = FairLimit(total=128, least=4), []
    for caller in "abcdef":
        before = limit.num_held
        while limit.fits((caller,), 1):
            limit.take((caller,), 1)
        taken.append(limit.num_held - before)
    assert taken == [64, 32, 16, 8, 4, 4]
    limit.take(("a",), -30)
    assert not limit.fits(("a",), 1)
    assert limit.fits(("g",), 15)
    assert FairLimit(10, 10).fits(("a",), 10)
    assert not FairLimit(10, 10).fits(("a",), 11)


async def test_slots_are_shared_by_every_name_of_a_caller() -> None:
    slots, tasks = FairSlots(8), list[asyncio.Task[None]]()

    async def takes(*callers: str) -> bool:
        tasks.append(task := asyncio.create_task(slots.take(callers)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task.done()

    assert [await takes(f"key {number}", "address") for number in range(8)] == [True] * 4 + [False] * 4
    assert await takes("another key", "another address")
    assert not await takes("another key 2", "address")
    for task in tasks[4:8]:
        task.cancel()
    await asyncio.gather(*tasks[4:8], return_exceptions=True)
    assert list(slots.waiting) == [("another key 2", "address")]
    for number in range(4):
        slots.give((f"key {number}", "address"))
    await tasks[-1]
    slots.give(("another key 2", "address"))
    slots.give(("another key", "another address"))
    assert (slots.num_free, list(slots.waiting)) == (8, [])


async def test_callers_that_wait_take_turns() -> None:
    slots, order = FairSlots(2), list[str]()
    for holder in ("x", "y"):
        await slots.take((holder,))

    async def use(name: str) -> None:
        await slots.take((name,))
        order.append(name)
        await asyncio.sleep(0)
        slots.give((name,))

    uses = [asyncio.create_task(use(name)) for name in "aaaabbc"]
    await asyncio.sleep(0)
    slots.give(("x",))
    await asyncio.gather(*uses)
    assert "".join(order) == "abcabaa"


async def test_a_slot_that_is_granted_to_one_who_leaves_goes_on() -> None:
    slots = FairSlots(1)
    await slots.take(("a",))
    leaves, waits = (asyncio.create_task(slots.take((name,))) for name in "bc")
    await asyncio.sleep(0)
    assert slots.num_waiting(("b",)) == 1
    slots.give(("a",))
    leaves.cancel()
    await waits
    assert leaves.cancelled()
    assert slots.num_free == 0
