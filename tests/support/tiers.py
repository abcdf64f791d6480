"""Cases of a parametrised test that run every day, and those that run nightly."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def tiered(names: Iterable[str], daily: Container[str]) -> list[Any]:
    """Return a parameter for each name, marked nightly if the name is not among the daily ones."""
    return [pytest.param(name, marks=() if name in daily else pytest.mark.nightly) for name in names]
