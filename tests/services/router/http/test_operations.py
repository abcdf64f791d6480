"""For operators: health checks, metrics, and the API keys and TLS of both listeners."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import AsyncOpenAI, AuthenticationError
from prometheus_client import Counter

from eyas.config import ApiKeysConfig, DiscoveryConfig, HttpConfig, RegistryConfig, RouterConfig, ServerConfig, TlsConfig
from eyas.errors import ConfigError, Unauthenticated
from eyas.rpc.channel import Peers
from eyas.rpc.messages import Lease, Load
from eyas.rpc.server import RpcServer
from eyas.services.discovery.probing import build_discovery
from eyas.services.discovery.redis_registry import Registry
from eyas.services.local.cluster import free_port
from eyas.services.router.auth.keys import OPEN_PATHS, ApiKeys, load_api_keys, plain_keys
from eyas.services.router.dispatch.dispatcher import Dispatcher, SessionMap
from eyas.services.router.dispatch.generation import GenerationService
from eyas.services.router.dispatch.workers import WorkerPool
from eyas.services.router.grpc_server import RouterServicer, server_credentials
from eyas.services.router.http.drafter_kill import KILL_PATH
from eyas.services.router.http.listener import listen
from eyas.services.router.http.server import HttpServer
from eyas.services.router.telemetry import RouterTelemetry
from eyas.v1.generation_pb2 import ListModelsRequest
from eyas.v1.generation_pb2_grpc import GenerationStub, add_GenerationServicer_to_server
from tests.services.router.test_router_cli import eyas
from tests.support.services.authority import Authority, tls_config
from tests.support.services.http_router import (
    ALL,
    REST_TEXT,
    Script,
    echo,
    get,
    get_until,
    http_router,
    is_ok,
    post,
    worker,
)
from tests.support.services.redis_server import running_redis
from tests.support.services.scripted_verifier import LEASE_S, MODEL, RETRY, TOKENS


async def test_a_router_without_verifiers_is_ready_but_not_healthy(url: str) -> None:
    async def serves_only_later(base: str) -> None:
        """The router takes requests and rejects them with a time to retry."""
        unhealthy = {"status": "unhealthy", "reason": "no verifier can be reached", "models": {}}
        await get_until(base, "/health", lambda answer: answer.status_code == 503 and answer.json() == unhealthy)
        assert [(await get(base, path)).status_code for path in ("/live", "/ready")] == [200, 200]
        answer = await post(base, "/v1/completions", ALL)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert int(answer.headers["retry-after"]) >= 1

    async with http_router(url, retry=replace(RETRY, budget_s=0.3)) as base:
        assert (await get_until(base, "/ready", is_ok)).json() == {"status": "ready"}
        await serves_only_later(base)
        async with worker(url, Script(TOKENS)), worker(url, Script(()), "draft"):
            workers = {"verifiers": 1, "reachable_verifiers": 1, "drafters": 1}
            healthy = {"status": "healthy", "models": {"demo": workers}}
            await get_until(base, "/health", lambda answer: bool(answer.json() == healthy))
        await serves_only_later(base)


async def test_a_ready_router_warns_that_redis_is_away() -> None:
    async def ready(base: str, awaited: dict[str, str]) -> None:
        await get_until(base, "/ready", lambda answer: bool(answer.json() == awaited))

    with ExitStack() as stack:
        redis = stack.enter_context(running_redis(free_port()))
        async with http_router(redis) as base:
            await ready(base, {"status": "ready"})
            stack.close()
            await ready(base, {"status": "ready", "warning": "Redis is away; the last known workers serve"})


async def test_a_starting_router_waits_for_its_discovery(url: str) -> None:
    """It is not ready while Redis is away, nor while it reaches none of the verifiers that it knows."""

    async def reason(base: str, awaited: str) -> None:
        answer = await get_until(base, "/ready", lambda answer: bool(answer.json().get("reason", "") == awaited))
        assert answer.status_code == (503 if awaited else 200)

    async with http_router(f"redis://127.0.0.1:{free_port()}/0") as base:
        await reason(base, "the discovery of verifiers has not answered yet: Redis is away")
    gone = Lease("verifier", f"127.0.0.1:{free_port()}", "gone", MODEL, Load(0, 0, 9))
    registry = Registry(RegistryConfig(url, LEASE_S, 0.05))
    await registry.publish(lambda: gone)
    async with http_router(url) as base:
        await reason(base, "no verifier can be reached")
        await registry.withdraw()
        await reason(base, "")
    await registry.close()


async def test_metrics_equal_the_counts_of_the_process(url: str) -> None:
    Counter("eyas_test_of_metrics", "Counts once.").inc()
    async with http_router(url) as base:
        answer = await get(base, "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "eyas_test_of_metrics_total 1.0" in answer.text.splitlines()


async def test_every_get_route_answers_head(url: str) -> None:
    async with http_router(url) as base, httpx.AsyncClient(base_url=base, timeout=30) as client:
        await get_until(base, "/ready", is_ok)
        for path in ("/live", "/ready", "/health", "/v1/models", "/v1/models/other", "/version", "/metrics", "/docs", "/"):
            asked, whole = await client.head(path), await client.get(path)
            assert (asked.status_code, asked.content) == (whole.status_code, b""), path
            assert asked.headers["content-type"] == whole.headers["content-type"]
        assert (await client.head("/v1/completions")).status_code == 405


async def test_the_page_of_the_api_loads_nothing_from_elsewhere(url: str) -> None:
    async with http_router(url) as base:
        page = await get(base, "/docs")
        schema = (await get(base, "/openapi.json")).json()
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "openapi.json" in page.text
    assert "://" not in page.text
    assert not re.search(r"<(?:link|img|iframe)|\bsrc=|@import", page.text)
    routes = {"/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/version"}
    assert routes <= set(schema["paths"])


async def test_browsers_of_allowed_origins_may_use_the_api(url: str) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    page = "https://here.example"
    async with (
        http_router(url, keys=ApiKeys(plain_keys(["one"], "test")), cors_allow_origins=(page,)) as base,
        http_router(url) as other,
        httpx.AsyncClient() as client,
    ):
        for origin, allowed in ((page, page), ("https://there.example", None)):
            preflight = await client.options(f"{base}/v1/completions", headers={"Origin": origin, **asks})
            answer = await client.get(f"{base}/v1/models", headers={"Origin": origin})
            assert (preflight.is_success, answer.status_code) == (bool(allowed), 401)
            assert {part.headers.get("access-control-allow-origin") for part in (preflight, answer)} == {allowed}
        answer = await client.get(f"{other}/v1/models", headers={"Origin": page})
        assert "access-control-allow-origin" not in answer.headers


async def test_every_route_but_open_ones_requires_a_key(url: str) -> None:
    """So does a path that does not exist, and a route that is added."""
    async with http_router(url, keys=ApiKeys(plain_keys(["one"], "test"))) as base:
        paths = [*(await get(base, "/openapi.json")).json()["paths"], "/v1/models/a", "/v2/new", "/docs", "/"]
        assert {"/version", "/tokenize", "/v1/completions", "/metrics"} <= set(paths)
        answers = {path: (await get(base, path)).status_code for path in paths}
        assert {path for path, status in answers.items() if status != 401} == {*OPEN_PATHS} - {"/openapi.json"}
        async with httpx.AsyncClient(base_url=base) as client:
            for path in (KILL_PATH, f"{KILL_PATH}%0A"):
                assert (await client.delete(path)).status_code == 401


@pytest.mark.parametrize("path", ["/v1/cluster", "/v1/cluster%0A"])
async def test_the_cluster_is_shown_to_keys_of_its_scope_only(path: str, url: str) -> None:
    """A route also matches a path with a line break at its end."""
    key = {"Authorization": "Bearer one"}
    async with http_router(url, keys=ApiKeys(plain_keys(["one"], "test"))) as base, httpx.AsyncClient(headers=key) as client:
        assert (await client.get(f"{base}{path}")).status_code == 403


async def test_v1_requires_a_known_api_key(url: str) -> None:
    async def complete(base: str, key: str) -> str:
        async with AsyncOpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0) as client:
            return str((await client.completions.create(**ALL)).choices[0].text)

    async with worker(url, Script(TOKENS)), http_router(url, keys=ApiKeys(plain_keys(("one", "other"), "test"))) as base:
        assert [await complete(base, key) for key in ("one", "other")] == [REST_TEXT, REST_TEXT]
        for wrong in ("on", "one1", "One"):
            with pytest.raises(AuthenticationError, match="no known API key"):
                await complete(base, wrong)
        answer = await get(base, "/v1/models")
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert [(await get(base, path)).status_code for path in ("/live", "/ready", "/metrics")] == [200] * 3


def test_keys_come_from_the_environment_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("three\n\n  four\n")
    keys = load_api_keys(ApiKeysConfig("KEYS", str(file)), {"KEYS": "one, two"})
    for key in ("one", "two", "three", "four"):
        keys.access([("authorization", f"Bearer {key}")])
    for value in ("", "one", "Bearer", "Bearer ", "Basic one", "Bearer five"):
        with pytest.raises(Unauthenticated):
            keys.access([("authorization", value)])
    load_api_keys(ApiKeysConfig(), {}).access(())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ApiKeysConfig(env="KEYS"), "environment variable KEYS holds no key"),
        (ApiKeysConfig(file="no/such"), "cannot read no/such"),
    ],
)
def test_missing_api_keys_are_an_error_not_open_access(config: ApiKeysConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_api_keys(config, {"KEYS": " , "})


@asynccontextmanager
async def grpc_server(keys: ApiKeys, tls: TlsConfig) -> AsyncIterator[str]:
    server = RpcServer(ServerConfig(), server_credentials(tls))
    workers = WorkerPool(build_discovery(DiscoveryConfig("static"), None), RouterConfig(()), Peers())
    telemetry = RouterTelemetry()
    service = GenerationService([], workers, Dispatcher(workers, SessionMap(None), 1.0, telemetry), 1.0, telemetry)
    add_GenerationServicer_to_server(RouterServicer(service, keys), server.aio)
    address = await server.start(["eyas.v1.Generation"])
    try:
        yield address
    finally:
        await server.stop(0)


async def test_grpc_needs_the_api_keys_over_tls_but_health_does_not(tmp_path: Path) -> None:
    async def status(stub: Any, *more: tuple[str, str], **metadata: str) -> grpc.StatusCode:
        try:
            await stub.ListModels(ListModelsRequest(), metadata=(*metadata.items(), *more))
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    Authority().write(tmp_path, "eyas")
    trust = grpc.ssl_channel_credentials((tmp_path / "ca.crt").read_bytes())
    async with (
        grpc_server(ApiKeys(plain_keys(["one"], "test")), tls_config(tmp_path)) as address,
        grpc.aio.secure_channel(address, trust) as channel,
    ):
        stub = GenerationStub(channel)
        assert await status(stub, authorization="Bearer one") is grpc.StatusCode.OK
        assert await status(stub, authorization="Bearer two") is grpc.StatusCode.UNAUTHENTICATED
        assert await status(stub) is grpc.StatusCode.UNAUTHENTICATED
        for again in ("authorization", "x-api-key"):
            twice = await status(stub, (again, "Bearer two"), authorization="Bearer one")
            assert twice is grpc.StatusCode.UNAUTHENTICATED
        assert await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


async def test_the_command_sends_its_api_key() -> None:
    async with grpc_server(ApiKeys(plain_keys(["one"], "test")), TlsConfig()) as address:
        known = await eyas("generate", "--model", "none", "Hello", EYAS_ADDRESS=address, EYAS_API_KEY="one")
        unknown = await eyas("generate", "Hello", "--address", address, "--api-key", "two")
    assert known.err.startswith("error: NOT_FOUND: model 'none'")
    assert unknown.err.startswith("error: UNAUTHENTICATED: no known API key")


async def test_nagles_algorithm_is_off() -> None:
    no_delay: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        no_delay.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = listen("127.0.0.1", 0)
    async with await asyncio.start_server(accepted, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        writer.close()
        found = await no_delay
    assert found == 1


async def test_a_server_that_cannot_listen_names_the_setting(tmp_path: Path) -> None:
    async def start(config: HttpConfig, tls: TlsConfig) -> None:
        server = HttpServer(echo, config, tls)
        try:
            await server.start()
        finally:
            await server.stop(0)

    missing = str(tmp_path / "missing.pem")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=r"in use .* set http\.port"):
        await start(HttpConfig(port=taken.getsockname()[1]), TlsConfig())
    with pytest.raises(ConfigError, match=r"tls\.cert_file and tls\.key_file cannot be used"):
        await start(HttpConfig(), TlsConfig(missing, missing))
    with pytest.raises(ConfigError, match=r"tls\.cert_file and tls\.key_file cannot be used"):
        server_credentials(TlsConfig(missing, missing))
    with pytest.raises(ConfigError, match="go together"):
        TlsConfig(cert_file="only")
