"""Work for a client that may leave at any moment: it is cancelled then. Knows nothing of what is said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

ResultT = TypeVar("ResultT")

DONE = "[DONE]"


class ClientGone(Exception):
    """The client has left; nobody reads an answer."""


async def while_there(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """What `work` gives back or raises. Once the client has left, cancels it, waits for its end and raises ClientGone.

    receive: the request's own, its body read.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, one for each text. texts: what follows the first; asked for one at a time, as the client reads."""

    media_type = "text/event-stream"

    def __init__(self, first: str, texts: AsyncGenerator[str, None], headers: dict[str, str]) -> None:
        super().__init__(headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_there(receive, self._send(send))
        except ClientGone:
            pass
        finally:
            await self._texts.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send(_event(self._first))
        async for text in self._texts:
            await send(_event(text))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def first_of(texts: AsyncGenerator[str, None]) -> str:
    """The first text; there must be one."""
    return await anext(texts)


def as_json(value: dict[str, Any]) -> str:
    """Compact JSON of one event."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _event(text: str) -> Message:
    return {"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True}


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
