"""The playground: a page at / that calls the public API from the browser. Its files are in the folder `static`.

The page needs no key and shows nothing by itself; its requests go to /v1 with the key that its user types. All its links are
relative, so that it works below any path prefix that ends with a slash.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hashlib import blake2b
from importlib.resources import files

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
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
            app.add_route(path, _respond_with(file.read_bytes(), MEDIA_TYPES[kind]), include_in_schema=False)


def _respond_with(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    tag = f'"{blake2b(content, digest_size=16).hexdigest()}"'
    headers = HEADERS | {"ETag": tag}

    async def respond(request: Request) -> Response:
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return respond
