"""The playground: a page at / that calls the public API, in the folder `static`; and the cluster's state, which it shows.

The page needs no key and shows nothing by itself; its requests go to /v1 with the key that its user types. All its links are
relative, so that it works below any path prefix that ends with a slash.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from hashlib import blake2b
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from eyas.rpc.messages import DraftClientStatus, Lease
from eyas.services.router.dispatch.readiness import ReadinessMonitor
from eyas.services.router.http.drafter_kill import add_kill_route, can_kill

MEDIA_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "json": "application/json",
    "svg": "image/svg+xml",
}
# Begins the page; with the attribute it shows the button that kills the drafter.
ROOT_TAG, KILLING_ROOT_TAG = b'<html lang="en">', b'<html lang="en" data-can-kill="">'
# Only the page's own files are loaded and run, no text becomes markup, and no other page shows it in a frame.
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def add_playground(app: Starlette) -> None:
    """Serve the page at / and its other files below /playground/."""
    for file in (files("eyas.services.router.http") / "static").iterdir():
        kind = file.name.rpartition(".")[2]
        if kind in MEDIA_TYPES:
            path = "/" if file.name == "index.html" else f"/playground/{file.name}"
            content = file.read_bytes()
            if path == "/" and can_kill():
                content = content.replace(ROOT_TAG, KILLING_ROOT_TAG)
            app.add_route(path, _respond_with(content, MEDIA_TYPES[kind]), include_in_schema=False)
    if can_kill():
        add_kill_route(app)


def _respond_with(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    tag = f'"{blake2b(content, digest_size=16).hexdigest()}"'
    headers = HEADERS | {"ETag": tag}

    async def respond(request: Request) -> Response:
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return respond


def cluster_state(readiness: ReadinessMonitor, has_addresses: bool) -> dict[str, Any]:
    """Return the router's state and its workers as JSON, verifiers first. Values are as old as a heartbeat.

    has_addresses: whether the workers have their addresses; otherwise they have ids only.
    """
    pool = readiness.workers
    snapshot, reachable = pool.snapshot(), {lease.incarnation for lease in pool.reachable}
    drafters = {lease.address: _id(lease) for lease in snapshot.drafters}

    def health(lease: Lease) -> str:
        if lease.incarnation in snapshot.unhealthy:
            return "unhealthy"
        return "healthy" if lease.role == "draft" or lease.incarnation in reachable else "unreachable"

    workers = [
        _worker(lease, health(lease), snapshot.in_flight.get(lease.incarnation, 0), drafters, has_addresses)
        for lease in (*snapshot.verifiers, *snapshot.drafters)
    ]
    router = {"status": "unhealthy" if readiness.outage else "healthy", "reason": readiness.outage or None}
    return {"object": "cluster", "router": router, "workers": workers}


def _id(lease: Lease) -> str:
    """Return a short name of a worker that names no address. Workers of one process have a part in common."""
    process, _, rest = lease.incarnation.partition("/")
    return f"{process[:8]}/{rest}" if rest else process[:8]


def _worker(
    lease: Lease, health: str, num_requests: int, drafters: Mapping[str, str], has_addresses: bool
) -> dict[str, Any]:
    """Describe a worker. drafters: ids of draft services by address."""
    load = lease.load
    worker = {
        "id": _id(lease),
        "role": lease.role,
        "model": lease.model.name,
        "zone": lease.zone or None,
        "health": health,
        "requests": num_requests,
        "running": load.num_running,
        "waiting": load.num_waiting,
    } | ({"address": lease.address} if has_addresses else {})
    if lease.role == "draft":
        return worker
    hit_rate = load.num_cached_tokens / load.num_prompt_tokens if load.num_prompt_tokens else None
    return worker | {
        "max_running": load.max_num_seqs,
        "step_seconds": load.step_seconds,
        "kv_cache": {"tokens": load.num_kv_tokens, "free_tokens": load.free_kv_tokens},
        "prefix_cache": {
            "prompt_tokens": load.num_prompt_tokens,
            "cached_tokens": load.num_cached_tokens,
            "hit_rate": hit_rate,
        },
        "drafters": [_draft_client(client, drafters, has_addresses) for client in lease.draft_clients],
    }


def _draft_client(client: DraftClientStatus, drafters: Mapping[str, str], has_address: bool) -> dict[str, Any]:
    return {
        "id": drafters.get(client.address),
        "method": client.method or None,
        "connected": client.connected,
        "circuit_breaker": client.circuit,
        "sessions": client.num_sessions,
        "answered": client.num_answered,
        "lost": client.num_lost,
        "drafted_tokens": client.num_drafted,
        "accepted_tokens": client.num_accepted,
    } | ({"address": client.address} if has_address else {})
