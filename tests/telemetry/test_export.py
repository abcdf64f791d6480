"""How metrics, spans and log lines leave a process, and the environment variables that control it."""

import json
import logging
import urllib.error
import urllib.request
import warnings
from dataclasses import fields

import pytest
from opentelemetry.trace import NoOpTracer
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from eyas.config import TelemetryConfig
from eyas.errors import ConfigError
from eyas.services.local.cluster import free_port
from eyas.telemetry import metrics
from eyas.telemetry.exporters import exposition, serving_metrics, telemetry
from eyas.telemetry.logging import request_log
from eyas.telemetry.metrics import counter, histogram
from eyas.telemetry.tracing import context_of, exports_traces, resource, trace_of, trace_pairs
from tests.support.logs import caught_log
from tests.support.services.promql import ROOT
from tests.support.services.spans import TRACE, Spans

OTEL = (
    "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OTEL:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "traces"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_otel_variables_choose_whether_traces_leave(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], traces: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert exports_traces() == traces


def test_variables_that_ask_for_pushed_metrics_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "none")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    with telemetry(TelemetryConfig(), "router", CollectorRegistry()):
        assert [record.getMessage()[:35] for record in caplog.records] == ["OTEL_METRICS_EXPORTER has no effect"]


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
    ],
)
def test_unsupported_models_are_refused(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=list(environment)[-1]), telemetry(TelemetryConfig(), "router"):
        pass


def test_without_exporters_nothing_starts_or_changes() -> None:
    registry = CollectorRegistry()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with telemetry(TelemetryConfig(), "router", registry) as own:
            assert isinstance(own.tracer, NoOpTracer)
            assert own.registry.get_sample_value("eyas_service_info", {"service": "router", "version": "0.1.0"}) == 1
            assert b"eyas_service_info" in exposition("", registry)[1]
    assert exposition("", registry)[1] == b""


def test_two_services_of_one_process_keep_their_numbers_apart() -> None:
    registry = CollectorRegistry()
    with (
        telemetry(TelemetryConfig(), "verifier", registry) as one,
        telemetry(TelemetryConfig(), "verifier", registry) as two,
    ):
        counter(metrics.VERIFIER_BATCHED_TOKENS, one.registry).inc(3)
        counter(metrics.VERIFIER_BATCHED_TOKENS, two.registry).inc(4)
        assert one.registry.get_sample_value("eyas_verifier_batched_tokens_total") == 3


def test_the_environment_names_the_service_before_eyas_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resource("draft").attributes["service.name"] == "eyas-draft"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.namespace=prod,service.version=9")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    attributes = resource("draft").attributes
    assert (attributes["service.name"], attributes["service.namespace"], attributes["service.version"]) == (
        "mine",
        "prod",
        "9",
    )


def test_names_with_colons_go_out_as_they_are_in_every_format() -> None:
    registry = CollectorRegistry()
    counter(metrics.VLLM_DRAFTS, registry).labels("m").inc()
    for accept in ("", "text/plain", "application/openmetrics-text;version=1.0.0;escaping=underscores"):
        assert b'\nvllm:spec_decode_num_drafts_total{model_name="m"} 1.0\n' in exposition(accept, registry)[1]


def test_metrics_are_served_at_one_path_until_the_port_is_freed() -> None:
    registry, port = CollectorRegistry(), free_port()
    histogram(metrics.VERIFIER_QUEUE_DURATION, registry).observe(0.02, {"trace_id": "a", "span_id": "b"})
    for _ in range(2):
        with serving_metrics("127.0.0.1", port, registry) as bound:
            assert bound == port
            url = f"http://127.0.0.1:{port}"
            request = urllib.request.Request(f"{url}/metrics", headers={"Accept": "application/openmetrics-text"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                [family] = text_string_to_metric_families(answer.read().decode())
            assert [s.exemplar.labels["trace_id"] for s in family.samples if s.exemplar] == ["a"]
            with pytest.raises(urllib.error.HTTPError, match="404") as error:
                urllib.request.urlopen(url, timeout=60)
            error.value.close()


def test_a_port_that_is_taken_is_named() -> None:
    with serving_metrics("127.0.0.1", 0, CollectorRegistry()) as port:
        config = TelemetryConfig(metrics_port=port)
        taken = pytest.raises(ConfigError, match=rf"{port}.*set telemetry\.metrics_port")
        with taken, telemetry(config, "router", CollectorRegistry()):
            pass


@pytest.mark.parametrize("settings", [{"metrics_port": 70000}, {"step_span_ratio": 1.5}])
def test_settings_out_of_range_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        TelemetryConfig(**settings)  # type: ignore[arg-type]


def test_a_trace_context_comes_back_and_nonsense_begins_none() -> None:
    assert trace_pairs([("TraceParent", TRACE[0][1]), ("authorization", "x"), ("grpc-trace-bin", b"\0")]) == TRACE
    spans = Spans()
    span = spans.telemetry.tracer.start_span("child", context_of(TRACE))
    assert trace_of(span)[0][1].split("-")[1] == TRACE[0][1].split("-")[1]
    for nonsense in ((), (("traceparent", "00-x"),), (("traceparent", "é" * 100),)):
        assert spans.telemetry.tracer.start_span("root", context_of(nonsense)).parent is None  # type: ignore[attr-defined]


def test_lines_within_a_request_bear_its_ids() -> None:
    with caught_log("json") as out:
        span = Spans().telemetry.tracer.start_span("request", context_of(TRACE))
        with request_log("", span) as about:
            about.request_id = "r-1"
            logging.getLogger("somewhere").info("inside %d", 1)
        logging.getLogger("somewhere").warning("outside")
    inside, outside = map(json.loads, out.getvalue().splitlines())
    assert inside["request_id"] == "r-1"
    assert inside["trace_id"] == TRACE[0][1].split("-")[1]
    assert inside["span_id"] == f"{span.get_span_context().span_id:016x}"
    assert (inside["message"], inside["level"], inside["logger"]) == ("inside 1", "INFO", "somewhere")
    assert not {"request_id", "trace_id", "span_id"} & set(outside)


def test_the_page_explains_every_telemetry_setting() -> None:
    text = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")
    assert not [field.name for field in fields(TelemetryConfig) if f"`{field.name}`" not in text]
