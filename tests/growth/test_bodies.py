"""How the work of the router's listeners grows with what a client sends before its request is understood."""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import uvicorn
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from uvicorn.server import ServerState

from eyas.config import LimitsConfig
from eyas.config.drafting import split_method
from eyas.config.router import RouterConfig, ServedModel
from eyas.errors import InvalidRequest, UnknownModel
from eyas.rpc.admission import Admission, address_of, check_num_fields
from eyas.rpc.fair_share import FairLimit
from eyas.services.local.batch import read_requests
from eyas.services.local.cluster import message_of
from eyas.services.router.auth.keys import ApiKeys, plain_keys
from eyas.services.router.http.connection import READ_BYTES, HttpConnection
from eyas.services.router.http.errors import error_bytes, error_response
from eyas.services.router.http.turns import Turns
from eyas.v1 import generation_pb2
from tests.growth.growth import Reader, check_growth, label, pairs

LIMITS = LimitsConfig()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
KEYS = ApiKeys(plain_keys([f"key-{number}" for number in range(100)], "test"))
SCOPE = {"type": "http", "path": "/v1/completions", "headers": []}
GENERATE = generation_pb2.GenerateRequest.DESCRIPTOR


class Wire(asyncio.Transport):
    """The transport of a connection whose other end takes everything."""

    def __init__(self) -> None:
        super().__init__()
        self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None: ...

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


