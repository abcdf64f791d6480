"""Policies as Serve calls them, with its own context; the delays of their pools are Serve's."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.services.ray.autoscaling import DraftUsage, VerifierUsage

config = pytest.importorskip("ray.serve.config", reason="needs Ray: pip install -e '.[ray]'")
common = pytest.importorskip("ray.serve._private.common", reason="needs Ray: pip install -e '.[ray]'")

SCALING = {"low": 0.5, "target": 0.7, "high": 0.85, "upscale_delay_s": 1.0, "downscale_delay_s": 5.0}
FULL = VerifierUsage(used_kv_tokens=900, queued_kv_tokens=900, num_kv_tokens=1000, num_requests=4, max_num_seqs=8)
IDLE = VerifierUsage(0, 0, 1000, 0, 8)


def wanted_size(policy: object, reports: list[VerifierUsage | DraftUsage | None], requests: float, size: int) -> int:
    """The size of a pool that its reports ask for; None is a replica without reports."""
    names = {name for use in reports if use for name in asdict(use)}
    raw = {
        name: {str(i): series(asdict(use)[name]) for i, use in enumerate(reports) if use} for name in names
    }  # fmt: skip
    context = config.AutoscalingContext(
        deployment_id=None, deployment_name="d", app_name="a", current_num_replicas=len(reports),
        target_num_replicas=size, running_replicas=[str(i) for i in range(len(reports))], total_num_requests=requests,
        total_queued_requests=0, aggregated_metrics=None, raw_metrics=raw, capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=9, policy_state={}, last_scale_up_time=None, last_scale_down_time=None,
        current_time=1000.0, config=None,
    )  # fmt: skip
    wanted, state = policy(context)  # type: ignore[operator]
    assert state == {}
    return int(wanted)


def series(value: float) -> list[object]:
    """Reports of a replica over 20 s: an outlier long ago, then a little more and a little less than `value`."""
    points = [(0.0, 1e6), (18.0, value * 1.1), (20.0, value * 0.9)]
    return [common.TimeStampedValue(timestamp=at, value=reported) for at, reported in points]


def test_verifiers_scale_by_load() -> None:
    from eyas.services.ray.autoscaling import VerifierPolicy

    policy = VerifierPolicy(look_back_period_s=5.0, **SCALING)
    assert wanted_size(policy, [FULL], 0, 1) == 3
    assert wanted_size(policy, [FULL, IDLE], 0, 3) == 3
    assert wanted_size(policy, [IDLE, IDLE, IDLE], 0, 3) == 1


def test_drafters_follow_their_occupancy_and_lateness() -> None:
    from eyas.services.ray.autoscaling import DraftPolicy

    policy = DraftPolicy(look_back_period_s=5.0, max_late_ratio=0.1, **SCALING)
    assert wanted_size(policy, [DraftUsage(0.9, 100, 0)], 0, 1) == 2
    assert wanted_size(policy, [DraftUsage(0.4, 100, 12)], 0, 1) == 2
    assert wanted_size(policy, [DraftUsage(0.4, 100, 4)], 0, 1) == 1


def test_routers_follow_the_requests_that_serve_counts() -> None:
    from eyas.services.ray.autoscaling import RouterPolicy

    policy = RouterPolicy(max_requests=100, look_back_period_s=5.0, **SCALING)
    assert wanted_size(policy, [None], 250, 1) == 4
    assert wanted_size(policy, [None], 250, 9) == 4


def test_a_pool_without_reports_keeps_its_size() -> None:
    from eyas.services.ray.autoscaling import DraftPolicy, VerifierPolicy

    assert wanted_size(VerifierPolicy(look_back_period_s=5.0, **SCALING), [None, None, None], 0, 3) == 3
    assert wanted_size(DraftPolicy(look_back_period_s=5.0, max_late_ratio=0.1, **SCALING), [None, None], 0, 2) == 2


def test_serve_gets_the_delays_of_each_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.services.ray.app import build

    serve = pytest.importorskip("ray.serve", reason="needs Ray: pip install -e '.[ray]'")
    given, deployment = dict[str, Any](), serve.deployment

    def noted(**options: Any) -> Any:
        given[options["name"]] = options["autoscaling_config"]
        return deployment(**options)

    monkeypatch.setattr(serve, "deployment", noted)
    file = Path(__file__).parents[3] / "examples" / "configs" / "ray" / "demo.yaml"
    args = yaml.safe_load(file.read_text())["applications"][0]["args"]
    args["pools"] = {"verifier": {"scaling": {"upscale_delay_s": 1.5, "downscale_delay_s": 7.0}}}
    build(args)
    assert (given["Verifier"].upscale_delay_s, given["Verifier"].downscale_delay_s) == (1.5, 7.0)
    assert (given["Router"].upscale_delay_s, given["Router"].downscale_delay_s) == (5.0, 120.0)
