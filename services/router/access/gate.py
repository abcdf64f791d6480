"""What stands before every path below /v1: a known key, and a body that is not too long. Knows no bodies."""

from __future__ import annotations

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.errors import Unauthenticated
from services.router.access.keys import Keys
from services.router.http.errors import Refusal, refusal, status_refusal

MAX_BODY_BYTES = 16 * 2**20


class Gate:
    """ASGI middleware. Health and metrics are open to all; bodies of up to MAX_BODY_BYTES come in."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refused = self._refused(headers)
        if refused:
            await JSONResponse(refused.body, refused.kind.status, refused.headers)(scope, receive, send)
            return
        await self._app(scope, _limited(receive), send)

    def _refused(self, headers: Headers) -> Refusal | None:
        if not self._keys.admit(headers.get("authorization", "")):
            message = "no known API key; send one as the header 'Authorization: Bearer KEY'"
            return refusal(Unauthenticated(message))
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            return status_refusal(413, _too_long())
        return None


def _limited(receive: Receive) -> Receive:
    """The same messages, up to where their bodies together are too long."""
    taken = 0

    async def counted() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > MAX_BODY_BYTES:
            raise HTTPException(413, _too_long())
        return message

    return counted


def _too_long() -> str:
    return f"the body is longer than {MAX_BODY_BYTES} bytes; send less at once"
