"""The HTTP server of a router process: it needs no torch and no transformers, and it drains on SIGTERM."""

import asyncio
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from tests.services.http.http_router import ALL, REST_TEXT, Script, client, get, until, worker
from tests.services.router.scripted_verifier import TOKENS

BLOCKED = (
    "import sys, runpy; sys.modules['torch'] = sys.modules['transformers'] = None; "
    "runpy.run_module('eyas.services.router', run_name='__main__')"
)


@asynccontextmanager
async def process(url: str, *settings: str) -> AsyncIterator[Process]:
    own = [
        f"registry.url={url}",
        "registry.heartbeat_interval_s=0.1",
        "models=[{name: demo, tokenizer: models/demo/target}]",
    ]
    arguments = [argument for setting in (*own, *settings) for argument in ("--set", setting)]
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", BLOCKED, *arguments, stderr=PIPE, env=os.environ)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def base_url(child: Process) -> str:
    assert child.stderr is not None
    async with asyncio.timeout(120):
        while (line := (await child.stderr.readline()).decode()) and "HTTP on" not in line:
            pass
    found = re.search(r"HTTP on (\S+)", line)
    assert found, "ended without listening for HTTP"
    return found[1]


async def ready(base: str) -> httpx.Response:
    async with asyncio.timeout(60):
        while (answer := await get(base, "/ready")).status_code != 200:
            await asyncio.sleep(0.02)
    return answer


def test_a_stopping_router_is_not_ready_and_finishes_its_streams(url: str) -> None:
    async def body() -> None:
        gate = asyncio.Event()
        script = Script(TOKENS, gate=gate)
        settings = ("server.shutdown_delay_s=3", "server.graceful_shutdown_timeout_s=20")
        async with worker(url, script), process(url, *settings) as child:
            base = await base_url(child)
            await ready(base)
            async with client(base) as api:
                answer = asyncio.create_task(api.completions.create(**ALL))
                await until(lambda: len(script.calls) == 1)
                child.send_signal(signal.SIGTERM)
                async with asyncio.timeout(60):
                    while (response := await get(base, "/ready")).status_code == 200:
                        await asyncio.sleep(0.01)
                assert response.json()["reason"] == "the router is stopping"
                assert (await get(base, "/live")).status_code == 200
                gate.set()
                assert (await answer).choices[0].text == REST_TEXT
            assert await asyncio.wait_for(child.wait(), 60) == 0

    asyncio.run(body())


def test_operations_have_a_port_and_a_drain_has_an_end(url: str) -> None:
    """One process for both."""
    private, both = ("/health", "/metrics", "/openapi.json", "/docs"), ("/live", "/ready")

    async def body() -> None:
        async with process(url, "http.operations_port=0", "server.graceful_shutdown_timeout_s=0.2") as child:
            api, operations = await base_url(child), await base_url(child)
            await ready(api)
            assert [(await get(api, path)).status_code for path in (*private, *both)] == [404] * 4 + [200] * 2
            answers = {path: await get(operations, path) for path in (*private, *both, "/v1/models")}
            assert [answers[path].status_code for path in ("/metrics", "/openapi.json", "/docs", *both)] == [200] * 5
            assert answers["/health"].json()["reason"] == "no verifier can be reached"
            assert "/v1/completions" in answers["/openapi.json"].json()["paths"]
            assert answers["/v1/models"].status_code == 404
            script = Script(TOKENS, stalls_after=1)
            async with worker(url, script), httpx.AsyncClient(timeout=30) as client:
                await until_healthy(operations)
                async with client.stream("POST", f"{api}/v1/completions", json=ALL | {"stream": True}) as answer:
                    await anext(answer.aiter_lines())
                    child.send_signal(signal.SIGTERM)
                    assert await asyncio.wait_for(child.wait(), 60) == 0
                await until(lambda: script.num_cancelled == 1)

    asyncio.run(body())


async def until_healthy(operations: str) -> None:
    async with asyncio.timeout(60):
        while (await get(operations, "/health")).status_code != 200:
            await asyncio.sleep(0.02)
