"""Checks that configs share: ranges, choices, ports, sizes, and patterns of white space."""

from __future__ import annotations

import re
from typing import get_args

from eyas.errors import ConfigError

MAX_WHITESPACE_PATTERN = 256
WHITESPACE_PATTERN_RULE = (
    "write a regular expression of spaces, \\n, \\r, \\t and \\s, such as '[ \\n]?', with 256 characters at most"
)
_WHITE = r"[ \t\n\r]|\\[ntrs]|\\x(?:20|0[9aAdD])"
_WHITESPACE = re.compile(rf"(?:{_WHITE}|\[(?:{_WHITE})+\]|[()|?*+]|\(\?:|\{{[0-9]+(?:,[0-9]*)?\}})*")


def is_whitespace_pattern(pattern: object) -> bool:
    """Return whether a regular expression can match whitespace of JSON only, by the characters that it is written with."""
    if not isinstance(pattern, str) or len(pattern) > MAX_WHITESPACE_PATTERN or not _WHITESPACE.fullmatch(pattern):
        return False
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


MAX_PORT = 65_535


# Checks for __post_init__. Each raises ConfigError that begins with the name of the setting.


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with `message` if the condition is false."""
    if not condition:
        raise ConfigError(message)


def at_least(minimum: float, **settings: float) -> None:
    """Check that all settings are `minimum` or more."""
    for name, value in settings.items():
        require(value >= minimum, f"{name} is {value}; it must be at least {minimum}")


def above_zero(**settings: float) -> None:
    """Check that all settings are above 0."""
    for name, value in settings.items():
        require(value > 0, f"{name} is {value}; it must be above 0")


def not_below(config: object, most: str, least: str) -> None:
    """Check that the setting `most` is not below the setting `least` of the same part."""
    low, high = getattr(config, least), getattr(config, most)
    require(high >= low, f"{most} is {high}; it must be at least {least} {low}")


def one_of(choices: object, **settings: str) -> None:
    """Check that all settings are among the values of a Literal type."""
    allowed = get_args(choices)
    for name, value in settings.items():
        require(value in allowed, f"{name} is {value!r}; it must be one of {', '.join(filter(None, allowed))}")


def valid_ports(*, can_be_null: bool = False, **settings: int | None) -> None:
    """Check that port numbers are in range; null is a port that is not served."""
    or_null = ", or be null" if can_be_null else ""
    for name, port in settings.items():
        require(port is None or 0 <= port <= MAX_PORT, f"{name} is {port}; it must lie in [0, {MAX_PORT}]{or_null}")


def num_bytes(name: str, size: str) -> int:
    """Return the bytes of a size such as 512MiB or 1.5GiB. name: the setting, for the ConfigError of another format."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT])iB", size)
    if found is None:
        raise ConfigError(f"{name} is {size!r}; it must be a size such as 512MiB or 2GiB")
    return int(float(found[1]) * 2 ** (10 * (1 + "KMGT".index(found[2]))))


def cert_and_key(cert_file: str, key_file: str) -> None:
    """Check that certificate and key are both set, or neither."""
    require(bool(cert_file) == bool(key_file), "cert_file and key_file go together; set both or none")
