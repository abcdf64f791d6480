"""Scripted verifiers in processes of their own, which a poisonous request ends as a crash does.

`python -m tests.services.router.mortal_verifier URL` runs one. Its prompt decides what a request does there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis

from eyas.request import Request, SamplingParams
from eyas.rpc.convert import generate_call_from_proto
from eyas.rpc.messages import GenerateCall
from tests.services.router.scripted_verifier import TOKENS, Script, ScriptedVerifier, worker

# The first token of a prompt.
POISON, SLOW = 7, 8


def call_of(kind: int, number: int = 0, num_tokens: int = 3, n: int = 1) -> GenerateCall:
    """Return a request of a kind; requests with other numbers are not equal."""
    sampling = SamplingParams(num_tokens, n=n)
    return GenerateCall(Request(f"{kind}-{number}", (kind, number, 0, 0), sampling))


class MortalVerifier(ScriptedVerifier):
    """Ends its process at a poisonous request, after a moment. A slow one waits long for its first token."""

    async def Generate(self, message: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        kind = generate_call_from_proto(message).request.prompt_ids[0]
        if kind == POISON:
            await asyncio.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == SLOW:
            await asyncio.sleep(0.5)
        await super().Generate(message, context)


@contextmanager
def mortal_verifiers(url: str, number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run verifiers in processes of their own; wait until all have leases."""
    command = [sys.executable, "-m", "tests.services.router.mortal_verifier", url]
    running = [subprocess.Popen(command) for _ in range(number)]
    try:
        with Redis.from_url(url) as client:
            while client.scard("eyas:leases:verifier") < number:
                assert all(process.poll() is None for process in running)
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


async def main(url: str) -> None:
    """Serve until killed."""
    async with worker(url, Script(TOKENS), servicer=MortalVerifier):
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
