"""A real router with its HTTP server in this process, and OpenAI's own client of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from eyas.config import (
    HttpConfig,
    LimitsConfig,
    OutlierDetectionConfig,
    RegistryConfig,
    RetryConfig,
    RouterConfig,
    ServerConfig,
    TlsConfig,
)
from eyas.config.router import UnknownFields
from eyas.rpc.admission import Admission
from eyas.rpc.channel import Peers
from eyas.rpc.server import RpcServer
from eyas.services.discovery.redis_registry import Registry
from eyas.services.router.auth.keys import ApiKeys
from eyas.services.router.dispatch.dispatcher import Dispatcher, SessionMap
from eyas.services.router.dispatch.generation import GenerationService
from eyas.services.router.dispatch.readiness import ReadinessMonitor
from eyas.services.router.dispatch.workers import WorkerPool
from eyas.services.router.http.app import build_app
from eyas.services.router.http.server import HttpServer
from eyas.services.router.models import RouterModel
from eyas.services.router.telemetry import RouterTelemetry
from eyas.text.chat_template import ChatTemplate
from eyas.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.services.scripted_verifier import DEMO, LEASE_S, PROMPT, REST, RETRY, TEXT, TOKENS, Script, until, worker

TOKENIZER = load_tokenizer(DEMO)
PROMPT_TEXT = TOKENIZER.decode(PROMPT)
REST_TEXT = TEXT.removeprefix(PROMPT_TEXT)
ALL: dict[str, Any] = {"model": "demo", "prompt": PROMPT_TEXT, "max_tokens": len(REST), "temperature": 0}
# Renders messages unchanged, so that the scripted verifier continues where they end.
PLAIN = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": PROMPT_TEXT}],
    "max_tokens": len(REST),
    "temperature": 0,
}


@asynccontextmanager
async def http_router(  # noqa: PLR0913  # settings of a router, all by keyword
    url: str,
    template: str = PLAIN,
    keys: ApiKeys | None = None,
    request_timeout_s: float = 30.0,
    tokenizer: Tokenizer = TOKENIZER,
    telemetry: RouterTelemetry | None = None,
    retry: RetryConfig = RETRY,
    keepalive_interval_s: float = 5.0,
    limits: LimitsConfig | None = None,
    cors_allow_origins: tuple[str, ...] = (),
    playground: bool = True,
    unknown_fields: UnknownFields = "refuse",
    aliases: tuple[str, ...] = (),
) -> AsyncIterator[str]:
    """Run a router for the model "demo"; yields its base URL."""
    server, registry = RpcServer(ServerConfig()), Registry(RegistryConfig(url, LEASE_S, 0.05))
    workers = WorkerPool(
        registry, RouterConfig((), outlier_detection=OutlierDetectionConfig(base_ejection_time_s=0.2)), Peers()
    )
    telemetry, limits = telemetry or RouterTelemetry(), limits or LimitsConfig()
    dispatcher = Dispatcher(workers, SessionMap(registry), 20.0, telemetry, retry)
    readiness = ReadinessMonitor(server.set_serving, registry, workers, 0.02)
    chat = ChatTemplate(template, {"bos_token": "<|bos|>"}, "demo") if template else None
    model = RouterModel("demo", tokenizer, chat, aliases=aliases)
    service = GenerationService([model], workers, dispatcher, request_timeout_s, telemetry)
    config = HttpConfig(
        keepalive_interval_s=keepalive_interval_s,
        cors_allow_origins=cors_allow_origins,
        unknown_fields=unknown_fields,
        playground=playground,
    )
    app = build_app(service, readiness, keys or ApiKeys(), telemetry, config, Admission(limits))
    http = HttpServer(app, config, TlsConfig(), limits)
    address = await server.start([])
    await http.start()
    await readiness.register(address)
    try:
        yield f"http://{http.address}"
    finally:
        await readiness.deregister()
        await asyncio.gather(http.stop(0), server.stop(0))
        await workers.close()
        await registry.close()


@asynccontextmanager
async def http_server(app: Any, tls: TlsConfig | None = None, limits: LimitsConfig | None = None) -> AsyncIterator[str]:
    """Serve an ASGI application over HTTP; yields the address."""
    server = HttpServer(app, HttpConfig(), tls or TlsConfig(), limits or LimitsConfig())
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0.2)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that sends back each body."""
    body = b""
    more = True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def served(url: str, script: Script | None = None, **router: Any) -> AsyncIterator[AsyncOpenAI]:
    """Run a router of one verifier; yields a client that does not retry."""
    async with worker(url, script or Script(TOKENS)), http_router(url, **router) as base, client(base) as api:
        yield api


def client(base: str) -> AsyncOpenAI:
    plain = DefaultAsyncHttpxClient(verify=False)  # to read the certificates takes longer than a request
    return AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, http_client=plain)


async def post(base: str, path: str, body: Any, **options: Any) -> httpx.Response:
    """Return the raw response."""
    async with httpx.AsyncClient(base_url=base, timeout=30, verify=False) as client:
        return await client.post(path, json=body, **options)


async def get(base: str, path: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=base, timeout=30, verify=False) as client:
        return await client.get(path)


def is_ok(answer: httpx.Response) -> bool:
    return answer.status_code == 200


async def get_until(base: str, path: str, awaited: Callable[[httpx.Response], bool]) -> httpx.Response:
    """Get a path until its answer is the awaited one, and return that."""
    async with asyncio.timeout(60):
        while not awaited(answer := await get(base, path)):
            await asyncio.sleep(0.01)
    return answer


# Of scripted verifiers, for tests that need both.
__all__ = [
    "TOKENS", "Script", "get", "get_until", "http_router", "http_server", "is_ok", "post", "served", "until", "worker",
]  # fmt: skip
