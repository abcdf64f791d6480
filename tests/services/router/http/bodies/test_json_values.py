"""Values of JSON are compared as JSON does, at any depth."""

import json
from typing import Any

import pytest

from eyas.services.router.http.bodies.json_values import is_same

DEPTH = 20_000


def nested(leaf: Any) -> Any:
    for _ in range(DEPTH):
        leaf = [leaf]
    return leaf


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ('{"a": [1, {"b": null}]}', '{"a": [1.0, {"b": null}]}', True),
        ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}', True),
        ("[1]", "[true]", False),
        ("[0]", "[false]", False),
        ('{"a": 1}', '{"b": 1}', False),
        ("[1, 2]", "[2, 1]", False),
        ("[]", "{}", False),
    ],
)
def test_numbers_are_no_booleans_and_keys_have_no_order(one: str, other: str, expected: bool) -> None:
    assert is_same(json.loads(one), json.loads(other)) is expected


def test_values_are_compared_at_any_depth() -> None:
    assert is_same(nested(1), nested(1.0))
    assert not is_same(nested(1), nested(True))
