"""A real router with its HTTP door in this process, and OpenAI's own client to ask it with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from openai import AsyncOpenAI

from eyas.config import EjectionConfig, HttpConfig, RegistryConfig, ServerConfig, TlsConfig
from eyas.rpc.server import RpcServer
from eyas.text import TokenText, load_tokenizer
from services.registry import Registry
from services.router.access.keys import Keys
from services.router.fleet.memory import Sessions
from services.router.front import Front
from services.router.http.app import build_app
from services.router.http.chat import ChatTemplate
from services.router.http.door import HttpDoor
from services.router.presence import RouterPresence
from services.router.relay import Relay
from services.router.telemetry.observer import RouterTelemetry
from services.router.workers import Workers
from tests.services.router.scripted_verifier import DEMO, PROMPT, REST, TEXT, TOKENS, Script, until, worker

TOKENIZER = load_tokenizer(DEMO)
PROMPT_TEXT = TOKENIZER.decode(PROMPT)
REST_TEXT = TEXT.removeprefix(PROMPT_TEXT)
ALL = {"model": "demo", "prompt": PROMPT_TEXT, "max_tokens": len(REST), "temperature": 0}
# Renders messages as they stand, so that the scripted verifier goes on where they end.
PLAIN = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
CHAT = {"model": "demo", "messages": [{"role": "user", "content": PROMPT_TEXT}], "max_tokens": len(REST), "temperature": 0}


@asynccontextmanager
async def http_router(
    url: str,
    template: str = PLAIN,
    keys: Keys | None = None,
    timeout: float = 30.0,
    tokenizer: TokenText = TOKENIZER,
    telemetry: RouterTelemetry | None = None,
) -> AsyncIterator[str]:
    """A router for the model "demo"; gives the base of its URLs."""
    server, registry = RpcServer(ServerConfig()), Registry(RegistryConfig(url, 2.0, 0.05))
    workers = Workers(registry, ejection=EjectionConfig(seconds=0.2))
    relay = Relay(workers, Sessions(registry), 20.0, telemetry)
    front = Front({"demo": tokenizer}, workers, relay, timeout, telemetry)
    presence = RouterPresence(server, registry, workers, 0.02)
    chat = ChatTemplate(template, {"bos_token": "<|bos|>"}, "demo") if template else None
    app = build_app(front, {"demo": chat}, presence, keys or Keys(frozenset()), telemetry or RouterTelemetry())
    door = HttpDoor(app, HttpConfig(), TlsConfig())
    address = await server.start([])
    await door.start()
    await presence.enter(address)
    try:
        yield f"http://{door.address}"
    finally:
        await presence.leave()
        await asyncio.gather(door.stop(0), server.stop(0))
        await workers.close()
        await registry.close()


def with_router(url: str, body: Callable[[AsyncOpenAI], Awaitable[Any]], script: Script | None = None, **router: Any) -> Any:
    """What `body` gives back, asked with a client of a router that has one verifier; an error is not tried again."""

    async def run() -> Any:
        async with worker(url, script or Script(TOKENS)), http_router(url, **router) as base, client(base) as asking:
            return await body(asking)

    return asyncio.run(run())


def client(base: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)


async def post(base: str, path: str, body: Any, **options: Any) -> httpx.Response:
    """The raw answer."""
    async with httpx.AsyncClient(base_url=base, timeout=30) as client:
        return await client.post(path, json=body, **options)


async def get(base: str, path: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=base, timeout=30) as client:
        return await client.get(path)


__all__ = ["TOKENS", "Script", "get", "http_router", "post", "until", "with_router", "worker"]
