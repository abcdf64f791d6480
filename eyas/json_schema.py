"""Parts of JSON schemas: what references lead to, the alternatives of a value, and the properties of an object.

Formats that write values outside of JSON need them. llguidance knows all of this where a schema is compiled as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias
from urllib.parse import unquote

Schema: TypeAlias = Mapping[str, Any]

# What bounds the work of a hostile schema: parts that are looked at, with the combinations of them, how deep they lie, and
# values in definitions that are written more than once.
MAX_PARTS, MAX_ALTERNATIVES, MAX_DEPTH, MAX_WRITTEN = 3000, 500, 64, 50_000

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

    is_exclusive: it is a part of a oneOf.
    """

    parts: tuple[Schema, ...] = ()
    is_exclusive: bool = False

    @cached_property
    def kinds(self) -> frozenset[str] | None:
        """Types of JSON that a value may have, integers as numbers; None if no type is named."""
        kinds = None if self.values is None else frozenset(map(_kind, self.values))
        for part in self.parts:
            own = part.get("type")
            named = frozenset(
                "number" if one == "integer" else one
                for one in (own if isinstance(own, list) else [own])
                if isinstance(one, str)
            )
            kinds = kinds if not named else named if kinds is None else kinds & named
        return kinds

    @cached_property
    def values(self) -> list[Any] | None:
        """What `const` and `enum` allow; None if the alternative has neither."""
        values: list[Any] | None = None
        for part in self.parts:
            own = [part["const"]] if "const" in part else part.get("enum")
            if isinstance(own, list):
                shared = set(map(_comparable, own))
                values = own if values is None else [one for one in values if _comparable(one) in shared]
        return values

    @cached_property
    def texts(self) -> list[str] | None:
        """The texts among the values; None if any text may do, which patterns and lengths may limit."""
        if self.kinds is not None and "string" not in self.kinds:
            return []
        return None if self.values is None else [value for value in self.values if isinstance(value, str)]

    def may_be(self, text: str) -> bool:
        """Whether a text may do."""
        return self.texts is None or text in self.texts


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


def alternatives(schema: object, whole: Schema) -> list[Alternative]:
    """Return the alternatives of a value: it is valid if it matches one. References lead into `whole`.

    Raises ValueError for a reference that leads nowhere, and for a schema with too many parts.
    """
    return _Alternatives(whole).of(schema, frozenset(), 0)


class _Alternatives:
    """Finds alternatives with a bound on the parts that it looks at."""

    def __init__(self, whole: Schema) -> None:
        self._whole = whole
        self._num_parts = 0

    def of(self, schema: object, open_: frozenset[str], depth: int) -> list[Alternative]:
        """open_: the references that led here."""
        self._count(1)
        if depth > MAX_DEPTH:
            raise ValueError("combines schemas too deeply; simplify it")
        if schema is False:
            return []
        if not isinstance(schema, Mapping):
            return [Alternative()]
        own = {key: value for key, value in schema.items() if key not in _NO_LIMITS}
        found = [Alternative((own,) if own else ())]
        if (path := schema.get("$ref")) is not None:
            found = self._both(found, self._referenced(path, open_, depth))
        for part in _parts(schema, "allOf"):
            found = self._both(found, self.of(part, open_, depth + 1))
        if "anyOf" in schema:
            found = self._both(found, [one for part in _parts(schema, "anyOf") for one in self.of(part, open_, depth + 1)])
        if "oneOf" in schema:
            options = [self._both(found, self.of(part, open_, depth + 1)) for part in _parts(schema, "oneOf")]
            _check_exclusive(options)
            found = [Alternative(one.parts, is_exclusive=True) for option in options for one in option]
        return found

    def _referenced(self, path: object, open_: frozenset[str], depth: int) -> list[Alternative]:
        target = resolve(path, self._whole)
        if target is None:
            raise ValueError(f"has $ref {str(path)[:80]!r}, which leads nowhere")
        path = str(path)
        return [] if path in open_ else self.of(target, open_ | {path}, depth + 1)

    def _both(self, first: list[Alternative], second: list[Alternative]) -> list[Alternative]:
        """Return the alternatives of what must match one of each."""
        num_found = len(first) * len(second)
        if num_found > MAX_ALTERNATIVES:
            raise ValueError(f"has more than {MAX_ALTERNATIVES} alternatives; simplify it")
        self._count(num_found)
        return [Alternative(a.parts + b.parts, a.is_exclusive or b.is_exclusive) for a in first for b in second]

    def _count(self, number: int) -> None:
        self._num_parts += number
        if self._num_parts > MAX_PARTS:
            raise ValueError("combines too many schemas; simplify it")


def _check_exclusive(options: list[list[Alternative]]) -> None:
    """Raise ValueError if a text may match two parts of a oneOf."""
    is_any, seen = False, set[str]()
    for option in options:
        texts = [one.texts for one in option]
        own = {text for some in texts for text in some or ()}
        is_own_any = any(some is None for some in texts)
        if (is_any and (is_own_any or own)) or (is_own_any and seen) or own & seen:
            raise ValueError("has a oneOf whose parts may match the same text; use anyOf")
        is_any, seen = is_any or is_own_any, seen | own


def properties_of(whole: Schema) -> tuple[dict[str, Any], list[str]]:
    """Return the properties of an object's schema, and the names of the required ones.

    Follows a reference and an allOf at its top level. Raises ValueError for what limits properties otherwise.
    """
    properties, required, parts = dict[str, Any](), list[str](), list(_object_parts(whole))
    for part in parts:
        own, names = part.get("properties", {}), part.get("required", [])
        if not isinstance(own, Mapping) or not isinstance(names, list):
            raise ValueError("has properties that are no object, or a required that is no list")
        for key, value in own.items():
            properties[key] = {"allOf": [properties[key], value]} if key in properties else value
        required += [name for name in names if name not in required]
    for part in parts:
        if part.get("additionalProperties") is False:
            properties = {key: value for key, value in properties.items() if key in part.get("properties", {})}
    if missing := [name for name in required if name not in properties]:
        raise ValueError(f"requires {str(missing[0])[:80]!r}, which is not among its properties")
    return properties, required


def _object_parts(whole: Schema) -> Iterator[Schema]:
    """Yield the schemas that hold for an object together."""
    open_: list[object] = [whole]
    for number, part in enumerate(open_):  # grows while it is read
        if not isinstance(part, Mapping) or number > MAX_DEPTH:
            raise ValueError("combines no schemas of objects, or too many")
        if found := next((key for key in _NOT_OF_OBJECTS if key in part), None):
            raise ValueError(f"has {found} at its top level, which is not supported in this format; use properties")
        if "object" not in (kinds if isinstance(kinds := part.get("type", "object"), list) else [kinds]):
            raise ValueError(f"has the type {part['type']!r}; it must be 'object'")
        yield part
        if "$ref" in part:
            if (target := resolve(part["$ref"], whole)) is None:
                raise ValueError(f"has $ref {str(part['$ref'])[:80]!r}, which leads nowhere")
            open_ += [target] if not any(target is one for one in open_) else []
        open_ += _parts(part, "allOf")


class Definitions:
    """Makes parts of schemas stand alone, with a bound on the work for all of them."""

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
