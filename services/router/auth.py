"""API keys of both listeners: which keys exist, and the gRPC interceptor and the ASGI middleware that require one."""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from eyas.config import ApiKeysConfig
from eyas.errors import ConfigError, Unauthenticated
from eyas.services.router.http.errors import error_response

_SCHEME = "bearer "
_EYAS_SERVICES = "/eyas."


class ApiKeys:
    """The valid API keys; without any, every call is accepted."""

    def __init__(self, keys: frozenset[str]) -> None:
        self._keys = tuple(key.encode() for key in keys)

    def accepts(self, authorization: str) -> bool:
        """Return whether the value of an authorization header, "Bearer KEY", holds a valid key. Takes constant time."""
        if not self._keys:
            return True
        if not authorization.lower().startswith(_SCHEME):
            return False
        given = authorization[len(_SCHEME) :].strip().encode("utf-8", "surrogateescape")
        return sum(hmac.compare_digest(given, key) for key in self._keys) > 0


def load_api_keys(config: ApiKeysConfig, environment: Mapping[str, str] = os.environ) -> ApiKeys:
    """Read the configured keys. Raises ConfigError if a configured source cannot be read or holds no key."""
    keys: set[str] = set()
    if config.env:
        keys |= _parse(environment.get(config.env, "").split(","), f"api_keys.env: the environment variable {config.env}")
    if config.file:
        try:
            lines = Path(config.file).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"api_keys.file: cannot read {config.file}: {error}") from error
        keys |= _parse(lines, f"api_keys.file: the file {config.file}")
    return ApiKeys(frozenset(keys))


def _parse(values: list[str], source: str) -> set[str]:
    keys = {key for value in values if (key := value.strip())}
    if not keys:
        raise ConfigError(f"{source} holds no key; put one there, or leave the setting empty to accept every call")
    return keys


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Requires the metadata `authorization: Bearer KEY` for Eyas' services; health and reflection need no key."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        metadata = cast("tuple[tuple[str, str], ...]", handler_call_details.invocation_metadata or ())
        authorization = dict(metadata).get("authorization", "")
        if not handler_call_details.method.startswith(_EYAS_SERVICES) or self._keys.accepts(authorization):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_reject)


async def _reject(request: Any, context: Any) -> NoReturn:
    raise Unauthenticated("no known API key; send one as the metadata 'authorization: Bearer KEY'")


class Authenticator:
    """ASGI middleware that requires the header `Authorization: Bearer KEY` below /v1; other paths need no key."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        needs_key = scope["type"] == "http" and scope["path"].startswith("/v1/")
        if needs_key and not self._keys.accepts(Headers(scope=scope).get("authorization", "")):
            error = Unauthenticated("no known API key; send one as the header 'Authorization: Bearer KEY'")
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
