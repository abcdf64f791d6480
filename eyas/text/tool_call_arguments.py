"""Reads the values of arguments that models do not write as JSON: text whose type is in a schema, and Python's literals."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from eyas.text.incremental_reader import JsonValue
from eyas.text.json_schema import Alternative, alternatives

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]  # JSON schemas of the arguments, by the tools' names

# Brackets, values and commas of a call in Python's form, which an event loop reads at once. An escape takes less work.
MAX_PIECES = 6000
_ESCAPES_OF_PIECE = 16

_NAMES = {"true": "true", "false": "false", "none": "null", "null": "null"}
_MENDED_NAMES = {"True": "true", "False": "false", "None": "null"}
_KINDS = {"true": "boolean", "false": "boolean", "null": "null", "{": "object", "[": "array"}
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_KEY = re.compile(r"""[^\s=,()\[\]{}"'\\]+""")
_STRING = re.compile(r"""(?s)([rRuU]?)(?:"([^"\\]*+(?:\\.[^"\\]*+)*+)"|'([^'\\]*+(?:\\.[^'\\]*+)*+)')\s*""")
_WORD = re.compile(r"[\w.+-]+")
_SPACE = re.compile(r"\s*")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", re.ASCII)
_ESCAPE = re.compile(
    r"(?s)\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4})|(.))"
)
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": "", "/": "/"}
_ESCAPES |= {character: character for character in "\\'\""}
_JSON = json.JSONDecoder()
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
        found = _alternatives(schema, whole)
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
        try:
            return _dumped(json.loads(text))
        except (ValueError, RecursionError):
            return self._python(text) or _dumped(text)

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


def _alternatives(schema: object, whole: Mapping[str, Any]) -> list[Alternative]:
    try:
        return alternatives(schema, whole)
    except ValueError:
        return []


def _dumped(value: object) -> str:
    """Return JSON that can be encoded: half a surrogate pair stays an escape. Raises ValueError."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if _HALF_PAIR.search(text) else text


def is_python_key(key: str) -> bool:
    """Return whether `python_arguments` reads a name of a parameter. It may be none of Python's, such as user-id or from."""
    return bool(_KEY.fullmatch(key))


def python_arguments(text: str) -> str | None:
    """Return keyword arguments in parentheses as a JSON object; None if the text is no whole list of them."""
    values, at = _keywords(text)
    return f"{{{', '.join(values)}}}" if text[at:] == ")" else None


def cut_python_arguments(text: str) -> str:
    """Return the beginning of keyword arguments, whose end is missing, as unclosed JSON. The last one stays as it is."""
    values, at = _keywords(text)
    key, equals, value = text[at:].strip().partition("=")
    last = [f"{json.dumps(key)}: {value}" if equals else f'"{key}'] if key else []
    return f"{{{', '.join([*values, *last])}"


def python_json(text: str) -> str | None:
    """Return a literal of Python as JSON, whatever its depth; None if the text is none, or a very long one.

    Names, numbers and strings may also be JSON's. Tuples and sets become lists.
    """
    try:
        value, at = _literal(text, _skip_space(text, 0), _Work())
    except ValueError:
        return None
    return value if at == len(text) else None


def _keywords(text: str) -> tuple[list[str], int]:
    """Return the members of a JSON object that whole keyword arguments make, and where the first other character is."""
    values, at, work = dict[str, str](), 1, _Work()
    while len(values) < MAX_PIECES // 2:
        start = at = _skip_space(text, at)
        key = _KEY.match(text, at)
        equals = _skip_space(text, key.end()) if key else at
        if key is None or key[0] in values or text[equals : equals + 1] != "=":
            break
        try:
            value, at = _value(text, _skip_space(text, equals + 1), work)
        except ValueError:
            return _members(values), start
        if text[at : at + 1] not in (",", ")"):
            return _members(values), start
        values[key[0]] = value
        if text[at] == ")":
            break
        at += 1
    return _members(values), at


def _members(values: Mapping[str, str]) -> list[str]:
    return [f"{_dumped(key)}: {value}" for key, value in values.items()]


def _value(text: str, at: int, work: _Work) -> tuple[str, int]:
    """Return a value as `_literal` does, also a very long one of JSON. Raises ValueError.

    JSON comes last, since its errors count the lines before them: for each argument, their time would be quadratic.
    """
    try:
        return _literal(text, at, work)
    except ValueError:
        try:
            value, end = _JSON.raw_decode(text, at)
            return _dumped(value), _skip_space(text, end)
        except RecursionError as error:
            raise ValueError("too many brackets") from error


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at) if text[at : at + 1].isspace() else None
    return found.end() if found else at


