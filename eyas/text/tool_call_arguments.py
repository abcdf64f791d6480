"""Reads the values of arguments that models do not write as JSON: text whose type is in a schema, and Python's literals."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from eyas.text.incremental_reader import JsonValue
from eyas.text.json_schema import Alternatives

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]  # JSON schemas of the arguments, by the tools' names

# Brackets, strings and commas of a call in Python's form, which an event loop reads at once. An escape takes less work.
MAX_PIECES = 6000
_ESCAPES_OF_PIECE = 16

_NAMES = {"true": "true", "false": "false", "none": "null", "null": "null"}
_MENDED_NAMES = {"True": "true", "False": "false", "None": "null"}
_KINDS = {"true": "boolean", "false": "boolean", "null": "null", "{": "object", "[": "array"}
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_KEY = re.compile(r"""[^\s=,()\[\]{}"'\\]+""")
_STRING = re.compile(r"""([rRuU]?)(?:"([^"\\]*+(?:\\.[^"\\]*+)*+)"|'([^'\\]*+(?:\\.[^'\\]*+)*+)')\s*+""", re.DOTALL)
_END = re.compile(rf"{_STRING.pattern}|[,()\[\]{{}}\"']", re.DOTALL)
_NUMBER = (
    r"0[xX][0-9a-fA-F_]++|0[oO][0-7_]++|0[bB][01_]++"
    r"|(?:[0-9][0-9_]*+(?:\.[0-9_]*+)?+|\.[0-9][0-9_]*+)(?:[eE][+-]?+[0-9_]++)?+"
)
_WORD = rf"(?:True|False|None|true|false|null|[+-]?+\s*+(?:{_NUMBER}))(?!\s*+[\w.+-])"
# What literals are made of. Other expressions never reach the parser of Python: they take more time and memory, and warn.
_PARTS = re.compile(rf"(?:[\s,:()\[\]{{}}]++|{_STRING.pattern}|{_WORD})*+", re.DOTALL)
_ESCAPE = re.compile(
    r"(?s)\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4})|(.))"
)
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": "", "/": "/"}
_ESCAPES |= {character: character for character in "\\'\""}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


class PythonValue(JsonValue):
    """Finder of the end of one Python literal, or of a call's arguments with their parentheses."""

    _PAIRS: Mapping[str, str] = _CLOSERS
    _QUOTES = "\"'"

    def _may_be_plain(self, character: str) -> bool:
        return True


class JsonSlips:
    """Corrector of models' slips in JSON that arrives in pieces.

    They are Python's names of values, a comma before a bracket's end, and line breaks and other control characters in texts.
    """

    def __init__(self) -> None:
        self._comma = self._word = ""
        self._is_string = self._is_escaped = False

    def mend(self, text: str) -> str:
        """Take the next piece; return what is known of the mended text."""
        out = list[str]()
        for character in text:
            if self._is_string:
                written = character if character >= " " else json.dumps(character)[1:-1]
                out.append(written[1:] if self._is_escaped and character < " " else written)
                self._is_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif self._word and character.isalnum():
                self._word += character
            elif self._comma and character.isspace():
                self._comma += character
            else:
                out.append(_MENDED_NAMES.get(self._word, self._word))
                out.append(self._comma[character in "}]" :])
                self._word = character if character in "TFN" else ""
                self._comma = character if character == "," else ""
                self._is_string = character == '"'
                out.append("" if self._word or self._comma else character)
        return "".join(out)

    def rest(self) -> str:
        """Return what was held back; the text has ended."""
        return self._word + self._comma


@dataclass(frozen=True)
class ValueType:
    """The values that a parameter may have, as its schema says.

    Attributes:
        kinds: types of JSON.
        is_any_text: any text may do.
        texts: texts that may do.
    """

    kinds: frozenset[str] = frozenset()
    is_any_text: bool = True
    texts: frozenset[str] = frozenset()

    @classmethod
    def of(cls, schema: object, whole: Mapping[str, Any]) -> ValueType:
        """Read a schema, which is a part of the whole one. References that lead nowhere, and the like, allow any text."""
        try:
            found = Alternatives(whole).of(schema)
        except ValueError:
            found = []
        texts = [one.texts for one in found]
        return cls(
            frozenset[str]().union(*(one.kinds or () for one in found)),
            any(some is None for some in texts),
            frozenset(text for some in texts for text in some or ()),
        )

    @property
    def may_be_text(self) -> bool:
        """Return whether a value may be text. If not, it is JSON."""
        return not self.kinds - {"string"} or self.is_any_text or bool(self.texts)

    def json(self, text: str) -> str:
        """Return a value as JSON. It is text unless its schema says otherwise."""
        if not self.kinds - {"string"}:
            return _dumped(text)
        if (self.is_any_text or text in self.texts) and not (text == "null" and "null" in self.kinds):
            return _dumped(text)
        return _long_json(text) or self._python(text) or _dumped(text)

    def cut_json(self, text: str) -> str:
        """Return the beginning of a value, whose end is missing, as unclosed JSON."""
        return _dumped(text)[:-1] if self.may_be_text else text

    def _python(self, text: str) -> str | None:
        """Return a value that is written as Python has it; None if it is none, or of another type."""
        name = _NAMES.get(text.strip().lower())
        found = name or python_json(text)
        return found if found and _KINDS.get(name or found[0], "") in self.kinds else None


