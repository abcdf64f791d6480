"""`eyas plan`: the estimate obeys what can be worked out by hand."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from eyas.bench.plan import PlannedMode, PlanSettings, plan_table
from eyas.cli.main import app
from eyas.emulation.costs import DeviceCosts, flat
from eyas.errors import ConfigError

PASS_S = 0.060
DRAFTER = flat("d", draft_round=6.0, draft_level=6.0)
SETTINGS = PlanSettings(flat("v", verify=60.0), DRAFTER, DRAFTER, tau=3.0)


def passes(mode: PlannedMode, settings: PlanSettings = SETTINGS, batch: int = 1) -> float:
    """Return the time of a step in verify passes."""
    return settings.step_s(mode, batch) / PASS_S


def test_a_plain_step_yields_a_token_of_each_sequence() -> None:
    assert SETTINGS.rate("plain", 8) == pytest.approx(8 / PASS_S)


def test_levels_and_the_wire_are_on_the_critical_path() -> None:
    """Five levels of a tenth of a pass, and a round trip of half a pass that only another device has."""
    wired = replace(SETTINGS, trip_s=0.5 * PASS_S)
    assert (passes("local", wired), passes("serial", wired)) == (pytest.approx(1.5), pytest.approx(2.0))
    assert wired.rate("local", 2) == pytest.approx(2 * 3 / (1.5 * PASS_S))


def test_a_prepared_tree_takes_neither_a_round_nor_a_trip() -> None:
    half = replace(SETTINGS, ready=0.5, trip_s=0.5 * PASS_S)
    assert passes("ahead", replace(half, ready=1.0)) == pytest.approx(1.0)
    assert passes("ahead", half) == pytest.approx(1 + 0.5 * 1.0)
    assert passes("ahead", half, batch=2) == pytest.approx(1 + 0.75 * 1.0), "a step waits if one of its trees is missing"


def test_a_shared_drafter_saturates() -> None:
    """Rounds that cost in proportion to their rows: forty verifiers take twenty passes of one drafter."""
    passes_by_rows = replace(DRAFTER, passes={"draft_round": DeviceCosts.read("eagle3-8b@l4").passes["draft_round"]})
    alone, many = (replace(SETTINGS, drafter=passes_by_rows, num_verifiers=count) for count in (1, 40_000))
    assert many.step_s("serial", 1) == pytest.approx(passes_by_rows.seconds("draft_round", 40_000 * 5))
    assert many.rate("serial", 1) < 0.5 * alone.rate("serial", 1)
    assert many.rate("local", 1) == alone.rate("local", 1)


def test_host_work_is_part_of_every_step() -> None:
    slow = replace(SETTINGS, host_s=0.1 * PASS_S)
    assert [passes(mode, slow) for mode in ("plain", "local")] == [pytest.approx(1.1), pytest.approx(1.6)]


def test_a_verifier_pays_its_share_of_the_drafter() -> None:
    priced = replace(SETTINGS, verifier=replace(SETTINGS.verifier, dollars_h=3.0), drafter=replace(DRAFTER, dollars_h=1.0))
    own = priced.rate("local", 1)
    assert priced.dollars("local", 1) == pytest.approx(3.0 / 3600 / own * 1e6)
    assert replace(priced, num_verifiers=4).dollars("serial", 1) == pytest.approx(3.25 / 3600 / own * 1e6)


def test_without_trees_grown_ahead_that_mode_is_left_out() -> None:
    assert {row[1] for row in plan_table(SETTINGS, (1,)).rows} == {"plain", "local", "serial"}
    assert "ahead" in {row[1] for row in plan_table(replace(SETTINGS, ready=0.5), (1,)).rows}


@pytest.mark.parametrize(("change", "reason"), [({"tau": 0.5}, "tau is 0.5"), ({"ready": 1.5}, "ready is 1.5")])
def test_figures_that_cannot_be_measured_are_refused(change: dict[str, float], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        replace(SETTINGS, **change)  # type: ignore[arg-type]


def test_the_command_prints_every_mode_and_price() -> None:
    shown = CliRunner().invoke(app, ["plan", "--tau", "3.4", "--ready", "0.8", "--drafter-price", "0.5"])
    assert shown.exit_code == 0, shown.output
    assert all(mode in shown.output for mode in ("plain", "local", "serial", "ahead"))
    assert "$3.00 an hour for a verifier and $0.50 for a drafter" in " ".join(shown.output.split())


def test_a_plan_guesses_no_device() -> None:
    shown = CliRunner().invoke(app, ["plan", "--tau", "3", "--verifier", "60ms"])
    assert shown.exit_code == 1
    assert "--local" in shown.output
