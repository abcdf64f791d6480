"""The tables of costs that are measured at start, on a clock of their own."""

import logging
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from eyas.config import EngineConfig, TreeConfig
from eyas.emulation.costs import DeviceCosts
from eyas.emulation.device import VirtualClock
from eyas.engine.budget.costs import CostModel
from eyas.engine.budget.measuring import TIME_LIMIT_S, measure_sizes
from eyas.engine.build import assemble_engine
from eyas.models.loading import load_target
from tests.engine.test_out_of_memory import no_memory
from tests.support.bad_drafters import RandomDrafter


def measured(seconds: dict[str, float], largest: int = 1024) -> tuple[CostModel, VirtualClock]:
    """The table of a roofline: seconds to read the weights, and of each row."""
    clock = VirtualClock()

    def rounds(num_rows: int) -> Iterator[partial[None]]:
        while True:
            yield partial(clock.sleep, max(seconds["read"], num_rows * seconds["row"]))

    return measure_sizes(rounds, largest, clock), clock


@pytest.mark.parametrize("read", [0.004, 0.015])
@pytest.mark.parametrize("knee", [100, 130, 158, 247, 300, 500])
def test_the_bend_of_a_roofline_is_found(read: float, knee: int) -> None:
    table, clock = measured({"read": read, "row": read / knee})
    for rows in range(1, 1025):
        assert table.seconds(rows) == pytest.approx(read * max(1, rows / knee), rel=0.06), rows
    assert clock() <= TIME_LIMIT_S


def test_a_slow_device_is_timed_for_a_bounded_time(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        table, clock = measured({"read": 0.2, "row": 0.01})
    assert clock() <= TIME_LIMIT_S
    assert table.sizes[-1] < 1024
    assert f"timed sizes up to {table.sizes[-1]:.0f} of 1024" in caplog.text


def test_sizes_without_memory_are_estimated(caplog: pytest.LogCaptureFixture) -> None:
    """A start does not fail because of passes that serving may never need."""
    clock, most = VirtualClock(), 100

    def rounds(num_rows: int) -> Iterator[Callable[[], object]]:
        while True:
            yield partial(clock.sleep, 1e-5 * num_rows) if num_rows <= most else no_memory

    table = measure_sizes(rounds, 1024, clock)
    assert table.sizes[-1] == 64
    assert table.seconds(1024) == pytest.approx(1024e-5)
    assert "timed sizes up to 64 of 1024" in caplog.text
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        measure_sizes(rounds, 1024, clock)


def test_the_slowest_device_is_timed_at_two_sizes() -> None:
    table, _ = measured({"read": 10.0, "row": 5.0})
    assert table.sizes == [1, 4]
    assert table.seconds(4) == pytest.approx(20)


def test_a_straight_line_needs_no_further_sizes() -> None:
    table, _ = measured({"read": 0.0, "row": 1e-5})
    assert table.sizes == [1, 4, 16, 32, 64, 128, 256, 512, 1024]


def test_other_work_while_sizes_are_timed_changes_no_table() -> None:
    """It takes half of the processor from the 5th to the 25th millisecond."""
    clock = VirtualClock()

    def work(num_rows: int) -> None:
        seconds = 0.001 + 1e-4 * num_rows
        clock.sleep(seconds * (2 if 0.005 < clock() < 0.025 else 1))

    def rounds(num_rows: int) -> Iterator[Callable[[], object]]:
        while True:
            yield partial(work, num_rows)

    table = measure_sizes(rounds, 16, clock)
    assert table.at([1, 4, 16]).tolist() == pytest.approx([0.0011, 0.0014, 0.0026])


def test_what_a_context_costs_is_measured_at_start(tiny_target: str) -> None:
    config = EngineConfig(max_kv_tokens=4096, draft_budget="adaptive", emulated_device="llama-3.1-8b@h200")
    engine = assemble_engine(load_target(tiny_target), None, config, TreeConfig(), RandomDrafter(48), clock=VirtualClock())
    expected = DeviceCosts.read("llama-3.1-8b@h200").passes["verify"].us_per_context_token
    assert 1e6 * engine.budget._context_token_s == pytest.approx(expected)  # type: ignore[attr-defined]


def test_a_pause_at_one_size_makes_no_larger_one_dearer() -> None:
    clock = VirtualClock()

    def rounds(num_rows: int) -> Iterator[partial[None]]:
        while True:
            yield partial(clock.sleep, 1e-4 * num_rows + (0.03 if num_rows == 4 else 0.0))

    table = measure_sizes(rounds, 64, clock)
    assert [table.seconds(size) for size in (1, 16, 64)] == pytest.approx([1e-4, 16e-4, 64e-4])
    assert table.seconds(4) <= table.seconds(16)
