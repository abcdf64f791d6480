"""Policies as Serve calls them: with its own context, ten times a second."""

from collections.abc import Mapping
from dataclasses import asdict

import pytest

from eyas.services.ray.autoscaling import DraftUsage, VerifierUsage

config = pytest.importorskip("ray.serve.config", reason="needs Ray: pip install -e '.[ray]'")
common = pytest.importorskip("ray.serve._private.common", reason="needs Ray: pip install -e '.[ray]'")

SCALING = {"low": 0.5, "target": 0.7, "high": 0.85, "upscale_delay_s": 1.0, "downscale_delay_s": 5.0}
FULL = VerifierUsage(used_kv_tokens=900, queued_kv_tokens=900, num_kv_tokens=1000, num_requests=4, max_num_seqs=8)
IDLE = VerifierUsage(0, 0, 1000, 0, 8)


def size_after(
    policy: object, reports: list[VerifierUsage | DraftUsage | None], requests: float, size: int, seconds: int
) -> int:
    """The size of a pool after `seconds` of constant reports; None is a replica without reports."""
    names = {name for use in reports if use for name in asdict(use)}
    raw = {
        name: {str(i): series(asdict(use)[name]) for i, use in enumerate(reports) if use} for name in names
    }  # fmt: skip
    state: Mapping[str, object] = {}
    for tick in range(seconds * 10):
        context = config.AutoscalingContext(
            deployment_id=None, deployment_name="d", app_name="a", current_num_replicas=len(reports),
            target_num_replicas=size, running_replicas=[str(i) for i in range(len(reports))], total_num_requests=requests,
            total_queued_requests=0, aggregated_metrics=None, raw_metrics=raw, capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=9, policy_state=dict(state), last_scale_up_time=None, last_scale_down_time=None,
            current_time=1000 + tick / 10, config=None,
        )  # fmt: skip
        size, state = policy(context)  # type: ignore[operator]
    return size


def series(value: float) -> list[object]:
    """Reports of a replica over 20 s: an outlier long ago, then a little more and a little less than `value`."""
    points = [(0.0, 1e6), (18.0, value * 1.1), (20.0, value * 0.9)]
    return [common.TimeStampedValue(timestamp=at, value=reported) for at, reported in points]


def test_verifiers_scale_by_load_after_the_delay() -> None:
    from eyas.services.ray.autoscaling import VerifierPolicy

    policy = VerifierPolicy(look_back_period_s=5.0, **SCALING)
    assert size_after(policy, [FULL], 0, 1, seconds=1) == 1
    assert size_after(policy, [FULL], 0, 1, seconds=2) == 3
    assert size_after(policy, [FULL, IDLE], 0, 3, seconds=9) == 3
    assert size_after(policy, [IDLE, IDLE, IDLE], 0, 3, seconds=6) == 1


def test_drafters_follow_their_occupancy_and_lateness() -> None:
    from eyas.services.ray.autoscaling import DraftPolicy

    policy = DraftPolicy(look_back_period_s=5.0, max_late_ratio=0.1, **SCALING)
    assert size_after(policy, [DraftUsage(0.9, 100, 0)], 0, 1, seconds=2) == 2
    assert size_after(policy, [DraftUsage(0.4, 100, 12)], 0, 1, seconds=2) == 2
    assert size_after(policy, [DraftUsage(0.4, 100, 4)], 0, 1, seconds=9) == 1


def test_routers_follow_the_requests_that_serve_counts() -> None:
    from eyas.services.ray.autoscaling import RouterPolicy

    policy = RouterPolicy(max_requests=100, look_back_period_s=5.0, **SCALING)
    assert size_after(policy, [None], 250, 1, seconds=2) == 4
    assert size_after(policy, [None], 250, 9, seconds=6) == 4


def test_a_pool_without_reports_keeps_its_size() -> None:
    from eyas.services.ray.autoscaling import DraftPolicy, VerifierPolicy

    assert size_after(VerifierPolicy(look_back_period_s=5.0, **SCALING), [None, None, None], 0, 3, seconds=9) == 3
    assert size_after(DraftPolicy(look_back_period_s=5.0, max_late_ratio=0.1, **SCALING), [None, None], 0, 2, seconds=9) == 2
