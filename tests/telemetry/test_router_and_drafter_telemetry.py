"""Metrics, spans and logs of router and draft service."""

import asyncio
from dataclasses import replace

import grpc
import pytest
import torch

from eyas.api.outputs import TextChunk, Totals
from eyas.api.request import Chunk, Request, SamplingParams
from eyas.config import TelemetryConfig
from eyas.drafters.base import Draft, DraftContext
from eyas.errors import InvalidRequest, Overloaded, Unavailable
from eyas.protocol.commit import Commit, NoiseKey, ResyncRequired, TreeBudget
from eyas.protocol.tree import DraftTree
from eyas.rpc.messages import NO_DRAFTER, GenerateCall, Load, ModelInfo
from eyas.services.discovery.redis_registry import Lease
from eyas.services.draft.telemetry import DraftTelemetry
from eyas.services.router.dispatch.routing import Pair
from eyas.services.router.telemetry import Arrival, RouterTelemetry
from tests.support.services.spans import TRACE, Spans

FINISH_REASONS = "gen_ai.response.finish_reasons"
REQUEST = Request("r", (1, 2, 3), SamplingParams(max_tokens=10, seed=1))


def router_status(error: BaseException) -> grpc.StatusCode:
    """What a router counts for a request that ended so."""
    spans = Spans()
    with pytest.raises(type(error)), RouterTelemetry(spans.telemetry).request(GenerateCall(REQUEST)):
        raise error
    [status] = [s for s in grpc.StatusCode if spans.value("eyas_router_requests_total", model="", status=s.name)]
    return status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("no"), grpc.StatusCode.INVALID_ARGUMENT),
        (Overloaded("no"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Unavailable("no"), grpc.StatusCode.UNAVAILABLE),
        (TimeoutError(), grpc.StatusCode.DEADLINE_EXCEEDED),
        (asyncio.CancelledError(), grpc.StatusCode.CANCELLED),
        (GeneratorExit(), grpc.StatusCode.CANCELLED),
        (ZeroDivisionError(), grpc.StatusCode.INTERNAL),
    ],
)
def test_requests_are_counted_by_how_they_end(error: BaseException, status: grpc.StatusCode) -> None:
    assert router_status(error) is status


def test_attempts_retries_and_lost_verifiers_are_counted() -> None:
    spans = Spans()
    router, model = RouterTelemetry(spans.telemetry), ModelInfo("m", "f", 10, 10, features_fingerprint="none")
    alone = Lease("verifier", "v:2", "k", replace(model, features_fingerprint=""))  # drafts itself, or not at all
    verifier, drafter = Lease("verifier", "v:1", "i", model), Lease("draft", "d:1", "j", model)
    call = GenerateCall(REQUEST, trace=TRACE)
    with pytest.raises(Unavailable), router.upstream_request(call, Pair(verifier, drafter), 0):
        raise Unavailable("gone")
    with router.upstream_request(call, Pair(verifier), 1) as sent:
        assert sent.trace != TRACE
        assert sent.trace[0][1].split("-")[1] == TRACE[0][1].split("-")[1]
    for asked, pair in ((GenerateCall(REQUEST, drafter=NO_DRAFTER), Pair(verifier)), (call, Pair(alone))):
        with router.upstream_request(asked, pair, 0):
            pass
    assert spans.value("eyas_router_upstream_requests_total", status="UNAVAILABLE") == 1
    assert spans.value("eyas_router_upstream_requests_total", status="OK") == 3
    assert spans.value("eyas_router_upstream_retries_total") == 1
    assert spans.value("eyas_router_upstream_requests_without_drafter_total") == 1


