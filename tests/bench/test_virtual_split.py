"""Rates in virtual time: serial traces give every cost exactly, beside drafting on the verifier's own GPU."""

import json
from dataclasses import replace

import pytest

from benchmarks.scripts.virtual_rates import (
    Cell,
    Halves,
    Step,
    Times,
    Trace,
    best,
    cell_of,
    costs,
    free,
    in_halves,
    serially,
    times_of,
)
from benchmarks.scripts.virtual_split import Settings, VirtualSplit
from eyas.config import DraftAheadConfig
from tests.support.tiny import DEMO

LEVELS = (("draft_round", 4), ("draft_level", 8), ("draft_level", 8))
DEEP = Trace("24:3", 8, (Step(1, 24, LEVELS), Step(1, 24, LEVELS)))  # type: ignore[arg-type]
FLAT_TREE = Trace("24:1", 6, (Step(1, 24, LEVELS[:1]), Step(1, 24, LEVELS[:1])))  # type: ignore[arg-type]


def settings(head: str, *, roofline: bool = False) -> Settings:
    config = DraftAheadConfig(top_k=64)
    own = Settings(str(DEMO / "target"), (head,), (0.1,), (0.03,), (0.0,), (1,), 2, 16, config, 1, 0.0, ("ahead",))
    return replace(own, roofline=roofline)


@pytest.mark.parametrize(("tree", "roofline"), [("24:0", False), ("6:2", True)])
def test_a_trace_gives_the_rate_that_a_replay_measures(tree: str, roofline: bool) -> None:
    """Two sequences of 24 nodes take passes of one unit in both tables; rows of the drafter are below the knee as well."""
    prompts = [json.loads(line)["token_ids"] for line in (DEMO / "prompts.jsonl").read_text().splitlines()[:2]]
    split = VirtualSplit(settings("eagle3-full", roofline=roofline), str(DEMO / "eagle3-full"), prompts)
    recordings = split.record(0.0, 2)
    where = Cell(split.name, 0.0, 2, 0.1, 0.03, "serial", tree=tree)
    trace, measured = split.trace(recordings, 0.0, 2, tree), split.cell(recordings, where, 0.0)
    found = cell_of(where, [trace], split.times(0.1))
    assert found.speedup == pytest.approx(measured.speedup)
    assert found.tau == pytest.approx(measured.tau, rel=0.2), "by steps of sequences, and by steps that count"
    assert found.eta == pytest.approx(1 / (1 + 2 * 0.03 + 0.1 * split.tree(tree).num_steps), rel=0.01)


def test_a_local_drafter_has_no_delay_and_the_best_tree() -> None:
    cheap, dear = Times(costs("eagle3", 0.01)), Times(costs("eagle3", 0.3))
    where = Cell("eagle3", 0.0, 1, 0.1, 0.5, "local")
    assert cell_of(where, [FLAT_TREE, DEEP], cheap).speedup == pytest.approx(4 / 1.03)
    local = cell_of(where, [FLAT_TREE, DEEP], dear)
    assert local.tree == "24:1"
    assert local.speedup == pytest.approx(3 / 1.3)
    apart = cell_of(replace(where, mode="serial"), [FLAT_TREE, DEEP], dear)
    assert apart.tree == "24:3", "with a delay more levels pay"
    assert apart.speedup == pytest.approx(4 / 2.9)


def test_a_one_pass_head_pays_once_for_all_levels() -> None:
    times = times_of("dspark", 0.1, "l40s", has_bend=False)
    assert times.draft_s(DEEP.steps[0]) == pytest.approx(0.2 * (1 + 2 / 24))


@pytest.mark.parametrize(("verify_s", "draft_s", "delay"), [(1, 0.4, 0.0), (1, 1.7, 0.0), (1, 0.9, 0.2), (2, 0.1, 0.5)])
def test_alternating_halves_are_as_fast_as_the_bound(verify_s: float, draft_s: float, delay: float) -> None:
    """Events: each half drafts and is verified in turn, on two devices that take one half at a time."""
    ready, verifier, drafter, ends = [0.0, 0.0], 0.0, 0.0, list[float]()
    for number in range(2000):
        half = number % 2
        verifier = max(verifier, ready[half]) + verify_s
        drafter = max(drafter, verifier + delay) + draft_s
        ready[half] = drafter + delay
        ends.append(verifier)
    assert (ends[-1] - ends[999]) / 500 == pytest.approx(in_halves(delay)(verify_s, draft_s), rel=1e-3)


def test_halves_gain_only_beyond_the_bend() -> None:
    """A batch of 24 rows takes one pass, and its halves two; of 4,096 rows both take as long, and drafting is hidden."""
    times = Times(costs("eagle3", 0.1), bend=256)
    large = Trace("64:3", 256, (Step(64, 4096, LEVELS),))  # type: ignore[arg-type]
    half = Trace("64:3", 128, (Step(32, 2048, LEVELS),))  # type: ignore[arg-type]
    assert best([large], times, serially(0.0))[1] == pytest.approx(4 / 16.3)
    assert best([half], times, in_halves(0.0))[1] == pytest.approx(4 / 16)
    assert best([DEEP], times, in_halves(0.0))[1] < best([DEEP], times, serially(0.0))[1]
    assert large.rate(times, free) == pytest.approx(4 / 16)
    where = Cell("eagle3", 0.0, 64, 0.1, 0.0, "halves")
    found = Halves.of(where, "eagle3", [large], [half], 0.025)
    assert found.halves[1] > found.whole[1]
    assert found.plain == 1.0
