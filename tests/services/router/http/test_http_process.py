"""The HTTP server of a router process: it needs no torch and no transformers, and it drains on SIGTERM."""

import asyncio
import re
import signal
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from eyas.rpc.channel import open_channel
from eyas.rpc.convert import generate_call_to_proto
from eyas.rpc.messages import RETRY_KEY
from eyas.v1.generation_pb2_grpc import GenerationStub
from tests.support.services.http_router import (
    ALL,
    CHAT,
    PROMPT_TEXT,
    REST_TEXT,
    Script,
    client,
    get,
    get_until,
    is_ok,
    until,
    worker,
)
from tests.support.services.router_process import line_with, router_process
from tests.support.services.scripted_verifier import CALL, TOKENS

HTTP = r"HTTP on (\S+)"


async def test_a_stopping_router_is_not_ready_and_finishes_its_streams(url: str) -> None:
    gate = asyncio.Event()
    script = Script(TOKENS, gate=gate)
    settings = ("server.shutdown_delay_s=3", "server.graceful_shutdown_timeout_s=20")
    async with worker(url, script), router_process(url, *settings) as child:
        base = await line_with(child, HTTP)
        await get_until(base, "/ready", is_ok)
        async with client(base) as api:
            answer = asyncio.create_task(api.completions.create(**ALL))
            await until(lambda: len(script.calls) == 1)
            child.send_signal(signal.SIGTERM)
            response = await get_until(base, "/ready", lambda answer: answer.status_code != 200)
            assert response.json()["reason"] == "the router is stopping"
            assert (await get(base, "/live")).status_code == 200
            gate.set()
            assert (await answer).choices[0].text == REST_TEXT
        assert await asyncio.wait_for(child.wait(), 60) == 0


async def test_a_router_started_with_its_verifier_awaits_it(url: str) -> None:
    """As `eyas serve` starts it."""
    async with router_process(url, "ready_without_verifiers=false") as child:
        base = await line_with(child, HTTP)
        reason = "no verifier can be reached"
        answer = await get_until(base, "/ready", lambda answer: bool(answer.json().get("reason") == reason))
        assert answer.status_code == 503
        assert (await get(base, "/live")).status_code == 200
        async with worker(url, Script(TOKENS)):
            await get_until(base, "/ready", is_ok)
            models = (await get(base, "/v1/models")).json()["data"]
            assert [model["id"] for model in models] == ["demo"]
        await get_until(base, "/health", lambda answer: answer.status_code != 200)
        assert (await get(base, "/ready")).status_code == 200


async def test_operations_have_a_port_and_a_drain_has_an_end(url: str) -> None:
    """One process for both."""
    private, both = ("/health", "/metrics", "/openapi.json", "/docs"), ("/live", "/ready")
    async with router_process(url, "http.operations_port=0", "server.graceful_shutdown_timeout_s=0.2") as child:
        api, operations = await line_with(child, HTTP), await line_with(child, HTTP)
        await get_until(api, "/ready", is_ok)
        assert [(await get(api, path)).status_code for path in (*private, *both)] == [404] * 4 + [200] * 2
        answers = {path: await get(operations, path) for path in (*private, *both, "/v1/models")}
        assert [answers[path].status_code for path in ("/metrics", "/openapi.json", "/docs", *both)] == [200] * 5
        assert answers["/health"].json()["reason"] == "no verifier can be reached"
        assert "/v1/completions" in answers["/openapi.json"].json()["paths"]
        assert answers["/v1/models"].status_code == 404
        script = Script(TOKENS, stalls_after=1)
        async with worker(url, script), httpx.AsyncClient(timeout=30) as client:
            await get_until(operations, "/health", is_ok)
            heads = [(await client.head(f"{operations}{path}")).status_code for path in (*private, *both)]
            assert heads == [200] * 6
            async with client.stream("POST", f"{api}/v1/completions", json=ALL | {"stream": True}) as answer:
                await anext(answer.aiter_lines())
                child.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(child.wait(), 60) == 0
            await until(lambda: script.num_cancelled == 1)


async def test_what_outlasts_the_drain_ends_with_an_error(url: str) -> None:
    """Streams with an event of their API, everything else with a status and the time to retry."""
    chat = {name: value for name, value in CHAT.items() if name != "max_tokens"}
    streams = {
        "/v1/completions": ALL | {"stream": True},
        "/v1/chat/completions": CHAT | {"stream": True},
        "/v1/responses": {"model": "demo", "input": PROMPT_TEXT, "temperature": 0, "stream": True},
        "/v1/messages": chat | {"max_tokens": 20, "stream": True},
    }
    whole = {"/v1/completions": ALL, "/v1/messages": chat | {"max_tokens": 20}}

    async def body() -> tuple[list[str], list[httpx.Response], bytes, grpc.aio.AioRpcError, str]:
        script = Script(TOKENS, stalls_after=1)
        settings = ("server.graceful_shutdown_timeout_s=0.5", "limits.body_timeout_s=60")
        async with worker(url, script), router_process(url, *settings) as child, httpx.AsyncClient(timeout=30) as client:
            base = await line_with(child, HTTP)
            address = await line_with(child, r"serving on (\S+)")
            await get_until(base, "/health", is_ok)
            running = [asyncio.create_task(read(client, base + path, body)) for path, body in streams.items()]
            waiting = [asyncio.create_task(client.post(base + path, json=body)) for path, body in whole.items()]
            reader, writer = await asyncio.open_connection(*base.removeprefix("http://").split(":"))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
            async with open_channel(address) as channel:
                call = GenerationStub(channel).Generate(generate_call_to_proto(CALL), wait_for_ready=True)
                await until(lambda: len(script.calls) == len(streams) + len(whole) + 1)
                await call.read()
                child.send_signal(signal.SIGTERM)
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await call.read()
            answers = await asyncio.gather(*running), await asyncio.gather(*waiting), await reader.read()
            writer.close()
            assert child.stderr is not None
            log = (await asyncio.wait_for(child.stderr.read(), 60)).decode()
            assert await asyncio.wait_for(child.wait(), 60) == 0
            return *answers, ended.value, log

    events, answers, unread, call, log = await body()
    reason = "the router is stopping; send the request again"
    assert all(reason in event for event in events)
    assert [event.endswith("data: [DONE]\n\n") for event in events] == [True, True, False, False]
    assert "event: response.failed" in events[2]
    assert 'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"' in events[3]
    assert [(answer.status_code, answer.headers["retry-after"]) for answer in answers] == [(503, "1")] * 2
    assert answers[0].json()["error"] == {"message": reason, "type": "server_error", "param": None, "code": "unavailable"}
    assert answers[1].json() == {"type": "error", "error": {"type": "overloaded_error", "message": reason}}
    assert unread.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in unread.lower()
    assert call.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(call.trailing_metadata() or ())[RETRY_KEY] == "1000"
    assert len(re.findall(r"request \S+: UNAVAILABLE, ", log)) == len(streams) + len(whole) + 1


async def read(client: httpx.AsyncClient, url: str, body: Any) -> str:
    async with client.stream("POST", url, json=body) as answer:
        assert answer.status_code == 200
        return (await answer.aread()).decode()
