"""Malformed HTTP requests: valid ones whose JSON is changed as the schemas of the application allow, or whose bytes are.

Routes and schemas come from the application's OpenAPI document, so that new routes and fields are covered by themselves.
"""

import copy
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st

from tests.fuzz.servers import SECRET

MAX_CHANGES = 4
HUGE_RATIO = 0.001
HUGE_COUNTS = (1_000, 20_000, 100_000)

NUMBERS = (
    0, 1, 2, 3, 16, 63, 64, 65, 128, 1024, 4096, -1, -2, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64 - 1, 2**64, 10**30,
    10**400, -(2**63) - 1, 0.0, -0.0, 0.5, 1.0, 1.5, -0.1, 2.1, 100.1, 1e-320, 1e308, -1e308,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
TEXTS = (
    "", " ", "\0", "a", "0", "-1", "1.0", "true", "none", "tiny", "user", "assistant", "größe 漢字 😀", "\ud800",
    "\udfff\ud800", "\u202e\u2028\ufeff", "id\n2026-01-01 00:00:00,000 INFO eyas: forged\r\x1b[2K", "{{ 7 * 7 }}", "%s%n",
    "<|endoftext|>", "../../etc/passwd", "9" * 5000, "ab" * 2048,
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [{}], {"": None}, [None], ["a", 1], {"a": {"a": {"a": []}}})
KEYS = ("", "a", "best_of", "tools", "suffix", "__class__", "\ud800", "0", "-1", "1e3", "99999", "max_tokens", "messages")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "FOO", "get", "P\u00d6ST")
PATHS = (
    "/", "/v1", "/v1/", "/v1/completions/", "/V1/completions", "/v1//completions", "/v1/models/..%2f..%2fx", "/%00", "/%ff",
    "/v1/models/%F0%9F%98%80", "*", "//x", "/v1/completions?x=%zz", "/" + "a" * 8000,
    "http://x/v1/models", "/metrics?name[]=a",
)  # fmt: skip
HEADER_NAMES = (
    "content-type", "content-encoding", "transfer-encoding", "expect", "host", "connection", "upgrade", "accept", "cookie",
    "authorization", "x-request-id", "traceparent", "tracestate", "x-forwarded-for", "content-length", "te", "x",
)  # fmt: skip
HEADER_VALUES = (
    b"", b" ", b"application/json", b"application/json; charset=utf-16", b"text/plain", b"multipart/form-data; boundary=a",
    b"gzip", b"br", b"chunked", b"gzip, chunked", b"100-continue", b"close", b"upgrade", b"websocket", b"h2c", b"*/*;q=x",
    b"Bearer ", b"bearer \xff\xfe", b"Basic Og==", b"\x00", b"\xff", b"a" * 300, b"a" * 20_000, b"-1", b"0", b"1e3", b"+5",
    b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-00", b"id\x0bforged", b"application/openmetrics-text; version=9;q=nan",
)  # fmt: skip


AUTHORIZED = f"Bearer {SECRET}".encode()


@dataclass(frozen=True)
class Route:
    """A method and path of the application. example: a valid body, or None. schema: of the body, with its definitions."""

    method: str
    path: str
    example: Any = None
    schema: Mapping[str, Any] = field(default_factory=dict)
    definitions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def properties(self) -> Mapping[str, Any]:
        """The fields of the body."""
        found: Mapping[str, Any] = _resolved(self.schema, self.definitions).get("properties", {})
        return found


@dataclass(frozen=True)
class Request:
    """The bytes of a request. is_complete: the server must answer it, and may keep the connection."""

    data: bytes
    is_complete: bool


def routes_of(document: Mapping[str, Any], examples: Mapping[str, Any]) -> list[Route]:
    """The routes of an OpenAPI document. examples: valid bodies by path."""
    definitions, found = document.get("components", {}).get("schemas", {}), []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            found.append(Route(method.upper(), path, examples.get(path), schema, definitions))
    return found


def malformed_requests(routes: Sequence[Route]) -> st.SearchStrategy[Request]:
    """Malformed requests of all routes, for hypothesis."""
    return st.builds(malformed_request, st.sampled_from(routes), st.randoms(use_true_random=False))


