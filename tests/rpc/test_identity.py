"""Workers accept calls of services that have the shared token or an allowed certificate; health checks stay open."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from eyas.config import DraftClientConfig, PeersConfig, ServerConfig
from eyas.drafters.base import DrafterNeeds
from eyas.errors import ConfigError
from eyas.rpc.channel import Peers
from eyas.rpc.identity import SharedToken
from eyas.rpc.server import RpcServer
from eyas.services.lifecycle import worker_server
from eyas.services.verifier.draft_client import RemoteDrafter
from eyas.v1 import worker_pb2, worker_pb2_grpc
from tests.support.services.authority import Authority, peers
from tests.support.services.scripted_verifier import CALL, RETRY, TOKENS, Script, failure, router, send, worker
from tests.support.services.toy_drafting import ToyDrafter, eventually, serving

TOKEN, OTHER = "0123456789abcdef", "fedcba9876543210"


def token_file(folder: Path, *tokens: str) -> PeersConfig:
    file = folder / "token"
    file.write_text("\n".join(tokens) + "\n")
    return PeersConfig(token_file=str(file))


class Idle(worker_pb2_grpc.WorkerServicer):
    """Answers every probe with nothing."""

    async def Status(self, request: object, context: object) -> worker_pb2.WorkerStatus:  # noqa: N802
        return worker_pb2.WorkerStatus()


@asynccontextmanager
async def idle_worker(own: Peers) -> AsyncIterator[str]:
    config = ServerConfig(reflection=True)
    server = RpcServer(config, own.server_credentials, own.check_metadata, own.check_certificate)
    worker_pb2_grpc.add_WorkerServicer_to_server(Idle(), server.aio)
    address = await server.start(["eyas.v1.Worker"])
    try:
        yield address
    finally:
        await server.stop(0)


async def status(address: str, caller: Peers) -> str:
    """The status of a call, with its details if it fails."""
    async with caller.open_channel(address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Status(worker_pb2.StatusRequest(), metadata=caller.metadata, timeout=10)
        code = await call.code()
        return code.name if code is grpc.StatusCode.OK else f"{code.name}: {await call.details()}"


async def test_a_worker_refuses_calls_without_the_token(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    own, other = Peers(token_file(tmp_path, TOKEN)), Peers(token_file(tmp_path / "other", OTHER))
    async with idle_worker(own) as address:
        assert await status(address, own) == "OK"
        for caller in (Peers(), other):
            answer = await status(address, caller)
            assert answer.startswith("UNAUTHENTICATED: ")
            assert "set peers.token_file or peers.token_env" in answer
            assert TOKEN not in answer


async def test_health_is_open_and_reflection_needs_the_token(tmp_path: Path) -> None:
    own = Peers(token_file(tmp_path, TOKEN))
    async with idle_worker(own) as address, own.open_channel(address) as channel:
        assert await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        # Without a request: a write to a call that is already refused fails with INTERNAL in grpc.aio.
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        assert await reflect(timeout=10).code() is grpc.StatusCode.UNAUTHENTICATED
        call = reflect(metadata=own.metadata, timeout=10)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert "eyas.v1.Worker" in [found.name for found in (await call.read()).list_services_response.service]


async def test_a_refused_call_is_not_read() -> None:
    read: list[int] = []

    async def answer(request: bytes, context: object) -> bytes:
        return b""

    def deserialize(data: bytes) -> bytes:
        read.append(len(data))
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKEN", TOKEN)
        own = Peers(PeersConfig(token_env="TOKEN"))
        server = RpcServer(ServerConfig(), check_metadata=own.check_metadata)
        method = grpc.unary_unary_rpc_method_handler(answer, deserialize)
        server.aio.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Send": method}),))
        server.aio.add_registered_method_handlers("test.Test", {"Send": method})
        address = await server.start([])
        try:
            async with own.open_channel(address) as channel:
                send = channel.unary_unary("/test.Test/Send")
                assert await send(bytes(8 * 2**20)).code() is grpc.StatusCode.UNAUTHENTICATED
                assert read == []
                assert await send(bytes(1024), metadata=own.metadata).code() is grpc.StatusCode.OK
                assert read == [1024]
        finally:
            await server.stop(0)


async def test_a_request_passes_router_and_verifier_with_the_token(url: str, tmp_path: Path) -> None:
    own = Peers(token_file(tmp_path, TOKEN))
    script = Script(TOKENS)
    async with worker(url, script, peers=own) as verifier, router(url, peers=own) as address:
        await send(address, CALL)
        assert (await failure(verifier, CALL))[0] is grpc.StatusCode.UNAUTHENTICATED
    async with worker(url, script, peers=own), router(url) as stranger:
        assert (await failure(stranger, CALL))[0] is grpc.StatusCode.UNAVAILABLE, "the client's key is not at fault"
    hasty = replace(RETRY, budget_s=2.0)
    async with worker(url, script), router(url, peers=own, retry=hasty) as address:
        assert (await failure(address, CALL))[0] is grpc.StatusCode.UNAVAILABLE, "its lease is not signed"
    assert len(script.calls) == 1


def test_a_draft_service_serves_verifiers_with_the_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = Peers(token_file(tmp_path, TOKEN))
    needs = DrafterNeeds(features=True)
    with (
        serving(ToyDrafter(), peers=own) as address,
        closing(RemoteDrafter(address, needs, DraftClientConfig(), peers=own)) as known,
        closing(RemoteDrafter(address, needs, DraftClientConfig())) as stranger,
    ):
        eventually(lambda: known.connected and "set peers.token_file or peers.token_env" in caplog.text)
        assert not stranger.connected


@pytest.mark.parametrize(("host", "warns"), [("0.0.0.0", True), ("node-1", True), ("127.0.0.1", False), ("::1", False)])
async def test_a_worker_open_to_everybody_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, warns: bool
) -> None:
    worker_server(ServerConfig(host), Peers(token_file(tmp_path, TOKEN)))
    assert "OPEN" not in caplog.text
    worker_server(ServerConfig(host), Peers())
    assert (f"OPEN TO EVERYBODY who can reach {host}" in caplog.text) == warns


async def test_a_replaced_token_is_read_without_a_restart(tmp_path: Path) -> None:
    (tmp_path / "caller").mkdir()
    own, caller = Peers(token_file(tmp_path, TOKEN)), Peers(token_file(tmp_path / "caller", OTHER))
    async with idle_worker(own) as address:
        assert (await status(address, caller)).startswith("UNAUTHENTICATED")
        token_file(tmp_path, TOKEN, OTHER)
        assert await status(address, caller) == "OK"
        token_file(tmp_path, OTHER)
        assert await status(address, caller) == "OK"
        token_file(tmp_path, "short")
        assert await status(address, caller) == "OK", "a bad file keeps the previous tokens"


async def test_a_certificate_needs_an_allowed_name(tmp_path: Path) -> None:
    authority = Authority()
    for name in ("worker", "router", "drafter"):
        authority.write(tmp_path / name, *([] if name == "worker" else [f"{name}.eyas"]))
    worker = Peers(peers(tmp_path / "worker", allowed_names=("router.eyas",)))
    async with idle_worker(worker) as address:
        assert await status(address, Peers(peers(tmp_path / "router"))) == "OK"
        refused = await status(address, Peers(peers(tmp_path / "drafter")))
        assert refused.startswith("UNAUTHENTICATED: the client certificate is for 127.0.0.1, drafter.eyas")
        async with Peers(peers(tmp_path / "drafter")).open_channel(address) as channel:
            assert await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot read"), ("\n \n", "holds no token"), ("short", "shorter than 16"), ("t\u00f6ken" * 8, "not ASCII")],
)
def test_an_unusable_token_is_a_clear_mistake(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "token"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        Peers(PeersConfig(token_file=str(file)))


def test_a_missing_variable_is_not_open_access() -> None:
    with pytest.raises(ConfigError, match="environment variable TOKEN holds no token"):
        SharedToken(PeersConfig(token_env="TOKEN"), {})
    with pytest.raises(ConfigError, match="set one of them"):
        PeersConfig(token_file="file", token_env="TOKEN")
    with pytest.raises(ConfigError, match="no client certificate is required"):
        PeersConfig(allowed_names=("router",))
