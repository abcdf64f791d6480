"""Finds the setting of a config.json that an error of transformers is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eyas.config.file_values import shown
from eyas.errors import CheckpointError
from eyas.models.checkpoint import cause
from eyas.models.transformers_log import quiet_transformers


def with_setting(
    error: CheckpointError, file: Path, values: Mapping[str, Any], make: Callable[[Mapping[str, Any]], object]
) -> CheckpointError:
    """Return the error with the setting of a config.json that causes it: the first without which `make` raises nothing."""
    with quiet_transformers():
        culprit = _culprit(values, make)
    if not culprit:
        return error
    reason = cause(error.__cause__) if error.__cause__ else str(error)
    return CheckpointError(f"{file}: {culprit}, which {file.parent.name} cannot be loaded with: {reason}")


def _culprit(values: Mapping[str, Any], make: Callable[[Mapping[str, Any]], object]) -> str:
    """Return the first setting without which `make` works, with its value; empty if there is none, as for unknown
    architectures.
    """
    for key in sorted(values.keys() - {"model_type"}):
        try:
            make({name: value for name, value in values.items() if name != key})
        except Exception:
            continue
        inner = values[key]
        if isinstance(inner, dict):
            deeper = _culprit(inner, lambda rest, key=key: make({**values, key: rest}))  # type: ignore[misc]
            return f"in {key} {deeper}" if deeper else f"{key} is {shown(inner)}"
        return f"{key} is {shown(inner)}"
    return ""