def test_attributes_are_of_the_conventions_or_of_eyas() -> None:
    spans = Spans()
    router, model = RouterTelemetry(spans.telemetry), ModelInfo("m", "f", 10, 10)
    verifier = Lease("verifier", "10.0.0.1:50051", "i", model)
    asked = GenerateCall(REQUEST, model="m")
    with router.request(asked) as observed:
        call = observed.set_call(asked)
        with router.upstream_request(call, Pair(verifier, replace(verifier, role="draft")), 0):
            pass
        with router.upstream_request(call, Pair(verifier), 1):
            pass
    found = [span.attributes or {} for name in ("text_completion m", "upstream_request") for span in spans.named(name)]
    assert len(found) == 3
    names = set().union(*found)
    assert {name.split(".")[0] for name in names} == {"gen_ai", "eyas", "server"}
    assert all(value not in ("", ()) for attributes in found for name, value in attributes.items() if name != FINISH_REASONS)
    assert names.isdisjoint({"gen_ai.conversation.id", "gen_ai.request.choice.count"})
    assert (found[1]["server.address"], found[1]["server.port"]) == ("10.0.0.1", 50051)
    assert ("eyas.drafter" in found[1], "eyas.drafter" in found[2]) == (True, False)


def test_a_request_that_is_no_call_has_no_settings() -> None:
    spans = Spans()
    router = RouterTelemetry(spans.telemetry)
    with pytest.raises(InvalidRequest), router.arrived(Arrival("r", TRACE), "chat"):
        raise InvalidRequest("no")
    attributes = spans.named("chat")[0].attributes or {}
    assert attributes["eyas.request.id"] == "r"
    assert not [name for name in attributes if name.startswith("gen_ai.request.") and name != "gen_ai.request.model"]


def test_a_session_is_the_conversation_of_its_requests() -> None:
    spans = Spans()
    call = GenerateCall(replace(REQUEST, session="s"), model="m")
    with RouterTelemetry(spans.telemetry).request(call) as observed:
        observed.set_call(call)
    assert (spans.named("text_completion m")[0].attributes or {})["gen_ai.conversation.id"] == "s"


def test_trace_context_reaches_the_verifier_without_an_exporter() -> None:
    router = RouterTelemetry()
    with router.request(GenerateCall(REQUEST, trace=TRACE)) as observed:
        assert observed.set_call(GenerateCall(REQUEST, model="m", trace=TRACE)).trace == TRACE


def test_prompts_and_outputs_are_traced_only_if_enabled(caplog: pytest.LogCaptureFixture) -> None:
    end = TextChunk(Chunk("r", (1,), finish_reason="stop"), "marzipan", totals=Totals(3, 1))
    for asked in (False, True):
        caplog.clear()
        spans = Spans(TelemetryConfig(log_prompts=asked))
        with (
            caplog.at_level("INFO"),
            RouterTelemetry(spans.telemetry).request(GenerateCall(REQUEST, "swordfish")) as observed,
        ):
            observed.set_call(GenerateCall(REQUEST, model="m"))
            observed.add(end)
        [span] = spans.named("text_completion m")
        for word in ("swordfish", "marzipan"):
            assert (word in str(span.attributes)) is (word in caplog.text) is asked


def test_a_drafter_counts_commits_by_result_and_continues_traces() -> None:
    spans = Spans()
    telemetry = DraftTelemetry(spans.telemetry)
    telemetry.watch(lambda: [Load(2, 1), Load(1)])

    def context(session: str, nodes: int, traceparent: str = "") -> DraftContext:
        features = torch.zeros(0, 4)
        return Commit(session, 0, 0, (1,), features, NoiseKey(0), TreeBudget(nodes, nodes - 1), traceparent=traceparent)

    contexts = [context("a", 8, TRACE[0][1]), context("b", 8), context("c", 1), context("d", 8), context("e", 8, "nonsense")]
    tree = DraftTree.of((1, 2, 3), (0, 0, 1), (0.0, -0.1, -0.2))
    drafts: list[Draft] = [tree, ResyncRequired("b", 0, 4), DraftTree.root_only(1), None, tree]
    telemetry.drafted(contexts, drafts, 10**9, 10**9 + 5_000_000)
    outcomes = ("tree", "resync", "no_tree", "dropped")
    assert [spans.value("eyas_draft_commits_total", outcome=name) for name in outcomes] == [2, 1, 1, 1]
    assert spans.value("eyas_draft_drafted_tokens_total") == 4
    assert spans.value("eyas_draft_new_tokens_total") == 3
    assert spans.value("eyas_draft_sessions") == 3
    first = spans.named("draft")[0]
    assert first.parent is not None
    assert f"{first.parent.span_id:016x}" == TRACE[0][1].split("-")[2]
    assert (first.start_time, first.end_time) == (10**9, 10**9 + 5_000_000)
