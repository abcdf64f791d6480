"""Malformed messages, drawn by hypothesis, over every gRPC method and HTTP route of running services."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.bodies import Request, changed, malformed_requests
from tests.fuzz.calls import call, drafting_stream
from tests.fuzz.messages import malformed
from tests.fuzz.servers import Services, running_services
from tests.fuzz.sockets import HttpConnection
from tests.fuzz.storm import Client, FuzzResult, FuzzSettings, connected, is_http_fine, storm
from tests.support.services.forks import forked_services

NUM_MESSAGES, MAX_CHANGES = 250, 40_000
METHODS = (
    "router Generation/Generate", "router Generation/ListModels", "verifier Generation/Generate", "verifier Worker/Status",
    "verifier ChunkFeed/Follow", "verifier Health/Check", "draft Draft/Describe", "draft Draft/Speculate",
)  # fmt: skip


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    with forked_services(), running_services(folder) as services:
        yield services


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """An event loop that goes on between the messages of a test."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def client(services: Services, runner: asyncio.Runner) -> Iterator[Client]:
    connecting = connected(services)
    yield runner.run(connecting.__aenter__())
    runner.run(connecting.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def result(services: Services, client: Client, runner: asyncio.Runner) -> FuzzResult:
    """The end of a short storm."""
    return runner.run(storm(services, FuzzSettings(NUM_MESSAGES, at_once=16)))


def test_no_answer_is_a_servers_fault(result: FuzzResult) -> None:
    assert result.num_messages >= NUM_MESSAGES
    assert result.findings == []
    assert result.tracebacks == []


def test_valid_requests_among_malformed_ones_are_right(result: FuzzResult) -> None:
    assert result.num_probes > 0
    assert result.num_drafted > 0
    assert result.num_wrong == 0


def test_malformed_messages_leave_nothing_behind(result: FuzzResult) -> None:
    assert result.unreturned == {"verifier": 0, "draft": 0, "router": 0}


@pytest.mark.parametrize("label", METHODS)
def test_a_malformed_message_gets_a_fitting_status(client: Client, runner: asyncio.Runner, label: str) -> None:
    method = next(method for method in client.methods if method.label == label)
    channel = client.channels[method.role]

    @settings(max_examples=25)
    @given(st.lists(malformed(method.examples, method.request), min_size=1, max_size=3))
    def check(messages: list[bytes]) -> None:
        if label.endswith("Speculate"):
            answers = runner.run(drafting_stream(channel, method, messages))
        else:
            answers = [runner.run(call(channel, method, message)) for message in messages]
        assert [answer for answer in answers if not answer.is_fine] == []

    check()


def test_a_malformed_http_request_is_no_fault_of_ours(services: Services, client: Client, runner: asyncio.Runner) -> None:
    connection = HttpConnection(services.http)

    @settings(max_examples=25)
    @given(malformed_requests(client.routes))
    def check(request: Request) -> None:
        answer = runner.run(connection.send(request))
        assert is_http_fine(answer), answer

    check()
    runner.run(connection.close())


@pytest.mark.nightly
def test_every_field_of_a_body_is_changed(client: Client) -> None:
    for route in (route for route in client.routes if route.example is not None):
        rng, wanted = random.Random(0), set(route.properties)
        for _ in range(MAX_CHANGES):
            body = changed(route.example, route.schema, route.definitions, rng)
            values = body if isinstance(body, dict) else {}
            wanted -= {name for name, value in values.items() if name not in route.example or value != route.example[name]}
            if not wanted:
                break
        assert wanted == set()
