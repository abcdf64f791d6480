"""Every server answers health checks and reflection, and maps errors to status codes."""

import asyncio
import gc
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from eyas.config import ServerConfig
from eyas.errors import (
    CheckpointError,
    ConfigError,
    EyasError,
    InvalidRequest,
    InvalidTree,
    Overloaded,
    PermissionDenied,
    RateLimited,
    RequestFailed,
    TimedOut,
    Unavailable,
    UnknownDrafter,
    UnknownModel,
)
from eyas.rpc.channel import open_channel
from eyas.rpc.grpc_private import ClientHasGone
from eyas.rpc.messages import ERROR_KEY, RETRY_KEY
from eyas.rpc.server import LIVE, RpcServer
from eyas.rpc.status import status_error
from eyas.v1 import draft_pb2, draft_pb2_grpc
from tests.fuzz.sockets import call_frames, exchange_frames

NAME = "eyas.v1.Draft"


class Failing(draft_pb2_grpc.DraftServicer):
    """Raises the given error, from a unary and from a streaming method."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def Describe(self, request: Any, context: Any) -> draft_pb2.DescribeResponse:  # noqa: N802
        raise self._error

    async def Speculate(self, request_iterator: Any, context: Any) -> AsyncIterator[draft_pb2.SpeculateResponse]:  # noqa: N802
        await anext(request_iterator)
        yield draft_pb2.SpeculateResponse(step=1)
        raise self._error


class Reading(draft_pb2_grpc.DraftServicer):
    """Reads a stream in a task of its own, and ends with its error."""

    async def Speculate(self, request_iterator: Any, context: Any) -> AsyncIterator[draft_pb2.SpeculateResponse]:  # noqa: N802
        async def read() -> None:
            async for _ in request_iterator:
                pass

        reader = asyncio.create_task(read())
        await asyncio.wait({reader})
        reader.result()
        yield draft_pb2.SpeculateResponse()


@asynccontextmanager
async def serving(
    error: Exception | None = None, servicer: draft_pb2_grpc.DraftServicer | None = None
) -> AsyncIterator[tuple[RpcServer, str, grpc.aio.Channel]]:
    """Run a server; yields it, its address and a channel to it."""
    server = RpcServer(ServerConfig(reflection=True))
    draft_pb2_grpc.add_DraftServicer_to_server(servicer or Failing(error or EyasError()), server.aio)
    address = await server.start([NAME])
    try:
        async with open_channel(address) as channel:
            yield server, address, channel
    finally:
        await server.stop(0)


ERRORS = (
    *(kind("x") for kind in (UnknownModel, Unavailable, ConfigError, CheckpointError, RequestFailed, InvalidTree)),
    *(kind("x") for kind in (UnknownDrafter, TimedOut, PermissionDenied, InvalidRequest, Overloaded)),
    InvalidRequest("x", "structured_outputs"),
    Overloaded("full", 1.25),
    RateLimited("quota", 2.0, {"x-ratelimit-limit-requests": "5"}),
)


@pytest.mark.parametrize("raised", ERRORS, ids=repr)
async def test_an_error_crosses_the_wire_with_all_that_it_says(raised: EyasError) -> None:
    async with serving(raised) as (_, _, channel):
        stub = draft_pb2_grpc.DraftStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.Describe(draft_pb2.DescribeRequest())
        replies = aiter(stub.Speculate(iter([draft_pb2.SpeculateRequest(step=1)])))
        assert (await anext(replies)).step == 1
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            await anext(replies)
        for caught in (unary.value, stream.value):
            error = status_error(caught)
            assert (type(error), str(error), vars(error)) == (type(raised), str(raised), vars(raised))


async def test_a_parameter_that_metadata_cannot_hold_is_left_out() -> None:
    async with serving(InvalidRequest("x", "größe")) as (_, _, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await draft_pb2_grpc.DraftStub(channel).Describe(draft_pb2.DescribeRequest())
        assert vars(status_error(caught.value))["param"] == ""


@pytest.mark.parametrize("name", ["", "EyasError", "Mapping", "PermissionDenied", "no name"])
def test_a_kind_that_does_not_go_with_the_status_is_ignored(name: str) -> None:
    trailers = grpc.aio.Metadata((ERROR_KEY, name))
    error = status_error(grpc.aio.AioRpcError(grpc.StatusCode.INVALID_ARGUMENT, grpc.aio.Metadata(), trailers, "x"))
    assert type(error) is InvalidRequest


@pytest.mark.parametrize("hint", ["soon", "-5", "1e9", "9" * 5000])
def test_a_retry_hint_that_is_no_number_is_ignored(hint: str) -> None:
    trailers = grpc.aio.Metadata((RETRY_KEY, hint))
    error = status_error(grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), trailers, "full"))
    assert isinstance(error, Overloaded)
    assert error.retry_after is None


async def test_an_unexpected_error_is_logged_but_hidden_from_clients(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(KeyError("secret")) as (_, _, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await draft_pb2_grpc.DraftStub(channel).Describe(draft_pb2.DescribeRequest())
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert caught.value.details() == "internal error"
    assert "KeyError: 'secret'" in caplog.text


@pytest.mark.parametrize("method", ["Describe", "Speculate"])
async def test_bytes_that_do_not_decode_are_an_invalid_request(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (_, _, channel):
        path = f"/{NAME}/{method}"
        unary = method == "Describe"
        call = channel.unary_unary(path) if unary else channel.stream_stream(path)
        answer = call(b"\xff\xff\xff") if unary else call(iter([b"\xff\xff\xff"])).read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        expected = f"the 3 bytes of the request are not the message of {path}; encode it as in protos/eyas/v1"
        assert caught.value.details() == expected
    [record] = [record for record in caplog.records if record.name.startswith("eyas.")]
    assert "cannot be decoded" in record.getMessage()
    assert vars(record)["rate_limited"]
    assert not record.exc_info


class Sending(draft_pb2_grpc.DraftServicer):
    """Sends more than a client that reads nothing takes, and notes when its generator ends."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.has_ended = asyncio.Event()

    async def Speculate(self, request_iterator: Any, context: Any) -> AsyncIterator[draft_pb2.SpeculateResponse]:  # noqa: N802
        try:
            while True:
                self.has_begun.set()
                yield draft_pb2.SpeculateResponse(trees=[draft_pb2.Tree(session="s" * 2**16)])
        finally:
            self.has_ended.set()


