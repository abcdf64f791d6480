"""Replicas report usage from their own metrics, and demand rises with usage."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from eyas.config import TelemetryConfig
from eyas.engine.engine import EngineLoad
from eyas.errors import ConfigError, RequestFailed
from eyas.services.draft.telemetry import DraftTelemetry
from eyas.services.lifecycle import ServiceRunner
from eyas.services.ray.autoscaling import DraftUsage, DraftUsageReader, VerifierUsage, read_verifier_usage
from eyas.services.ray.replicas import WorkerReplica
from eyas.services.verifier.telemetry import VerifierTelemetry
from eyas.telemetry.exporters import Telemetry, telemetry

NUMBERS = st.floats(0, 1e6)
USES = st.builds(VerifierUsage, NUMBERS, NUMBERS, st.floats(1, 1e6), NUMBERS, st.floats(1, 1e4))


@contextmanager
def metrics_of(service: str) -> Iterator[tuple[Telemetry, CollectorRegistry]]:
    registry = CollectorRegistry()
    with telemetry(TelemetryConfig(), service, registry) as own:
        yield own, registry


def test_a_verifier_reports_its_slots_and_requests() -> None:
    with metrics_of("verifier") as (own, registry):
        read = partial(read_verifier_usage, registry, "m", max_num_seqs=8)
        assert VerifierUsage(**read()).demand == 0
        load = EngineLoad(num_running=3, num_waiting=5, free_kv_tokens=400, num_kv_tokens=1000, queued_kv_tokens=900)
        VerifierTelemetry(own, "m").watch(lambda: load)
        assert VerifierUsage(**read()) == VerifierUsage(600, 900, 1000, 8, 8)
    assert VerifierUsage(600, 900, 1000, 8, 8).demand == 1.5
    assert VerifierUsage(100, 0, 1000, 24, 8).demand == 3


def test_a_drafter_reports_events_since_the_last_report() -> None:
    now = [100.0]
    with metrics_of("draft") as (own, registry):
        observer = DraftTelemetry(own)
        reader = DraftUsageReader(registry, timeout_s=0.12, clock=lambda: now[0])
        observer.answered([0.01] * 6 + [0.3, 0.4])
        observer.drafted([], [], 7 * 10**9, 10 * 10**9)
        now[0] += 4.0
        use = DraftUsage(**reader.read())
        assert (use.occupancy, use.replies, use.late) == pytest.approx((0.75, 2.0, 0.5))
        now[0] += 4.0
        assert DraftUsage(**reader.read()) == DraftUsage(0, 0, 0)


@given(USES, st.sampled_from(["used_kv_tokens", "queued_kv_tokens", "num_requests"]), NUMBERS)
def test_more_work_never_asks_for_fewer_verifiers(use: VerifierUsage, name: str, more: float) -> None:
    busier = replace(use, **{name: getattr(use, name) + more})
    assert 0 <= use.demand <= busier.demand


@given(st.floats(0, 3), NUMBERS, st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 1))
def test_lateness_scales_drafters_within_bounds(
    occupancy: float, answers: float, one: float, other: float, max_late_ratio: float
) -> None:
    few, many = (DraftUsage(occupancy, answers, answers * share) for share in sorted((one, other)))
    assert min(occupancy, 2) <= few.demand(max_late_ratio) <= many.demand(max_late_ratio) <= 2


async def test_a_hosted_service_reports_ready_stop_and_failure() -> None:
    async def serve(runner: ServiceRunner, breaks: bool) -> None:
        with runner.stop_requested() as stop:
            runner.ready("here:1")
            if breaks:
                raise ConfigError("the port is gone")
            await stop.wait()

    hosted = WorkerReplica()
    await hosted.start(lambda runner: serve(runner, breaks=False))
    hosted.check_health()
    await hosted.stop()
    hosted.check_health()
    broken = WorkerReplica()
    with pytest.raises(ConfigError, match="the port is gone"):
        await broken.start(lambda runner: serve(runner, breaks=True))
    ended = WorkerReplica()
    with pytest.raises(RequestFailed, match="ended"):
        await ended.start(lambda runner: asyncio.sleep(0))