class ArgumentTypes:
    """The types of tools' parameters, each read once."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self._found: dict[tuple[str, str], ValueType] = {}

    def of(self, tool: str, key: str) -> ValueType:
        """Return the type of a parameter; any text for one that has no schema."""
        whole = self.tools.get(tool, {})
        properties = whole.get("properties")
        if not isinstance(properties, Mapping) or key not in properties:
            return ValueType()
        if (tool, key) not in self._found:
            self._found[tool, key] = ValueType.of(properties[key], whole)
        return self._found[tool, key]


def _dumped(value: object) -> str:
    """Return JSON that can be encoded: half a surrogate pair stays an escape. Raises ValueError."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if _HALF_PAIR.search(text) else text


def is_python_key(key: str) -> bool:
    """Return whether `python_arguments` reads a name of a parameter. It may be none of Python's, such as user-id or from."""
    return bool(_KEY.fullmatch(key))


def python_arguments(text: str) -> str | None:
    """Return keyword arguments in parentheses as a JSON object; None if the text is no whole list of them."""
    values, rest = _keywords(text)
    return f"{{{', '.join(values)}}}" if rest == ")" else None


def cut_python_arguments(text: str) -> str:
    """Return the beginning of keyword arguments, whose end is missing, as unclosed JSON. The last one stays as it is."""
    values, rest = _keywords(text)
    key, equals, value = rest.partition("=")
    last = [f"{json.dumps(key)}: {value}" if equals else f'"{key}'] if key else []
    return f"{{{', '.join([*values, *last])}"


def python_json(text: str) -> str | None:
    """Return a literal of Python as JSON; None if the text is none, or a very long one.

    Names, numbers and strings may also be JSON's. Tuples and sets become lists.
    """
    return _python_json(text) if _PARTS.fullmatch(text) and _num_pieces(text) <= MAX_PIECES else None


def _python_json(text: str) -> str | None:
    try:
        match ast.parse(f"[{_STRING.sub(_plain_string, text)}, None]", mode="eval").body:
            case ast.List(elts=[value, _]):
                return _dumped(_value(value))
        return None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _num_pieces(text: str) -> int:
    """Return a number that bounds the brackets, values and commas of a literal, which consists of _PARTS."""
    rest, num_strings = _STRING.subn("", text)
    return num_strings + text.count("\\") // _ESCAPES_OF_PIECE + sum(map(rest.count, "([{,:"))


def _plain_string(found: re.Match[str]) -> str:
    """Write a string as Python reads it: models leave line breaks in strings, and write the escapes of JSON."""
    body = found[2] if found[2] is not None else found[3]
    return f"{(body if found[1] in ('r', 'R') else _ESCAPE.sub(_unescaped, body))!r} "


def _value(node: ast.expr | None) -> Any:
    """Return the value of a literal. Raises ValueError for what is none, and TypeError for a key that is no scalar."""
    match node:
        case ast.Constant(value=None | str() | int() | float() as value):
            return value
        case ast.Name(id="true" | "false" | "null" as name):
            return json.loads(name)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)):
            return -number if isinstance(sign, ast.USub) else number
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return list(map(_value, items))
        case ast.Dict(keys=keys, values=values):
            return dict(zip(map(_value, keys), map(_value, values), strict=True))
    raise ValueError("no literal")


def _keywords(text: str) -> tuple[list[str], str]:
    """Return the members of a JSON object that whole keyword arguments make, and the text after them."""
    values, at, num_left = dict[str, str](), 1, MAX_PIECES
    for end in _value_ends(text):
        key, equals, value = text[at:end].partition("=")
        if not equals or not is_python_key(key.strip()) or key.strip() in values or not _PARTS.fullmatch(value):
            break
        num_left -= _num_pieces(value) + 2
        written = (_python_json(value) if num_left >= 0 else None) or _long_json(value)
        if written is None:
            break
        values[key.strip()] = written
        at = end + (text[end] == ",")
    return [f"{_dumped(key)}: {value}" for key, value in values.items()], text[at:].strip()


def _value_ends(text: str) -> Iterator[int]:
    """Yield where the values of keyword arguments end: at commas, and at the end of their parentheses."""
    depth, num_values = 0, 0
    for found in _END.finditer(text):
        mark = found[0]
        if mark in ("'", '"'):
            return  # a string without an end, which would be sought again from each quote in it
        depth += (mark in _CLOSERS) - (mark in _CLOSERS.values())
        if (mark == "," and depth == 1) or (mark == ")" and depth == 0):
            num_values += 1
            if num_values > MAX_PIECES // 2:
                return
            yield found.start()


def _long_json(text: str) -> str | None:
    """Return a value of JSON, of any length; None if it is none."""
    try:
        return _dumped(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _unescaped(found: re.Match[str]) -> str:
    """Return the character of an escape of Python or JSON; an unknown escape stays as it is."""
    octal, *hexadecimal, other = found.groups()
    if other is not None:
        return _ESCAPES.get(other, found[0])
    return chr(int(octal, 8) if octal else int(next(filter(None, hexadecimal)), 16))
