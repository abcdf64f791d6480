"""The router's servers over TLS: options of the `eyas` command, and certificates that change while they serve."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import Result
from typer.testing import CliRunner

from eyas.cli.main import app
from eyas.config import LimitsConfig, ServerConfig, TlsConfig
from eyas.rpc.admission import Admission
from eyas.rpc.server import RpcServer
from eyas.services.router.auth.keys import ApiKeys, plain_keys
from eyas.services.router.grpc_server import server_credentials
from eyas.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from tests.support.services.authority import Authority, tls_config
from tests.support.services.http_router import echo, http_server
from tests.support.services.scripted_verifier import TOKENS, Script, ScriptedVerifier, until

NAME = "llm.example.com"
HOST = "127.0.0.1"


@pytest.mark.parametrize("kind", ["http", "grpc"])
async def test_half_done_handshakes_count_and_end_soon(tmp_path: Path, kind: str) -> None:
    """The first two clients send nothing. Further ones are refused until both handshakes have timed out."""
    Authority().write(tmp_path, NAME)
    async with bounded_server(kind, tls_config(tmp_path), LimitsConfig(max_connections=2, header_timeout_s=1.0)) as address:
        host, port = address.rsplit(":", 1)
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
        trusting.set_alpn_protocols(["h2", "http/1.1"])
        num_refused = 0
        async with asyncio.timeout(60):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host, int(port), ssl=trusting)
                    break
                except (ssl.SSLError, OSError):
                    num_refused += 1
                    await asyncio.sleep(0.02)
            assert num_refused > 0
            assert [await reader.read() for reader, _ in silent] == [b"", b""]
        for each in (writer, *(writer for _, writer in silent)):
            each.close()


@asynccontextmanager
async def bounded_server(kind: str, tls: TlsConfig, limits: LimitsConfig) -> AsyncIterator[str]:
    """One of the router's servers, without a service."""
    if kind == "grpc":
        server = RpcServer(ServerConfig(), server_credentials(tls), admission=Admission(limits))
        address = await server.start([])
        try:
            yield address
        finally:
            await server.stop(0)
        return

    async def no_app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("no request is sent")

    async with http_server(no_app, tls, limits) as address:
        yield address


class GuardedVerifier(ScriptedVerifier):
    async def Generate(self, request: Any, context: Any) -> None:  # noqa: N802
        ApiKeys(plain_keys(["one"], "test")).access(context.invocation_metadata())
        await super().Generate(request, context)


@asynccontextmanager
async def grpc_server(folder: Path) -> AsyncIterator[str]:
    """A gRPC server that asks for an API key and generates fixed tokens."""
    server = RpcServer(ServerConfig(), server_credentials(tls_config(folder)))
    add_GenerationServicer_to_server(GuardedVerifier(Script(TOKENS)), server.aio)
    address = await server.start([])
    try:
        yield address
    finally:
        await server.stop(0)


async def eyas(address: str, *words: str, **environment: str) -> Result:
    environment = {"EYAS_ADDRESS": address, "EYAS_API_KEY": "one"} | environment
    return await asyncio.to_thread(CliRunner().invoke, app, words, env=environment)


async def test_the_command_comes_in_over_tls_by_options_or_environment(tmp_path: Path) -> None:
    Authority().write(tmp_path, NAME)
    ca = str(tmp_path / "ca.crt")
    async with grpc_server(tmp_path) as address:
        for result in (
            await eyas(address, "generate", "text", "--json", "--ca", ca),
            await eyas(address, "generate", "text", "--json", "--tls", "--ca", ca, "--tls-name", NAME),
            await eyas(address, "generate", "text", "--json", EYAS_TLS="1", EYAS_CA=ca, EYAS_TLS_NAME=NAME),
        ):
            assert (result.exit_code, result.stderr) == (0, "")
            lines = map(json.loads, result.output.splitlines())
            assert tuple(token for line in lines for token in line.get("token_ids", ())) == TOKENS


async def test_the_command_trusts_only_the_given_authority(tmp_path: Path) -> None:
    Authority().write(tmp_path, NAME)
    Authority("another").write(tmp_path / "other")
    ca, other = str(tmp_path / "ca.crt"), str(tmp_path / "other" / "ca.crt")
    async with grpc_server(tmp_path) as address:
        refused = [
            await eyas(address, "generate", "Hello"),
            await eyas(address, "generate", "Hello", "--tls"),
            await eyas(address, "generate", "Hello", "--ca", other),
            await eyas(address, "generate", "Hello", "--ca", ca, "--tls-name", "elsewhere"),
        ]
        missing = await eyas(address, "generate", "Hello", "--ca", str(tmp_path / "missing"))
        plainly = await eyas(address, "generate", "Hello", "--tls-name", NAME)
    assert [result.exit_code for result in refused] == [1] * 4
    assert all(result.stderr.startswith("error: UNAVAILABLE: ") for result in refused)
    assert missing.stderr.startswith(f"error: the client's certificates cannot be used: {tmp_path}")
    assert plainly.stderr.startswith(f"error: --tls-name {NAME} needs TLS; add --tls, or --ca")


async def shown(address: str, ca: bytes) -> bool:
    """Whether the server shows a certificate of this authority."""
    host, _, port = address.rpartition(":")
    trust = ssl.create_default_context(cadata=ca.decode())
    try:
        _, writer = await asyncio.open_connection(host, int(port), ssl=trust, server_hostname=HOST)
    except ssl.SSLCertVerificationError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def test_the_http_server_serves_a_renewed_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.services.router.http.server.RELOAD_INTERVAL_S", 0.02)
    old, new = Authority("old"), Authority("new")
    old.write(tmp_path, NAME)
    async with http_server(echo, tls_config(tmp_path)) as address:
        assert await shown(address, old.pem)
        assert not await shown(address, new.pem)
        new.write(tmp_path, NAME)
        await until(partial(shown, address, new.pem))
        assert not await shown(address, old.pem)


async def test_the_http_server_supports_tls(tmp_path: Path) -> None:
    sent = bytes(range(1, 251)) * 1000

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(sent), 10_000):
            yield sent[start : start + 10_000]

    Authority().write(tmp_path, NAME)
    async with http_server(echo, tls_config(tmp_path)) as address:
        trust = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
        async with httpx.AsyncClient(verify=trust, timeout=30, base_url=f"https://{address}") as client:
            assert (await client.get("/")).status_code == 200
            assert (await client.post("/", content=sent)).content == sent
            assert (await client.post("/", content=chunks())).content == sent