def malformed_request(route: Route, rng: random.Random) -> Request:
    """A request with a malformed body if the route takes one, else with other parts malformed."""
    path, headers = (
        _filled(route.path, rng),
        {"host": b"fuzz", "content-type": b"application/json", "authorization": AUTHORIZED},
    )
    body = b"" if route.example is None else encode(changed(route.example, route.schema, route.definitions, rng), rng)
    plain = request_bytes(route.method, path, headers, body)
    what = rng.random()
    if what < (0.9 if route.example is not None or "{" in route.path else 0.3):
        return Request(plain, True)
    what = rng.randrange(4)
    if what == 0:
        return Request(request_bytes(rng.choice(METHODS), path, headers, body), False)
    if what == 1:
        return Request(request_bytes(route.method, rng.choice(PATHS), headers, body), False)
    if what == 2:
        return Request(_unframed(plain, rng), False)
    for number in range(rng.randrange(1, 4) if rng.random() > 0.01 else 500):
        name = rng.choice(HEADER_NAMES) + ("" if rng.random() < 0.9 else f"{number}")
        headers[name] = rng.choice(HEADER_VALUES)
    return Request(request_bytes(route.method, path, headers, body), False)


def request_bytes(method: str, path: str, headers: Mapping[str, bytes], body: bytes) -> bytes:
    """A request of HTTP/1.1 as it is sent. A content-length among the headers stays."""
    length = {} if "content-length" in headers or "transfer-encoding" in headers else {"content-length": b"%d" % len(body)}
    lines = [f"{method} {path} HTTP/1.1".encode(), *(name.encode() + b": " + headers[name] for name in headers)]
    lines += [name.encode() + b": " + value for name, value in length.items()]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def changed(example: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any], rng: random.Random) -> Any:
    """A copy of a JSON value with some parts changed."""
    value = copy.deepcopy(example)
    for _ in range(rng.randrange(1, MAX_CHANGES)):
        value = _change(value, _resolved(schema, definitions), definitions, rng)
    return value


def encode(value: Any, rng: random.Random) -> bytes:
    """JSON as bytes; now and then in another encoding, cut, garbled, with a key twice, or nested deeply."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.9)
    what = rng.random()
    if what < 0.9:
        return text.encode(errors="surrogatepass")
    if what < 0.92:
        return text.encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")), errors="surrogatepass")
    if what < 0.94:
        return text[: rng.randrange(len(text) + 1)].encode(errors="surrogatepass")
    if what < 0.95:
        return text.replace("{", '{"prompt": 1, "n": 1, ', 1).encode(errors="surrogatepass")
    if what < 0.96:
        depth = rng.choice((10, 1000, 100_000))
        return rng.choice((b"[", b'{"a":')) * depth
    data = bytearray(text.encode(errors="surrogatepass"))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data)) if data else 0 :][:1] = b""
        data.insert(rng.randrange(len(data) + 1), rng.choice((0, 10, 34, 44, 91, 92, 123, 125, 128, 255)))
    return bytes(data)


def _change(value: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any], rng: random.Random) -> Any:
    """Change one part of a value: replace, drop or add a member, or go on inside one."""
    if isinstance(value, dict) and rng.random() < 0.95:
        return _change_members(value, schema, definitions, rng)
    if isinstance(value, list) and value and rng.random() < 0.7:
        return _change_elements(value, schema, definitions, rng)
    return _nasty(schema, definitions, rng)


def _change_members(
    value: dict[str, Any], schema: Mapping[str, Any], definitions: Mapping[str, Any], rng: random.Random
) -> Any:
    properties = schema.get("properties", {})
    what = rng.random()
    if value and what < 0.15:
        del value[rng.choice(sorted(value))]
    elif what < 0.2:
        value[rng.choice(KEYS)] = _nasty({}, definitions, rng)
    elif value and (what < 0.5 or not properties):
        name = rng.choice(sorted(value))
        value[name] = _change(value[name], _resolved(properties.get(name, {}), definitions), definitions, rng)
    elif properties:
        name = rng.choice(sorted(properties))
        value[name] = _nasty(_resolved(properties[name], definitions), definitions, rng)
    else:
        value[rng.choice(KEYS)] = _nasty(_resolved(schema.get("additionalProperties"), definitions), definitions, rng)
    return value


def _change_elements(value: list[Any], schema: Mapping[str, Any], definitions: Mapping[str, Any], rng: random.Random) -> Any:
    place, what = rng.randrange(len(value)), rng.random()
    if what < 0.2:
        return value[:place] + value[place + 1 :]
    if what < 0.4:
        return value + [value[place]] * _count(rng)
    value[place] = _change(value[place], _resolved(schema.get("items"), definitions), definitions, rng)
    return value


def _nasty(schema: Mapping[str, Any], definitions: Mapping[str, Any], rng: random.Random) -> Any:
    """A value of the schema's type that is at or beyond a bound; sometimes one of another type."""
    kind = schema.get("type") if rng.random() < 0.7 else rng.choice(("integer", "string", "array", "object", None))
    if kind in ("integer", "number"):
        return rng.choice(NUMBERS) if rng.random() < 0.7 else rng.randrange(10)
    if kind == "string":
        options = schema.get("enum", ()) if rng.random() < 0.5 else ()
        return rng.choice(options or TEXTS) * (1 if rng.random() > HUGE_RATIO else rng.choice(HUGE_COUNTS))
    if kind == "boolean":
        return rng.choice((True, False, 0, "true"))
    if kind == "array":
        inner = _nasty(_resolved(schema.get("items"), definitions), definitions, rng) if rng.random() < 0.9 else []
        return [inner] * _count(rng)
    if kind == "object":
        names = (
            rng.choices([*KEYS, *map(str, range(9))], k=rng.randrange(4))
            if rng.random() > HUGE_RATIO
            else map(str, range(20_000))
        )
        inner = _resolved(schema.get("additionalProperties"), definitions)
        return {name: _leaf(inner, rng) for name in names}
    return copy.deepcopy(rng.choice(OTHERS))


