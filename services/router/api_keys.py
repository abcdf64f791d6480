"""Who may ask: the API keys of both doors. Knows no protocol but the form of an authorization header."""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from eyas.config import KeysConfig
from eyas.errors import ConfigError

_SCHEME = "bearer "


class ApiKeys:
    """Known API keys; without any, everybody may ask."""

    def __init__(self, keys: frozenset[str]) -> None:
        self._keys = tuple(key.encode() for key in keys)

    def admit(self, authorization: str) -> bool:
        """Whether an authorization header's value, "Bearer KEY", lets a call in; a near miss takes as long as any."""
        if not self._keys:
            return True
        if not authorization.lower().startswith(_SCHEME):
            return False
        given = authorization[len(_SCHEME) :].strip().encode("utf-8", "surrogateescape")
        return sum(hmac.compare_digest(given, key) for key in self._keys) > 0


def load_keys(config: KeysConfig, environment: Mapping[str, str] = os.environ) -> ApiKeys:
    """The keys that the settings name. Raises ConfigError where they name a place that holds none."""
    keys: set[str] = set()
    if config.env:
        keys |= _named(environment.get(config.env, "").split(","), f"keys.env: the environment variable {config.env}")
    if config.file:
        try:
            lines = Path(config.file).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"keys.file: cannot read {config.file}: {error}") from error
        keys |= _named(lines, f"keys.file: the file {config.file}")
    return ApiKeys(frozenset(keys))


def _named(values: list[str], place: str) -> set[str]:
    keys = {key for value in values if (key := value.strip())}
    if not keys:
        raise ConfigError(f"{place} holds no key; put one there, or leave the setting empty to let everybody ask")
    return keys
