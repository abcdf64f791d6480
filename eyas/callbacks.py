"""The callback that does nothing, as a default."""

from __future__ import annotations


def nothing(*args: object) -> None:
    """Do nothing."""
