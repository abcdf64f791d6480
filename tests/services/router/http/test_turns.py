"""Requests that come at once begin a few at a time, and every address has its turn."""

import asyncio

from eyas.services.router.http.turns import STARTS_PER_ROUND, Turns


async def test_few_requests_begin_in_one_round_of_the_loop() -> None:
    async def body() -> list[int]:
        turns, started, counts = Turns(), list[int](), list[int]()
        for number in range(3 * STARTS_PER_ROUND + 1):
            turns.add("a", lambda number=number: started.append(number))  # type: ignore[misc]
        while len(started) <= 3 * STARTS_PER_ROUND:
            await asyncio.sleep(0)
            counts.append(len(started))
        assert started == list(range(3 * STARTS_PER_ROUND + 1))
        return counts

    counts = await body()
    assert max(after - before for before, after in zip([0, *counts], counts, strict=False)) <= STARTS_PER_ROUND


async def test_an_address_does_not_wait_for_all_requests_of_another() -> None:
    turns, started = Turns(), list[str]()
    for address in ["many"] * 100 + ["one", "two"]:
        turns.add(address, lambda address=address: started.append(address))  # type: ignore[misc]
    while len(started) < 102:
        await asyncio.sleep(0)
    assert started[:3] == ["many", "one", "two"]
