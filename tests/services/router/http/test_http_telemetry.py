"""Metrics, spans and log lines of HTTP requests; they equal those of gRPC requests."""

import asyncio
import json
from collections import Counter

import pytest

from eyas.config import LimitsConfig, RetryConfig
from eyas.services.router.auth.keys import ApiKeys, plain_keys
from eyas.services.router.telemetry import RouterTelemetry
from tests.support.logs import caught_log
from tests.support.services.http_router import ALL, CHAT, TOKENS, Script, get, http_router, post, worker
from tests.support.services.spans import TRACE, Spans

TRACE_ID = TRACE[0][1].split("-")[1]
PATHS = [("/v1/completions", ALL, "text_completion"), ("/v1/chat/completions", CHAT, "chat")]


@pytest.mark.parametrize(("path", "body", "operation"), PATHS)
@pytest.mark.parametrize("change", [{}, {"stream": True}, {"n": 2, "temperature": 0.5}])
async def test_a_response_is_one_span_in_the_client_trace(
    url: str, path: str, body: dict[str, object], operation: str, change: dict[str, object]
) -> None:
    spans = Spans()
    async with worker(url, Script(TOKENS)), http_router(url, telemetry=RouterTelemetry(spans.telemetry)) as base:
        answer = await post(base, path, body | change, headers={"traceparent": TRACE[0][1]})
        assert answer.status_code == 200
    [request] = spans.named(f"{operation} demo")
    attempts = spans.named("upstream_request")
    assert len(attempts) == change.get("n", 1)
    assert request.parent is not None
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE_ID, TRACE[0][1].split("-")[2])
    assert {attempt.parent.span_id for attempt in attempts if attempt.parent} == {request.context.span_id}
    assert spans.value("eyas_router_requests_total", model="demo", status="OK") == 1


@pytest.mark.parametrize(("path", "body", "operation"), PATHS)
@pytest.mark.parametrize(("change", "status"), [({}, "UNAVAILABLE"), ({"model": "made up"}, "NOT_FOUND")])
async def test_a_request_that_is_rejected_before_it_runs_counts(
    url: str, path: str, body: dict[str, object], operation: str, change: dict[str, object], status: str
) -> None:
    """An alert on failing requests needs rejected HTTP requests too."""
    spans = Spans()
    telemetry, retry = RouterTelemetry(spans.telemetry), RetryConfig(budget_s=0.2)  # no verifier ever comes
    async with http_router(url, telemetry=telemetry, retry=retry) as base:
        await post(base, path, body | change, headers={"traceparent": TRACE[0][1]})
    assert spans.value("eyas_router_requests_total", model="", status=status) == 1
    [span] = spans.named(operation)
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert (span.attributes or {})["error.type"] == status


async def test_a_request_that_cannot_fit_counts_once(url: str) -> None:
    spans = Spans()
    async with worker(url, Script(TOKENS)), http_router(url, telemetry=RouterTelemetry(spans.telemetry)) as base:
        answer = await post(base, "/v1/completions", ALL | {"prompt": ["ok", "long"], "max_tokens": 10**6})
        assert answer.status_code == 400
    assert spans.value("eyas_router_requests_total", model="", status="INVALID_ARGUMENT") == 1


async def test_every_response_is_counted_by_route_and_status(url: str) -> None:
    spans, key = Spans(), {"Authorization": "Bearer one"}
    requests = [
        ("/v1/completions", ALL, {}, 401),
        ("/v1/completions", ALL, key, 200),
        ("/v1/completions", ALL | {"stream": True}, key, 200),
        ("/v1/completions", {"prompt": 5}, key, 400),
        ("/v1/completions", ALL | {"prompt": "a" * LimitsConfig().max_request_bytes}, key, 413),
        ("/v1/chat/completions", ALL, key, 400),
        ("/v1/models/made/up", ALL, key, 405),
        ("/v1/made/up", ALL, key, 404),
        ("/made/up", ALL, key, 404),
    ]

    async def run() -> None:
        telemetry, keys = RouterTelemetry(spans.telemetry), ApiKeys(plain_keys(["one"], "test"))
        async with worker(url, Script(TOKENS)), http_router(url, telemetry=telemetry, keys=keys) as base:
            for path, body, headers, status in requests:
                assert (await post(base, path, body, headers=headers)).status_code == status
            await get(base, "/live")

    await run()
    routes = [path if "made" not in path else "/v1/models/{name:path}" if "models" in path else "" for path, *_ in requests]
    expected = Counter(zip(routes, (str(status) for *_, status in requests), strict=True)) | {("/live", "200"): 1}
    counted = {
        labels: spans.value(
            "http_server_request_duration_seconds_count",
            http_request_method="GET" if labels[0] == "/live" else "POST",
            http_route=labels[0],
            http_response_status_code=labels[1],
        )
        for labels in expected
    }
    assert counted == expected


async def test_a_request_begins_before_it_waits_for_a_verifier(url: str) -> None:
    spans, waited_s = Spans(), 0.3
    async with http_router(url, telemetry=RouterTelemetry(spans.telemetry)) as base:
        answer = asyncio.create_task(post(base, "/v1/completions", ALL))
        await asyncio.sleep(waited_s)
        async with worker(url, Script(TOKENS)):
            assert (await answer).status_code == 200
    labels = {"gen_ai_operation_name": "text_completion", "gen_ai_provider_name": "eyas", "gen_ai_request_model": "demo"}
    first_s = spans.value("gen_ai_server_time_to_first_token_seconds_sum", **labels)
    whole_s = spans.value("gen_ai_server_request_duration_seconds_sum", **labels, error_type="")
    [span] = spans.named("text_completion demo")
    assert span.end_time is not None
    assert span.start_time is not None
    assert first_s is not None
    assert whole_s is not None
    assert min(first_s, whole_s, (span.end_time - span.start_time) / 1e9) > 0.9 * waited_s


@pytest.mark.parametrize("stream", [False, True])
async def test_every_log_line_of_a_request_has_its_id_and_trace(url: str, stream: bool) -> None:
    """Also those in the middle and at the end, which other tasks write."""
    dying, telemetry = Script(TOKENS, fails_after=2), RouterTelemetry(Spans().telemetry)
    with caught_log("json") as log:
        async with (
            worker(url, dying, free_kv_tokens=99_999),
            worker(url, Script(TOKENS)),
            http_router(url, telemetry=telemetry) as base,
        ):
            headers = {"traceparent": TRACE[0][1], "x-request-id": "mine"}
            await post(base, "/v1/completions", ALL | {"stream": stream}, headers=headers)
    assert len(dying.calls) == 1
    lines = [line for line in map(json.loads, log.getvalue().splitlines()) if line["message"].startswith("request ")]
    assert [line["level"] for line in lines] == ["WARNING", "INFO"]
    assert {(line.get("request_id"), line.get("trace_id")) for line in lines} == {("cmpl-mine", TRACE_ID)}
