"""Reads the values of arguments that models do not write as JSON: text whose type is in a schema, and Python's literals."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from eyas.json_schema import Alternative, alternatives
from eyas.text_reader import JsonValue

_PYTHON_NAMES = {"true": ("true", "boolean"), "false": ("false", "boolean"), "none": ("null", "null")}
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_KEY = re.compile(r"""[^\s=,()\[\]{}"'\\]+""")
# Strings whole, brackets and commas alone, all else in runs.
_TOKEN = re.compile(r"""(?s)"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^"'()\[\]{},]+|.""")
_ESCAPE = re.compile(r"(?s)\\(?:[0-7]{1,3}|.)")
_KNOWN_ESCAPE = re.compile(r"""\\(?:[\n\\'"abfnrtvxNuU]|[0-3]?[0-7]{1,2})""")  # no warning of Python's about them


class PythonArguments(JsonValue):
    """Finds the end of a Python call's arguments, their parentheses included."""

    _PAIRS: Mapping[str, str] = {"(": ")", "{": "}", "[": "]"}
    _QUOTES = "\"'"

    def _may_be_plain(self, character: str) -> bool:
        return True


def json_value(text: str, schema: object, whole: Mapping[str, Any]) -> str:
    """Return the value of a parameter as JSON. It is text unless its schema, a part of the whole one, says otherwise."""
    found = _alternatives(schema, whole)
    kinds = _kinds(found)
    if not kinds - {"string"} or (any(one.may_be(text) for one in found) and not (text == "null" and "null" in kinds)):
        return _dumped(text)
    try:
        return _dumped(json.loads(text))
    except (ValueError, RecursionError):
        name, kind = _PYTHON_NAMES.get(text.lower(), ("", ""))
        return name if kind in kinds else _dumped(text)


def cut_value(text: str, schema: object, whole: Mapping[str, Any]) -> str:
    """Return the beginning of a value, whose end is missing, as unclosed JSON."""
    return _dumped(text)[:-1] if may_be_text(schema, whole) else text


def may_be_text(schema: object, whole: Mapping[str, Any]) -> bool:
    """Whether a value may be text. If not, it is JSON."""
    found = _alternatives(schema, whole)
    return not _kinds(found) - {"string"} or any(one.texts != [] for one in found)


def _alternatives(schema: object, whole: Mapping[str, Any]) -> list[Alternative]:
    """Return none for a schema whose references lead nowhere, and the like: its values are text."""
    try:
        return alternatives(schema, whole)
    except ValueError:
        return []


def _kinds(found: list[Alternative]) -> frozenset[str]:
    return frozenset[str]().union(*(one.kinds or () for one in found))


def _dumped(value: object) -> str:
    """Return JSON that can be encoded: half a surrogate pair stays an escape. Raises ValueError."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if _HALF_PAIR.search(text) else text


def is_python_key(key: str) -> bool:
    """Whether `python_arguments` reads a name of a parameter. It may be none of Python's, such as user-id or from."""
    return bool(_KEY.fullmatch(key))


def python_arguments(text: str) -> str | None:
    """Return keyword arguments in parentheses as a JSON object; None if the text is no whole list of them."""
    values: dict[str, object] = {}
    words = _words(text[1:-1])
    if words and not words[-1].strip():  # nothing, or a comma at the end
        words.pop()
    try:
        for word in words:
            key, _, value = word.partition("=")
            if not is_python_key(key.strip()) or key.strip() in values:
                return None
            values[key.strip()] = _python_literal(value.strip())
        return _dumped(values)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _words(text: str) -> list[str]:
    """Return what stands between the commas of a call, in Python's escapes."""
    words, depth = [""], 0
    for token in _TOKEN.findall(text):
        depth += (token in "([{") - (token in ")]}")
        if token == "," and depth == 0:
            words.append("")
        elif token[0] in PythonArguments._QUOTES and not words[-1].endswith(("r", "R")):
            words[-1] += _ESCAPE.sub(_python_escape, token)
        else:
            words[-1] += token
    return words


def _python_escape(found: re.Match[str]) -> str:
    """Return an escape of Python for one that it may warn of; JSON has one of a slash."""
    return found[0] if _KNOWN_ESCAPE.fullmatch(found[0]) else "/" if found[0] == "\\/" else f"\\{found[0]}"


def _python_literal(text: str) -> object:
    """Return the value of a literal of JSON or Python. Raises ValueError, SyntaxError and others."""
    try:
        return json.loads(text)
    except ValueError:
        if not text:
            raise
        return _python_value(ast.parse(f"({text}\n)", mode="eval").body)


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
