"""Telemetry of a cluster of processes: one trace per request, every metric, and logs that join them."""

import json

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.support.services.collector import Received, plain
from tests.support.services.promql import MISSING, ROOT, alert_rules, dashboard_queries, names
from tests.telemetry.cluster.recording import CALLER, HTTP_CALLER, HTTP_TRACE_ID, SECRET, TRACE_ID, Watched

ENGINE_SPANS = {"queue", "prefill", "decode"}


def named(spans: list[Received], name: str) -> Received:
    found = [span for span in spans if span.name == name]
    assert len(found) == 1, [span.name for span in spans]
    return found[0]


def test_tracing_does_not_change_the_tokens(run: Watched) -> None:
    assert len(run.speculative) == 48
    assert run.speculative == run.plain


def test_one_trace_goes_from_the_client_through_all_services(run: Watched) -> None:
    spans = run.collector.trace(TRACE_ID)
    parents = {span.span.span_id: span.span.parent_span_id for span in spans}
    request, attempt, serve = (named(spans, name) for name in ("text_completion demo", "upstream_request", "serve"))
    assert request.span.parent_span_id.hex() == CALLER[1].split("-")[2]
    assert attempt.span.parent_span_id == request.span.span_id
    assert serve.span.parent_span_id == attempt.span.span_id
    assert {span.name for span in spans if span.span.parent_span_id == serve.span.span_id} == ENGINE_SPANS
    rounds = {span.span.span_id for span in spans if span.name == "verify_step"}
    assert {parents[span_id] for span_id in rounds} == {named(spans, "decode").span.span_id}
    drafts = [span for span in spans if span.name == "draft"]
    assert drafts
    assert {span.span.parent_span_id for span in drafts} <= rounds
    assert {span.service for span in drafts} == {"eyas-draft"}
    assert {span.service for span in (request, attempt)} == {"eyas-router"}
    assert {span.service for span in (serve, named(spans, "decode"))} == {"eyas-verifier"}


def test_one_trace_goes_from_an_http_client_through_all_services(run: Watched) -> None:
    assert run.web["completion_tokens"] == 48
    spans = run.collector.trace(HTTP_TRACE_ID)
    request, attempt, serve = (named(spans, name) for name in ("text_completion demo", "upstream_request", "serve"))
    assert request.span.parent_span_id.hex() == HTTP_CALLER["traceparent"].split("-")[2]
    assert (attempt.span.parent_span_id, serve.span.parent_span_id) == (request.span.span_id, attempt.span.span_id)
    assert {span.name for span in spans if span.span.parent_span_id == serve.span.span_id} == ENGINE_SPANS
    assert {span.service for span in spans} == {"eyas-router", "eyas-verifier", "eyas-draft"}
    assert request.attributes["eyas.request.id"] == "cmpl-web"
    lines = [json.loads(line) for line in run.logs["router"] if line.startswith("{")]
    [ended] = [line for line in lines if line.get("request_id") == "cmpl-web"]
    assert (ended["trace_id"], ended["status"]) == (HTTP_TRACE_ID, "OK")


def test_spans_lie_within_their_parents(run: Watched) -> None:
    """On one machine the clocks agree; a draft that came late may end after its round."""
    spans = {span.span.span_id: span.span for span in run.collector.trace(TRACE_ID)}
    for span in spans.values():
        parent = spans.get(span.parent_span_id)
        if parent is not None and span.name != "draft":
            assert parent.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= parent.end_time_unix_nano


def test_verify_steps_are_events_of_the_decode_span(run: Watched) -> None:
    decode = named(run.collector.trace(TRACE_ID), "decode")
    rounds = [plain(event.attributes) for event in decode.span.events if event.name == "verify_step"]
    assert len(rounds) == decode.attributes["eyas.verify_steps"]
    assert sum(step["eyas.accepted_tokens"] + 1 for step in rounds) + 1 == len(run.speculative)
    drafted = [step for step in rounds if step["eyas.drafted_tokens"]]
    assert drafted
    for step in drafted:
        assert step["eyas.verify_ms"] > 0
        assert 0 < step["eyas.draft_ms"] <= step["eyas.round_trip_ms"]
        assert step["eyas.draft_wait_ms"] <= step["eyas.round_trip_ms"] + step["eyas.verify_ms"]


def test_the_request_span_has_parameters_and_results(run: Watched) -> None:
    attributes = named(run.collector.trace(TRACE_ID), "text_completion demo").attributes
    assert (attributes["gen_ai.usage.output_tokens"], attributes["gen_ai.request.temperature"]) == (48, 0.8)
    assert attributes["eyas.accepted_tokens"] + attributes["eyas.verify_steps"] + 1 == 48
    assert attributes["eyas.request.id"] == "drafted"


def test_a_refused_request_is_a_failed_span_and_counts(run: Watched) -> None:
    assert run.refusal is not None
    spans = [span for span in run.collector.spans if span.attributes.get("eyas.request.id") == "refused"]
    assert [span.attributes["error.type"] for span in spans] == [run.refusal.name] == ["INVALID_ARGUMENT"]
    assert 'status="INVALID_ARGUMENT"' in run.metrics["router"]


def test_metrics_of_dashboards_and_alerts_exist_after_a_run(run: Watched) -> None:
    there = {
        sample.name
        for text in run.metrics.values()
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    queries = [*dashboard_queries(), *((rule["alert"], rule["expr"]) for rule in alert_rules())]
    assert not {where: missing for where, query in queries if (missing := names(query) - there)}


def test_a_real_prometheus_answers_every_query(run: Watched) -> None:
    if run.results is None:
        pytest.skip(MISSING.format("prometheus"))
    empty = {where for where, query in dashboard_queries() if not run.results[query]}
    assert not empty
    assert not {rule["alert"] for rule in alert_rules() if run.results[rule["expr"]]}, "alerts fire in a healthy run"


def test_histograms_have_trace_exemplars(run: Watched) -> None:
    families = text_string_to_metric_families(run.metrics["router"])
    exemplars = [sample.exemplar for family in families for sample in family.samples if sample.exemplar]
    assert exemplars
    assert {exemplar.labels["trace_id"] for exemplar in exemplars} <= {
        span.span.trace_id.hex() for span in run.collector.spans
    }


def test_prompts_are_not_logged(run: Watched) -> None:
    word = SECRET.split("_")[2]
    assert not [name for name, lines in run.logs.items() if any(word in line for line in lines)]
    assert not [span for span in run.collector.spans if word in str(span.span)]
    assert not [name for name, text in run.metrics.items() if word in text]


def documented(heading: str) -> set[str]:
    """The names that begin the rows of a table or the entries of a list of docs/telemetry.md."""
    section = (
        (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8").partition(f"### {heading}\n")[2].partition("\n#")[0]
    )
    rows = {line.split("`")[1] for line in section.splitlines() if line.startswith("| `")}
    return rows | {name for entry in section.split("\n- ")[1:] for name in entry.split(" (")[0].split("`")[1::2]}


def test_the_page_lists_exactly_the_emitted_spans_and_attributes(run: Watched) -> None:
    spans = run.collector.spans
    assert {span.name.split()[0] for span in spans} == documented("Spans")
    events = [event for span in spans for event in span.span.events]
    assert {event.name for event in events} == documented("Events") - {"preempted"}
    attributes = {key for span in spans for key in span.attributes} | {
        key for event in events for key in plain(event.attributes)
    }
    unasked = {"gen_ai.conversation.id", "gen_ai.request.choice.count"}  # no request has a session, or several completions
    assert attributes == documented("Attributes") - {"eyas.prompt", "eyas.completion"} - unasked
