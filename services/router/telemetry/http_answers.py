"""Counts what the HTTP door answers, refusals before any request among them. Knows routes and statuses, no bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# What a client makes up must not become a label.
NO_ROUTE = "none"
_BUG = 500

Count = Callable[[str, int], None]


class HttpAnswers:
    """ASGI middleware, outermost of all. routes: of the application, as they are when something is asked. count: told the
    route and the status of every answer that has begun."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], count: Count) -> None:
        self._app = app
        self._routes = routes
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route, begun = self._route(scope), False

        async def told(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._count(route, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, told)
        except Exception:
            if not begun:  # answered further out
                self._count(route, _BUG)
            raise

    def _route(self, scope: Scope) -> str:
        found = (route.path for route in self._routes if isinstance(route, Route) and route.matches(scope)[0] != Match.NONE)
        return next(found, NO_ROUTE)
