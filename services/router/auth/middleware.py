"""Asks requests for an API key."""

from __future__ import annotations

import time

from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.errors import EyasError
from eyas.services.router.auth.keys import OPEN_FILES, OPEN_PATHS, Access, ApiKeys, KeyScope
from eyas.services.router.http.errors import error_response


class Authenticator:
    """ASGI middleware that requires an API key for every path but OPEN_PATHS and the files of the playground.

    The key is in the header `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients send it.

    It checks scope and rate before the body is read, leaves the Access in the request's state, and adds the quota's headers.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = get_route_path(scope) if scope["type"] == "http" else "/"
        if path in OPEN_PATHS or (path.startswith(OPEN_FILES) and scope["method"] in ("GET", "HEAD")):
            await self._app(scope, receive, send)
            return
        app, access = self._app, Access()
        try:
            access = self._keys.access(Headers(scope=scope).items())
            access.begin(_scope_of(path))
            caller = access.caller((scope.get("client") or ("",))[0])
            scope.setdefault("state", {}).update(access=access, caller=caller, arrived_at=time.perf_counter())
        except EyasError as error:
            app = error_response(error, scope)

        async def send_with_quota(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(access.headers)
            await send(message)

        await app(scope, receive, send_with_quota if access.quota else send)


def _scope_of(path: str) -> KeyScope:
    """Return the scope that a path needs."""
    if path.startswith("/v1/cluster"):  # the route also matches the path with a line break at its end
        return "cluster"
    return "models" if path.startswith(("/v1/models", "/version")) else "generate"
