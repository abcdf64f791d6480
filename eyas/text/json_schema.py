"""Parts of JSON schemas: what references lead to, the alternatives of a value, and the properties of an object.

Formats that write values outside of JSON need them. llguidance knows all of this where a schema is compiled as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias
from urllib.parse import unquote

Schema: TypeAlias = Mapping[str, Any]

# What bounds the work of a hostile schema: parts that are looked at, each once for every combination that it is in; how
# many combinations there are, and how deep they lie; values of enums that are compared; and values in definitions that are
# written more than once.
MAX_PARTS, MAX_ALTERNATIVES, MAX_DEPTH, MAX_VALUES, MAX_WRITTEN = 10_000, 500, 64, 50_000, 50_000

_COMBINATIONS = ("$ref", "allOf", "anyOf", "oneOf")
_NO_LIMITS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$id"}
_NO_LIMITS |= {"$schema", "$defs", "definitions", *_COMBINATIONS}
# What would limit the properties of an object in ways that their order and their own schemas do not show.
_NOT_OF_OBJECTS: tuple[str, ...] = (
    "anyOf",
    "oneOf",
    "not",
    "if",
    "$dynamicRef",
    "$recursiveRef",
    "patternProperties",
    "propertyNames",
)
_NOT_OF_OBJECTS += ("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies")


@dataclass(frozen=True)
class Alternative:
    """Schemas that hold together. They have no references, and no allOf, anyOf or oneOf.

    Attributes:
        parts: the schemas.
        kinds: types of JSON that a value may have, integers as numbers; None if no type is named.
        values: what `const` and `enum` allow, by what they are compared by; None if there is neither.
        is_exclusive: it is a part of a oneOf.
    """

    parts: tuple[Schema, ...] = ()
    kinds: frozenset[str] | None = None
    values: Mapping[object, Any] | None = None
    is_exclusive: bool = False

    @cached_property
    def texts(self) -> list[str] | None:
        """The texts among the values; None if any text may do, which patterns and lengths may limit."""
        if self.kinds is not None and "string" not in self.kinds:
            return []
        return None if self.values is None else [value for value in self.values.values() if isinstance(value, str)]


def resolve(path: object, whole: Schema) -> object:
    """Return what a `$ref` of the form "#" or "#/..." leads to in the whole schema; None if it leads nowhere."""
    if not isinstance(path, str) or (path != "#" and not path.startswith("#/")):
        return None
    found: object = whole
    for name in unquote(path[2:]).split("/") if path != "#" else ():
        if isinstance(found, list) and name.isascii() and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _alternative(
    parts: tuple[Schema, ...], kinds: frozenset[str] | None, values: Mapping[object, Any] | None, is_exclusive: bool = False
) -> Alternative:
    """Return an alternative whose values are of its kinds, and whose kinds are those of its values."""
    if values is not None:
        values = {key: value for key, value in values.items() if kinds is None or _kind(value) in kinds}
        kinds = frozenset(map(_kind, values.values()))
    return Alternative(parts, kinds, values, is_exclusive)


class Alternatives:
    """Finder of the alternatives of values, with a bound on the parts and values that it looks at for each.

    Args:
        whole: the schema that references lead into.
    """

    def __init__(self, whole: Schema) -> None:
        self._whole = whole
        self._num_parts = self._num_values = 0
        self._targets = dict[str, object]()  # of references
        self._plain = dict[int, Alternative]()  # by the identity of the schema

    def of(self, schema: object) -> list[Alternative]:
        """Return the alternatives of a value: it is valid if it matches one.

        Raises ValueError for a reference that leads nowhere, and for a schema with too many parts.
        """
        self._num_parts = self._num_values = 0
        return self._find(schema, frozenset(), 0)

    def _find(self, schema: object, open_: frozenset[str], depth: int) -> list[Alternative]:
        """Find alternatives. open_: the references that led here."""
        self._count(1)
        if depth > MAX_DEPTH:
            raise ValueError("combines schemas too deeply; simplify it")
        if schema is False:
            return []
        if not isinstance(schema, Mapping):
            return [Alternative()]
        found = [self._own(schema)]
        if (path := schema.get("$ref")) is not None:
            found = self._both(found, self._referenced(path, open_, depth))
        for part in _parts(schema, "allOf"):
            found = self._both(found, self._find(part, open_, depth + 1))
        if "anyOf" in schema:
            options = [one for option in self._options(schema, "anyOf", open_, depth) for one in option]
            found = self._both(found, list({tuple(map(id, one.parts)): one for one in options}.values()))
        if "oneOf" in schema:
            exclusive = [self._both(found, option) for option in self._options(schema, "oneOf", open_, depth)]
            _check_exclusive(exclusive)
            found = [replace(one, is_exclusive=True) for option in exclusive for one in option]
        return found

    def _options(self, schema: Schema, key: str, open_: frozenset[str], depth: int) -> list[list[Alternative]]:
        """Return the alternatives of each part of an anyOf or oneOf."""
        parts = _parts(schema, key)
        if len(parts) > MAX_ALTERNATIVES:
            raise ValueError(f"has more than {MAX_ALTERNATIVES} alternatives; simplify it")
        found = [self._find(part, open_, depth + 1) for part in parts]
        self._count(sum(map(len, found)))
        return found

    def _own(self, schema: Schema) -> Alternative:
        """Return the alternative of a schema without what it combines."""
        if id(schema) not in self._plain:
            self._count(len(schema) // 16)
            own = {key: value for key, value in schema.items() if key not in _NO_LIMITS}
            listed = [own["const"]] if "const" in own else own.get("enum")
            values: dict[object, Any] | None = None
            if isinstance(listed, list):
                self._count_values(len(listed))
                values = {_comparable(value): value for value in listed}
            self._plain[id(schema)] = _alternative((own,) if own else (), _named_kinds(own.get("type")), values)
        return self._plain[id(schema)]

    def _referenced(self, path: object, open_: frozenset[str], depth: int) -> list[Alternative]:
        path = str(path)
        if path not in self._targets:
            self._targets[path] = resolve(path, self._whole)
        target = self._targets[path]
        if target is None:
            raise ValueError(f"has $ref {path[:80]!r}, which leads nowhere")
        return [] if path in open_ else self._find(target, open_ | {path}, depth + 1)

    def _both(self, first: list[Alternative], second: list[Alternative]) -> list[Alternative]:
        """Return the alternatives of what must match one of each."""
        if len(first) * len(second) > MAX_ALTERNATIVES:
            raise ValueError(f"has more than {MAX_ALTERNATIVES} alternatives; simplify it")
        if first == [Alternative()]:
            return second
        return [self._merged(a, b) for a in first for b in second]

    def _merged(self, first: Alternative, second: Alternative) -> Alternative:
        parts = first.parts + second.parts
        self._count(len(parts))
        values = second.values if first.values is None else first.values
        if first.values is not None and second.values is not None:
            fewer, more = sorted((first.values, second.values), key=len)
            values = {key: value for key, value in fewer.items() if key in more}
        kinds = second.kinds if first.kinds is None else first.kinds
        if first.kinds is not None and second.kinds is not None:
            kinds = first.kinds & second.kinds
        if values is not None:
            self._count_values(len(values))
        return _alternative(parts, kinds, values, first.is_exclusive or second.is_exclusive)

    def _count(self, number: int) -> None:
        self._num_parts += number
        if self._num_parts > MAX_PARTS:
            raise ValueError("combines too many schemas; simplify it")

    def _count_values(self, number: int) -> None:
        self._num_values += number
        if self._num_values > MAX_VALUES:
            raise ValueError("compares too many values; simplify it")


def _check_exclusive(options: list[list[Alternative]]) -> None:
    """Raise ValueError if a text may match two parts of a oneOf."""
    is_any, seen = False, set[str]()
    for option in options:
        texts = [one.texts for one in option]
        own = {text for some in texts for text in some or ()}
        is_own_any = any(some is None for some in texts)
        if (is_any and (is_own_any or own)) or (is_own_any and seen) or own & seen:
            raise ValueError("has a oneOf whose parts may match the same text; use anyOf")
        is_any |= is_own_any
        seen |= own


def properties_of(whole: Schema) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the properties of an object's schema, and the names of the required ones.

    Follows a reference and an allOf at its top level. Raises ValueError for what limits properties otherwise.
    """
    properties, required, parts = dict[str, Any](), dict[str, None](), list(_object_parts(whole))
    for part in parts:
        own, names = part.get("properties", {}), part.get("required", [])
        if not isinstance(own, Mapping) or not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise ValueError("has properties that are no object, or a required that is no list of names")
        for key, value in own.items():
            properties[key] = {"allOf": [properties[key], value]} if key in properties else value
        required |= dict.fromkeys(names)
    for part in parts:
        if part.get("additionalProperties") is False:
            properties = {key: value for key, value in properties.items() if key in part.get("properties", {})}
    if missing := next((name for name in required if name not in properties), None):
        raise ValueError(f"requires {missing[:80]!r}, which is not among its properties")
    return {key: value for key, value in properties.items() if value is not False or key in required}, frozenset(required)


