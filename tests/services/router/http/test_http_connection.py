"""What a client may send on one HTTP connection, and how the connection ends."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from types import FrameType
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from eyas.config import HttpConfig, LimitsConfig, TlsConfig
from eyas.services.router.http.connection import HttpConnection
from eyas.services.router.http.server import HttpServer
from tests.support.services.http_router import http_server

POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


class App:
    """An ASGI application that sends back each body, or refuses before it reads one."""

    def __init__(self, refuses: bool = False) -> None:
        self.num_requests = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._refuses = refuses

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_requests += 1
        body, more = b"", not self._refuses
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        await self.gate.wait()
        status, content = (401, b"no key") if self._refuses else (200, body)
        length = (b"content-length", str(len(content)).encode())
        await send({"type": "http.response.start", "status": status, "headers": [length]})
        await send({"type": "http.response.body", "body": content})


@asynccontextmanager
async def connection(address: str, sent: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*address.split(":"))
    try:
        writer.write(sent)
        async with asyncio.timeout(20):
            yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def answer_to(sent: bytes, app: App | None = None, **limits: Any) -> bytes:
    async with http_server(app or App(), limits=LimitsConfig(**limits)) as address, connection(address, sent) as (reader, _):
        return await reader.read()


def error_of(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    error: dict[str, Any] = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


class Calls:
    """Counts the calls of the event loop's thread: work that does not depend on the machine."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event in ("call", "c_call")


def test_uvicorn_has_the_private_methods_that_are_overridden() -> None:
    """Another name in a later version would let all requests of an address begin at once, without an error."""
    for name in ("_start_asgi_task", "_should_upgrade"):
        assert name in vars(HttpToolsProtocol)
        assert name in vars(HttpConnection)


async def test_nothing_is_parsed_after_a_refusal() -> None:
    """Only closed connections stand between a client without a key and the event loop."""
    async with http_server(App(refuses=True)) as address, connection(address, CHUNKED) as (reader, writer):
        assert (await reader.readuntil(b"no key")).startswith(b"HTTP/1.1 401 ")
        with Calls() as calls:
            writer.write(b"1\r\n \r\n" * 100_000)
            assert await reader.read() == b""
            await asyncio.sleep(0.2)
    assert calls.count < 5000


async def test_a_refused_client_that_still_sends_gets_its_answer() -> None:
    def post(address: str) -> tuple[int, bytes, str | None]:
        with closing(http.client.HTTPConnection(address, timeout=20)) as client:
            client.request("POST", "/v1/completions", b" " * 3_000_000)
            answer = client.getresponse()
            return answer.status, answer.read(), answer.getheader("connection")

    async with http_server(App(refuses=True)) as address:
        found = await asyncio.to_thread(post, address)
    assert found == (401, b"no key", "close")


async def test_a_refused_client_that_never_stops_is_cut() -> None:
    app = App(refuses=True)
    async with (
        http_server(app, limits=LimitsConfig(max_request_bytes=2**17)) as address,
        connection(address, CHUNKED) as (_, writer),
    ):
        with suppress(ConnectionError):
            while True:
                writer.write(b" " * 2**16)
                await writer.drain()


@pytest.mark.parametrize(
    "framing",
    [b"1\r\n \r\n" * 10_000, b"1;" + b"a" * 50_000 + b"\r\n \r\n", b"0\r\n" + b"a: b\r\n" * 10_000],
    ids=["tiny chunks", "extension", "trailers"],
)
async def test_the_framing_of_a_body_is_bounded(framing: bytes) -> None:
    answer = await answer_to(CHUNKED + framing)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert "send larger chunks" in error_of(answer)["message"]


@pytest.mark.parametrize(("size", "number"), [(1, 1000), (700, 2000), (65_536, 20)])
async def test_bodies_in_usual_chunks_are_read(size: int, number: int) -> None:
    chunk = b"%x\r\n" % size + b"a" * size + b"\r\n"
    sent = CHUNKED.replace(b"Host", b"Connection: close\r\nHost") + chunk * number + b"0\r\nEnd: here\r\n\r\n"
    assert (await answer_to(sent)).endswith(b"\r\n\r\n" + b"a" * size * number)


