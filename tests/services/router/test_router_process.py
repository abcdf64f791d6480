"""The router as a process: it prints its settings, serves, checks keys and drains on SIGTERM."""

import asyncio
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from eyas.rpc.channel import open_channel
from eyas.rpc.convert import generate_call_to_proto
from eyas.v1.generation_pb2_grpc import GenerationStub
from tests.support.services.scripted_verifier import CALL, REST, TOKENS, Script, worker

BLOCKED_TORCH = (
    "import sys, runpy; sys.modules['torch'] = None; runpy.run_module('eyas.services.router', run_name='__main__')"
)
MODELS = "models=[{name: demo, tokenizer: models/demo/target}]"


@asynccontextmanager
async def process(*settings: str) -> AsyncIterator[Process]:
    """Run a router in a Python where importing torch fails."""
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BLOCKED_TORCH, *arguments, stdout=PIPE, stderr=PIPE, env=os.environ | {"NO_COLOR": "1"}
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def line_with(child: Process, text: str) -> str:
    """Return the next line on stderr that contains `text`."""
    assert child.stderr is not None
    async with asyncio.timeout(120):
        while text not in (line := (await child.stderr.readline()).decode()):
            assert line, f"ended without printing {text!r}"
    return line


async def exit_of(child: Process) -> tuple[int | None, str]:
    async with asyncio.timeout(120):
        _, err = await child.communicate()
    return child.returncode, err.decode().splitlines()[-1]


def registry(url: str) -> list[str]:
    return [f"registry.url={url}", "registry.heartbeat_interval_s=0.1"]


async def test_a_router_drains_running_requests_on_sigterm(url: str) -> None:
    async with worker(url, Script(TOKENS)), process(MODELS, *registry(url)) as child:
        assert "demo" in await line_with(child, "config models = ")
        found = re.search(r"serving on (\S+)", await line_with(child, "serving on"))
        assert found
        async with open_channel(found[1]) as channel:
            answers = GenerationStub(channel).Generate(generate_call_to_proto(CALL), wait_for_ready=True)
            first = await answers.read()
            child.send_signal(signal.SIGTERM)
            rest = [message async for message in remaining(answers)]
        assert [token for message in (first, *rest) for token in message.token_ids] == list(REST)
        assert "stopping" in await line_with(child, "stopping")
        status, _ = await exit_of(child)
        assert status == 0


async def remaining(stream: Any) -> AsyncIterator[Any]:
    while (message := await stream.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
        yield message


async def test_keys_are_checked_before_a_message_is_read(tmp_path: Path) -> None:
    """Also without Redis, when the router is not ready, with a reason."""
    keys = tmp_path / "keys"
    keys.write_text("secret")
    async with process(MODELS, *registry("redis://me:secret@127.0.0.1:1/0"), f"api_keys.file={keys}") as child:
        assert child.stderr is not None
        lines = ""
        async with asyncio.timeout(120):
            while not ("is away" in lines and "serving on" in lines):
                lines += (await child.stderr.readline()).decode()
        assert "secret" not in lines
        found = re.search(r"serving on (\S+)", lines)
        assert found
        async with open_channel(found[1]) as channel:
            generate = channel.stream_stream("/eyas.v1.Generation/Generate")
            while (code := await generate(timeout=20).code()) is grpc.StatusCode.UNAVAILABLE:
                pass  # the connection took too long, on a busy machine
        child.send_signal(signal.SIGINT)
        assert (await exit_of(child))[0] == 0
    assert code is grpc.StatusCode.UNAUTHENTICATED
