"""The benchmark of adaptive trees under constant load counts the tokens and the time of both engines."""

from itertools import count

import pytest

from benchmarks.scripts import adaptive_load
from eyas.bench.settings import MethodSpec
from eyas.models.loading import load_target


@pytest.fixture(autouse=True)
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes a millisecond, and nothing else does."""
    clock = count()
    monkeypatch.setattr(adaptive_load.time, "thread_time", lambda: next(clock) / 1000)


@pytest.mark.nightly
def test_both_engines_get_the_same_time() -> None:
    settings = adaptive_load.Settings(adaptive_load.MODEL, seconds=0.3, tokens=10)
    prompts = [tuple(range(10, 30)), tuple(range(40, 70))]
    target, method = load_target(settings.model, "float32", "cpu"), MethodSpec.parse(adaptive_load.METHODS[1])
    ratio = adaptive_load.measure(settings, method, (2, 0.0), prompts, target)
    assert ratio.steps > 4
    assert abs(ratio.seconds[0] - ratio.seconds[1]) < 0.05, "a step takes some looks at the clock"
    assert 0.2 < ratio.whole < 5
    assert 0 <= ratio.steps_with_trees <= ratio.steps
    assert adaptive_load.table([ratio]).rows[0][:3] == ("`dspark`", "2", "0")
