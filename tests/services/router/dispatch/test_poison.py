"""Requests that end verifiers are refused after the second one; the requests that shared these verifiers are served."""

import asyncio
import logging
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from eyas.config import RegistryConfig
from eyas.errors import PoisonRequest
from eyas.rpc.messages import Lease, Load
from eyas.services.discovery.redis_registry import Registry
from eyas.services.router.dispatch.poison import REFUSAL_S, PoisonDetector
from tests.services.router.dispatch.mortal_verifier import POISON, SLOW, call_of, mortal_verifiers, num_alive
from tests.support.services.pods import pod_router, pod_worker, settings
from tests.support.services.scripted_verifier import (
    CALL,
    MODEL,
    REST,
    TOKENS,
    Script,
    call_with,
    failure,
    request_with,
    router,
    send,
    tokens_of,
    until,
    worker,
)

ANSWER = TOKENS[4:7]


async def test_poison_ends_two_verifiers_and_no_more(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with mortal_verifiers(url, 3) as verifiers:
        async with router(url) as address:
            code, details = await failure(address, call_of(POISON, n=3))
            assert (code, "two verifiers were lost" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
            again = await failure(address, call_of(POISON))
            assert again == (code, details), "the same request comes back at once"
            assert tokens_of(await send(address, call_of(SLOW))) == ANSWER
        assert num_alive(verifiers) == 1
    first, second = [record.getMessage() for record in caplog.records if "refused request" in record.getMessage()]
    assert re.search(r"request 7-0 .* lost the verifiers \S+:\d+, \S+:\d+ before .* digest \w{32}$", first)
    assert re.search(r"request 7-0 .* digest \w{32}$", second)
    assert first[-32:] == second[-32:]


def test_a_refusal_is_logged_remembered_and_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    detector = PoisonDetector(clock=lambda: now)
    with detector.attempt("v2", "body", is_suspect=True) as attempt:
        assert detector.isolate(attempt)
    call = request_with(tenant="acme")
    detector.refuse(call, attempt, ["host:1", "host:2"])
    assert "request r of tenant 'acme': it lost the verifiers host:1, host:2" in caplog.text
    same_in_all_that_matters = request_with(id="s", sampling=replace(call.request.sampling, seed=1))
    for again in (call, same_in_all_that_matters):
        with pytest.raises(PoisonRequest, match="refused for 10 minutes"):
            detector.check(again)
    detector.check(call_with(max_tokens=2))
    now = REFUSAL_S
    detector.check(call)


def test_a_suspect_is_to_blame_only_if_it_was_alone() -> None:
    detector = PoisonDetector(clock=lambda: 0.0)
    with detector.attempt("v", "a", is_suspect=False) as first, detector.attempt("v", "b", is_suspect=True) as trial:
        assert detector.closed() == {"v"}
        assert not detector.isolate(trial), "the first call still waits there"
        detector.begin(first)
        assert detector.isolate(trial)
        with detector.attempt("w", "b", is_suspect=True) as sibling:
            assert not sibling.trial_until, "its body is tried elsewhere"
        with detector.attempt("v", "c", is_suspect=True) as late:
            assert not late.trial_until
            assert not trial.is_alone
    assert detector.closed() == set()


async def test_requests_that_shared_verifiers_with_poison_are_served(url: str) -> None:
    with mortal_verifiers(url, 5) as verifiers:
        async with router(url) as address:
            slow = [asyncio.create_task(send(address, call_of(SLOW, number))) for number in range(12)]
            poison = [asyncio.create_task(failure(address, call_of(POISON, number))) for number in range(2)]
            assert {tokens_of(await answer) for answer in slow} == {ANSWER}
            for refusal in poison:
                assert (await refusal)[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert num_alive(verifiers) >= 1


async def test_verifiers_that_drain_make_no_suspects(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with router(url) as address:
            answer = None
            for _ in range(3):
                script = Script(TOKENS, gate=asyncio.Event())
                async with worker(url, script):
                    answer = answer or asyncio.create_task(send(address, CALL))
                    await until(lambda script=script: bool(script.calls))
            async with worker(url, Script(TOKENS)):
                assert answer is not None
                assert tokens_of(await answer) == REST


async def test_a_request_that_sticks_two_verifiers_is_refused() -> None:
    scripts = [Script(TOKENS, gate=asyncio.Event()) for _ in range(3)]
    async with pod_worker(scripts[0]) as one, pod_worker(scripts[1]) as two, pod_worker(scripts[2]) as three:
        workers = {worker.incarnation: worker for worker in (one, two, three)}
        discovery = settings("static", verifiers=tuple(worker.address for worker in workers.values()))
        async with pod_router(discovery) as (address, pool):
            await until(lambda: len(pool.reachable) == 3)
            answer = asyncio.create_task(failure(address, CALL))
            for number in (1, 2):
                await until(lambda number=number: sum(len(script.calls) for script in scripts) == number)
                stuck = next(worker for worker in workers.values() if worker.script.calls)
                del workers[stuck.incarnation]
                stuck.lease = replace(stuck.lease, load=replace(stuck.lease.load, step_seconds=61.0))
            code, details = await answer
            assert (code, "two verifiers were lost" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
            assert sum(len(script.calls) for script in scripts) == 2


@asynccontextmanager
async def resetting_verifier(url: str) -> AsyncIterator[None]:
    """A lease of an address that resets every connection before any call was sent."""

    def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    registry = Registry(RegistryConfig(url, 60.0))
    async with await asyncio.start_server(reset, "127.0.0.1") as server:
        host, port = server.sockets[0].getsockname()
        lease = Lease("verifier", f"{host}:{port}", f"resets-{port}", MODEL, Load(0, 0, 90_000))
        await registry.publish(lambda: lease)
        try:
            yield
        finally:
            await registry.withdraw()
            await registry.close()


async def test_connections_that_were_never_made_make_no_suspects(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with worker(url, Script(TOKENS)), resetting_verifier(url), resetting_verifier(url), router(url) as address:
        assert tokens_of(await send(address, CALL)) == REST
    assert caplog.text.count("failed to connect") == 2, "both were tried"
