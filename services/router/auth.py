"""The API keys of both listeners, and the ASGI middleware that requires one."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from eyas.config import ApiKeysConfig
from eyas.errors import ConfigError, Unauthenticated
from eyas.services.router.http.errors import error_response

_SCHEME = "bearer "


class ApiKeys:
    """The valid API keys; without any, every call is accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = tuple(key.encode() for key in keys)

    def accepts(self, authorization: str) -> bool:
        """Return whether the value of an authorization header, "Bearer KEY", holds a valid key. Takes constant time."""
        if not self._keys:
            return True
        if not authorization.lower().startswith(_SCHEME):
            return False
        given = authorization[len(_SCHEME) :].strip().encode("utf-8", "surrogateescape")
        return sum(hmac.compare_digest(given, key) for key in self._keys) > 0

    def check(self, headers: Iterable[tuple[str, str]]) -> None:
        """Check the HTTP headers or gRPC metadata of a call, with lower-case names. Raises Unauthenticated."""
        if not self.accepts(dict(headers).get("authorization", "")):
            raise Unauthenticated("no known API key; send one as the header or metadata 'authorization: Bearer KEY'")


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
    return ApiKeys(keys)


def _parse(values: list[str], source: str) -> set[str]:
    keys = {key for value in values if (key := value.strip())}
    if not keys:
        raise ConfigError(f"{source} holds no key; put one there, or leave the setting empty to accept every call")
    return keys


class Authenticator:
    """ASGI middleware that requires the header `Authorization: Bearer KEY` below /v1; other paths need no key."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            try:
                self._keys.check(Headers(scope=scope).items())
            except Unauthenticated as error:
                app = error_response(error)
        await app(scope, receive, send)
