"""The router as a process: it prints its settings, serves, checks keys and drains on SIGTERM."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio

from eyas.rpc.channel import open_channel
from eyas.rpc.convert import generate_call_to_proto
from eyas.v1.generation_pb2_grpc import GenerationStub
from tests.support.services.router_process import line_with, router_process
from tests.support.services.scripted_verifier import CALL, REST, TOKENS, Script, worker


async def test_a_router_drains_running_requests_on_sigterm(url: str) -> None:
    async with worker(url, Script(TOKENS)), router_process(url) as child:
        await line_with(child, "config models = .*(demo)")
        async with open_channel(await line_with(child, r"serving on (\S+)")) as channel:
            answers = GenerationStub(channel).Generate(generate_call_to_proto(CALL), wait_for_ready=True)
            first = await answers.read()
            child.send_signal(signal.SIGTERM)
            rest = [message async for message in remaining(answers)]
        assert [token for message in (first, *rest) for token in message.token_ids] == list(REST)
        await line_with(child, "(stopping)")
        assert await asyncio.wait_for(child.wait(), 60) == 0


async def remaining(stream: Any) -> AsyncIterator[Any]:
    while (message := await stream.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
        yield message


async def test_keys_are_checked_before_a_message_is_read(tmp_path: Path) -> None:
    """Also without Redis, when the router is not ready, with a reason."""
    keys = tmp_path / "keys"
    keys.write_text("secret")
    async with router_process("redis://me:secret@127.0.0.1:1/0", f"api_keys.file={keys}") as child:
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
        assert await asyncio.wait_for(child.wait(), 60) == 0
    assert code is grpc.StatusCode.UNAUTHENTICATED
