"""Writes ordinary JSON schemas in the keywords that llguidance knows, as it refuses all others that limit values.

What only describes values is left out. What limits them is said in other words, at most more narrowly. Source of the
keywords: JSON Schema, draft 2020-12.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from eyas.text.json_schema import MAX_WRITTEN, resolve

# Formats that llguidance enforces. All others are notes, as JSON Schema has it.
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
_DIALECTS = {f"https://json-schema.org/draft/{draft}/schema" for draft in ("2019-09", "2020-12")}
_DIALECTS |= {f"http://json-schema.org/draft-0{draft}/schema" for draft in (4, 6, 7)}
# What limits values, holds schemas or names them. All else is a note; llguidance minds notes where references form a circle.
_KEYWORDS = {
    "$schema", "$id", "id", "$anchor", "$ref", "$defs", "definitions", "$dynamicRef", "$recursiveRef", "x-guidance",
    "type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependencies", "dependentSchemas",
    "format", "pattern", "minLength", "maxLength",
    "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "prefixItems", "items", "additionalItems", "unevaluatedItems", "minItems", "maxItems",
    "contains", "minContains", "maxContains",
    "properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames", "required",
    "dependentRequired", "minProperties", "maxProperties",
}  # fmt: skip
_VALUES = {"const", "enum"}  # hold values, not schemas
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # hold schemas by names
_NOTES = {"title", "description", "default", "examples", "deprecated", "$comment", "type"}  # of names, which are texts
_APPLICATORS = {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "patternProperties", "$dynamicRef"}
# Bounds that are brought to what llguidance can say: more than 10**18 from zero is not written.
_LEAST, _MOST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_FARTHEST = 10**18
# A part of a pattern that no automaton has. Pydantic writes it for decimals, zod next to formats.
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
# What limits nothing without the other keyword.
_NEEDED = {"minContains": "contains", "maxContains": "contains", "then": "if", "else": "if"}


def known_schema(schema: Any) -> Any:
    """Return a schema in the keywords that llguidance knows, as far as there are such words.

    Raises ValueError for one that lists too many names, and RecursionError for one that is nested too deeply.
    """
    translation = _Translation(schema)
    found = translation.of(schema)
    for path, name in translation.tags:
        if isinstance(target := resolve(_redirected(path, found), found), dict):
            target.update(_with_tag(target, name))
    if translation.rewrites_one_of:
        _redirect(found)
    return found


class _Translation:
    """Translation of parts of one schema, with a bound on the names that it writes.

    Attributes:
        tags: references to objects, each with a property that they must have.
        rewrites_one_of: a list of alternatives, which references may lead through, has another name now.
    """

    def __init__(self, whole: Any) -> None:
        self.tags = dict[tuple[str, str], None]()
        self.rewrites_one_of = False
        self._whole = whole
        self._kept = _KEYWORDS | _names_in_references(whole)
        self._num_names = 0

    def of(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return list(map(self.of, schema))
        if not isinstance(schema, Mapping):
            return schema
        if schema.get("not") in ({}, True):
            return False
        found = {key: self._value(key, value) for key, value in schema.items() if self._limits(key, value, schema)}
        if isinstance(options := found.get("anyOf"), list):
            found["anyOf"] = [one for one in options if not _looks_around(one)] or options
        if found.get("unevaluatedProperties") is False and not found.keys() & _APPLICATORS:
            found.setdefault("additionalProperties", found.pop("unevaluatedProperties"))
        if "propertyNames" in found:
            found = self._with_names(found, found["propertyNames"])
        if isinstance(found.get("oneOf"), list) and (tagged := self._tagged(found["oneOf"])):
            del found["oneOf"]
            if "anyOf" in found:
                found["allOf"] = [*_listed(found.get("allOf")), {"anyOf": found["anyOf"]}]
            found["anyOf"] = tagged
            self.rewrites_one_of = True
        return found

    def _limits(self, key: str, value: Any, schema: Mapping[str, Any]) -> bool:
        """Return whether a keyword may limit values, or hold what does."""
        match key:
            case "format":
                return not isinstance(value, str) or value in _FORMATS
            case "$schema":
                return not isinstance(value, str) or value.rstrip("#") in _DIALECTS
            case "pattern":  # the format says the same
                return not (_looks_around(schema) and schema.get("format") in _FORMATS)
            case "if":
                return "then" in schema or "else" in schema
            case "unevaluatedProperties" | "unevaluatedItems":
                return value not in (True, {})
        return key in self._kept and _NEEDED.get(key, key) in schema

    def _value(self, key: str, value: Any) -> Any:
        if key in _VALUES:
            return value
        if key in _NAMED and isinstance(value, Mapping):
            return {name: self.of(one) for name, one in value.items()}
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return max(value, -_FARTHEST) if key in _LEAST else min(value, _FARTHEST) if key in _MOST else value
        return self.of(value)

    def _with_names(self, schema: dict[str, Any], names: Any) -> dict[str, Any]:
        """Return the schema of an object with its `propertyNames` said by its properties; as it is if they cannot."""
        if isinstance(names, Mapping) and names.keys() - _NOTES == {"$ref"}:
            names = resolve(names["$ref"], self._whole)
        if names is True:
            names = {}
        own = schema.get("properties", {})
        if not isinstance(names, Mapping) or not isinstance(own, Mapping) or "patternProperties" in schema:
            return schema
        limits = {key: value for key, value in names.items() if key not in _NOTES}
        rest = {key: value for key, value in schema.items() if key != "propertyNames"}
        if not limits.keys() - {"format"}:
            return rest
        others = rest.get("additionalProperties", True)
        allowed = [limits["const"]] if "const" in limits else limits.get("enum")
        if isinstance(allowed, list) and len(limits) == 1:
            self._num_names += len(allowed)
            if self._num_names > MAX_WRITTEN:
                raise ValueError("lists names of properties too often; simplify it")
            named = {name: own.get(name, others) for name in allowed if isinstance(name, str)}
            return rest | {"properties": named, "additionalProperties": False}
        if own or (pattern := _name_pattern(limits)) is None:
            return schema
        return rest | {"patternProperties": {pattern: others}, "additionalProperties": False}

    def _tagged(self, options: Sequence[Any]) -> list[Any]:
        """Return the parts of a oneOf, which then require a property that differs between them; empty without one.

        Pydantic gives such a tag a default, and so does not require it: a value without it would match several parts.
        llguidance compares no references, and follows none in a circle that has keywords next to it.
        """
        refer = [isinstance(one, Mapping) and "$ref" in one for one in options]
        targets = [resolve(one["$ref"], self._whole) if is_ else one for one, is_ in zip(options, refer, strict=True)]
        properties = [one.get("properties") for one in targets if isinstance(one, Mapping)]
        named = [one for one in properties if isinstance(one, Mapping)]
        if len(named) < max(len(options), 2):
            return []
        name = next((name for name in named[0] if _is_tag(name, named)), None)
        if name is None:
            return []
        self.tags |= {(one["$ref"], name): None for one, is_ in zip(options, refer, strict=True) if is_}
        return [one if is_ else _with_tag(one, name) for one, is_ in zip(options, refer, strict=True)]


def _redirect(whole: Any) -> None:
    """Let references that lead through a oneOf find it by its new name."""
    for part in _referring(whole):
        part["$ref"] = _redirected(part["$ref"], whole)


def _redirected(path: str, whole: Any) -> str:
    """Return a reference with anyOf in place of each oneOf that is not there any more."""
    if "/oneOf/" not in path:
        return path
    names, at = path.split("/"), whole
    for number, name in enumerate(names[1:], 1):
        if name == "oneOf" and isinstance(at, Mapping) and name not in at:
            names[number] = name = "anyOf"
        at = resolve(f"#/{name}", at)
    return "/".join(names)


def _with_tag(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the schema of an object that requires a property."""
    required = _listed(schema.get("required"))
    return {"type": "object", **schema, "required": required if name in required else [*required, name]}


