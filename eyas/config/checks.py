"""What settings must satisfy: values in, nothing or a ConfigError out."""

from __future__ import annotations

from eyas.errors import ConfigError


def at_least(least: int, **settings: float) -> None:
    """Raises ConfigError naming the first setting that lies below `least`."""
    for name, value in settings.items():
        require(value >= least, f"{name} is {value}; it must be at least {least}")


def above_zero(**settings: float) -> None:
    """Raises ConfigError naming the first setting that is not above 0."""
    for name, value in settings.items():
        require(value > 0, f"{name} is {value}; it must be above 0")


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` unless the condition holds."""
    if not condition:
        raise ConfigError(message)
