"""Translates xgrammar's structural tags, which vLLM and SGLang take too, to Lark's syntax, which is llguidance's.

A structural tag describes text whose parts may follow a schema, such as calls of tools between words. Source of the format:
xgrammar's documentation, "Structural Tag".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eyas.argument_values import value_kinds
from eyas.errors import InvalidRequest

# Fields of each format besides `type`: required ones, and those that may be left out.
_FIELDS: Mapping[str, tuple[set[str], set[str]]] = {
    "const_string": ({"value"}, set()),
    "json_schema": ({"json_schema"}, {"style"}),
    "any_text": (set(), {"excludes"}),
    "regex": ({"pattern"}, set()),
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
# Styles of a json_schema whose properties are text between tags: what stands before a key, behind it, and behind its value.
_XML_STYLES = {
    "qwen_xml": ("<parameter=", ">\n", "\n</parameter>\n"),
    "glm_xml": ("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
    "glm45_xml": ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
}
_REPEATS = {"optional": "?", "plus": "+", "star": "*"}
_COMBINED = ("anyOf", "oneOf", "allOf", "not", "if", "patternProperties")
_TEXT = r"/(.|\n)*/"


def structural_tag_to_lark(text: str, any_whitespace: bool, token_id: Callable[[str], int | None]) -> str:
    """The grammar of a structural tag. token_id: finds a special token of the model by its text.

    Raises InvalidRequest for a format that is unknown or malformed.
    """
    tag = json.loads(text)
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag" or not isinstance(tag.get("format"), dict):
        raise _invalid('it must be an object of the form {"type": "structural_tag", "format": {...}}')
    writer = _LarkWriter(any_whitespace, token_id)
    start = writer.expression(tag["format"])
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules])


class _LarkWriter:
    """Writes rules; `expression` returns what stands for a format in another rule."""

    def __init__(self, any_whitespace: bool, token_id: Callable[[str], int | None]) -> None:
        self.rules: list[str] = []
        self._any_whitespace = any_whitespace
        self._token_id = token_id

    def expression(self, format_: Any) -> str:
        kind = self._checked(format_)
        match kind:
            case "const_string":
                return _literal(format_["value"])
            case "json_schema":
                return self._json(format_)
            case "any_text":
                return self._rule(self._text_without(_TEXT, format_.get("excludes", [])))
            case "regex":
                return self._rule(_pattern(_string(format_["pattern"], "pattern")))
            case "token":
                return self._token(format_["token"])
            case "sequence":
                return self._sequence(_list(format_["elements"], "elements"))
            case "or":
                return f"({' | '.join(map(self.expression, _list(format_['elements'], 'elements')))})"
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
        """The type of a format whose fields are known. Raises InvalidRequest."""
        kind = format_.get("type") if isinstance(format_, dict) else None
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise _invalid(f"a format is {str(format_)[:80]}; its type must be one of {', '.join(_FIELDS)}")
        required, optional = _FIELDS[kind]
        given = format_.keys() - {"type"}
        if missing := required - given:
            raise _invalid(f"a format of the type {kind!r} has no {sorted(missing)[0]}")
        if unknown := given - required - optional:
            raise _invalid(f"{sorted(unknown)[0]!r} of a format of the type {kind!r} is not supported; leave it out")
        return kind

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _text_without(self, body: str, excludes: Any) -> str:
        """`body` without any of the texts `excludes` in it."""
        if not excludes:
            return body
        banned = "|".join(re.escape(_string(one, "excludes")) for one in _list(excludes, "excludes"))
        name = f"T{len(self.rules)}"  # only terminals, whose names are upper-case, can be intersected
        self.rules.append(f"{name}: ({body}) & ~" + _pattern(rf"(.|\n)*({banned})(.|\n)*"))
        return name

    def _json(self, format_: Mapping[str, Any]) -> str:
        schema = format_["json_schema"]
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if not isinstance(schema, dict):
            raise _invalid("json_schema must be an object")
        style = format_.get("style", "json")
        if style in _XML_STYLES:
            return self._xml(schema, _XML_STYLES[style])
        if style != "json":
            raise _invalid(f"style {style!r} of a json_schema is not supported; use json, {', '.join(_XML_STYLES)}")
        if not self._any_whitespace:
            schema = {**schema, "x-guidance": {"whitespace_flexible": False}}
        return self._rule(f"%json {json.dumps(schema)}")

    def _xml(self, schema: Mapping[str, Any], tags: tuple[str, str, str]) -> str:
        """Properties in the schema's order, each between tags."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if combined := next((key for key in _COMBINED if key in schema), None):
            raise _invalid(f"{combined} of a whole json_schema is not supported in a style of tags; use properties")
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise _invalid("properties of a json_schema must be an object, and required a list")
        parts = []
        for key, own in properties.items():
            part = f"{_literal(tags[0] + key + tags[1])} {self._xml_value(own, schema, tags[2])}"
            parts.append(part if key in required else f"({part})?")
        return self._rule(" ".join(parts) or '""')

    def _xml_value(self, schema: Any, whole: Mapping[str, Any], end: str) -> str:
        """A value and its end: text as it is where the schema allows text, else JSON."""
        schema = schema if isinstance(schema, dict) else {}
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
            return f"({' | '.join(_literal(text + end) for text in texts)})"
        kinds = value_kinds(schema, whole)
        if kinds and "string" not in kinds:
            shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
            return f"{self._json({'json_schema': {**schema, **shared}})} {_literal(end)}"
        least, most, pattern = (schema.get(key) for key in ("minLength", "maxLength", "pattern"))
        limits = (
            [_pattern(rf"(.|\n){{{least or 0},{'' if most is None else most}}}")] if (least, most) != (None, None) else []
        )
        limits += [_pattern(_searched(_string(pattern, "pattern")))] if pattern is not None else []
        if not limits or kinds != {"string"}:
            return self._text_until({}, _literal(end))
        name = f"T{len(self.rules)}"
        tag = _pattern(rf"(.|\n)*{re.escape(end.strip())}(.|\n)*")
        self.rules.append(f"{name}: ({' & '.join(limits)} & ~{tag}) {_literal(end)}")
        return name

    def _token(self, token: Any) -> str:
        number = token if isinstance(token, int) else self._token_id(_string(token, "token"))
        if number is None or isinstance(token, bool):
            raise _invalid(f"token {token!r} is not in the model's vocabulary")
        return f"<[{number}]>"

    def _edge(self, edge: Any) -> str:
        """A begin, an end, or one of several ends."""
        if isinstance(edge, dict):
            return self.expression(edge)
        if isinstance(edge, list):
            return f"({' | '.join(_literal(one) for one in _list(edge, 'end'))})"
        return _literal(edge)

    def _repeat(self, format_: Mapping[str, Any]) -> str:
        least, most = format_["min"], format_["max"]
        if not (isinstance(least, int) and isinstance(most, int) and least >= 0 and (most == -1 or least <= most)):
            raise _invalid(f"a repeat has min {least!r} and max {most!r}; give 0 <= min <= max, or max -1")
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
        """The content and the end of a tag."""
        if self._checked(tag["content"]) == "any_text" and not isinstance(tag["end"], dict):
            if not _ends(tag["end"]):
                return self.expression(tag["content"])
            return self._text_until(tag["content"], self._edge(tag["end"]))
        return f"{self.expression(tag['content'])} {self._edge(tag['end'])}"

    def _triggered(self, format_: Mapping[str, Any]) -> str:
        triggers, excludes = _list(format_["triggers"], "triggers"), format_.get("excludes", [])
        firsts, alternatives = [], []
        for tag in _list(format_["tags"], "tags"):
            if self._checked(tag) != "tag":
                raise _invalid("tags must hold formats of the type 'tag'")
            begin = _string(tag["begin"], "begin")
            found = [one for one in triggers if _string(one, "trigger") and begin.startswith(one)]
            if len(found) != 1:
                raise _invalid(f"{len(found)} triggers begin the tag {begin[:80]!r}; exactly one must")
            until = self._rule(self._text_without(f"{_TEXT} {_literal(found[0])}", excludes), "[lazy]")
            rest = self._rule(self._after_begin(tag))  # written once: nested tags would double with every level
            firsts.append(f"{_literal(begin)} {rest}")
            alternatives.append(f"{until} {_literal(begin[len(found[0]) :])} {rest}")
        triggered = self._rule(" | ".join(alternatives))
        tail = self._rule(self._text_without(_TEXT, excludes))
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


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _invalid(f"{name} is {value!r}; it must be text")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _invalid(f"{name} must be a list that is not empty")
    return value


def _ends(end: Any) -> bool:
    """Whether the ends of a tag have any text."""
    return all(end) if isinstance(end, list) else bool(end)


def _literal(value: Any) -> str:
    return json.dumps(_string(value, "a text"))


def _searched(pattern: str) -> str:
    """A pattern of JSON schema, which may match anywhere, as one of the whole text."""
    if "|" in pattern:
        return rf"(.|\n)*({pattern})(.|\n)*"
    begin, end = ("" if pattern.startswith("^") else r"(.|\n)*"), ("" if pattern.endswith("$") else r"(.|\n)*")
    return f"{begin}({pattern.removeprefix('^').removesuffix('$')}){end}"


def _pattern(pattern: str) -> str:
    """A regular expression as Lark writes it."""
    return "/" + re.sub(r"(?<!\\)/", r"\\/", pattern) + "/"
