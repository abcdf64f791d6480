"""Translates xgrammar's structural tags, which vLLM and SGLang take too, to Lark's syntax, which is llguidance's.

A structural tag describes text whose parts may follow a schema, such as calls of tools between words. Source of the format:
xgrammar's documentation, "Structural Tag".
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from eyas.errors import InvalidRequest, first_line
from eyas.text.json_schema import MAX_WRITTEN, Alternative, Alternatives, Definitions, properties_of
from eyas.text.schema_keywords import known_schema

# Fields of each format besides `type`: required ones, and those that may be left out.
_FIELDS: Mapping[str, tuple[set[str], set[str]]] = {
    "const_string": ({"value"}, set()),
    "json_schema": ({"json_schema"}, {"style"}),
    "any_text": (set(), {"excludes"}),
    "regex": ({"pattern"}, {"excludes"}),
    "grammar": ({"grammar"}, set()),
    "token": ({"token"}, set()),
    "sequence": ({"elements"}, set()),
    "or": ({"elements"}, set()),
    "optional": ({"content"}, set()),
    "plus": ({"content"}, set()),
    "star": ({"content"}, set()),
    "repeat": ({"content", "min", "max"}, set()),
    "tag": ({"begin", "content", "end"}, set()),
    "triggered_tags": ({"triggers", "tags"}, {"at_least_one", "stop_after_first", "excludes"}),
    "tags_with_separator": ({"tags", "separator"}, {"at_least_one", "stop_after_first"}),
}


@dataclass(frozen=True)
class _TagStyle:
    """A style of a json_schema whose properties are text between tags.

    stops: what ends a value for its reader, so no text may hold it.
    """

    before_key: str
    behind_key: str
    behind_value: str
    stops: tuple[str, ...]


_TAG_STYLES = {
    "qwen_xml": _TagStyle("<parameter=", ">\n", "\n</parameter>\n", ("</parameter>", "<parameter=", "</function>")),
    "glm_xml": _TagStyle("<arg_key>", "</arg_key><arg_value>", "</arg_value>", ("</arg_value>",)),
    "glm45_xml": _TagStyle("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", ("</arg_value>",)),
}
_REPEATS = {"optional": "?", "plus": "+", "star": "*"}
_NOT_OF_TEXTS = ("not", "if", "$dynamicRef", "$recursiveRef")
_TEXT = r"/(.|\n)*/"
# An escape of GBNF, with the hexadecimal digits of those that name a character by its number.
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def json_options(whitespace_pattern: str) -> dict[str, Any]:
    """Return what llguidance is to know of JSON's whitespace. whitespace_pattern: empty for none."""
    if not whitespace_pattern:
        return {"whitespace_flexible": False, "whitespace_pattern": None}
    return {"whitespace_flexible": True, "whitespace_pattern": whitespace_pattern.replace(r"\s", r"[ \t\n\r]")}


def structural_tag_to_lark(text: str, whitespace_pattern: str, token_id: Callable[[str], int | None]) -> str:
    """Return the grammar of a structural tag. token_id: finds a special token of the model by its text.

    Raises InvalidRequest for a format that is unknown or malformed.
    """
    tag = json.loads(text)
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag" or not isinstance(tag.get("format"), dict):
        raise _invalid('it must be an object of the form {"type": "structural_tag", "format": {...}}')
    writer = _LarkWriter(whitespace_pattern, token_id)
    start = writer.expression(tag["format"])
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules])


def grammar_to_lark(text: str) -> str:
    """Return a grammar in llama.cpp's syntax (GBNF) or Lark's, in Lark's. Raises InvalidRequest."""
    from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

    try:
        return any_to_lark(text if is_lark_syntax(text) else _GBNF_ESCAPE.sub(_unescaped, text))
    except Exception as error:  # a parser of its own, with errors of its own; RecursionError too
        raise InvalidRequest(f"grammar cannot be read: {first_line(str(error))}", "structured_outputs") from error


