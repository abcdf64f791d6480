"""Single settings of a head's config.json: a mapping and a key in, a checked value out. Knows no kind of head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.errors import CheckpointError


def whole_number(config: Mapping[str, Any], key: str, source: object, default: int | None = None) -> int:
    """A setting of a config.json. Raises CheckpointError when it is no whole number and there is no default."""
    value = config.get(key) or default
    if not isinstance(value, int):
        raise CheckpointError(f"{source}: {key} is {value!r}; it must be a whole number")
    return value


def real(config: Mapping[str, Any], key: str, source: object, default: float) -> float:
    """A setting of a config.json. Raises CheckpointError when it is no number."""
    value = config.get(key) or default
    if not isinstance(value, int | float):
        raise CheckpointError(f"{source}: {key} is {value!r}; it must be a number")
    return float(value)


def flag(config: Mapping[str, Any], key: str, source: object, default: bool = False) -> bool:
    """A setting of a config.json. Raises CheckpointError when it is neither true nor false."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"{source}: {key} is {value!r}; it must be true or false")
    return value
