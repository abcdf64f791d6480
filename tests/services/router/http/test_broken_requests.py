"""A request that breaks off or turns into nonsense is no error of the server: no traceback, and others go on."""

import asyncio

import pytest

from eyas.services.router.auth.keys import ApiKeys, plain_keys
from tests.support.services.http_router import ALL, Script, get, http_router, post, worker
from tests.support.services.scripted_verifier import TOKENS

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"
BROKEN = [
    (HEAD + b'Content-Length: 100\r\n\r\n{"prompt"', b""),
    (CHUNKED, b""),
    (CHUNKED, b"zz\r\n"),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"-1\r\n"),
    (b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", b"\x00\x01\x02\r\n\r\n"),
    (b"GET /v1/models HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", b"zz\r\n"),
]


@pytest.mark.parametrize("keys", [(), ("other",)], ids=["open", "with keys"])
async def test_a_broken_request_logs_no_exception(url: str, keys: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    async with worker(url, Script(TOKENS)), http_router(url, keys=ApiKeys(plain_keys(keys, "test") if keys else ())) as base:
        for first, then in BROKEN:
            for pause_s in (0.0, 0.02):
                _, writer = await asyncio.open_connection(*base.removeprefix("http://").split(":"))
                writer.write(first)
                await asyncio.sleep(pause_s)
                writer.write(then)
                await asyncio.sleep(pause_s)
                writer.close()
                assert (await get(base, "/live")).status_code == 200
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize("header", ["traceparent", "tracestate"])
@pytest.mark.parametrize("value", [b"gr\xc3\xb6\xc3\x9fe", b"a\tb", b"a=" + b"b" * 8000])
async def test_a_trace_header_cannot_take_a_verifier_away(url: str, header: str, value: bytes) -> None:
    """gRPC refuses such metadata, as if the connection had failed."""
    async with worker(url, Script(TOKENS)), http_router(url) as base:
        answer = await post(base, "/v1/completions", ALL, headers={header: value})
        assert answer.status_code == 200
        assert (await get(base, "/health")).status_code == 200