def _leaf(schema: Mapping[str, Any], rng: random.Random) -> Any:
    return rng.choice(NUMBERS if schema.get("type") in ("number", "integer") or rng.random() < 0.5 else TEXTS)


def _resolved(schema: Any, definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema behind references; the first of alternatives that is not null."""
    while isinstance(schema, Mapping) and ("$ref" in schema or "anyOf" in schema):
        if "$ref" in schema:
            schema = definitions.get(schema["$ref"].rpartition("/")[2], {})
        else:
            schema = next((one for one in schema["anyOf"] if one.get("type") != "null"), {})
    return schema if isinstance(schema, Mapping) else {}


def _count(rng: random.Random) -> int:
    return rng.choice(HUGE_COUNTS) if rng.random() < HUGE_RATIO else rng.choice((0, 1, 2, 3, 9, 64, 130))


def _filled(path: str, rng: random.Random) -> str:
    """The path with its parameters filled in."""
    if "{" not in path:
        return path
    text = rng.choice(TEXTS[:-2])
    return path[: path.index("{")] + quote(text, safe=rng.choice(("", "/")), errors="surrogatepass")


def _unframed(request: bytes, rng: random.Random) -> bytes:
    """A request whose lines or framing are broken."""
    head, _, body = request.partition(b"\r\n\r\n")
    what = rng.randrange(7)
    if what == 0:
        return request[: rng.randrange(len(request) + 1)]
    if what == 1:
        return (
            head.replace(b"HTTP/1.1", rng.choice((b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"", b"SPDY"))) + b"\r\n\r\n" + body
        )
    if what == 2:
        return head.replace(b"\r\n", b"\n") + b"\n\n" + body
    if what == 3:
        return (
            head
            + b"\r\n"
            + rng.choice((b"a", b": b", b"a b: c", b"\x00: 1", b" folded", b"content-length: x"))
            + b"\r\n\r\n"
            + body
        )
    if what == 4:
        chunked = rng.choice(
            (b"0\r\n\r\n", b"zz\r\n", b"-1\r\n", b"f" * 40 + b"\r\n", b"2\r\n{}\r\n0\r\n\r\n", b"2;x=" + b"y" * 9000)
        )
        return head.partition(b"\r\ncontent-length")[0] + b"\r\ntransfer-encoding: chunked\r\n\r\n" + chunked
    if what == 5:
        return rng.randbytes(rng.randrange(200))
    return head + b"\r\ncontent-length: %d" % rng.choice((0, 1, 2**31, 2**64)) + b"\r\n\r\n" + body