async def test_an_unread_stream_ends_with_its_call() -> None:
    servicer = Sending()
    async with serving(servicer=servicer) as (_, _, channel):
        gc.disable()
        try:
            call = draft_pb2_grpc.DraftStub(channel).Speculate()
            await servicer.has_begun.wait()
            await asyncio.sleep(0.2)  # until a write waits for the client
            call.cancel()
            async with asyncio.timeout(5):
                await servicer.has_ended.wait()
        finally:
            gc.enable()


async def test_a_refused_message_is_freed_without_a_collection() -> None:
    size, count = 2**20, 12
    async with serving(servicer=Reading()) as (_, _, channel):

        async def send() -> None:
            call: Any = channel.stream_stream("/eyas.v1.Draft/Speculate")()
            await call.write(b"\xff" * size)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

        await send()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(count):
                await send()
            assert tracemalloc.get_traced_memory()[0] < count * size / 3
        finally:
            tracemalloc.stop()
            gc.enable()


@pytest.mark.parametrize("path", [b"/x/\xff", b"/eyas.v1.Draft/Describ\xe8", b"\x80", b"", b"x"])
async def test_a_path_that_is_no_text_does_not_end_the_server(path: bytes) -> None:
    async with serving() as (_, address, channel):
        answer = await exchange_frames(address, call_frames(address, path, b""))
        assert answer.status == "UNIMPLEMENTED"
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.slow
async def test_a_client_that_leaves_during_its_status_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(ClientHasGone()) as (_, _, channel):
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await draft_pb2_grpc.DraftStub(channel).Describe(draft_pb2.DescribeRequest(), timeout=2)
    assert caplog.records == []


async def test_a_peer_that_is_away_is_unavailable() -> None:
    async with serving() as (server, _, channel):
        await server.stop(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await draft_pb2_grpc.DraftStub(channel).Describe(draft_pb2.DescribeRequest())
        assert isinstance(status_error(caught.value), Unavailable)


async def test_health_follows_the_server_and_watches_do_not_delay_stop() -> None:
    async with serving() as (server, _, channel):
        status, stub = health_pb2.HealthCheckResponse, health_pb2_grpc.HealthStub(channel)
        listed = await stub.List(health_pb2.HealthListRequest())
        assert {name: value.status for name, value in listed.statuses.items()} == dict.fromkeys(
            ("", "grpc.health.v1.Health", NAME), status.NOT_SERVING
        ) | {LIVE: status.SERVING}
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=NAME))
        assert (await watch.read()).status == status.NOT_SERVING
        await server.set_serving(True)
        assert (await watch.read()).status == status.SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=NAME))).status == status.SERVING
        await asyncio.wait_for(server.stop(60), timeout=30)
        assert (await watch.read()).status == status.NOT_SERVING
        assert await watch.read() is grpc.aio.EOF  # type: ignore[attr-defined]


async def test_reflection_lists_the_services() -> None:
    async with serving() as (_, _, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for response in stub.ServerReflectionInfo(iter([request])):
            assert NAME in [service.name for service in response.list_services_response.service]


async def test_a_port_in_use_is_a_clear_mistake() -> None:
    async with serving() as (_, address, _):
        port = int(address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"{port}: the port is in use .* set server.port or server.host"):
            await RpcServer(ServerConfig(port=port)).start([])


async def test_long_requests_are_cancelled_before_the_grace_period() -> None:
    async with serving() as (server, _, _):
        ended = asyncio.Event()

        async def end() -> None:
            ended.set()

        server.before_stop(end)
        await server.stop(60)
        assert ended.is_set()


SCRIPT = """
import socket, threading
from eyas.client import Client
from eyas.errors import EyasError

listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=lambda: listener.accept()[0].sendall(b"no TLS"), daemon=True).start()
try:
    Client(f"127.0.0.1:{listener.getsockname()[1]}", tls=True).models()
except EyasError as error:
    print(error)
"""


def test_a_failing_client_writes_nothing_but_its_error() -> None:
    """gRPC logs a failed handshake by itself."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert "handshake failed" in ended.stdout
    assert ended.stderr == ""
