"""Malformed messages, drawn by hypothesis, over every gRPC method and HTTP route of running services."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.v1 import draft_pb2, generation_pb2
from tests.fuzz.bodies import Request, changed, malformed_requests
from tests.fuzz.calls import call, drafting_stream, generate_request, speculate_requests
from tests.fuzz.messages import change, chunks_of, malformed
from tests.fuzz.servers import Services, running_services
from tests.fuzz.sockets import HttpConnection
from tests.fuzz.storm import Client, FuzzResult, FuzzSettings, connected, is_http_fine, storm
from tests.support.services.forks import forked_services

NUM_MESSAGES, MAX_CHANGES, MAX_SIZE = 500, 40_000, 2000
METHODS = (
    "router Generation/Generate", "router Generation/ListModels", "verifier Generation/Generate", "verifier Worker/Status",
    "verifier ChunkFeed/Follow", "verifier Health/Check", "draft Draft/Describe", "draft Draft/Speculate",
)  # fmt: skip
TARGET = draft_pb2.TargetInfo(target_fingerprint="a", features_fingerprint="b")


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

    @given(malformed_requests(client.routes))
    def check(request: Request) -> None:
        answer = runner.run(connection.send(request))
        assert is_http_fine(answer), answer

    check()
    runner.run(connection.close())


def fields_of(descriptor: Descriptor, depth: int = 4) -> set[str]:
    """The full names of all fields in a message and the messages inside it."""
    own = {field.full_name for field in descriptor.fields}
    inner = (field.message_type for field in descriptor.fields if depth and field.message_type)
    return own.union(*(fields_of(each, depth - 1) for each in inner))


def touched(before: bytes, after: bytes, descriptor: Descriptor) -> Iterator[str]:
    """The full names of the fields in which two encoded messages differ."""
    for field in descriptor.fields:
        old, new = ([chunk for chunk in chunks_of(data) if chunk.number == field.number] for data in (before, after))
        if old != new:
            yield field.full_name
            if (kind := field.message_type) is not None:
                for inner in new:
                    yield from touched(old[0].data if old else b"", inner.data, kind)


@pytest.mark.nightly
@pytest.mark.parametrize("message", [generate_request(text="a"), *speculate_requests(TARGET, 4)[:1]])
def test_every_field_of_a_message_is_changed(message: generation_pb2.GenerateRequest) -> None:
    rng, example, wanted = random.Random(0), message.SerializeToString(), fields_of(message.DESCRIPTOR)
    for _ in range(MAX_CHANGES):
        data = change(example, message.DESCRIPTOR, rng)
        wanted.difference_update(touched(example, data, message.DESCRIPTOR) if len(data) < MAX_SIZE else ())
        if not wanted:
            break
    assert wanted == set()


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
