"""Reads the values of arguments that models do not write as JSON: text whose type is in a schema, and Python's literals."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from eyas.text_reader import JsonValue


class PythonArguments(JsonValue):
    """Finds the end of a Python call's arguments, their parentheses included."""

    _PAIRS: Mapping[str, str] = {"(": ")", "{": "}", "[": "]"}
    _QUOTES = "\"'"

    def _may_be_plain(self, character: str) -> bool:
        return True


def json_value(text: str, schema: object, whole: Mapping[str, Any]) -> str:
    """Return the value of a parameter as JSON. It is text unless its schema, a part of the whole one, says otherwise."""
    kinds = value_kinds(schema, whole)
    if not kinds or ("string" in kinds and not (text == "null" and "null" in kinds)):
        return json.dumps(text, ensure_ascii=False)
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def value_kinds(schema: object, whole: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema, unchecked, names; empty if it may be anything. References lead into `whole`."""
    kinds, seen, open_ = set[str](), set[int](), [schema]
    while open_:
        part = open_.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        own = part.get("type")
        named = {kind for kind in (own if isinstance(own, list) else [own]) if isinstance(kind, str)}
        values = [part["const"]] if "const" in part else part.get("enum")
        if not named and isinstance(values, list):
            named = {"string" if isinstance(one, str) else "null" if one is None else "other" for one in values}
        kinds |= named
        open_ += [one for key in ("anyOf", "oneOf", "allOf") if isinstance(part.get(key), list) for one in part[key]]
        open_.append(referenced(part, whole))
    return kinds


def referenced(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> object:
    """Return what "$ref": "#/..." of a schema leads to; None if it leads nowhere."""
    path, found = schema.get("$ref"), None
    if isinstance(path, str) and path.startswith("#/"):
        found = whole
        for name in path[2:].split("/"):
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def python_arguments(text: str) -> str | None:
    """Return keyword arguments in parentheses as a JSON object; None if the text is no whole list of them."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body if text else None
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            return None
        values = {word.arg: _python_value(word.value) for word in call.keywords if word.arg is not None}
        return json.dumps(values, ensure_ascii=False, allow_nan=False) if len(values) == len(call.keywords) else None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _python_value(node: ast.expr) -> object:
    """Return the value of a literal of Python, in which true, false and null may stand as in JSON. Raises ValueError."""
    match node:
        case ast.Name("true" | "false" | "null" as name):
            return json.loads(name)
        case ast.List(elements) | ast.Tuple(elements):
            return [_python_value(element) for element in elements]
        case ast.Dict(keys, values):
            names = [None if key is None else ast.literal_eval(key) for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("a key is no text")
            return dict(zip(names, map(_python_value, values), strict=True))
    value: object = ast.literal_eval(node)
    json.dumps(value, allow_nan=False)
    return value
