"""The size of a pool that a demand asks for."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import ConfigError
from eyas.services.ray.autoscaling import ScalingConfig, desired_size

DEMANDS = st.floats(0, 200)
SIZES = st.integers(1, 100)


@st.composite
def configs(draw: st.DrawFn) -> ScalingConfig:
    low, target, high = sorted(draw(st.lists(st.floats(0.05, 1.5), min_size=3, max_size=3)))
    return ScalingConfig(low, target, high, draw(st.floats(0, 30)), draw(st.floats(0, 300)))


@given(DEMANDS, SIZES, configs())
def test_a_wanted_size_is_between_current_and_target_size(demand: float, size: int, config: ScalingConfig) -> None:
    fitting = max(1, math.ceil(demand / config.target))
    assert min(size, fitting) <= desired_size(demand, size, config) <= max(size, fitting)


@given(DEMANDS, DEMANDS, SIZES, configs())
def test_more_demand_never_wants_fewer(one: float, other: float, size: int, config: ScalingConfig) -> None:
    low, high = sorted((one, other))
    assert desired_size(low, size, config) <= desired_size(high, size, config)


@given(SIZES, configs(), st.data())
def test_demand_between_the_bounds_changes_nothing(size: int, config: ScalingConfig, data: st.DataObject) -> None:
    demand = data.draw(st.floats(config.low * size, config.high * size))
    assert desired_size(demand, size, config) == size


@given(DEMANDS, SIZES, configs())
def test_constant_demand_changes_a_pool_once_at_most(demand: float, size: int, config: ScalingConfig) -> None:
    wanted = desired_size(demand, size, config)
    assert desired_size(demand, wanted, config) == wanted


@pytest.mark.parametrize("settings", [{"low": 0.9}, {"target": 0.9}, {"low": 0.0}, {"upscale_delay_s": -1}])
def test_settings_that_would_oscillate_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ScalingConfig(**settings)
