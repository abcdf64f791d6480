"""Clients that disconnect, and verifiers that are full, fail or are missing: statuses, headers and cancellations."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest
from openai import InternalServerError, RateLimitError
from prometheus_client import CollectorRegistry

from eyas.config import RetryConfig
from eyas.services.router.telemetry import RouterTelemetry
from eyas.telemetry.exporters import Telemetry
from tests.support.services.http_router import ALL, CHAT, REST_TEXT, Script, client, http_router, served, until, worker
from tests.support.services.scripted_verifier import TOKENS

PATHS = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
SAMPLED = {"temperature": 1, "n": 3}
# A worker that fails is asked until it is gone.
PATIENT = RetryConfig(max_attempts=10_000, budget_s=60.0, initial_backoff_s=0.01, max_backoff_s=0.05)


def body_of(path: str) -> dict[str, Any]:
    return CHAT if "chat" in path else ALL


@pytest.mark.parametrize(
    ("path", "silent_after", "stream"),
    [("/v1/completions", 0, False), ("/v1/completions", 1, True), ("/v1/chat/completions", 1, False)],
)
async def test_a_client_that_disconnects_cancels_all_completions(
    url: str, path: str, silent_after: int, stream: bool
) -> None:
    script = Script(TOKENS, stalls_after=silent_after)
    async with worker(url, script), http_router(url) as base, httpx.AsyncClient(base_url=base, timeout=30) as http:
        reading = asyncio.create_task(_read(http, path, body_of(path) | SAMPLED | {"stream": stream}))
        await until(lambda: len(script.calls) == 3)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: script.num_cancelled == 3)


async def _read(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    async with http.stream("POST", path, json=body) as answer:
        async for _ in answer.aiter_lines():
            pass


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_verifier_is_429_with_the_time_to_try_again(url: str, stream: bool) -> None:
    script = Script(TOKENS, fails_after=0, status=grpc.StatusCode.RESOURCE_EXHAUSTED, pushback=2500)
    async with served(url, script) as api:
        with pytest.raises(RateLimitError) as raised:
            await api.completions.create(**ALL, stream=stream)
        error = raised.value
    assert (error.status_code, error.type, error.code) == (429, "rate_limit_error", "overloaded")
    assert (error.response.headers["retry-after"], error.response.headers["retry-after-ms"]) == ("3", "2500")


async def test_a_lost_verifier_is_a_503_with_retry_after(url: str) -> None:
    """The verifier recovers between two attempts of the client, which waits for the time of retry-after."""
    script = Script(TOKENS, fails_after=0)
    async with served(url, script, retry=RetryConfig(max_attempts=1)) as api:
        with pytest.raises(InternalServerError) as raised:
            await api.completions.create(**ALL)
        assert (raised.value.status_code, raised.value.code) == (503, "unavailable")
        assert raised.value.response.headers["retry-after"] == "1"
        trying = asyncio.create_task(api.with_options(max_retries=1).completions.create(**ALL))
        await until(lambda: len(script.calls) == 2)
        script.fails_after = None
        found = str((await trying).choices[0].text)
    assert found == REST_TEXT


async def test_without_a_verifier_a_request_is_503_and_a_late_one_504(url: str) -> None:
    async with http_router(url, retry=replace(PATIENT, budget_s=0.3)) as base, client(base) as api:
        with pytest.raises(InternalServerError, match="no verifier of model 'demo' is alive") as raised:
            await api.completions.create(**ALL)
        assert (raised.value.status_code, raised.value.response.headers["retry-after"]) == (503, "1")
    stalling = worker(url, Script(TOKENS, stalls_after=1))
    async with stalling, http_router(url, request_timeout_s=1.0) as base, client(base) as api:
        with pytest.raises(InternalServerError, match=r"not done within 1\.0 s") as raised:
            await api.completions.create(**ALL)
        assert (raised.value.status_code, raised.value.code) == (504, "timeout")


@PATHS
async def test_an_error_in_the_middle_of_a_stream_is_an_event(url: str, path: str) -> None:
    script = Script(TOKENS, fails_after=1)
    async with worker(url, script), http_router(url) as base, httpx.AsyncClient(base_url=base, timeout=30) as api:
        answer = await api.post(path, json=body_of(path) | {"stream": True})
        assert answer.status_code == 200
        first, last, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert json.loads(first)["choices"][0]["finish_reason"] is None
    error = json.loads(last)["error"]
    assert (error["type"], error["code"]) == ("server_error", "unavailable")
    assert "scripted failure" in error["message"]
    assert done == "[DONE]"


@PATHS
async def test_a_stream_that_waits_for_a_verifier_gets_comments(url: str, path: str) -> None:
    script, lines = Script(TOKENS, fails_after=1), list[str]()

    async def read(base: str) -> None:
        async with (
            httpx.AsyncClient(base_url=base, timeout=30) as http,
            http.stream("POST", path, json=body_of(path) | {"stream": True}) as answer,
        ):
            async for line in answer.aiter_lines():
                lines.append(line)

    async with http_router(url, retry=PATIENT, keepalive_interval_s=0.05) as base:
        async with worker(url, script):
            reading = asyncio.create_task(read(base))
            await until(lambda: script.has_failed)
        await until(lambda: lines.count(": waiting for a verifier") >= 2)
        async with worker(url, Script(TOKENS)):
            await reading
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert (
        "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
        == REST_TEXT
    )
    assert choices[-1]["finish_reason"] == "length"


@PATHS
async def test_a_client_that_disconnects_ends_the_wait_for_a_verifier(url: str, path: str) -> None:
    registry = CollectorRegistry()
    telemetry = RouterTelemetry(Telemetry(registry=registry))

    def num_waiting() -> float | None:
        return registry.get_sample_value("eyas_router_waiting_requests")

    async with http_router(url, telemetry=telemetry, retry=PATIENT) as base:
        async with httpx.AsyncClient(base_url=base, timeout=30) as http:
            reading = asyncio.create_task(_read(http, path, body_of(path)))
            await until(lambda: num_waiting() == 1)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: num_waiting() == 0)