async def answer(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass


CONFIG = uvicorn.Config(answer, lifespan="off", ws="none", log_config=None)


def receive(data: bytes, size: int = READ_BYTES) -> None:
    """Let one connection read bytes, a few at a time. Its application never runs, as on a busy event loop."""

    async def read() -> None:
        connection = HttpConnection(CONFIG, ServerState(), {}, limits=LIMITS, turns=Turns())
        connection.connection_made(Wire())
        for start in range(0, len(data), size):
            part = data[start : start + size]
            connection.get_buffer(-1)[: len(part)] = part
            connection.buffer_updated(len(part))
        connection.connection_lost(None)

    asyncio.run(read())


def drip(data: bytes) -> None:
    receive(data, 16)


REQUESTS: Mapping[str, Callable[[int], bytes]] = {
    "header lines": lambda n: POST + b"a:b\r\n" * (n // 5),
    "one header": lambda n: POST + b"a: " + b"b" * n,
    "folded header": lambda n: POST + b"a: b\r\n" + b" c\r\n" * (n // 4),
    "spaces": lambda n: POST + b"a:" + b" " * n + b"b\r\n\r\n",
    "percents": lambda n: b"GET /" + b"%41" * (n // 3) + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "broken percents": lambda n: b"GET /" + b"%" * n + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "query": lambda n: b"GET /?" + b"a=b&" * (n // 4) + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "empty lines": lambda n: b"\r\n" * (n // 2),
    "requests ahead": lambda n: b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * (n // 27),
    "chunks": lambda n: CHUNKED + b"1\r\n \r\n" * (n // 6),
    "chunk size": lambda n: CHUNKED + b"0" * n,
    "extensions": lambda n: CHUNKED + b"1;a=b;c\r\n \r\n" * (n // 12),
    "extension": lambda n: CHUNKED + b"1;" + b"a" * n,
    "trailers": lambda n: CHUNKED + b"0\r\n" + b"a:b\r\n" * (n // 5),
    "upgrade": lambda n: POST + b"Upgrade: a\r\nConnection: upgrade\r\nb: " + b"c" * n + b"\r\n\r\n",
}
HEADERS: Mapping[str, Callable[[int], Iterable[tuple[str, str]]]] = {
    "many": lambda n: [("a", "b")] * (n // 4),
    "long key": lambda n: [("authorization", "Bearer " + "k" * n)],
    "spaces": lambda n: [("authorization", "Bearer " + " " * n)],
    "words": lambda n: [("authorization", "Bearer " + "k " * (n // 2))],
    "two keys": lambda n: [("authorization", "k" * (n // 2)), ("authorization", "l" * (n // 2))],
    "trace": lambda n: [("tracestate", "a=b," * (n // 4))],
}
TEXTS: Mapping[str, Callable[[int], str]] = {
    "letters": lambda n: "a" * n,
    "controls": lambda n: "\x01" * n,
    "quotes": lambda n: "'\"\\" * (n // 3),
    "colons": lambda n: "ipv6:" + ":" * n,
    "percents": lambda n: "ipv4:" + "%3A" * (n // 3),
}
LINES: Mapping[str, Callable[[int], list[str]]] = {
    "ids of their own": lambda n: [line(f"r{number}") for number in range(n)],
    "one id": lambda n: [line("r")] * n,
    "no JSON": lambda n: ["{" * 20] * n,
    "one long line": lambda n: [line("r" * n)],
    "deep": lambda n: ["[" * n],
}
MESSAGES: Mapping[str, Callable[[int], bytes]] = {
    "fields": lambda n: b"\x08\x01" * (n // 2),
    "messages": lambda n: b"\x32\x00" * (n // 2),
    "nested": lambda n: nested(n),
    "groups": lambda n: b"\x0b" * n,
    "long numbers": lambda n: b"\x08" + b"\xff" * n,
    "text": lambda n: b"\x22\xff\xff\xff\x07" + b"a" * n,
}


def line(name: str) -> str:
    """A line of a batch."""
    request = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    return json.dumps({"custom_id": name, **request})


def nested(num_bytes: int) -> bytes:
    """Messages in messages: field 6 of the request, then a field that it does not know."""
    inner = b""
    while len(inner) < num_bytes:
        inner = b"\x32" + varint(len(inner)) + inner if len(inner) < 2**14 else inner + inner
    return inner[:num_bytes]


def varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def many_callers(num_callers: int) -> None:
    """Take and give back for many addresses at once."""
    limit = FairLimit(2**28, 2**24)
    callers = [(f"10.0.{number >> 8}.{number & 255}",) for number in range(num_callers)]
    for caller in callers:
        if limit.fits(caller, 1):
            limit.take(caller, 1)
    for caller in callers:
        limit.take(caller, -1)


def match_path(path: str) -> object:
    route = APIRoute("/v1/models/{name:path}", lambda: None, methods=["GET"])
    return route.matches({"type": "http", "method": "GET", "path": f"/v1/models/{path}", "headers": []})


HEADER_BYTES = LIMITS.max_header_bytes
READERS = (
    Reader("HttpConnection.buffer_updated", receive, REQUESTS, HEADER_BYTES + READ_BYTES, on_loop=True),
    Reader("HttpConnection.buffer_updated, dripping", drip, REQUESTS, HEADER_BYTES + READ_BYTES),
    Reader(
        "HttpConnection.buffer_updated, body",
        receive,
        {
            "usual chunks": lambda n: CHUNKED + (b"2000\r\n" + b"a" * 2**13 + b"\r\n") * (n // 2**13),
            "small chunks": lambda n: CHUNKED + (b"200\r\n" + b"a" * 2**9 + b"\r\n") * (n // 2**9),
            "length": lambda n: POST + b"Content-Length: %d\r\n\r\n" % n + b"a" * n,
            "after a refusal": lambda n: b"GET / HTTP/1.1\r\n\r\n" + b"1\r\n \r\n" * (n // 6),
        },
        LIMITS.max_request_bytes,
    ),
    Reader("ApiKeys.access", KEYS.access, HEADERS, HEADER_BYTES, on_loop=True),
    Reader("Headers.items", lambda headers: list(Headers(dict(headers)).items()), HEADERS, HEADER_BYTES, on_loop=True),
    Reader(
        "Admission.callers",
        lambda text: Admission(LIMITS, has_keys=True).callers({"authorization": text}, text),
        TEXTS,
        HEADER_BYTES,
        on_loop=True,
    ),
    Reader("address_of", address_of, TEXTS, HEADER_BYTES, on_loop=True),
    Reader("FairLimit", many_callers, {"addresses": lambda n: n}, LIMITS.max_connections, on_loop=True),
    Reader("match of a path", match_path, TEXTS, HEADER_BYTES, on_loop=True),
    Reader("error_bytes", lambda text: error_bytes(400, text, text), TEXTS, HEADER_BYTES, on_loop=True),
    Reader(
        "error_response", lambda text: error_response(InvalidRequest(text, text), SCOPE), TEXTS, HEADER_BYTES, on_loop=True
    ),
    Reader(
        "error_response, model", lambda text: error_response(UnknownModel(text), SCOPE), TEXTS, HEADER_BYTES, on_loop=True
    ),
    Reader("read_requests", lambda lines: list(read_requests(lines)), LINES, 2**15),
    Reader("split_method", split_method, {"names": lambda n: "+suffix" * n, "pluses": lambda n: "+" * n}, 2**17),
    Reader(
        "message_of",
        message_of,
        {"colons": lambda n: ": " * n, "braces": lambda n: "{" * n, "text": lambda n: "{" + '"a":1,' * n},
        2**17,
    ),
    Reader(
        "RouterConfig",
        lambda names: RouterConfig((ServedModel("m", "t", aliases=tuple(names)),)),
        {"aliases": lambda n: [f"a{number}" for number in range(n)]},
        2**12,
    ),
    Reader(
        "check_num_fields",
        lambda data: check_num_fields(data, GENERATE, LIMITS.max_request_values),
        MESSAGES,
        LIMITS.max_request_bytes,
    ),
)


@pytest.mark.parametrize(("reader", "shape"), pairs(READERS), ids=label)
def test_work_before_admission_grows_no_faster_than_n_log_n(reader: Reader, shape: str) -> None:
    check_growth(reader, shape)