async def test_a_request_sent_ahead_is_left_to_the_next_connection() -> None:
    app = App()
    app.gate.clear()
    async with http_server(app) as address, connection(address, GET * 1000) as (reader, _):
        while not app.num_requests:
            await asyncio.sleep(0)
        app.gate.set()
        answer = await reader.read()
    assert (answer.count(b"HTTP/1.1 200 "), answer.count(b"connection: close"), app.num_requests) == (1, 1, 1)


async def test_only_a_client_whose_body_is_wanted_continues() -> None:
    expecting = POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    async with http_server(App()) as address, connection(address, expecting) as (reader, writer):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(b"ab")
        found = await reader.readuntil(b"\r\n\r\nab")
    assert found.startswith(b"HTTP/1.1 200 ")
    assert (await answer_to(expecting, App(refuses=True))).startswith(b"HTTP/1.1 401 ")


CONTRADICTIONS = {
    "lengths": (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400, "Content-Length"),
    "length and chunks": (POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na", 400, "Transfer-Encoding"),
    "codings": (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n\r\n", 400, "Transfer-Encoding"),
    "negative": (POST + b"Content-Length: -1\r\n\r\n", 400, "Content-Length"),
    "1.0": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "HTTP/1.0"),
    "hosts": (POST + b"Host: b\r\n\r\n", 400, "2 Host headers"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400, "0 Host headers"),
    "path": (b"GET /" + b"\xff" * 5000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 400, "not HTTP/1.1"),
    "lines": (POST + b"a: b\r\n" * 300, 431, "more than 256 header lines"),
    "bytes": (POST + b"a: " + b"b" * 40_000, 431, "longer than 32768 bytes"),
    "gzip": (POST + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", 415, "Content-Encoding 'gzip'"),
    "several encodings": (POST + b"Content-Encoding: identity\r\nContent-Encoding: br\r\n\r\n", 415, "'identity, br'"),
    "TLS": (b"\x16\x03\x01\x00\xa5", 400, "not HTTP/1.1"),
    "proxy": (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 400, "no proxy"),
}


@pytest.mark.parametrize(("sent", "status", "reason"), CONTRADICTIONS.values(), ids=list(CONTRADICTIONS))
async def test_requests_that_contradict_themselves_are_refused(sent: bytes, status: int, reason: str) -> None:
    app = App()
    answer = await answer_to(sent, app)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert reason in error_of(answer)["message"]
    assert len(answer) < 1000
    assert not app.num_requests


async def test_errors_below_the_messages_api_have_its_shape() -> None:
    answer = await answer_to(CHUNKED.replace(b"/v1/completions", b"/v1/messages") + b"1\r\n \r\n" * 10_000)
    error = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")


@pytest.mark.parametrize("sent", [b"", b"GET /", CHUNKED + b"5\r\na"], ids=["nothing", "headers", "body"])
async def test_half_a_request_gets_status_408(sent: bytes) -> None:
    answer = await answer_to(sent, header_timeout_s=0.3, body_timeout_s=0.3)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"retry-after: 1" in answer.lower()
    assert error_of(answer)["code"] == "timeout"


@pytest.mark.parametrize("sent", [GET, GET[:-2], CHUNKED], ids=["whole", "headers", "body"])
async def test_a_server_that_stops_answers_every_request(sent: bytes) -> None:
    app = App()
    app.gate.clear()
    server = HttpServer(app, HttpConfig(), TlsConfig())
    await server.start()
    async with connection(server.address, sent) as (reader, _):
        await asyncio.sleep(0.1)
        answer, _ = await asyncio.gather(reader.read(), server.stop(0.1))
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in answer.lower()
    assert error_of(answer)["code"] == "unavailable"


@pytest.mark.parametrize(
    "sent",
    [
        POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: a\r\nContent-Length: 2\r\n\r\nab",
        b"POST http://a/v1 HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab",
        b"POST / HTTP/1.0\r\nContent-Length: 2\r\n\r\nab",
    ],
    ids=["an offer of HTTP/2", "absolute", "HTTP/1.0"],
)
async def test_forms_of_a_request_that_are_answered(sent: bytes) -> None:
    async with http_server(App()) as address, connection(address, sent) as (reader, _):
        found = await reader.readuntil(b"\r\n\r\nab")
    assert found.startswith(b"HTTP/1.1 200 ")
