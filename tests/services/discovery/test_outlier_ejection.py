"""Workers that fail are avoided for a growing time, never all of them, and come back once they answer."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from eyas.config import OutlierDetectionConfig
from eyas.rpc.messages import Load
from eyas.services.router.workers import OutlierDetector
from tests.services.discovery.pods import pod_router, pod_worker, settings
from tests.services.router.scripted_verifier import CALL, REST, TOKENS, Script, ask, failure, tokens_of, until


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_failures_in_a_row_eject_and_a_served_request_clears() -> None:
    ejections = OutlierDetector(OutlierDetectionConfig(consecutive_failures=3), Clock())
    for _ in range(2):
        ejections.failed("v")
    ejections.served("v")
    for _ in range(2):
        ejections.failed("v")
    assert not ejections.ejected
    ejections.failed("v")
    assert ejections.ejected == {"v"}


def test_each_ejection_is_twice_as_long_up_to_the_longest() -> None:
    clock, lengths = Clock(), []
    ejections = OutlierDetector(OutlierDetectionConfig(base_ejection_time_s=5, max_ejection_time_s=30), clock)
    for _ in range(5):
        ejections.failed("v")
        began = clock.now
        while not ejections.due:
            clock.now += 0.5
        lengths.append(clock.now - began)
        ejections.probed("v", answered=True)
    assert lengths == [5, 10, 20, 30, 30]


def test_only_a_successful_probe_ends_an_ejection() -> None:
    clock = Clock()
    ejections = OutlierDetector(OutlierDetectionConfig(base_ejection_time_s=5), clock)
    ejections.failed("v")
    assert ejections.due == []
    clock.now += 5
    assert (ejections.due, ejections.ejected) == (["v"], {"v"})
    ejections.probed("v", answered=False)
    assert (ejections.due, ejections.ejected) == ([], {"v"})
    clock.now += 10
    ejections.probed("v", answered=True)
    assert (ejections.due, ejections.ejected) == ([], frozenset())


def test_failures_while_ejected_do_not_lengthen_the_ejection() -> None:
    clock = Clock()
    ejections = OutlierDetector(OutlierDetectionConfig(base_ejection_time_s=5), clock)
    for _ in range(10):  # its requests of before fail as well
        ejections.failed("v")
    clock.now += 5
    assert ejections.due == ["v"]


def test_workers_that_are_gone_are_forgotten() -> None:
    ejections = OutlierDetector(OutlierDetectionConfig(), Clock())
    ejections.failed("v")
    ejections.keep(["w"])
    ejections.probed("v", answered=False)
    assert not ejections.ejected


def test_a_failing_verifier_gets_nothing_until_a_probe_passes() -> None:
    async def body() -> None:
        failing = Script(TOKENS, dies_after=0)
        async with (
            pod_worker(failing) as one,
            pod_worker() as other,
            pod_router(
                settings("static", verifiers=(one.address, other.address), stale_after_s=600.0),
                OutlierDetectionConfig(base_ejection_time_s=0.1),
            ) as (address, workers),
        ):
            one.lease = replace(one.lease, load=Load(free_kv_tokens=9000))
            await until(lambda: workers.ready and {one.lease, other.lease} == set(workers.fleet().verifiers))
            one.gate.clear()
            for _ in range(5):
                assert tokens_of(await ask(address, CALL)) == REST
            assert (len(failing.calls), workers.fleet().suspects) == (1, {one.incarnation})
            failing.dies_after = None
            one.gate.set()
            await until(lambda: not workers.fleet().suspects)

    asyncio.run(body())


@pytest.mark.parametrize("falls_silent_after", [0, 1])
def test_the_requests_of_a_stuck_verifier_go_on_elsewhere(falls_silent_after: int) -> None:
    async def body() -> None:
        stuck = Script(TOKENS, falls_silent_after=falls_silent_after)
        async with (
            pod_worker(stuck) as one,
            pod_worker() as other,
            pod_router(settings("static", verifiers=(one.address, other.address))) as (address, workers),
        ):
            one.lease = idle = replace(one.lease, load=Load(free_kv_tokens=9000))
            await until(lambda: workers.ready and {idle, other.lease} == set(workers.fleet().verifiers))
            answer = asyncio.create_task(ask(address, CALL))
            await until(lambda: len(stuck.calls) == 1)
            one.lease = replace(idle, load=replace(idle.load, step_seconds=61.0))
            assert tokens_of(await answer) == REST
            assert one.incarnation in workers.fleet().suspects
            await until(lambda: workers.reachable == (other.lease,))

    asyncio.run(body())


def test_if_every_verifier_is_ejected_requests_still_go_out() -> None:
    async def body() -> None:
        script = Script(TOKENS, dies_after=0)
        async with (
            pod_worker(script) as one,
            pod_router(
                settings("static", verifiers=(one.address,)),
                OutlierDetectionConfig(base_ejection_time_s=600, max_ejection_time_s=600),
            ) as (
                address,
                workers,
            ),
        ):
            await until(lambda: workers.ready)
            assert (await failure(address, CALL))[0] is grpc.StatusCode.UNAVAILABLE
            assert workers.fleet().suspects == {one.incarnation}
            await until(lambda: not workers.ready)  # no green light over nothing but failures
            script.dies_after = None
            assert tokens_of(await ask(address, CALL)) == REST
            assert not workers.fleet().suspects
            await until(lambda: workers.ready)

    asyncio.run(body())