@dataclass
class _Work:
    """The work that may still be spent on values in Python's form."""

    num_pieces: int = MAX_PIECES

    def spend(self, num_pieces: int) -> None:
        """Raise ValueError if less is left."""
        self.num_pieces -= num_pieces
        if self.num_pieces < 0:
            raise ValueError("too many brackets, values and commas")


@dataclass
class _Bracket:
    """An open bracket of a literal.

    Attributes:
        begin: of its JSON.
        item: of its last item's.
        is_dict: None until it shows.
    """

    mark: str
    begin: int
    item: int
    is_dict: bool | None
    has_value: bool = False
    has_comma: bool = False


def _literal(text: str, at: int, work: _Work) -> tuple[str, int]:
    """Return the literal that begins at a place as JSON, and where the text after it and white space begins.

    Raises ValueError.
    """
    out, open_ = list[str](), list[_Bracket]()
    while True:
        work.spend(2)  # with the comma, the colon or the end that follows
        mark = text[at : at + 1]
        if mark in _CLOSERS and mark:
            out.append(mark)
            open_.append(_Bracket(mark, len(out) - 1, len(out), None if mark == "{" else False))
            at = _skip_space(text, at + 1)
            if text[at : at + 1] != _CLOSERS[mark]:
                continue
        elif not (open_ and mark == _CLOSERS[open_[-1].mark] and open_[-1].has_comma and len(out) == open_[-1].item):
            value, at = _scalar(text, at, work)
            out.append(value)
        is_ended, at = _end_values(text, at, out, open_)
        if is_ended:
            return "".join(out), at


def _end_values(text: str, at: int, out: list[str], open_: list[_Bracket]) -> tuple[bool, int]:
    """Read what follows a value: the ends of brackets, then a comma or a colon; return whether all brackets are closed."""
    while open_:
        inner, mark = open_[-1], text[at : at + 1]
        at = _skip_space(text, at + 1)
        is_empty = len(out) == inner.item
        if mark == _CLOSERS[inner.mark] and not (inner.is_dict and not inner.has_value and not is_empty):
            _close(open_.pop(), out, is_empty)
            continue
        if mark == ":" and inner.mark == "{" and not inner.has_value and inner.is_dict is not False:
            if len(out) != inner.item + 1:
                raise ValueError("a key is no text")
            out[-1] = out[-1] if out[-1][0] == '"' else f'"{out[-1]}"'
            out.append(": ")
            inner.is_dict, inner.has_value = True, True
        elif mark == "," and not is_empty and (inner.has_value or not inner.is_dict):
            inner.is_dict, inner.has_value, inner.has_comma = bool(inner.is_dict), False, True
            out.append(", ")
            inner.item = len(out)
        else:
            raise ValueError("no end of a value")
        return False, at
    return True, at


def _close(inner: _Bracket, out: list[str], is_empty: bool) -> None:
    """Write the end of a bracket. Parentheses around one value without a comma are none of a tuple."""
    if is_empty and inner.has_comma:
        out.pop()
    if inner.mark == "(" and not inner.has_comma and not is_empty:
        out[inner.begin] = ""
        return
    is_object = inner.mark == "{" and (inner.is_dict or is_empty)
    out[inner.begin] = "{" if is_object else "["
    out.append("}" if is_object else "]")


def _scalar(text: str, at: int, work: _Work) -> tuple[str, int]:
    """Return a name, a number, or strings in a row as JSON, and where the text after it begins. Raises ValueError."""
    strings, first = list[str](), at
    while found := _STRING.match(text, at):
        body = found[2] if found[2] is not None else found[3]
        work.spend(bool(strings) + body.count("\\") // _ESCAPES_OF_PIECE)
        strings.append(body if found[1] in ("r", "R") else _ESCAPE.sub(_unescaped, body))
        at = found.end()
    if at > first:
        return _dumped("".join(strings)), at
    word = _WORD.match(text, at)
    if word is None:
        raise ValueError("no literal")
    name = _NAMES.get(word[0].lower()) if word[0] in _PYTHON_OR_JSON else None
    return name or _number(word[0]), _skip_space(text, word.end())


_PYTHON_OR_JSON = {"True", "False", "None", "true", "false", "null"}


def _number(word: str) -> str:
    if not any(character.isdecimal() for character in word[:2]):
        raise ValueError(f"{word[:80]!r} is no number")
    if _JSON_NUMBER.fullmatch(word) and (word.lstrip("-").isdecimal() or math.isfinite(float(word))):
        return word
    return json.dumps(float(word), allow_nan=False) if "." in word else str(int(word, 0))


def _unescaped(found: re.Match[str]) -> str:
    """Return the character of an escape of Python or JSON; an unknown escape stays as it is."""
    octal, *hexadecimal, other = found.groups()
    if other is not None:
        return _ESCAPES.get(other, found[0])
    return chr(int(octal, 8) if octal else int(next(filter(None, hexadecimal)), 16))
