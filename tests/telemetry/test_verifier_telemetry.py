"""Metrics and spans of the verifier: bounded, and by the way in which a request ends."""

import asyncio
from collections.abc import Sequence

import pytest

from eyas.api.request import Chunk, Request, SamplingParams, VerifyStep
from eyas.config import TelemetryConfig
from eyas.engine.engine import EngineLoad, StepReport
from eyas.errors import Overloaded
from eyas.services.verifier.telemetry import VerifierTelemetry
from tests.support.services.spans import TRACE, Spans

UNSAMPLED = (("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"),)
REQUEST = Request("r", (1, 2, 3), SamplingParams(max_tokens=10, seed=1))
STEP = StepReport(wait=0.001, verify=0.004, num_rows=8)
ROUND = Chunk("r", (5, 6), (True, False), VerifyStep(7, 4, 1))
FIRST = Chunk("r", (4,), (False,), num_cached=2)
LAST = Chunk("r", (9,), (False,), VerifyStep(7, 4, 0), "length")


def run(verifier: VerifierTelemetry, chunks: Sequence[Chunk], trace: tuple[tuple[str, str], ...] = TRACE) -> list[str]:
    """Run a request with one chunk per step; return the traceparents of its verify steps."""
    with verifier.request(REQUEST, trace):
        parents = []
        for number, chunk in enumerate(chunks):
            began = ("r",) if number == 0 else ()
            parents.append(verifier.traceparent("r"))
            verifier.on_step(StepReport(STEP.wait, STEP.verify, STEP.num_rows, began), [chunk])
        return parents


def test_events_of_a_span_are_bounded_and_the_last_are_kept() -> None:
    spans = Spans()
    run(VerifierTelemetry(spans.telemetry, "m"), [FIRST, *[ROUND] * 1000, LAST])
    [decode] = spans.named("decode")
    assert len(decode.events) == 128
    assert decode.events[-1].attributes is not None
    assert decode.events[-1].attributes["eyas.accepted_tokens"] == 0
    assert (decode.attributes or {})["eyas.verify_steps"] == 1001
    assert decode.dropped_events == 0


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, 0), (0.01, 1), (0.25, 10), (1.0, 40)])
def test_a_fraction_of_verify_steps_has_spans_with_the_first(ratio: float, expected: int) -> None:
    spans = Spans(TelemetryConfig(step_span_ratio=ratio))
    parents = run(VerifierTelemetry(spans.telemetry, "m"), [FIRST, *[ROUND] * 40])
    assert sum(map(bool, parents)) == expected == len(spans.named("verify_step"))
    assert not ratio or parents[1]


def test_verify_spans_last_from_draft_request_to_step_end() -> None:
    """A step requests the next trees before telemetry gets its report."""
    spans = Spans(TelemetryConfig(step_span_ratio=1.0))
    verifier = VerifierTelemetry(spans.telemetry, "m")
    with verifier.request(REQUEST, TRACE):
        verifier.on_step(STEP, [FIRST])
        for accepted in (2, 3):
            assert verifier.traceparent("r")
            verifier.on_step(STEP, [Chunk("r", (1,), (False,), VerifyStep(7, 4, accepted - 1))])
    assert [(span.attributes or {}).get("eyas.accepted_tokens") for span in spans.named("verify_step")] == [2, None]


def test_an_unsampled_trace_has_no_spans_but_is_counted() -> None:
    spans = Spans(TelemetryConfig(step_span_ratio=1.0))
    parents = run(VerifierTelemetry(spans.telemetry, "m"), [FIRST, ROUND, ROUND], UNSAMPLED)
    assert not any(parents)
    assert not spans.named("decode")
    assert spans.value("vllm:spec_decode_num_accepted_tokens_total", model_name="m") == 2


def test_a_verifier_counts_trees_tokens_and_depths() -> None:
    spans = Spans()
    plain = Chunk("r", (7,), (False,), VerifyStep(0, 0, 0))
    deep = Chunk("r", (1, 2, 3, 4), (True, True, True, False), VerifyStep(5, 3, 3))
    run(VerifierTelemetry(spans.telemetry, "m"), [FIRST, ROUND, plain, deep])
    assert spans.value("vllm:spec_decode_num_drafts_total", model_name="m") == 2
    assert spans.value("vllm:spec_decode_num_draft_tokens_total", model_name="m") == 12
    per_pos = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [spans.value(per_pos, model_name="m", position=str(i)) for i in range(4)] == [2, 1, 1, None]
    assert spans.value("eyas_verifier_verify_steps_total", kind="plain") == 1
    assert spans.value("eyas_verifier_generated_tokens_total") == 8
    assert spans.value("eyas_verifier_verify_step_tokens_total") == 7
    assert spans.value("eyas_verifier_cached_prompt_tokens_total") == 2
    assert spans.value("eyas_verifier_prompt_tokens_total") == 3


def test_a_preempted_request_reports_its_preemption() -> None:
    spans = Spans()
    verifier = VerifierTelemetry(spans.telemetry, "m")
    with verifier.request(REQUEST, TRACE):
        verifier.on_step(StepReport(began=("r",), num_rows=1), [FIRST])
        verifier.on_step(StepReport(preempted=("r",), num_rows=1), [])
        verifier.on_step(STEP, [LAST])
    assert [event.name for event in spans.named("decode")[0].events] == ["preempted", "verify_step"]
    assert spans.value("eyas_verifier_preemptions_total") == 1


def test_rejections_count_by_reason_queued_ends_have_no_prefill() -> None:
    spans = Spans()
    verifier = VerifierTelemetry(spans.telemetry, "m")
    with pytest.raises(Overloaded), verifier.request(REQUEST, TRACE):
        raise Overloaded("full", 1.0)
    with pytest.raises(asyncio.CancelledError), verifier.request(REQUEST, TRACE):
        raise asyncio.CancelledError
    assert spans.value("eyas_verifier_rejected_requests_total", status="RESOURCE_EXHAUSTED") == 1
    assert spans.value("eyas_verifier_rejected_requests_total", status="CANCELLED") is None
    assert not spans.named("prefill")
    assert [span.status.is_ok for span in spans.named("serve")] == [False, True]


def test_a_failed_step_fails_the_span_of_its_requests() -> None:
    spans = Spans()
    run(VerifierTelemetry(spans.telemetry, "m"), [FIRST, Chunk("r", finish_reason="error", message="broken")])
    assert not spans.named("serve")[0].status.is_ok
    assert spans.value("eyas_verifier_requests_total", status="INTERNAL") == 1


def test_the_load_is_read_at_each_scrape() -> None:
    spans, load = Spans(), [EngineLoad(0, 0, 10, 10, 0)]
    VerifierTelemetry(spans.telemetry, "m").watch(lambda: load[0])
    load[0] = EngineLoad(3, 2, 4, 10, 5, step_seconds=1.5)
    assert spans.value("eyas_verifier_kv_cache_tokens", state="used") == 6
    assert spans.value("vllm:num_requests_waiting", model_name="m") == 2
    assert spans.value("eyas_verifier_step_age_seconds") == 1.5
    assert spans.value("vllm:kv_cache_usage_perc", model_name="m") == 0.6
