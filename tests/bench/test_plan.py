"""`eyas plan`: simulated fleets obey closed forms where there are any."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas.bench import settings as bench_settings
from eyas.bench.plan import (
    FleetResult,
    FleetSettings,
    FleetSimulation,
    best_ratio,
    draw_curves,
    every_mode,
    simulate,
)
from eyas.bench.settings import AcceptanceProfile, Arrival, load_profile, poisson, read_trace
from eyas.cli.main import app
from eyas.drafters.ahead import trees as trees_ahead
from eyas.emulation.costs import DeviceCosts, PassCosts, flat
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
    assert found.drafter_busy == pytest.approx(6 * 3 / 60, rel=0.02), "passes ahead: one for the commit, and five levels"


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
    assert run("ahead", level_ms=20.0, profile=half).tokens_per_s == pytest.approx(4 / PASS_S, rel=0.02)
    assert run("ahead", level_ms=20.0).tokens_per_s < 3.5 / PASS_S


READY = replace(PROFILE, hit=(0, 0, 0, 1), miss=(0, 1), hit_rate=0.9, prepared=0.9, wire_ms=6.0)


def test_a_prepared_tree_needs_no_round_trip() -> None:
    """Nine of ten steps have four tokens and no wait, the tenth two tokens, a round of half a pass, and 0.7 of wire."""
    slow_wire = {"delay_s": 0.3 * PASS_S, "profile": READY}
    expected = (0.9 * 4 + 0.1 * 2) / (1 + 0.1 * (0.5 + 0.6 + 0.1)) / PASS_S
    assert run("ahead", **slow_wire).tokens_per_s == pytest.approx(expected, rel=0.02)
    known = replace(READY, prepared=0.0)
    waits = run("ahead", profile=known, delay_s=0.3 * PASS_S).tokens_per_s
    assert waits == pytest.approx(3.8 / (1 + 0.7 + 0.1 * 0.5) / PASS_S, rel=0.02)


def test_late_hits_take_the_drafter_less_than_misses() -> None:
    """Half of the steps have their tree, 0.4 wait for a fifth of a round, and 0.1 for two fifths."""
    profile = replace(READY, prepared=0.5, hit_rounds=0.2, miss_rounds=0.4, wire_ms=0.0)
    found = run("ahead", profile=profile)
    assert found.tokens_per_s == pytest.approx(3.8 / (1 + 0.4 * 0.1 + 0.1 * 0.2) / PASS_S, rel=0.02)
    assert 0.5 < found.drafter_busy < 0.7, "it grows in advance for six levels of a tenth of a pass, and answers"


def test_many_sessions_have_no_prepared_trees() -> None:
    small, large = (run("ahead", profile=READY, concurrency=n, max_num_seqs=n, seconds=30.0) for n in (64, 65))
    assert large.tokens_per_s / 65 < 0.9 * small.tokens_per_s / 64
    for name in ("MAX_PREPARED_NODES", "MIN_PREPARED_NODES"):
        assert getattr(bench_settings, name) == getattr(trees_ahead, name), "as drafters send"


def test_a_batch_waits_for_trees_only_where_that_yields_more() -> None:
    """One of 16 lacks a tree that takes a pass: it decodes plainly, unless it alone is there."""
    dear = replace(READY, hit_rate=0.94, prepared=0.94)
    many = run("ahead", level_ms=12.0, profile=dear, concurrency=16)
    assert many.tokens_per_s == pytest.approx(16 * (0.94 * 4 + 0.06) / PASS_S, rel=0.03)
    alone = run("ahead", level_ms=12.0, profile=dear)
    assert alone.tokens_per_s == pytest.approx((0.94 * 4 + 0.06 * 2) / (1 + 0.06 * 1.1) / PASS_S, rel=0.03)


def test_sessions_share_the_rows_that_take_a_pass_no_longer() -> None:
    """16 sessions would have 256 rows in a pass. As 40 take as long as one, trees of many grow as deep as those of one."""
    level = PassCosts((1, 40, 400), (10.0, 10.0, 100.0))
    drafter = DeviceCosts("d", "m", "made up", {"draft_round": level, "draft_level": level})
    profile = replace(READY, hit_rate=1.0, prepared=1.0)
    alone, many = (run("ahead", drafter=drafter, profile=profile, concurrency=count) for count in (1, 16))
    assert many.tokens_per_s == pytest.approx(16 * alone.tokens_per_s, rel=0.02)


def test_the_rows_that_are_free_follow_from_a_table() -> None:
    assert PassCosts((1, 40, 400), (10.0, 10.0, 100.0)).free_rows == pytest.approx(44)
    assert PassCosts((1, 41), (10.0, 10.2)).free_rows == pytest.approx(201), "the last slope goes on"
    assert PassCosts((1, 40), (10.0, 10.0)).free_rows == PassCosts((1,), (10.0,)).free_rows == math.inf
    assert PassCosts((1, 10), (10.0, 20.0)).free_rows == pytest.approx(1.9)
    assert DeviceCosts("d", "m", "made up", {}).free_rows("draft_level") == math.inf


def test_steps_wait_only_where_the_fleet_gains() -> None:
    settings = fleet("ahead", level_ms=2.0, profile=replace(READY, hit_rate=0.8, prepared=0.8, wire_ms=0.0), concurrency=4)
    both = [FleetSimulation(replace(settings, waits=waits)).run().tokens_per_s for waits in (True, False)]
    assert both[0] != both[1]
    assert simulate(settings).tokens_per_s == max(both)
    serial = replace(settings, mode="serial")
    assert simulate(serial) == FleetSimulation(serial).run()


def test_trees_that_grow_on_are_shorter_with_a_slower_drafter() -> None:
    """Levels of a third of a pass: a step accepts no more than three, with the bonus token, instead of four."""
    profile = replace(READY, hit_rate=1.0, prepared=1.0)
    assert run("ahead", level_ms=6.0, profile=profile).tokens_per_s == pytest.approx(4 / PASS_S, rel=0.02)
    assert run("ahead", level_ms=20.0, profile=profile).tokens_per_s == pytest.approx(3 / PASS_S, rel=0.03)
    block = run("ahead", level_ms=90.0, profile=replace(profile, one_pass=True, miss_rounds=0.0))
    assert block.tokens_per_s < 3.9 / PASS_S, "a block that is not done is a miss"


def test_a_drafter_with_no_time_to_grow_ahead_still_answers() -> None:
    """Sixteen verifiers at one drafter: trees ahead run out of levels, so their sequences wait for trees on demand."""
    shared = run("ahead", profile=READY, num_verifiers=16, level_ms=20.0, seconds=60.0)
    assert shared.drafter_busy > 0.9
    assert 1.0 < shared.tokens_per_s * PASS_S / 16 < 1.5
    alone = run("ahead", profile=READY, level_ms=20.0, seconds=60.0)
    assert alone.tokens_per_s * PASS_S > 2.3


THICK = replace(READY, hit=(0, 0, 0, 1), hit_rate=0.9, prepared=0.9, ahead_top_k=64, ahead_rows=640.0)


def test_thinner_trees_foresee_fewer_outcomes() -> None:
    """Of 640 nodes a tenth of the outcomes is missed, and of n nodes n ** -0.356; no tree is better than as measured."""
    assert THICK.exponent == pytest.approx(0.356, abs=0.001)
    ten_ms, alone, shared = flat("d", draft_round=10.0, draft_level=10.0), [], []
    for num_passes in (20.0, 10.0, 5.0, 1.0, 0.0):
        alone.append(THICK.foreseen(ten_ms, 1.0, num_passes, 1))
    assert [found.hits for found in alone] == pytest.approx([0.9, 0.9, 1 - 320**-0.3564, 1 - 64**-0.3564, 0], abs=0.001)
    assert [found.missing_levels for found in alone][:3] == pytest.approx([0, 0, 4 * 0.3564 * math.log(2)], abs=0.01)
    few = DeviceCosts("d", "m", "made up", {"draft_level": PassCosts((1, 64, 640), (10.0, 10.0, 100.0))})
    for num_sessions in (1, 16):
        shared.append(THICK.foreseen(few, 1.0, 10.0, num_sessions).hits)
    assert shared == pytest.approx([0.9, 1 - 44**-0.3564], abs=0.001), "16 sessions have 70 rows of a pass together"


def test_a_report_says_how_many_rows_grew_its_trees(tmp_path: Path) -> None:
    """Ten passes of 64 rows in a verify pass; what a profile says itself stays."""
    drafter = flat("d", draft_round=6.0, draft_level=6.0)
    assert replace(THICK, ahead_rows=0.0).measured_on(drafter, PASS_S, 1).ahead_rows == pytest.approx(640)
    report, own = tmp_path / "report.json", {"fresh": [1, 1], "hit": [1, 1], "hit_rate": 0.5, "ahead_top_k": 64}
    serial = {"mode": "serial", "temperature": 0.8, "verify_ms": 60.0, "batch": 2}
    drafter.write(tmp_path / "drafter.json")
    costs = json.loads((tmp_path / "drafter.json").read_text())
    for known, expected in ((0.0, 640.0), (100.0, 100.0)):
        profiles = {"0.8": {**own, "ahead_rows": known}}
        report.write_text(json.dumps({"results": {"profiles": profiles, "drafter": costs, "results": [serial]}}))
        assert load_profile(report, 0.8).ahead_rows == pytest.approx(expected)


def test_a_tree_starts_from_its_root_after_a_plain_step() -> None:
    """Levels of a third of a pass: a miss has a token, the next step at most three instead of four."""
    profile = replace(READY, hit_rate=0.5, prepared=0.5)
    many = FleetSimulation(fleet("ahead", level_ms=20.0, profile=profile, concurrency=4, waits=False)).run()
    assert many.tokens_per_s * PASS_S / 4 < 0.5 * 1 + 0.5 * 3


@pytest.mark.parametrize(
    ("temperature", "gpu", "measured"),
    [
        (0, "l40s", (1.02, 0.99, 1.10)),
        (1, "l40s", (0.92, 0.88, 1.05)),
        (0, "l4", (0.67, 0.64, 0.93)),
        (1, "l4", (0.71, 0.64, 0.85)),
    ],
)
def test_thin_trees_agree_with_virtual_time(temperature: int, gpu: str, measured: tuple[float, ...]) -> None:
    """Ahead over local with batches of 4, 8 and 16, by a profile of one sequence at c = .1, see docs/split.md."""
    fresh = (1, 1, 2, 1, 1, 39), (5, 6, 16, 11, 7, 18)
    hit = (0, 2, 0, 5, 4, 31), (3, 13, 18, 12, 8, 9)
    miss = (0, 1, 1, 0, 1, 2), (0, 0, 4, 1, 1, 1)
    rates = {"prepared": (0.894, 0.829)[temperature], "hit_rounds": (0, 0.055)[temperature], "miss_rounds": 0.65}
    weights = fresh[temperature], hit[temperature], miss[temperature]
    profile = AcceptanceProfile(*weights, 0.9, ahead_rows=640, ahead_top_k=64, **rates)
    verifier, drafter, local = map(DeviceCosts.read, ("llama-3.1-8b@h100", f"eagle3-8b@{gpu}", "eagle3-8b@h100"))
    for batch, ratio in zip((4, 8, 16), measured, strict=True):
        beside = FleetSettings(verifier, drafter, local, profile, "local", concurrency=batch, seconds=4.0)
        planned = simulate(replace(beside, mode="ahead")).tokens_per_s / simulate(beside).tokens_per_s
        assert planned == pytest.approx(ratio, rel=0.11), batch


def test_rates_agree_with_those_in_virtual_time() -> None:
    """Shares and tau of the demo's EAGLE-3 at c = .1 without delay give rates with delays; 15 % too much at c = .27.

    Measured on 2026-11-25 at batch 1: eta and tau of serial trees at temperatures 0 and 1.
    """
    for tau, tau_hit, tau_miss, hits, prepared, cells in (
        (5.35, 5.06, 4.2, 0.95, 0.89, {(0.1, 0.0): 0.919, (0.1, 0.03): 0.912, (0.1, 0.1): 0.883, (0.27, 0.1): 0.601}),
        (3.77, 3.40, 3.67, 0.92, 0.75, {(0.1, 0.0): 0.882, (0.1, 0.03): 0.869, (0.1, 0.1): 0.816, (0.27, 0.1): 0.688}),
    ):
        profile = AcceptanceProfile(
            spread(tau), spread(tau_hit), spread(tau_miss), hits, prepared=prepared, hit_rounds=0.2, miss_rounds=0.4,
            ahead_top_k=128,
        )  # fmt: skip
        for (c, delay), eta in cells.items():
            found = run("ahead", level_ms=60 * c, profile=profile, delay_s=delay * PASS_S, seconds=200.0)
            assert found.tokens_per_s * PASS_S / tau == pytest.approx(eta, rel=0.04 if c == 0.1 else 0.16), (c, delay)


def spread(tau: float) -> tuple[float, ...]:
    """Weights of 0 to 8 accepted tokens, of a mean of tau with the bonus token: binomial."""
    share = (tau - 1) / 8
    return tuple(math.comb(8, k) * share**k * (1 - share) ** (8 - k) for k in range(9))


def test_a_profile_says_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match="prepared trees are hits"):
        replace(PROFILE, hit_rate=0.5, prepared=0.6)
    for name in ("hit", "miss"):
        with pytest.raises(ConfigError, match=rf"{name} is \(0, 0\); it must have a weight above 0"):
            replace(PROFILE, **{name: (0, 0)})
    with pytest.raises(ConfigError, match=r"hit_rate is 1\.0, so hit must have weights"):
        replace(PROFILE, hit=())


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
