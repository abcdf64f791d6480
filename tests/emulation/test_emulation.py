"""Emulated devices: passes take the times of a table while the host goes on, and nothing else changes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas import LLM, SamplingParams
from eyas.config import DraftingConfig
from eyas.emulation.costs import DeviceCosts, PassCosts, flat
from eyas.emulation.device import NUM_RECENT, EmulatedDevice, VirtualClock, emulated_device
from eyas.errors import ConfigError
from tests.support.tiers import nightly
from tests.support.tiny import fixed_config

PROMPT = (5, 6, 7, 8, 9, 10, 11, 12)


def working(clock: VirtualClock, seconds: float) -> Callable[[], torch.Tensor]:
    """Host work of some seconds."""

    def work() -> torch.Tensor:
        clock.sleep(seconds)
        return torch.arange(4.0)

    return work


def device(clock: VirtualClock, **ms: float) -> EmulatedDevice:
    return EmulatedDevice(flat("test", **ms), clock)


def test_passes_queue_while_the_host_goes_on() -> None:
    clock = VirtualClock()
    own = device(clock, verify=60.0)
    own.run("verify", 1, 0, working(clock, 0.010))
    own.run("verify", 1, 0, working(clock, 0.010))
    assert clock.now == pytest.approx(0.020)
    own.synchronize()
    assert clock.now == pytest.approx(0.120)


def test_reading_a_result_waits_and_computing_with_it_does_not() -> None:
    clock = VirtualClock()
    own = device(clock, verify=60.0)
    result = own.on_device(own.run("verify", 1, 0, working(clock, 0.010)))
    best = (result * 2).topk(2).indices
    assert clock.now == pytest.approx(0.010)
    assert best.tolist() == [3, 2]
    assert clock.now == pytest.approx(0.060)


def test_every_way_to_read_a_result_waits() -> None:
    reads: list[Callable[[torch.Tensor], object]] = [
        lambda x: x.tolist(), lambda x: x.cpu(), lambda x: float(x[0]), lambda x: bool(x.sum() > 0), lambda x: x.numpy(),
        lambda x: x.nonzero(), lambda x: torch.cat([x, x]).cpu(), lambda x: x.argmax().item(), lambda x: x[x > 1],
    ]  # fmt: skip
    for read in reads:
        clock = VirtualClock()
        own = device(clock, verify=60.0)
        read(own.on_device(own.run("verify", 1, 0, working(clock, 0.010))))
        assert clock.now == pytest.approx(0.060)


def test_a_table_that_is_too_fast_is_refused() -> None:
    clock = VirtualClock()
    own = device(clock, verify=5.0)
    for _ in range(NUM_RECENT - 1):
        own.run("verify", 1, 0, working(clock, 0.010))
    with pytest.raises(ConfigError, match=r"takes 10\.0 ms here, and 5\.0 ms in its table"):
        own.run("verify", 1, 0, working(clock, 0.010))
    assert own.num_late == NUM_RECENT


def test_costs_are_interpolated_and_extended() -> None:
    costs = PassCosts((1, 100, 200), (5.0, 5.0, 10.0), us_per_context_token=1.0)
    assert [costs.seconds(rows) * 1e3 for rows in (1, 50, 100, 150, 200, 300)] == pytest.approx([5, 5, 5, 7.5, 10, 15])
    assert costs.seconds(1, 2000) * 1e3 == pytest.approx(7.0)


def test_a_table_reads_back_as_it_was_written(tmp_path: Path) -> None:
    costs = DeviceCosts.read("dspark-8b@l4").scaled(2.0)
    costs.write(tmp_path / "costs.json")
    assert DeviceCosts.read(str(tmp_path / "costs.json")) == costs


def test_presets_follow_the_arithmetic_of_a_roofline() -> None:
    """15 GB at 0.8 of 3350 GB/s, and 32 layers of 6 us; an EAGLE-3 head of 0.374 GB on an L4 is 0.27 of that."""
    verify = DeviceCosts.read("llama-3.1-8b@h100").seconds("verify", 24)
    assert verify == pytest.approx(15.0 / (0.8 * 3350) + 32 * 6e-6)
    assert DeviceCosts.read("eagle3-8b@l4").seconds("draft_level", 8) / verify == pytest.approx(0.27, abs=0.01)


def test_a_missing_or_broken_table_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"passes": {"verify": {"rows": [2, 1], "ms": [1, 1]}}}')
    with pytest.raises(ConfigError, match="no cost table; give a file"):
        DeviceCosts.read("llama@h100")
    with pytest.raises(ConfigError, match="ascending rows"):
        DeviceCosts.read(str(tmp_path / "broken.json"))
    with pytest.raises(ConfigError, match="cannot read a cost table"):
        DeviceCosts.read(str(tmp_path / "missing.json"))


@pytest.mark.parametrize("method", ["eagle3", nightly("dspark")])
def test_emulation_changes_no_token(tmp_path: Path, method: str) -> None:
    log, tables = tmp_path / "log", str(tmp_path / "costs.json")
    replace(flat("test", verify=60.0, draft_round=30.0, draft_level=1e-3), log=str(log)).write(Path(tables))
    sampling = SamplingParams(max_tokens=6, temperature=0.8, seed=1, ignore_eos=True)
    plain = LLM("models/demo/target", validate_head="never").generate([PROMPT], sampling)[0].outputs[0]
    engine, drafting = fixed_config(emulated_device=tables), DraftingConfig(emulated_device=tables)
    llm = LLM("models/demo/target", f"models/demo/{method}", engine=engine, drafting=drafting, validate_head="never")
    assert llm.generate([PROMPT], sampling)[0].outputs[0].token_ids == plain.token_ids
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert {record["kind"] for record in records} == {"verify", "draft_round", "draft_level"}
    assert all(r["ended"] - r["began"] >= 0.0599 for r in records if r["kind"] == "verify")


def test_only_a_cpu_emulates_other_devices() -> None:
    with pytest.raises(ConfigError, match="only a CPU"):
        emulated_device("llama-3.1-8b@h100", torch.device("meta"))
