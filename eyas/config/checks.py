"""What settings must satisfy: values in, nothing or a ConfigError out."""

from __future__ import annotations

import re

from eyas.errors import ConfigError


def at_least(least: int, **settings: float) -> None:
    """Raises ConfigError naming the first setting that lies below `least`."""
    for name, value in settings.items():
        require(value >= least, f"{name} is {value}; it must be at least {least}")


def above_zero(**settings: float) -> None:
    """Raises ConfigError naming the first setting that is not above 0."""
    for name, value in settings.items():
        require(value > 0, f"{name} is {value}; it must be above 0")


def num_bytes(name: str, size: str) -> int:
    """Of a size such as 512MiB or 1.5GiB. Raises ConfigError naming the setting whose value is no such size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT])iB", size)
    if found is None:
        raise ConfigError(f"{name} is {size!r}; it must be a size such as 512MiB or 2GiB")
    return int(float(found[1]) * 2 ** (10 * (1 + "KMGT".index(found[2]))))


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` unless the condition holds."""
    if not condition:
        raise ConfigError(message)
