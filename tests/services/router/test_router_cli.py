"""The `eyas` command against a real router: its output for people and for scripts. Processes of it need no torch."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any
from unittest.mock import patch

from eyas.cli.main import main
from eyas.services.local.cluster import free_port
from eyas.text.tokenizer import load_tokenizer
from tests.support.services.http_router import REST_TEXT, http_router
from tests.support.services.scripted_verifier import DEMO, PROMPT_TEXT, REST, TEXT, TOKENS, Script, router, until, worker

BLOCKED_TORCH = "import sys; sys.modules['torch'] = None; from eyas.cli.main import main; main()"
GREEN, YELLOW = "\x1b[1;32m", "\x1b[33m"


@dataclass(frozen=True)
class Outcome:
    """The exit status and the output of a command."""

    status: int
    out: str
    err: str


async def started(*arguments: str, **environment: str) -> Process:
    """Start the command in a Python where importing torch fails."""
    settings = os.environ | {"NO_COLOR": "1", "COLUMNS": "200"} | environment
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", BLOCKED_TORCH, *arguments, stdout=PIPE, stderr=PIPE, env=settings
    )


async def ended(process: Process) -> Outcome:
    try:
        out, err = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    return Outcome(process.returncode or 0, out.decode(), err.decode())


async def eyas(*arguments: str, text: str = "", **environment: str) -> Outcome:
    """The command in a thread of this process, which starts sooner. text: standard input."""
    return await asyncio.to_thread(run, arguments, text, {"NO_COLOR": "1", "COLUMNS": "200"} | environment)


def run(arguments: Sequence[str], text: str, environment: Mapping[str, str]) -> Outcome:
    status: Any = 0
    with (
        patch.dict(os.environ, environment),
        patch.object(sys, "argv", ["eyas", *arguments]),
        patch.object(sys, "stdin", StringIO(text)),
        redirect_stdout(StringIO()) as out,
        redirect_stderr(StringIO()) as err,
    ):
        try:
            main()
        except SystemExit as ending:
            status = ending.code
    return Outcome(status or 0, out.getvalue(), err.getvalue())


async def test_generate_streams_the_text_and_ends_with_statistics(url: str) -> None:
    async with worker(url, Script(TOKENS)), router(url) as address:
        arguments = ("generate", PROMPT_TEXT, "--max-tokens", str(len(REST)))
        outcome = await ended(await started(*arguments, EYAS_ADDRESS=address))
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith(TEXT.removeprefix(PROMPT_TEXT))
    assert f"{len(REST)} tokens" in outcome.out
    assert "accepted draft tokens" in outcome.out


async def test_generate_shows_accepted_tokens_in_their_own_style(url: str) -> None:
    async with worker(url, Script(TOKENS)), router(url) as address:
        arguments = ("generate", PROMPT_TEXT, "--max-tokens", "3", "--address", address)
        outcome = await eyas(*arguments, NO_COLOR="", FORCE_COLOR="1", TERM="xterm")
    first, second, third = (load_tokenizer(DEMO).decode([token]) for token in REST[:3])
    assert f"{GREEN}{first}\x1b[0m{GREEN}{second}\x1b[0m{YELLOW}{third}\x1b[0m" in outcome.out


async def test_json_gives_one_object_per_chunk_and_one_with_statistics(url: str) -> None:
    script = Script(TOKENS)
    async with worker(url, script), router(url) as address:
        options = ("--max-tokens", "7", "--seed", "9", "--top-k", "4", "--stop", "nowhere", "--json")
        outcome = await eyas("generate", PROMPT_TEXT, "--address", address, *options)
    *chunks, final = map(json.loads, outcome.out.splitlines())
    assert [token for chunk in chunks for token in chunk["token_ids"]] == list(REST[:7])
    assert "".join(chunk["text"] for chunk in chunks) == load_tokenizer(DEMO).decode(REST[:7])
    assert chunks[0]["seed"] == 9
    assert (final["finish_reason"], final["num_output_tokens"]) == ("length", 7)
    assert final["stats"]["num_verify_steps"] == 3
    assert script.calls[0].request.sampling.top_k == 4


async def test_a_refused_request_is_one_line_on_stderr(url: str) -> None:
    async with worker(url, Script(TOKENS)), router(url) as address:
        outcome = await eyas("generate", "x", "--max-tokens", "100000", "--address", address)
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert outcome.err.startswith("error: INVALID_ARGUMENT: ")


async def test_a_router_that_is_not_there_is_one_line_on_stderr() -> None:
    outcome = await eyas("generate", "x", "--address", f"127.0.0.1:{free_port()}")
    assert (outcome.status, outcome.err.count("\n")) == (1, 1)
    assert outcome.err.startswith("error: UNAVAILABLE: ")


async def test_a_prompt_comes_from_standard_input(url: str) -> None:
    async with worker(url, Script(TOKENS)), router(url) as address:
        outcome = await eyas("generate", "--address", address, "--max-tokens", "7", "--json", text=PROMPT_TEXT)
    assert (outcome.status, outcome.err) == (0, "")
    chunks = [json.loads(line) for line in outcome.out.splitlines()]
    assert [token for chunk in chunks for token in chunk.get("token_ids", ())] == list(REST[:7])


async def test_chat_streams_the_answers_of_a_url(url: str) -> None:
    async with worker(url, Script(TOKENS)), http_router(url) as base:
        options = ("--temperature", "0", "--max-tokens", str(len(REST)))
        outcome = await eyas("chat", base, *options, text=f"{PROMPT_TEXT}\n/exit\n")
    assert outcome == Outcome(0, f"{REST_TEXT}\n", "")


async def test_a_failed_handshake_is_one_line_on_stderr(url: str) -> None:
    async with router(url) as address:
        outcome = await eyas("generate", "x", "--address", address, "--tls")
    assert (outcome.status, outcome.err.count("\n")) == (1, 1)
    assert "whether it speaks TLS" in outcome.err


async def test_ctrl_c_cancels_the_request(url: str) -> None:
    script = Script(TOKENS, stalls_after=1)
    async with worker(url, script), router(url) as address:
        process = await started("generate", PROMPT_TEXT, "--address", address, "--json")
        try:
            assert process.stdout is not None
            await process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, err = await asyncio.wait_for(process.communicate(), 20)
            await until(lambda: script.num_cancelled == 1)
        finally:
            if process.returncode is None:
                process.kill()
    assert (process.returncode, err.strip()) == (130, b"")
