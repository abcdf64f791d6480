"""A pool's size follows demand without fluttering."""

import itertools
import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import ConfigError
from eyas.services.ray.autoscaling import Damping, Verdict, Wish, damped, wanted

DEMANDS = st.floats(0, 200)
SIZES = st.integers(1, 100)


@st.composite
def dampings(draw: st.DrawFn) -> Damping:
    low, target, high = sorted(draw(st.lists(st.floats(0.05, 1.5), min_size=3, max_size=3)))
    return Damping(low, target, high, draw(st.floats(0, 30)), draw(st.floats(0, 300)))


def sizes(demands: Iterable[float], size: int, damping: Damping, step: float = 1.0) -> list[int]:
    """The sizes of a pool that is looked at every `step` seconds."""
    found, verdict, changed = [], Verdict(size), None
    for number, demand in enumerate(demands):
        now = 1000 + number * step
        before, verdict = verdict.size, damped(demand, verdict.size, verdict.wish, changed, now, damping)
        changed = now if verdict.size != before else changed
        found.append(verdict.size)
    return found


@given(DEMANDS, SIZES, dampings())
def test_a_wanted_size_is_between_current_and_target_size(demand: float, size: int, damping: Damping) -> None:
    fitting = max(1, math.ceil(demand / damping.target))
    assert min(size, fitting) <= wanted(demand, size, damping) <= max(size, fitting)


@given(DEMANDS, DEMANDS, SIZES, dampings())
def test_more_demand_never_wants_fewer(one: float, other: float, size: int, damping: Damping) -> None:
    low, high = sorted((one, other))
    assert wanted(low, size, damping) <= wanted(high, size, damping)


@given(DEMANDS, SIZES, dampings())
def test_constant_demand_changes_a_pool_once_at_most(demand: float, size: int, damping: Damping) -> None:
    seen = sizes([demand] * 400, size, damping, step=1.0)
    changes = [(a, b) for a, b in itertools.pairwise([size, *seen]) if a != b]
    assert len(changes) <= 1
    assert wanted(demand, seen[-1], damping) == seen[-1] or damping.down_seconds >= 399


@given(SIZES, dampings(), st.data())
def test_demand_between_the_bounds_changes_nothing(size: int, damping: Damping, data: st.DataObject) -> None:
    between = st.floats(damping.low * size, damping.high * size)
    demands = data.draw(st.lists(between, min_size=1, max_size=50))
    assert set(sizes(demands, size, damping)) == {size}


@given(st.lists(DEMANDS, min_size=1, max_size=200), SIZES, dampings())
def test_a_pool_shrinks_no_sooner_than_its_wait_after_any_change(demands: list[float], size: int, damping: Damping) -> None:
    seen = [size, *sizes(demands, size, damping)]
    last = -math.inf
    for at, (before, after) in enumerate(itertools.pairwise(seen)):
        if after < before:
            assert at - last >= damping.down_seconds
        if after != before:
            last = at


def test_growth_waits_and_a_dip_starts_the_wait_again() -> None:
    damping = Damping(up_seconds=3, down_seconds=10)
    assert sizes([2.0] * 5, 1, damping) == [1, 1, 1, 3, 3]
    assert sizes([2.0, 2.0, 0.7, 2.0, 2.0, 2.0, 2.0], 1, damping) == [1, 1, 1, 1, 1, 1, 3]


def test_a_delay_ends_at_the_smallest_change_wanted_in_it() -> None:
    damping = Damping(up_seconds=2, down_seconds=2)
    assert sizes([9.0, 2.0, 9.0], 1, damping)[-1] == 3
    assert sizes([0.1, 2.0, 0.1], 8, damping)[-1] == 3


def test_a_change_of_direction_restarts_the_delay() -> None:
    verdict = damped(0.1, 4, Wish(6, 0.0), None, 100.0, Damping(up_seconds=1, down_seconds=5))
    assert verdict == Verdict(4, Wish(1, 100.0))


@pytest.mark.parametrize("settings", [{"low": 0.9}, {"target": 0.9}, {"low": 0.0}, {"up_seconds": -1}])
def test_settings_that_would_oscillate_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Damping(**settings)
