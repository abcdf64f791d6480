"""A route that has the draft service killed, for the playground of `eyas serve --demo`.

It exists only where the process that started this router takes the signal. Only the router's own page, opened on this
machine, may call it: a page of another site, or one whose name was made to point to this machine, gets status 403.
"""

from __future__ import annotations

import os
import signal
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse

from eyas.errors import PermissionDenied, Unavailable
from eyas.services.lifecycle import is_loopback

KILL_PATH = "/playground/drafter"
KILL_SIGNAL = signal.SIGUSR1
# Holds the id of the process that starts the draft service again.
SUPERVISOR_VARIABLE = "EYAS_DEMO_SUPERVISOR"


def can_kill() -> bool:
    """Return whether the process that started this one kills the drafter on request."""
    return os.environ.get(SUPERVISOR_VARIABLE) == str(os.getppid())


def add_kill_route(app: Starlette) -> None:
    """Answer DELETE, which no page of another origin can send without asking first."""
    app.add_route(KILL_PATH, _kill, methods=["DELETE"], include_in_schema=False)


async def _kill(request: Request) -> JSONResponse:
    """Ask the supervisor to kill the drafter. Raises PermissionDenied, and Unavailable if the supervisor has gone."""
    _check_is_own_page(request)
    if not can_kill():
        raise Unavailable("the process that starts the drafter again has ended, so the drafter is left alone")
    os.kill(os.getppid(), KILL_SIGNAL)
    return JSONResponse({"object": "drafter.kill", "signal": "SIGKILL"}, 202)


def _check_is_own_page(request: Request) -> None:
    host, origin = request.headers.get("host", ""), request.headers.get("origin", "")
    peer = request.client.host if request.client else ""
    if not (is_loopback(peer) and is_loopback(_name_of(host))):
        raise PermissionDenied(
            f"only a page of this machine may kill the drafter; open http://127.0.0.1 instead of {host[:80]!r}"
        )
    is_same_site = request.headers.get("sec-fetch-site", "same-origin") == "same-origin"
    if origin != f"{request.url.scheme}://{host}" or not is_same_site:
        raise PermissionDenied(f"only the playground itself may kill the drafter; the request is from {origin[:80]!r}")


def _name_of(host: str) -> str:
    """Return the host of a Host header without its port; empty if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
