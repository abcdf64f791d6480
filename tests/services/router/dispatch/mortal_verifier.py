"""Scripted verifiers in processes of their own, which a poisonous request ends as a crash does.

The first token of its prompt decides what a request does there.
"""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from typing import Any

from redis import Redis

from eyas.api.request import Request, SamplingParams
from eyas.rpc.convert import generate_call_from_proto
from eyas.rpc.messages import GenerateCall
from tests.support.services.scripted_verifier import TOKENS, Script, ScriptedVerifier, worker

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
def mortal_verifiers(url: str, number: int) -> Iterator[list[ForkServerProcess]]:
    """Run verifiers in processes of their own, forks of one that has imported this file; wait until all have leases."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    running = [context.Process(target=serve, args=(url,), daemon=True) for _ in range(number)]
    for process in running:
        process.start()
    try:
        with Redis.from_url(url) as client:
            while client.scard("eyas:leases:verifier") < number:
                assert all(process.is_alive() for process in running)
                time.sleep(0.01)
        yield running
    finally:
        for process in running:
            process.kill()
            process.join()


def num_alive(verifiers: Iterable[ForkServerProcess]) -> int:
    """Return how many still run."""
    return sum(verifier.is_alive() for verifier in verifiers)


def serve(url: str) -> None:
    """Serve until killed; the body of a process."""

    async def body() -> None:
        async with worker(url, Script(TOKENS), servicer=MortalVerifier):
            await asyncio.sleep(600)

    asyncio.run(body())
