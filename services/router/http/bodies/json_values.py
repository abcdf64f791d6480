"""Values of JSON as they come: when two of them are the same."""

from __future__ import annotations


def is_same(value: object, other: object) -> bool:
    """Return whether two values are the same in JSON, where `true` is not the number 1, as it is in Python."""
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(is_same(own, other[name]) for name, own in value.items())
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(is_same, value, other))
    return isinstance(value, bool) == isinstance(other, bool) and value == other
