"""Whether a step waits for missing trees, and how many rows a pass ahead has, by what is measured."""

import numpy as np
import pytest

from eyas.drafters.on_demand import RowLimit, StepWait
from eyas.models.emulation import VirtualClock


def share_of_waits(wait_s: float, num_missing: int, left: float = 3.0) -> float:
    """Of steps, once both ways have been tried. Four sessions have 3 tokens a step with a tree, and 1 without.

    left: tokens that the trees of the others yield after a wait, which keeps the drafter from growing them.
    """
    clock, rule, waits = VirtualClock(), StepWait(VirtualClock()), list[bool]()
    rule.clock, lengths, missing = clock, dict.fromkeys("abcd", 3.0), set("abcd"[:num_missing])
    for _ in range(1500):
        waits.append(rule.waits(lengths, missing))  # type: ignore[arg-type]
        if waits[-1]:
            rule.waited(wait_s)
        clock.now += 1.0 + wait_s * waits[-1]
        lengths = {name: (3 if waits[-1] else 1) if name in missing else left if waits[-1] else 3 for name in "abcd"}
    return sum(waits[-400:]) / 400


@pytest.mark.parametrize(
    ("wait_s", "num_missing", "waits"), [(0.5, 1, False), (0.5, 3, True), (0.1, 1, True), (3.0, 4, False)]
)
def test_a_step_waits_only_where_trees_yield_more(wait_s: float, num_missing: int, waits: bool) -> None:
    """A tree on demand brings 2 more than none; in a step's time 12 are lost."""
    share = share_of_waits(wait_s, num_missing)
    assert share == 1.0 if waits else share <= 2 / StepWait.RETRY


def test_a_step_does_not_wait_where_the_other_trees_lose_more() -> None:
    """Nine tokens of the others become seven, for two tokens of the tree that was missing."""
    assert share_of_waits(0.1, 1, left=7 / 3) == 0.0


def test_steps_that_are_not_asked_about_lengthen_no_other() -> None:
    """Without prepared trees for a while, steps always wait. Their time is not that of one step."""
    clock = VirtualClock()
    rule, lengths = StepWait(clock), dict.fromkeys("abcd", 3)
    for number in range(40):
        if rule.waits(lengths, "abcd"):
            rule.waited(2.0)
        clock.now += 3.0
        if number % 10 == 9:
            rule.pause()
            clock.now += 1000.0
    assert rule._interval_s.value == pytest.approx(3.0)
    assert not rule.waits(lengths, "a"), "one tree brings less than four sequences lose"


def test_a_single_sequence_always_waits_for_its_tree() -> None:
    rule = StepWait(clock := VirtualClock())
    for _ in range(40):
        if rule.waits(dict.fromkeys("abcd", 3), "abcd"):
            rule.waited(9.0)
        clock.now += 10.0
    for _ in range(2 * StepWait.RETRY):
        clock.now += 1.0
        assert rule.waits({"a": 1}, "a")
        assert not rule.waits({"a": 1}, "")


def test_a_pass_has_the_rows_with_the_most_worth_per_second() -> None:
    """A device takes as long for 150 rows as for one, and longer from there on; worth falls slowly or fast."""
    slow, fast = 0.997 ** np.arange(2000), 0.9 ** np.arange(2000)
    for worth, knee, expected in ((slow, 150, 160), (slow, 10**6, 1024), (fast, 150, 64), (slow, 200, 192)):
        sizes = RowLimit()
        for _ in range(200):
            rows = sizes.best(worth)
            sizes.add(rows, max(1.0, rows / knee))
        assert sizes.best(worth) == expected
    sizes.add(1024, 0.0)
    assert RowLimit().best(worth) == 64, "no pass has been measured"


def test_passes_that_are_fetched_late_do_not_lengthen_others() -> None:
    """The first pass, and every tenth one, is fetched long after the device has ended it."""
    sizes, worth = RowLimit(), 0.997 ** np.arange(2000)
    chosen = list[int]()
    for number in range(200):
        chosen.append(sizes.best(worth))
        sizes.add(chosen[-1], max(1.0, chosen[-1] / 150) + 40.0 * (number % 10 == 0))
    assert 160 <= np.median(chosen) <= 192
    assert np.percentile(chosen[20:], 90) <= 192


def test_a_device_that_gets_faster_is_noticed() -> None:
    sizes, worth = RowLimit(), 0.999 ** np.arange(2000)
    for speed in (1.0, 0.1):
        for _ in range(2000):
            rows = sizes.best(worth)
            sizes.add(rows, max(1.0, rows * speed / 150))
    assert sizes.best(worth) >= 512
