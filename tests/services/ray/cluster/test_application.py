"""The whole application on a local Ray: its answers, its traces, and how its pools scale."""

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from eyas import SamplingParams
from eyas.api.request import Request
from eyas.errors import InvalidRequest, Overloaded
from eyas.rpc import convert
from eyas.rpc.channel import open_sync_channel
from eyas.rpc.messages import NO_DRAFTER, GenerateCall
from eyas.v1.generation_pb2_grpc import GenerationStub
from tests.services.ray.cluster.application import MAX_MODEL_LEN, RayApplication, running_application, write_model
from tests.services.ray.cluster.load import Asked, plainly, scale_out_and_in
from tests.services.ray.cluster.traces import PARTS, SERVICES, torn
from tests.support.services.collector import Received
from tests.support.services.grpc_client import generate
from tests.support.strategies import unchecked

pytest.importorskip("ray.serve", reason="needs Ray: pip install -e '.[ray]'")

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

TRACED = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
CALLER = "00f067aa0ba902b7"
ENDLESS = SamplingParams(max_tokens=MAX_MODEL_LEN - 100, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def asked(model: Path) -> list[Asked]:
    return plainly(model, num_requests=8, max_tokens=48)


@pytest.fixture(scope="module")
def application(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayApplication]:
    with running_application(tmp_path_factory.mktemp("ray"), model) as running:
        yield running


def by_grpc(application: RayApplication, headers: Mapping[str, str]) -> None:
    """A drafted request with this metadata."""
    call = convert.generate_call_to_proto(GenerateCall(Request("", (), TRACED), prompt_text="def f():"))
    with open_sync_channel(application.grpc) as channel:
        list(GenerationStub(channel).Generate(call, timeout=250, metadata=tuple(headers.items())))


def by_http(application: RayApplication, headers: Mapping[str, str]) -> None:
    """The same by HTTP."""
    body = {"prompt": "def f():", "max_tokens": TRACED.max_tokens, "temperature": 0, "ignore_eos": True}
    assert httpx.post(f"{application.http}/v1/completions", json=body, headers=headers, timeout=250).status_code == 200


def test_http_and_grpc_output_equals_plain_decoding(application: RayApplication, asked: list[Asked]) -> None:
    for one in asked[:2]:
        outs = [generate(application.grpc, one.prompt, one.sampling, drafter) for drafter in ("", NO_DRAFTER)]
        assert [tuple(out.token_ids) for out in outs] == [one.expected] * 2
        assert [out.stats.num_drafted > 0 for out in outs] == [True, False]
        body = {
            "prompt": list(one.prompt), "max_tokens": one.sampling.max_tokens, "seed": one.sampling.seed,
            "temperature": one.sampling.temperature, "ignore_eos": True,
        }  # fmt: skip
        whole = httpx.post(f"{application.http}/v1/completions", json=body, timeout=250).json()
        streamed = httpx.post(f"{application.http}/v1/completions", json=body | {"stream": True}, timeout=250)
        assert whole["choices"][0]["text"] == outs[0].text
        assert streamed.text.count("data: ") > 3
        assert streamed.text.endswith("data: [DONE]\n\n")


def test_a_rejected_request_has_the_status_of_its_error(application: RayApplication) -> None:
    with pytest.raises(InvalidRequest, match="temperature is -1"):
        generate(application.grpc, "a", unchecked(SamplingParams(), temperature=-1.0))
    assert httpx.post(f"{application.http}/v1/completions", json={"prompt": "a", "n": 0}).status_code == 400


def test_a_grpc_rejection_carries_retry_after(application: RayApplication) -> None:
    """Serve itself keeps metadata of errors to itself."""
    refused = threading.Event()

    def ask(number: int) -> Overloaded | None:
        try:
            generate(application.grpc, "def f():", ENDLESS, enough=lambda out: refused.is_set())
        except Overloaded as error:
            refused.set()
            return error
        return None

    with ThreadPoolExecutor(14) as clients:
        errors = [error for error in clients.map(ask, range(14)) if error]
    assert errors
    assert all(0.1 <= (error.retry_after or 0) <= 60 for error in errors)
    application.wait(lambda: not busy(application), 250, "requests go on")


@pytest.mark.parametrize("call", [by_grpc, by_http])
def test_a_request_is_one_trace_through_all_services(
    application: RayApplication, call: Callable[[RayApplication, Mapping[str, str]], None]
) -> None:
    trace = uuid.uuid4().hex
    call(application, {"traceparent": f"00-{trace}-{CALLER}-01"})

    def ours() -> list[Received]:
        return application.collector.trace(trace)

    seen = PARTS | {"text_completion"}
    application.wait(lambda: {span.name.split()[0] for span in ours()} == seen, 250, "parts of the trace are missing")
    application.wait(lambda: not torn(ours(), CALLER), 250, "the trace is torn")
    [root] = [span for span in ours() if span.name == "text_completion demo"]
    assert root.span.parent_span_id.hex() == CALLER
    assert {span.service for span in ours()} == SERVICES


def test_grpc_clients_that_disconnect_cancel_their_requests(application: RayApplication) -> None:
    def leave(after: int) -> int:
        enough = [lambda out: len(out.chunks) > after, lambda out: len(out.chunks) > after and busy(application)]
        return len(generate(application.grpc, "def f():", ENDLESS, enough=enough[after % 2]).token_ids)

    with ThreadPoolExecutor(4) as clients:
        assert max(clients.map(leave, range(12))) < ENDLESS.max_tokens
    application.wait(lambda: not busy(application), 250, "requests go on")
    assert application.ready()


def test_an_http_client_that_disconnects_cancels_its_request(application: RayApplication) -> None:
    body = {"prompt": "def f():", "max_tokens": ENDLESS.max_tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{application.http}/v1/completions", json=body, timeout=250) as answer:
        events = answer.iter_lines()
        while not busy(application):
            next(events)
    application.wait(lambda: not busy(application), 250, "the request goes on")


def busy(application: RayApplication) -> int:
    """Requests in the verifiers, as their leases say."""
    return sum(lease.load.num_running + lease.load.num_waiting for lease in application.verifiers())


def test_verifiers_scale_with_load_without_a_failed_request(application: RayApplication, asked: list[Asked]) -> None:
    outcome = scale_out_and_in(application, asked)
    assert outcome.failures == []
    assert outcome.num_drafted > 0
    application.wait(lambda: not torn(application.collector.spans, CALLER), 250, "traces are torn")