def _names_in_references(whole: Any) -> set[str]:
    """Return the keys that references may lead through."""
    names = {name for part in _referring(whole) for name in unquote(part["$ref"]).split("/")}
    return {name.replace("~1", "/").replace("~0", "~") for name in names}


def _referring(whole: Any) -> Iterator[Any]:
    """Yield the objects of a schema that hold a reference."""
    open_ = [whole]
    for value in open_:  # grows while it is read
        if isinstance(value, Mapping):
            if isinstance(value.get("$ref"), str):
                yield value
            open_ += value.values()
        elif isinstance(value, list):
            open_ += value


def _name_pattern(limits: Mapping[str, Any]) -> str | None:
    """Return the pattern of names with these limits; None if no single one says it."""
    if limits.keys() == {"pattern"}:
        return str(limits["pattern"])
    least, most = limits.get("minLength", 0), limits.get("maxLength", "")
    is_length = limits.keys() <= {"minLength", "maxLength"}
    return rf"^(.|\n){{{least},{most}}}$" if is_length and re.fullmatch(r"\d{1,9},\d{0,9}", f"{least},{most}") else None


def _is_tag(name: str, properties: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a property has other values in each object."""
    seen = set[str]()
    for own in properties:
        schema = own.get(name)
        listed = ([schema["const"]] if "const" in schema else schema.get("enum")) if isinstance(schema, Mapping) else None
        tags = {json.dumps(value, sort_keys=True) for value in _listed(listed)}
        if not tags or not seen.isdisjoint(tags):
            return False
        seen |= tags
    return True


def _looks_around(schema: Any) -> bool:
    """Return whether a schema has a pattern with look-around."""
    pattern = schema.get("pattern") if isinstance(schema, Mapping) else None
    return isinstance(pattern, str) and _LOOK_AROUND.search(pattern) is not None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