def _object_parts(whole: Schema) -> Iterator[Schema]:
    """Yield the schemas that hold for an object together."""
    open_: list[object] = [whole]
    for number, part in enumerate(open_):  # grows while it is read
        if not isinstance(part, Mapping) or number > MAX_DEPTH:
            raise ValueError("combines no schemas of objects, or too many")
        if found := next((key for key in _NOT_OF_OBJECTS if key in part), None):
            raise ValueError(f"has {found} at its top level, which is not supported in this format; use properties")
        if "object" not in (kinds if isinstance(kinds := part.get("type", "object"), list) else [kinds]):
            raise ValueError(f"has the type {str(part['type'])[:80]!r}; it must be 'object'")
        yield part
        if "$ref" in part:
            if (target := resolve(part["$ref"], whole)) is None:
                raise ValueError(f"has $ref {str(part['$ref'])[:80]!r}, which leads nowhere")
            open_ += [target] if not any(target is one for one in open_) else []
        open_ += _parts(part, "allOf")


class Definitions:
    """Resolver that makes parts of schemas stand alone, with a bound on the work for all of them."""

    def __init__(self) -> None:
        self._num_written = 0

    def standalone(self, schema: Any, whole: Schema) -> Any:
        """Return a part of a schema together with the definitions that it needs of the whole one. Raises ValueError."""
        names, open_ = dict[str, str](), list[str]()

        def renamed(value: Any) -> Any:
            self._num_written += 1
            if self._num_written > MAX_WRITTEN:
                raise ValueError("refers to large definitions too often; simplify it")
            if isinstance(value, list):
                return [renamed(one) for one in value]
            if not isinstance(value, Mapping):
                return value
            return {key: reference(one) if key == "$ref" else renamed(one) for key, one in value.items()}

        def reference(path: Any) -> Any:
            if resolve(path, whole) is None:
                return renamed(path)
            if path not in names:
                names[path] = f"d{len(names)}"
                open_.append(path)
            return f"#/$defs/{names[path]}"

        alone, definitions = renamed(schema), {}
        while open_:
            path = open_.pop()
            target = resolve(path, whole)
            if isinstance(target, Mapping):
                outer = ("$defs", "definitions", "$id", "$schema")
                target = {key: value for key, value in target.items() if key not in outer}
            definitions[names[path]] = renamed(target)
        return {**alone, "$defs": definitions} if definitions else alone


def _parts(schema: Schema, key: str) -> list[Any]:
    parts = schema.get(key, [])
    if not isinstance(parts, list):
        raise ValueError(f"has {key} {str(parts)[:80]!r}; it must be a list")
    return parts


def _named_kinds(types: object) -> frozenset[str] | None:
    """Return the types that `type` names, integers as numbers; None if there are none."""
    named = [one for one in (types if isinstance(types, list) else [types]) if isinstance(one, str)]
    return frozenset("number" if one == "integer" else one for one in named) or None


def _kind(value: object) -> str:
    """Return the type of JSON that a value has."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (str, Mapping)):
        return "string" if isinstance(value, str) else "object"
    return "array" if isinstance(value, list) else "number"


def _comparable(value: object) -> tuple[str, object]:
    """Return a value as what can be compared: true is not 1, and 1.0 is."""
    kind = _kind(value)
    return kind, json.dumps(value, sort_keys=True) if kind in ("object", "array") else value
