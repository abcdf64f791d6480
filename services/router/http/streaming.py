"""Responses in blocks and events, limits of bodies, and the end of calls whose client has left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Any, TypeVar

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.errors import EyasError
from eyas.rpc.admission import Admission
from eyas.services.discovery.base import cancel_task
from eyas.services.router.http.errors import CLIENT_CLOSED_REQUEST
from eyas.services.router.http.writers.json_blocks import encoded
from eyas.services.router.http.writers.openai import StreamWriter

WAITING_COMMENT = b": waiting for a verifier\n\n"

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)


class BodyLimit:
    """ASGI middleware that bounds each body, and what all unfinished requests hold together.

    A body above `limits.max_request_bytes` is rejected with status 413, by its header or while it arrives. A body counts
    as held from its arrival to the end of the response. `hold` in the request's state counts further bytes until then.
    """

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission
        self._max_bytes = admission.limits.max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        too_long = HTTPException(413, f"the body is longer than {self._max_bytes} bytes; send less at once")
        headers, num_received = Headers(scope=scope), 0
        announced = headers.get("content-length", "")
        caller, *_ = self._admission.callers(headers, (scope.get("client") or ("",))[0])

        with self._admission.memory.reservation(caller) as take:
            scope.setdefault("state", {})["hold"] = take

            async def limited_receive() -> Message:
                nonlocal num_received
                if announced.isdigit() and int(announced) > self._max_bytes:
                    raise too_long
                message = await receive()
                num_bytes = len(message.get("body", b""))
                num_received += num_bytes
                if num_received > self._max_bytes:
                    raise too_long
                take(num_bytes)
                return message

            await self._app(scope, limited_receive, send)


class HeadAsGet:
    """ASGI middleware that lets every GET route respond to HEAD, which probes use. The server leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self._app({**scope, "method": "GET"} if is_head else scope, receive, send)


class ClientDisconnected(HTTPException):
    """The client has closed the connection before its response was complete."""

    def __init__(self) -> None:
        super().__init__(CLIENT_CLOSED_REQUEST, "the client has disconnected")  # which does not receive it


async def cancel_on_disconnect(receive: Receive, work: Awaitable[ResultT]) -> ResultT:
    """Await `work`; if the client disconnects first, cancel it, wait for its end and raise ClientDisconnected.

    receive: that of the request, after its body has been read.
    """
    task, disconnect = asyncio.ensure_future(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class BlockResponse(Response):
    """A response in blocks of bytes, which are sent one by one: no layer below copies all of it at once."""

    def __init__(self, blocks: list[bytes], headers: Mapping[str, str] | None, media_type: str) -> None:
        super().__init__(headers=headers, media_type=media_type)
        self.headers["content-length"] = str(sum(map(len, blocks)))
        self._blocks = blocks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for block in self._blocks:
            await send({"type": "http.response.body", "body": block, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(Response):
    """Server-sent events. Each is requested when the one before is sent.

    An error before the first has a response of its own, later ones are events. While none comes after the first, a comment
    is sent every `keepalive_interval_s`, so that no proxy closes a silent connection.

    writer: says what comes before an event, and how the stream ends.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        writer: StreamWriter,
        events: AsyncGenerator[dict[str, Any], None],
        headers: dict[str, str],
        keepalive_interval_s: float,
    ) -> None:
        super().__init__(headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._writer = writer
        self._events = events
        self._keepalive_interval_s = keepalive_interval_s
        self._sending = asyncio.Lock()  # a comment would break an event in blocks
        self._sent_at = 0.0  # before the response has started

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await cancel_on_disconnect(receive, self._send(send))
        except ClientDisconnected:
            if not self._sent_at:
                raise
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        event = await anext(self._events, None)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._sent_at = asyncio.get_running_loop().time()
        keepalive = asyncio.create_task(self._send_comments(send))
        try:
            while event is not None:
                await self._send_event(send, event)
                event = await anext(self._events, None)
        except EyasError as error:
            log.warning("request %s: %s", self._writer.id, error, extra={"rate_limited": True})
            await self._send_event(send, self._writer.failure(error))
        finally:
            await cancel_task(keepalive)
        await send({"type": "http.response.body", "body": self._writer.end, "more_body": False})

    async def _send_event(self, send: Send, event: dict[str, Any]) -> None:
        await self._write(send, await encoded(event, self._writer.before(event)))

    async def _send_comments(self, send: Send) -> None:
        """Send a comment whenever the stream has been silent for the interval, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            silent_since = clock() if self._sending.locked() else self._sent_at
            if (left_s := silent_since + self._keepalive_interval_s - clock()) > 0:
                await asyncio.sleep(left_s)
            else:
                await self._write(send, [WAITING_COMMENT])

    async def _write(self, send: Send, blocks: list[bytes]) -> None:
        async with self._sending:
            for block in blocks:
                await send({"type": "http.response.body", "body": block, "more_body": True})
            self._sent_at = asyncio.get_running_loop().time()
