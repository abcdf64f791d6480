"""`eyas plan`: simulated fleets obey closed forms where there are any."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas.bench.plan import (
    AcceptanceProfile,
    Arrival,
    FleetResult,
    FleetSettings,
    FleetSimulation,
    best_ratio,
    draw_curves,
    every_mode,
    load_profile,
    poisson,
    read_trace,
)
from eyas.cli import app
from eyas.config.device_costs import DeviceCosts, flat
from eyas.errors import ConfigError

PROFILE = AcceptanceProfile(fresh=(1, 1, 1, 1, 1), hit=(0, 0, 0, 1), miss=(0, 1), hit_rate=1.0)
PASS_S = 0.060


def fleet(mode: str, level_ms: float = 6.0, **changes: object) -> FleetSettings:
    verifier, drafter = flat("v", verify=60.0), flat("d", draft_round=level_ms, draft_level=level_ms)
    own = FleetSettings(verifier, drafter, drafter, PROFILE, mode, seconds=120.0, output_tokens=10**6)  # type: ignore[arg-type]
    return replace(own, **changes)  # type: ignore[arg-type]


def run(mode: str, **changes: object) -> FleetResult:
    return FleetSimulation(fleet(mode, **changes)).run()  # type: ignore[arg-type]


def test_plain_decoding_gives_a_token_per_pass_and_sequence() -> None:
    assert run("plain").tokens_per_s == pytest.approx(1 / PASS_S, rel=0.01)
    assert run("plain", concurrency=8, num_verifiers=3).tokens_per_s == pytest.approx(24 / PASS_S, rel=0.01)


@pytest.mark.parametrize("mode", ["local", "serial"])
def test_levels_on_the_critical_path_cost_their_share(mode: str) -> None:
    """Five levels of a tenth of a pass: eta is 1 / 1.5; tau is 3."""
    found = run(mode)
    assert found.eta == pytest.approx(1 / 1.5, rel=0.05)
    assert found.tokens_per_s == pytest.approx(3 / (1.5 * PASS_S), rel=0.05)


def test_a_delay_is_paid_both_ways() -> None:
    assert run("serial", delay_s=0.5 * PASS_S).eta == pytest.approx(1 / 2.5, rel=0.05)


def test_hits_cost_no_round_and_have_their_own_acceptance() -> None:
    found = run("ahead", level_ms=3.0)
    assert found.tokens_per_s == pytest.approx(4 / PASS_S, rel=0.02)
    assert found.drafter_busy < 0.01


def test_host_work_is_part_of_every_step() -> None:
    slow = replace(PROFILE, host_ms=6.0, wire_ms=3.0, draft_host_ms=3.0)
    assert run("serial", profile=slow).tokens_per_s == pytest.approx(3 / (1.7 * PASS_S), rel=0.05)
    assert run("serial", profile=slow.with_host(0.0)).tokens_per_s == pytest.approx(3 / (1.5 * PASS_S), rel=0.05)


def test_a_shared_drafter_saturates() -> None:
    """Sixteen verifiers at one drafter, with costs in proportion to rows, yield no more than the drafter drafts."""
    alone = run("serial", num_verifiers=16, num_drafters=16)
    shared = run("serial", num_verifiers=16, num_drafters=1, level_ms=60.0)
    assert shared.drafter_busy > 0.95
    assert shared.tokens_per_s < 0.5 * alone.tokens_per_s


def test_more_drafters_than_pay_are_not_bought() -> None:
    cheap = fleet("serial", num_verifiers=8, verifier_price=3.0, seconds=20.0)
    dear = replace(cheap, drafter_price=50.0)
    assert best_ratio(dear)[0] < best_ratio(cheap)[0] <= 8


def test_arrivals_are_all_served_and_wait_in_an_overload() -> None:
    arrivals = poisson(2.0, 30.0, prompt_tokens=100, output_tokens=10, seed=1)
    calm = FleetSimulation(fleet("plain", seconds=60.0), arrivals).run()
    assert calm.tokens_per_s == pytest.approx(10 * len(arrivals) / 60)
    assert len(arrivals) == pytest.approx(60, rel=0.4)
    busy = FleetSimulation(fleet("plain", max_num_seqs=1, seconds=60.0), arrivals).run()
    assert busy.first_token_s[1] > 10 * calm.first_token_s[1]
    assert calm.first_token_s[0] <= calm.first_token_s[1] <= calm.first_token_s[2]


def test_the_same_settings_give_the_same_result() -> None:
    assert run("ahead", concurrency=4) == run("ahead", concurrency=4)
    assert run("serial", seed=1) != run("serial", seed=2)


def test_a_thousand_verifiers_can_be_planned() -> None:
    many = run("serial", num_verifiers=1000, num_drafters=250, seconds=1.0)
    assert many.tokens_per_s == pytest.approx(1000 * run("serial").tokens_per_s, rel=0.15)


def test_profiles_and_traces_are_read_or_refused(tmp_path: Path) -> None:
    own, report, trace = tmp_path / "own.json", tmp_path / "report.json", tmp_path / "trace.jsonl"
    own.write_text(json.dumps({"fresh": [1, 2], "host_ms": 1.0}))
    report.write_text(json.dumps({"results": {"profiles": {"0.8": {"fresh": [3]}}}}))
    trace.write_text('{"at_s": 1.0, "prompt_tokens": 5, "output_tokens": 6}\n')
    assert load_profile(own, 0.0) == AcceptanceProfile((1, 2), host_ms=1.0)
    assert load_profile(report, 0.8).fresh == (3,)
    assert read_trace(trace) == [Arrival(1.0, 5, 6)]
    with pytest.raises(ConfigError, match="temperature 0 from"):
        load_profile(report, 0.0)
    with pytest.raises(ConfigError, match="must have a weight above 0"):
        AcceptanceProfile((0,))
    with pytest.raises(ConfigError, match="cannot read arrivals"):
        read_trace(own)


def test_a_preset_knows_its_price() -> None:
    assert DeviceCosts.read("llama-3.1-70b-tp4@h100").dollars_h == pytest.approx(12.0)
    assert DeviceCosts.read("60ms").dollars_h == 0


def test_hits_fall_only_where_less_is_grown_than_measured() -> None:
    """Six levels of 20 ms in a pass of 60 ms: half is grown, as where the profile was measured."""
    half = replace(PROFILE, grown=0.5)
    assert run("ahead", level_ms=20.0, profile=half).drafter_busy < 0.01 < run("ahead", level_ms=20.0).drafter_busy


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        (["--verifier", "60ms"], "--local"),
        (["--verifier", "60ms", "--local", "6ms", "--drafters", "0"], "--verifier-price"),
    ],
)
def test_a_plan_guesses_no_device_and_no_price(tmp_path: Path, options: list[str], missing: str) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"fresh": [1, 1]}))
    shown = CliRunner().invoke(app, ["plan", "--profile", str(profile), *options])
    assert shown.exit_code == 1
    assert missing in shown.output


def test_without_trees_grown_ahead_that_mode_is_left_out(tmp_path: Path) -> None:
    assert set(every_mode(fleet("plain", profile=AcceptanceProfile((1, 1)), seconds=5.0), None)) == {
        "plain",
        "local",
        "serial",
    }


def test_the_command_prints_every_mode_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.bench.plan.CURVE_COSTS", (0.01, 0.1))
    monkeypatch.setattr("eyas.bench.plan.CURVE_BATCHES", (1,))
    profile, picture = tmp_path / "profile.json", tmp_path / "curves.png"
    profile.write_text(json.dumps({"fresh": [1, 1, 1], "hit": [1, 1, 1], "hit_rate": 0.8}))
    shown = CliRunner().invoke(
        app, ["plan", "--profile", str(profile), "--seconds", "2", "--drafters", "0", "--curves", str(picture)]
    )
    assert shown.exit_code == 0, shown.output
    assert all(mode in shown.output for mode in ("plain", "local", "serial, 1 : 1", "ahead, 1 : 1"))
    assert "$3.00 an hour for a verifier and $0.60 for a drafter" in " ".join(shown.output.split())
    assert picture.stat().st_size > 1000
    draw_curves(AcceptanceProfile((1, 1)), picture)
