"""Errors as OpenAI's clients expect them, and Anthropic's below /v1/messages: status, headers and body.

The kind of an error follows from its gRPC status. To add one, define its exception in `eyas.errors` and its status in
`eyas.rpc.server`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import grpc
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from eyas.errors import EyasError, InvalidRequest, Overloaded, RateLimited, RequestFailed, Unauthenticated, Unavailable
from eyas.rpc.status import UNAVAILABLE_RETRY_AFTER_S, status_of
from eyas.services.router.http.bodies.body_errors import invalid_body

CLIENT_CLOSED_REQUEST = 499  # nginx's status for its log
MAX_QUOTED_PATH = 200
_MAX_PATH_PARTS = 8  # that are looked at


@dataclass(frozen=True)
class ErrorKind:
    """The HTTP status of an error, and its `type` and `code` in the body."""

    status: int
    type: str
    code: str | None = None


_KINDS: Mapping[grpc.StatusCode, ErrorKind] = {
    grpc.StatusCode.NOT_FOUND: ErrorKind(404, "invalid_request_error", "model_not_found"),
    grpc.StatusCode.INVALID_ARGUMENT: ErrorKind(400, "invalid_request_error"),
    grpc.StatusCode.UNAUTHENTICATED: ErrorKind(401, "invalid_request_error", "invalid_api_key"),
    grpc.StatusCode.PERMISSION_DENIED: ErrorKind(403, "invalid_request_error", "permission_denied"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorKind(429, "rate_limit_error", "overloaded"),
    grpc.StatusCode.UNAVAILABLE: ErrorKind(503, "server_error", "unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorKind(504, "server_error", "timeout"),
}
_INTERNAL = ErrorKind(500, "server_error", "internal_error")
# Anthropic's `type` of an error by its HTTP status.
_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
ANTHROPIC_PATH = "/v1/messages"
_HTTP_KINDS: Mapping[int, ErrorKind] = {
    408: ErrorKind(408, "invalid_request_error", "timeout"),
    503: _KINDS[grpc.StatusCode.UNAVAILABLE],
}
_QUOTA = ErrorKind(429, "rate_limit_error", "rate_limit_exceeded")


def error_response(error: EyasError, scope: Scope) -> JSONResponse:
    """Return the HTTP response to an error. scope: of the request."""
    return JSONResponse(error_body(error, get_route_path(scope)), _kind(error).status, _headers(error))


def error_body(error: EyasError, path: str = "") -> dict[str, Any]:
    """Return an error as JSON: the body of a response, or an event of a stream that has begun.

    path: of the request, which decides the shape.
    """
    return _shaped(_kind(error), str(error), path, error.param if isinstance(error, InvalidRequest) else "")


def error_bytes(status: int, message: str, path: str = "") -> bytes:
    """Return the whole response to bytes that reach no application. It closes the connection.

    path: of the request, as far as it is known.
    """
    body = json.dumps(_shaped(_HTTP_KINDS.get(status, ErrorKind(status, "invalid_request_error")), message, path)).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    if status in _HTTP_KINDS:  # which pass
        headers |= _retry_headers(UNAVAILABLE_RETRY_AFTER_S)
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def add_error_handlers(app: FastAPI) -> None:
    """Let the application respond to every exception in the shape that its client expects."""

    @app.exception_handler(EyasError)
    async def eyas_error(request: Request, error: EyasError) -> Response:
        return error_response(error, request.scope)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        return error_response(invalid_body(error.errors()), request.scope)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        """Respond to an error of HTTP itself, such as an unknown path."""
        kind = ErrorKind(error.status_code, "server_error" if error.status_code >= 500 else "invalid_request_error")
        path = get_route_path(request.scope)
        message = f"{request.method} {path[:MAX_QUOTED_PATH]}: {error.detail}"
        routes = {getattr(route, "path", "") for route in app.routes}
        if error.status_code == 404 and (instead := instead_of(path, routes)):
            message = f"{request.method} {path[:MAX_QUOTED_PATH]} does not exist here: {instead}"
        elif error.status_code == 405 and error.headers and (allowed := error.headers.get("Allow")):
            message = f"{message}; use {allowed}"
        return JSONResponse(_shaped(kind, message, path), kind.status, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def disconnected(request: Request, error: ClientDisconnect) -> Response:
        """End a request whose client left before its body was complete. The response is not sent."""
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        """Return a response without details; the server logs the traceback."""
        return error_response(RequestFailed("internal error"), request.scope)


def instead_of(path: str, routes: Collection[str]) -> str:
    """Return what to call instead of a path that is nearly right, as the end of a sentence; empty if that is unknown.

    routes: the paths that exist.
    """
    parts = [part for part in path.lower().split("/", _MAX_PATH_PARTS + 1)[1 : _MAX_PATH_PARTS + 1] if part]
    plain = "/" + "/".join(parts)
    candidates = [plain, f"/v1{plain}", plain.replace("/v1/v1/", "/v1/", 1), plain.removeprefix("/v1")]
    found = next((one for one in candidates if one in routes and one != path), "")
    doubled = "; the base URL ends with /v1 already" if plain.startswith("/v1/v1/") else ""
    return f"call {found}{doubled}" if found else ""


def _kind(error: EyasError) -> ErrorKind:
    return _QUOTA if isinstance(error, RateLimited) else _KINDS.get(status_of(error), _INTERNAL)


def _shaped(kind: ErrorKind, message: str, path: str, param: str = "") -> dict[str, Any]:
    """Return an error in the shape of the API below a path. param: the wrong field of the body; empty if there is none."""
    if not path.startswith(ANTHROPIC_PATH):
        return {"error": {"message": message, "type": kind.type, "param": param or None, "code": kind.code}}
    type_ = _ANTHROPIC_TYPES.get(kind.status, "invalid_request_error" if kind.status < 500 else "api_error")
    return {"type": "error", "error": {"type": type_, "message": message}}


def _headers(error: EyasError) -> dict[str, str]:
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, Overloaded | Unavailable):
        return _retry_headers((error.retry_after if isinstance(error, Overloaded) else None) or UNAVAILABLE_RETRY_AFTER_S)
    return {}


def _retry_headers(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds))), "Retry-After-Ms": str(math.ceil(seconds * 1000))}


@contextmanager
def named_by(name_of: Callable[[str], str]) -> Iterator[None]:
    """Let errors name the fields of a body instead of the call's parameters. name_of: the field of a parameter."""
    try:
        yield
    except InvalidRequest as error:
        raise type(error)(str(error), name_of(error.param)) from error
