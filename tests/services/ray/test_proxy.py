"""A client that disconnects cancels its request wherever Serve's generators are."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from eyas.services.ray.ingress import read_in_task


class Call:
    """A context like gRPC's: asking for the peer after the end crashes the process."""

    def __init__(self) -> None:
        self.over = False

    def hang_up(self) -> None:
        self.over = True

    def peer(self) -> str:
        assert not self.over, "the process has crashed"
        return "ipv4:1"


class Handler:
    """Sends numbers; `left` is set once it is cancelled while it waits for the next."""

    def __init__(self, num_messages: int, error: Exception | None = None) -> None:
        self.num_messages, self.error, self.left = num_messages, error, asyncio.Event()

    async def __call__(self, request: Any, context: Any) -> AsyncGenerator[bytes, None]:
        for number in range(self.num_messages):
            yield b"%d" % number
        try:
            if self.error:
                yield b""
                raise self.error
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            context.hang_up()
            assert context.peer() == "ipv4:1"
            self.left.set()
            raise


async def test_messages_pass_unchanged_and_errors_end_the_stream() -> None:
    stream = read_in_task(Handler(3, RuntimeError("lost")), None, Call())
    assert [await anext(stream) for _ in range(3)] == [b"0", b"1", b"2"]
    with pytest.raises(RuntimeError, match="lost"):
        await anext(stream)


@pytest.mark.parametrize("num_read", [1, 3])
async def test_closing_cancels_the_handler_reading_or_waiting(num_read: int) -> None:
    handler = Handler(3)
    stream = read_in_task(handler, None, Call())
    for _ in range(num_read):
        await anext(stream)
    await asyncio.sleep(0)
    await stream.aclose()
    assert handler.left.is_set()


async def test_a_cancelled_call_cancels_the_handler() -> None:
    handler = Handler(2)

    async def call() -> None:
        async for _ in read_in_task(handler, None, Call()):
            pass

    task = asyncio.create_task(call())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(handler.left.wait(), 5)