def _unescaped(found: re.Match[str]) -> str:
    """Return a character of GBNF in a form that Lark reads: \\x41 and not \\u0041, and itself from U+0100 on."""
    if not (digits := found[1] or found[2]):
        return found[0]
    number = int(digits, 16)
    if 0xD800 <= number <= 0xDFFF or number > sys.maxunicode:
        raise ValueError(f"{found[0]} names no character")
    return chr(number) if number > 0xFF else f"\\x{number:02x}"


class _LarkWriter:
    """Writer of rules; `expression` returns what stands for a format in another rule."""

    def __init__(self, whitespace_pattern: str, token_id: Callable[[str], int | None]) -> None:
        self.rules: list[str] = []
        self._whitespace_pattern = whitespace_pattern
        self._token_id = token_id
        self._definitions = Definitions()
        self._num_texts = 0  # that enums allow, between tags

    def expression(self, format_: Any) -> str:
        kind = self._checked(format_)
        match kind:
            case "const_string":
                return _literal(format_["value"])
            case "json_schema":
                return self._json(format_)
            case "any_text" | "regex":
                body = _TEXT if kind == "any_text" else _pattern(_regex(format_["pattern"]))
                return self._rule(self._text_without(body, format_.get("excludes", [])))
            case "grammar":
                return self._rule(f"%lark {{\n{grammar_to_lark(_string(format_['grammar'], 'grammar'))}\n}}")
            case "token":
                return self._token(format_["token"])
            case "sequence":
                return self._sequence(_list(format_["elements"], "elements"))
            case "or":
                return self._or(_list(format_["elements"], "elements"))
            case "optional" | "plus" | "star":
                return f"({self.expression(format_['content'])}){_REPEATS[kind]}"
            case "repeat":
                return self._repeat(format_)
            case "tag":
                return self._tag(format_)
            case "triggered_tags":
                return self._triggered(format_)
            case _:
                return self._separated(format_)

    def _checked(self, format_: Any) -> str:
        """Return the type of a format whose fields are known. Raises InvalidRequest."""
        kind = format_.get("type") if isinstance(format_, dict) else None
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise _invalid(f"a format is {_short(format_)}; its type must be one of {', '.join(_FIELDS)}")
        required, optional = _FIELDS[kind]
        given = format_.keys() - {"type"}
        if missing := required - given:
            raise _invalid(f"a format of the type {kind!r} has no {sorted(missing)[0]}")
        if unknown := given - required - optional:
            raise _invalid(f"{_short(sorted(unknown)[0])} of a format of the type {kind!r} is not supported; leave it out")
        return kind

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _text_without(self, body: str, excludes: Any) -> str:
        """Return `body` without any of the texts `excludes` in it."""
        return self._limited(body, self._other_than(excludes))

    def _other_than(self, excludes: Any) -> str:
        """Return the terminal of texts that hold one of `excludes`; empty if there are none."""
        if not excludes:
            return ""
        banned = "|".join(re.escape(_string(one, "excludes")) for one in _list(excludes, "excludes"))
        return self._terminal(_pattern(rf"(.|\n)*({banned})(.|\n)*"))

    def _limited(self, body: str, banned: str) -> str:
        """Return `body` where it is not of the terminal `banned`."""
        return self._terminal(f"({body}) & ~{banned}") if banned else body

    def _terminal(self, body: str) -> str:
        """Return a terminal. Only terminals, whose names are upper-case, can be intersected; one is an item of the parser
        whatever its size.
        """
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _json(self, format_: Mapping[str, Any]) -> str:
        schema = format_["json_schema"]
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if not isinstance(schema, dict):
            raise _invalid("json_schema must be an object")
        try:
            schema = known_schema(schema)
        except ValueError as error:
            raise _invalid(f"a json_schema {error}") from None
        style = format_.get("style", "json")
        if isinstance(style, str) and style in _TAG_STYLES:
            return self._xml(schema, _TAG_STYLES[style])
        if style != "json":
            raise _invalid(f"style {_short(style)} of a json_schema is not supported; use json, {', '.join(_TAG_STYLES)}")
        schema = {**schema, "x-guidance": json_options(self._whitespace_pattern)}
        return self._rule(f"%json {json.dumps(schema)}")

    def _xml(self, schema: Mapping[str, Any], style: _TagStyle) -> str:
        """Return the properties in the schema's order, each between tags."""
        try:
            properties, required = properties_of(schema)
        except ValueError as error:
            raise _invalid(f"a json_schema in a style of tags {error}") from None
        parts, found = [], Alternatives(schema)
        for key, own in properties.items():
            if key != key.strip() or style.behind_key.strip() in key:
                raise _invalid(f"the name {key[:80]!r} of a property cannot be written between tags; rename it")
            try:
                value = self._xml_value(own, schema, found.of(own), style)
            except ValueError as error:
                raise _invalid(f"property {key[:80]!r} of a json_schema {error}") from None
            part = f"{_literal(style.before_key + key + style.behind_key)} {value}"
            parts.append(part if key in required else f"({part})?")
        return self._rule(" ".join(parts) or '""')

    def _xml_value(self, schema: Any, whole: Mapping[str, Any], found: Sequence[Alternative], style: _TagStyle) -> str:
        """Return a value and its end: text as it is where the schema allows text, else JSON.

        Where any text may do, a value is read as text, so that JSON has no place beside it but for null.
        Raises ValueError for what cannot be written so.
        """
        end = _literal(style.behind_value)
        if not found or all(one.values is not None and not one.values for one in found):
            raise ValueError("allows no value; mend its schema")
        texts = [one for one in found if one.texts != []]
        self._num_texts += sum(len(one.texts or ()) for one in texts)
        if self._num_texts > MAX_WRITTEN:
            raise ValueError("refers to large enums too often; simplify it")
        if not texts:
            return f"{self._json({'json_schema': self._definitions.standalone(schema, whole)})} {end}"
        bodies = [_text_pattern(one) for one in texts]
        rests = [(one, sorted((one.kinds or frozenset()) - {"string"})) for one in found]
        others = [{"allOf": [*one.parts, {"type": kinds}]} for one, kinds in rests if kinds]
        if any(one.texts is None for one in texts):
            bodies += ['"null"'] if any("null" in kinds for _, kinds in rests) else []
            others = []
        stop = _pattern(rf"(.|\n)*({'|'.join(map(re.escape, style.stops))})(.|\n)*")
        name = self._terminal(f"(({' | '.join(f'({body})' for body in bodies)}) & ~{stop}) {end}")
        if not others:
            return name
        key = "oneOf" if any(one.is_exclusive for one in found) else "anyOf"
        return f"({name} | {self._json({'json_schema': self._definitions.standalone({key: others}, whole)})} {end})"

    def _or(self, elements: Sequence[Any]) -> str:
        parts = list(map(self.expression, elements))
        if not all(self._checked(element) == "const_string" for element in elements):
            return f"({' | '.join(parts)})"
        return self._terminal(" | ".join(parts))

    def _token(self, token: Any) -> str:
        number = token if isinstance(token, int) else self._token_id(_string(token, "token"))
        if number is None or isinstance(token, bool):
            raise _invalid(f"token {_short(token)} is not in the model's vocabulary")
        return f"<[{number}]>"

    def _edge(self, edge: Any) -> str:
        """Return a begin, an end, or one of several ends."""
        if isinstance(edge, dict):
            return self.expression(edge)
        if isinstance(edge, list):
            return f"({' | '.join(_literal(one) for one in _list(edge, 'end'))})"
        return _literal(edge)

    def _repeat(self, format_: Mapping[str, Any]) -> str:
        least, most = format_["min"], format_["max"]
        if not (isinstance(least, int) and isinstance(most, int) and least >= 0 and (most == -1 or least <= most)):
            raise _invalid(f"a repeat has min {_short(least)} and max {_short(most)}; give 0 <= min <= max, or max -1")
        return f"({self.expression(format_['content'])}){{{least},{'' if most < 0 else most}}}"

    def _sequence(self, elements: Sequence[Any]) -> str:
        parts, index = [], 0
        while index < len(elements):
            following = elements[index + 1] if index + 1 < len(elements) else None
            if following is not None and self._checked(elements[index]) == "any_text":
                if self._checked(following) != "const_string":
                    raise _invalid("an any_text in the middle of a sequence must be followed by a const_string")
                parts.append(self._text_until(elements[index], _literal(following["value"])))
                index += 2
            else:
                parts.append(self.expression(elements[index]))
                index += 1
        return f"({' '.join(parts)})"

    def _text_until(self, text: Mapping[str, Any], end: str) -> str:
        """Free text up to the first `end`, that one included."""
        return self._rule(self._text_without(f"{_TEXT} {end}", text.get("excludes", [])), "[lazy]")

    def _tag(self, tag: Mapping[str, Any]) -> str:
        return f"{self._edge(tag['begin'])} {self._after_begin(tag)}"

    def _after_begin(self, tag: Mapping[str, Any]) -> str:
        """Return the content and the end of a tag."""
        if self._checked(tag["content"]) == "any_text" and not isinstance(tag["end"], dict):
            if not _ends(tag["end"]):
                return self.expression(tag["content"])
            return self._text_until(tag["content"], self._edge(tag["end"]))
        return f"{self.expression(tag['content'])} {self._edge(tag['end'])}"

    def _triggered(self, format_: Mapping[str, Any]) -> str:
        triggers = {_string(one, "trigger") for one in _list(format_["triggers"], "triggers")}
        lengths, banned = sorted(set(map(len, triggers))), self._other_than(format_.get("excludes", []))
        untils, firsts, alternatives = dict[str, str](), [], []
        for tag in _list(format_["tags"], "tags"):
            if self._checked(tag) != "tag":
                raise _invalid("tags must hold formats of the type 'tag'")
            begin = _string(tag["begin"], "begin")
            found = [begin[:length] for length in lengths if length <= len(begin) and begin[:length] in triggers]
            if len(found) != 1:
                raise _invalid(f"{len(found)} triggers begin the tag {begin[:80]!r}; exactly one must")
            if found[0] not in untils:
                untils[found[0]] = self._rule(self._limited(f"{_TEXT} {_literal(found[0])}", banned), "[lazy]")
            rest = self._rule(self._after_begin(tag))  # written once: nested tags would double with every level
            firsts.append(f"{_literal(begin)} {rest}")
            alternatives.append(f"{untils[found[0]]} {_literal(begin[len(found[0]) :])} {rest}")
        triggered = self._rule(" | ".join(alternatives))
        tail = self._rule(self._limited(_TEXT, banned))
        if format_.get("at_least_one", False):
            first = f"({' | '.join(firsts)})"
            return first if format_.get("stop_after_first", False) else f"{first} {triggered}* {tail}"
        return f"({triggered} | {tail})" if format_.get("stop_after_first", False) else f"{triggered}* {tail}"

    def _separated(self, format_: Mapping[str, Any]) -> str:
        tag = self._rule(" | ".join(map(self.expression, _list(format_["tags"], "tags"))))
        separator = _literal(_string(format_["separator"], "separator"))
        several = tag if format_.get("stop_after_first", False) else f"{tag} ({separator} {tag})*"
        return several if format_.get("at_least_one", False) else f"({several})?"


