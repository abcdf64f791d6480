"""Requests that end verifiers are refused after the second one; the requests that shared these verifiers are served."""

import asyncio
import logging
import math
import re
from dataclasses import replace

import grpc
import pytest

from eyas.errors import PoisonRequest, Unavailable
from eyas.services.router.dispatcher import _read
from eyas.services.router.poison import REFUSAL_S, PoisonDetector, VerifierLost
from tests.services.router.mortal_verifier import POISON, SLOW, call_of, mortal_verifiers, num_alive
from tests.services.router.scripted_verifier import (
    CALL,
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


def test_poison_ends_two_verifiers_and_no_more(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        with mortal_verifiers(url, 3) as verifiers:
            async with router(url) as address:
                code, details = await failure(address, call_of(POISON, n=3))
                assert (code, "two verifiers were lost" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
                again = await failure(address, call_of(POISON))
                assert again == (code, details), "the same request comes back at once"
                assert tokens_of(await send(address, call_of(SLOW))) == ANSWER
            assert num_alive(verifiers) == 1

    asyncio.run(body())
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


def test_requests_that_shared_verifiers_with_poison_are_served(url: str) -> None:
    async def body() -> None:
        with mortal_verifiers(url, 5) as verifiers:
            async with router(url) as address:
                slow = [asyncio.create_task(send(address, call_of(SLOW, number))) for number in range(12)]
                poison = [asyncio.create_task(failure(address, call_of(POISON, number))) for number in range(2)]
                assert {tokens_of(await answer) for answer in slow} == {ANSWER}
                for refusal in poison:
                    assert (await refusal)[0] is grpc.StatusCode.INVALID_ARGUMENT
            assert num_alive(verifiers) >= 1

    asyncio.run(body())


def test_verifiers_that_drain_make_no_suspects(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
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

    with caplog.at_level(logging.WARNING):
        asyncio.run(body())


@pytest.mark.parametrize(
    ("details", "is_lost"),
    [
        ("Stream removed (Socket closed)", True),
        ("recvmsg:Connection reset by peer", True),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: recvmsg:Connection reset by peer",
            False,
        ),
        ("GOAWAY received", False),
    ],
)
def test_a_call_that_no_verifier_got_makes_no_suspect(details: str, is_lost: bool) -> None:
    class BrokenCall:
        async def read(self) -> None:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    async def body() -> None:
        with pytest.raises(Unavailable) as raised:
            await _read(BrokenCall(), math.inf, math.inf)  # type: ignore[arg-type]
        assert isinstance(raised.value, VerifierLost) is is_lost

    asyncio.run(body())
