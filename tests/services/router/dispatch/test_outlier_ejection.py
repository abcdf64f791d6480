"""Failing workers are ejected for a growing time, and return after a probe; if all are ejected, requests go on."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from eyas.config import OutlierDetectionConfig
from eyas.rpc.messages import Load
from eyas.services.router.dispatch.workers import OutlierDetector
from tests.support.clock import Clock
from tests.support.services.pods import pod_router, pod_worker, settings
from tests.support.services.scripted_verifier import CALL, REST, TOKENS, Script, failure, send, tokens_of, until


def test_failures_in_a_row_eject_and_a_served_request_clears() -> None:
    outliers = OutlierDetector(OutlierDetectionConfig(consecutive_failures=3), Clock())
    for _ in range(2):
        outliers.record_failure("v")
    outliers.record_success("v")
    for _ in range(2):
        outliers.record_failure("v")
    assert not outliers.ejected
    outliers.record_failure("v")
    assert outliers.ejected == {"v"}


def test_each_ejection_is_twice_as_long_up_to_the_longest() -> None:
    clock, lengths = Clock(), []
    outliers = OutlierDetector(OutlierDetectionConfig(base_ejection_time_s=5, max_ejection_time_s=30), clock)
    for _ in range(5):
        outliers.record_failure("v")
        began = clock.now
        while not outliers.due_probes:
            clock.now += 0.5
        lengths.append(clock.now - began)
        outliers.record_probe("v", answered=True)
    assert lengths == [5, 10, 20, 30, 30]


def test_only_a_successful_probe_ends_an_ejection() -> None:
    clock = Clock()
    outliers = OutlierDetector(OutlierDetectionConfig(base_ejection_time_s=5), clock)
    outliers.record_failure("v")
    assert outliers.due_probes == []
    clock.now += 5
    assert (outliers.due_probes, outliers.ejected) == (["v"], frozenset({"v"}))
    outliers.record_probe("v", answered=False)
    assert (outliers.due_probes, outliers.ejected) == ([], frozenset({"v"}))
    clock.now += 10
    outliers.record_probe("v", answered=True)
    assert (outliers.due_probes, outliers.ejected) == ([], frozenset())


def test_failures_while_ejected_do_not_lengthen_the_ejection() -> None:
    clock = Clock()
    outliers = OutlierDetector(OutlierDetectionConfig(base_ejection_time_s=5), clock)
    for _ in range(10):  # requests that were already running fail too
        outliers.record_failure("v")
    clock.now += 5
    assert outliers.due_probes == ["v"]


def test_the_records_of_lost_workers_are_dropped() -> None:
    outliers = OutlierDetector(OutlierDetectionConfig(), Clock())
    outliers.record_failure("v")
    outliers.retain(["w"])
    outliers.record_probe("v", answered=False)
    assert not outliers.ejected


async def test_a_failing_verifier_gets_nothing_until_a_probe_passes() -> None:
    failing = Script(TOKENS, fails_after=0)
    async with (
        pod_worker(failing) as one,
        pod_worker() as other,
        pod_router(
            settings("static", verifiers=(one.address, other.address), stale_after_s=600.0),
            OutlierDetectionConfig(base_ejection_time_s=0.1),
        ) as (address, workers),
    ):
        one.lease = replace(one.lease, load=Load(free_kv_tokens=9000))
        await until(lambda: bool(workers.reachable) and {one.lease, other.lease} == set(workers.snapshot().verifiers))
        one.gate.clear()
        for _ in range(5):
            assert tokens_of(await send(address, CALL)) == REST
        assert (len(failing.calls), workers.snapshot().unhealthy) == (1, frozenset({one.incarnation}))
        failing.fails_after = None
        one.gate.set()
        await until(lambda: not workers.snapshot().unhealthy)


@pytest.mark.parametrize("stalls_after", [0, 1])
async def test_requests_of_a_stuck_verifier_move_to_another(stalls_after: int) -> None:
    stuck = Script(TOKENS, stalls_after=stalls_after)
    async with (
        pod_worker(stuck) as one,
        pod_worker() as other,
        pod_router(settings("static", verifiers=(one.address, other.address))) as (address, workers),
    ):
        one.lease = idle = replace(one.lease, load=Load(free_kv_tokens=9000))
        await until(lambda: bool(workers.reachable) and {idle, other.lease} == set(workers.snapshot().verifiers))
        answer = asyncio.create_task(send(address, CALL))
        await until(lambda: len(stuck.calls) == 1)
        one.lease = replace(idle, load=replace(idle.load, step_seconds=61.0))
        assert tokens_of(await answer) == REST
        assert one.incarnation in workers.snapshot().unhealthy
        await until(lambda: workers.reachable == (other.lease,))


async def test_if_every_verifier_is_ejected_requests_still_go_out() -> None:
    script = Script(TOKENS, fails_after=0)
    async with (
        pod_worker(script) as one,
        pod_router(
            settings("static", verifiers=(one.address,)),
            OutlierDetectionConfig(base_ejection_time_s=600, max_ejection_time_s=600),
        ) as (address, workers),
    ):
        await until(lambda: bool(workers.reachable))
        assert (await failure(address, CALL))[0] is grpc.StatusCode.UNAVAILABLE
        assert workers.snapshot().unhealthy == {one.incarnation}
        await until(lambda: not workers.reachable)  # the only verifier is ejected
        script.fails_after = None
        assert tokens_of(await send(address, CALL)) == REST
        assert not workers.snapshot().unhealthy
        await until(lambda: bool(workers.reachable))
