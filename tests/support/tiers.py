"""Cases of a parametrised test that run every day, and those that run nightly."""

from collections.abc import Collection, Container, Iterable
from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """Return the values of a case that runs nightly."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def tiered(names: Iterable[Any], daily: Container[Any]) -> list[Any]:
    """Return a parameter for each name, nightly if the name is not among the daily ones."""
    names = list(names)
    assert not isinstance(daily, Collection) or all(name in names for name in daily), "a daily case that does not exist"
    return [name if name in daily else nightly(name) for name in names]