def _invalid(reason: str) -> InvalidRequest:
    return InvalidRequest(f"structural_tag: {reason}", "structured_outputs")


def _short(value: Any) -> str:
    """Return what an error quotes of a value."""
    return repr(value[:80] if isinstance(value, str) else value)[:80]


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _invalid(f"{name} is {_short(value)}; it must be text")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _invalid(f"{name} must be a list that is not empty")
    return value


def _ends(end: Any) -> bool:
    """Return whether the ends of a tag have any text."""
    return all(end) if isinstance(end, list) else bool(end)


def _literal(value: Any) -> str:
    return json.dumps(_string(value, "a text"))


def _text_pattern(one: Alternative) -> str:
    """Return what a text must match, as a terminal of Lark. Raises ValueError."""
    limits = [" | ".join(map(_literal, one.texts))] if one.texts else []
    for part in one.parts:
        if key := next((key for key in _NOT_OF_TEXTS if key in part), None):
            raise ValueError(f"has {key}, which is not supported for text between tags; leave it out")
        least, most = _length(part, "minLength"), _length(part, "maxLength")
        if (least, most) != (None, None):
            limits.append(_pattern(rf"(.|\n){{{least or 0},{'' if most is None else most}}}"))
        if "pattern" in part:
            limits.append(" | ".join(map(_pattern, _searched(_regex(part["pattern"])))))
    return " & ".join(f"({limit})" for limit in limits or [_TEXT])


