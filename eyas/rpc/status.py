"""Errors as gRPC status codes with trailing metadata, and back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import cast

import grpc
import grpc.aio

from eyas import errors
from eyas.errors import (
    CheckpointError,
    ConfigError,
    EyasError,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    RateLimited,
    RequestFailed,
    TimedOut,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from eyas.rpc.messages import ERROR_KEY, PARAM_KEY, RETRY_KEY

# When to try again if the service that should answer is not there, in seconds.
UNAVAILABLE_RETRY_AFTER_S = 1.0
# Trailing metadata about a quota, and the headers of HTTP responses, begin so.
_QUOTA_PREFIX = "x-ratelimit-"

# The first matching entry decides.
_STATUS_CODES: tuple[tuple[type[EyasError], grpc.StatusCode], ...] = (
    (UnknownModel, grpc.StatusCode.NOT_FOUND),
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (TimedOut, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (CheckpointError, grpc.StatusCode.FAILED_PRECONDITION),
    (EyasError, grpc.StatusCode.INTERNAL),
)


def status_error(error: grpc.RpcError) -> EyasError:
    """Return the EyasError behind a failed call. A deadline that gRPC ended, or a lost connection, is Unavailable.

    The kind is the one that the service raised, if it says so and the status fits, else the one of the status.
    """
    code, details, trailers = error.code(), error.details() or error.code().name, _trailers(error)
    kind = _raised_kind(trailers.get(ERROR_KEY, ""), code)
    if kind is None and code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unavailable(f"no answer in time: {details}")
    kind = kind or next((kind for kind, status in _STATUS_CODES if status is code), EyasError)
    if issubclass(kind, RateLimited):
        quota = {name: value for name, value in trailers.items() if name.startswith(_QUOTA_PREFIX)}
        return kind(details, _retry_after(error), quota)
    if issubclass(kind, Overloaded):
        return kind(details, _retry_after(error))
    if issubclass(kind, InvalidRequest):
        return kind(details, trailers.get(PARAM_KEY, ""))
    if kind is EyasError:
        return RequestFailed(details if code is grpc.StatusCode.INTERNAL else f"{code.name}: {details}")
    return kind(details)


def _raised_kind(name: str, code: grpc.StatusCode) -> type[EyasError] | None:
    """Return the kind of error that a service says it raised; None for one that does not go with the status."""
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, EyasError)) or kind is EyasError:
        return None
    return kind if _status_of_kind(kind) is code else None


def is_connection_error(error: grpc.RpcError) -> bool:
    """Return whether gRPC failed a call, not the service: it was away, or the connection broke. The text names addresses."""
    codes = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    return error.code() in codes and ERROR_KEY not in _trailers(error)


def status_of(error: BaseException) -> grpc.StatusCode:
    """Return the status code of an error; INTERNAL for an unexpected one."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return grpc.StatusCode.CANCELLED
    if isinstance(error, TimeoutError):
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return _status_of_kind(type(error))


def _status_of_kind(kind: type[BaseException]) -> grpc.StatusCode:
    known = (status for base, status in _STATUS_CODES if issubclass(kind, base))
    return next(known, grpc.StatusCode.INTERNAL)


def error_trailers(error: EyasError) -> tuple[tuple[str, str], ...]:
    """Return what `status_error` reads: the kind of error, its parameter if it names one, and the hint when to retry."""
    param = error.param if isinstance(error, InvalidRequest) else ""
    named = ((PARAM_KEY, param),) if param and param.isascii() and param.isprintable() else ()
    return *retry_hint(error), (ERROR_KEY, type(error).__name__), *named


def retry_hint(error: EyasError) -> tuple[tuple[str, str], ...]:
    """Return trailing metadata that says when to retry, and what is left of a quota; empty if the error does not say."""
    if isinstance(error, Unavailable):
        return ((RETRY_KEY, f"{UNAVAILABLE_RETRY_AFTER_S * 1000:.0f}"),)
    if not isinstance(error, Overloaded) or error.retry_after is None:
        return ()
    quota = error.headers.items() if isinstance(error, RateLimited) else ()
    return (RETRY_KEY, f"{error.retry_after * 1000:.0f}"), *quota


def _retry_after(error: grpc.RpcError) -> float | None:
    """Return the seconds of `retry_hint`, if the error has it; None for a text that the hint never has."""
    hint = str(_trailers(error).get(RETRY_KEY, ""))
    return int(hint) / 1000 if re.fullmatch("[0-9]{1,9}", hint) else None


def _trailers(error: grpc.RpcError) -> dict[str, str]:
    return dict(cast("Iterable[tuple[str, str]]", error.trailing_metadata() or ()))
