"""Values of JSON as they come: when two of them are the same."""

from __future__ import annotations


def is_same(value: object, other: object) -> bool:
    """Return whether two values are the same in JSON, where `true` is not the number 1, as it is in Python."""
    pairs = [(value, other)]
    while pairs:  # no recursion, as clients choose the depth
        own, given = pairs.pop()
        if isinstance(own, dict) and isinstance(given, dict):
            if own.keys() != given.keys():
                return False
            pairs += [(each, given[name]) for name, each in own.items()]
        elif isinstance(own, list) and isinstance(given, list):
            if len(own) != len(given):
                return False
            pairs += zip(own, given, strict=True)
        elif isinstance(own, bool) != isinstance(given, bool) or own != given:
            return False
    return True
