"""Errors in OpenAI's shape: given what went wrong, gives back a status, headers and a body. Knows no request."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from eyas.errors import EyasError, InvalidRequest, Overloaded, TimedOut, Unauthenticated, Unavailable, UnknownModel

RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Kind:
    """What OpenAI's clients are told of an error besides its message."""

    status: int
    type: str
    code: str | None = None


# The first entry that fits an error is its kind.
_KINDS: tuple[tuple[type[EyasError], Kind], ...] = (
    (UnknownModel, Kind(404, "invalid_request_error", "model_not_found")),
    (InvalidRequest, Kind(400, "invalid_request_error")),
    (Unauthenticated, Kind(401, "invalid_request_error", "invalid_api_key")),
    (Overloaded, Kind(429, "rate_limit_error", "overloaded")),
    (Unavailable, Kind(503, "server_error", "unavailable")),
    (TimedOut, Kind(504, "server_error", "timeout")),
)
_INTERNAL = Kind(500, "server_error", "internal_error")


@dataclass(frozen=True)
class Refusal:
    """An answer that says what went wrong. param: the field of the body that is to blame; empty if none alone is."""

    kind: Kind
    message: str
    param: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        told = {"message": self.message, "type": self.kind.type, "param": self.param or None, "code": self.kind.code}
        return {"error": told}


def refusal(error: EyasError) -> Refusal:
    """The answer to an error of the front."""
    kind = next((kind for type_, kind in _KINDS if isinstance(error, type_)), _INTERNAL)
    param = error.param if isinstance(error, InvalidRequest) else ""
    return Refusal(kind, str(error), param, _headers(error))


def status_refusal(status: int, message: str) -> Refusal:
    """The answer to what HTTP itself refuses, such as an unknown path."""
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return Refusal(Kind(status, kind), message)


def _headers(error: EyasError) -> dict[str, str]:
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, Overloaded | Unavailable):
        seconds = (error.retry_after if isinstance(error, Overloaded) else None) or RETRY_SECONDS
        return {"Retry-After": str(max(1, math.ceil(seconds))), "Retry-After-Ms": str(math.ceil(seconds * 1000))}
    return {}