def _length(schema: Mapping[str, Any], key: str) -> int | None:
    value = schema.get(key)
    if value is not None and not (isinstance(value, int | float) and not isinstance(value, bool) and value >= 0):
        raise ValueError(f"has {key} {_short(value)}; it must be a number that is not negative")
    return None if value is None else int(value)


# A pattern's escapes, classes, groups and alternatives; all else alone. What may go on to the end is possessive, and a class
# without an end takes the rest, so that nothing is read twice.
_PATTERN_TOKEN = re.compile(r"(?s)\\.|\[\^?\]?(?:\\.|\[:\^?[a-z]{1,9}:\]|[^\]\\])*+(?:\]|\Z)|\(\?(?:P?<\w{1,99}>|:)|.")


def _searched(pattern: str) -> list[str]:
    """Return patterns of the whole text for one of JSON schema, which may match anywhere in it. Raises ValueError."""
    tokens = _PATTERN_TOKEN.findall(pattern)
    closers, bars = _groups(tokens)
    found, free = list[str](), r"(.|\n)*"
    todo = [(-1, len(tokens), False, False)]  # groups: their ends, and whether they stand at those of the text in any case
    while todo:
        opener, closer, is_begin, is_end = todo.pop()
        for before, end in pairwise([opener, *bars[opener], closer]):
            start, begins, ends = before + 1, is_begin, is_end
            while start < end and tokens[start] == "^":
                start, begins = start + 1, True
            while start < end and tokens[end - 1] == "$":
                end, ends = end - 1, True
            if closers.get(start) == end - 1 and tokens[start + 1] != "?":
                todo.append((start, end - 1, begins, ends))
            else:
                found.append(f"{'' if begins else free}({''.join(tokens[start:end])}){'' if ends else free}")
    return found


def _groups(tokens: Sequence[str]) -> tuple[dict[int, int], dict[int, list[int]]]:
    """Return the place of the end of each group, and those of the bars between its alternatives; -1 is the whole pattern.

    Raises ValueError for a group without an end, and an end without a group.
    """
    closers, bars, open_ = dict[int, int](), {-1: list[int]()}, [-1]
    for place, token in enumerate(tokens):
        if token[0] == "(":
            open_.append(place)
            bars[place] = []
        elif token == "|":
            bars[open_[-1]].append(place)
        elif token == ")":
            if len(open_) == 1:
                raise ValueError("has a pattern with a ) that closes no group")
            closers[open_.pop()] = place
    if len(open_) > 1:
        raise ValueError("has a pattern with a ( that is not closed")
    return closers, bars


def _regex(value: Any) -> str:
    pattern = _string(value, "pattern")
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise _invalid(f"the pattern {pattern[:80]!r} ends with a single backslash")
    return pattern


def _pattern(pattern: str) -> str:
    """Return a regular expression as Lark writes it."""
    tokens = re.findall(r"(?s)\\.|.", pattern)
    return "/" + ("".join(r"\/" if token == "/" else token for token in tokens) or "(?:)") + "/"
