"""A pool's size follows demand without fluttering."""

import itertools
import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import ConfigError
from eyas.services.ray.autoscaling import PendingChange, ScalingConfig, decide_size, desired_size

DEMANDS = st.floats(0, 200)
SIZES = st.integers(1, 100)


@st.composite
def configs(draw: st.DrawFn) -> ScalingConfig:
    low, target, high = sorted(draw(st.lists(st.floats(0.05, 1.5), min_size=3, max_size=3)))
    return ScalingConfig(low, target, high, draw(st.floats(0, 30)), draw(st.floats(0, 300)))


def sizes(demands: Iterable[float], size: int, config: ScalingConfig, step: float = 1.0) -> list[int]:
    """The sizes of a pool that is looked at every `step` seconds."""
    found, pending, changed = [], None, None
    for number, demand in enumerate(demands):
        now, before = 1000 + number * step, size
        size, pending = decide_size(demand, size, pending, changed, now, config)
        changed = now if size != before else changed
        found.append(size)
    return found


@given(DEMANDS, SIZES, configs())
def test_a_wanted_size_is_between_current_and_target_size(demand: float, size: int, config: ScalingConfig) -> None:
    fitting = max(1, math.ceil(demand / config.target))
    assert min(size, fitting) <= desired_size(demand, size, config) <= max(size, fitting)


@given(DEMANDS, DEMANDS, SIZES, configs())
def test_more_demand_never_wants_fewer(one: float, other: float, size: int, config: ScalingConfig) -> None:
    low, high = sorted((one, other))
    assert desired_size(low, size, config) <= desired_size(high, size, config)


@given(DEMANDS, SIZES, configs())
def test_constant_demand_changes_a_pool_once_at_most(demand: float, size: int, config: ScalingConfig) -> None:
    seen = sizes([demand] * 400, size, config, step=1.0)
    changes = [(a, b) for a, b in itertools.pairwise([size, *seen]) if a != b]
    assert len(changes) <= 1
    assert desired_size(demand, seen[-1], config) == seen[-1] or config.downscale_delay_s >= 399


@given(SIZES, configs(), st.data())
def test_demand_between_the_bounds_changes_nothing(size: int, config: ScalingConfig, data: st.DataObject) -> None:
    between = st.floats(config.low * size, config.high * size)
    demands = data.draw(st.lists(between, min_size=1, max_size=50))
    assert set(sizes(demands, size, config)) == {size}


@given(st.lists(DEMANDS, min_size=1, max_size=200), SIZES, configs())
def test_a_pool_shrinks_no_sooner_than_its_wait_after_any_change(
    demands: list[float], size: int, config: ScalingConfig
) -> None:
    seen = [size, *sizes(demands, size, config)]
    last = -math.inf
    for at, (before, after) in enumerate(itertools.pairwise(seen)):
        if after < before:
            assert at - last >= config.downscale_delay_s
        if after != before:
            last = at


def test_growth_waits_and_a_dip_starts_the_wait_again() -> None:
    config = ScalingConfig(upscale_delay_s=3, downscale_delay_s=10)
    assert sizes([2.0] * 5, 1, config) == [1, 1, 1, 3, 3]
    assert sizes([2.0, 2.0, 0.7, 2.0, 2.0, 2.0, 2.0], 1, config) == [1, 1, 1, 1, 1, 1, 3]


def test_a_delay_ends_at_the_smallest_change_wanted_in_it() -> None:
    config = ScalingConfig(upscale_delay_s=2, downscale_delay_s=2)
    assert sizes([9.0, 2.0, 9.0], 1, config)[-1] == 3
    assert sizes([0.1, 2.0, 0.1], 8, config)[-1] == 3


def test_a_change_of_direction_restarts_the_delay() -> None:
    config = ScalingConfig(upscale_delay_s=1, downscale_delay_s=5)
    assert decide_size(0.1, 4, PendingChange(6, 0.0), None, 100.0, config) == (4, PendingChange(1, 100.0))


@pytest.mark.parametrize("settings", [{"low": 0.9}, {"target": 0.9}, {"low": 0.0}, {"upscale_delay_s": -1}])
def test_settings_that_would_oscillate_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ScalingConfig(**settings)
