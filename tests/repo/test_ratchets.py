"""Counts that may only fall: lines of packages, unrelated assignments, private names in tests, and what journeys cross."""

import tomllib
from collections.abc import Callable

import pytest

from benchmarks.scripts.count_code import package_lines, private_uses, sources, unrelated_assignments
from benchmarks.scripts.journeys import Journey, generate_journey, step_journey
from tests.support.repository import ROOT, syntax

WRITTEN = tomllib.loads((ROOT / "tests" / "repo" / "ratchets.toml").read_text(encoding="utf-8"))


def is_kept(count: int, most: int, slack: int) -> bool:
    """Return whether a count is not above what is written down, and not so far below that this is out of date."""
    return most - slack <= count <= most


def test_packages_have_no_more_lines_than_are_written_down() -> None:
    found, written = package_lines(ROOT), WRITTEN["lines"]
    assert found.keys() == written.keys()
    assert not {package: lines for package, lines in found.items() if not is_kept(lines, written[package], 200)}


def test_tuple_assignments_of_unrelated_things_only_fall() -> None:
    counts = {
        top: sum(len(unrelated_assignments(syntax(path))) for path in sources(top, ROOT))
        for top in WRITTEN["unrelated_assignments"]
    }
    assert all(is_kept(count, WRITTEN["unrelated_assignments"][top], 20) for top, count in counts.items()), counts


def test_private_names_in_tests_only_fall() -> None:
    """Tests show behaviour; what is worth a look from outside deserves a public name."""
    found = [name for path in sources("tests", ROOT) for name in private_uses(syntax(path))]
    assert is_kept(len(found), WRITTEN["private_names"]["tests"], 10), len(found)


@pytest.mark.timeout(900)  # it starts services, and every call of theirs is counted
@pytest.mark.parametrize(("name", "follow"), [("generate", generate_journey), ("step", step_journey)])
def test_a_journey_crosses_no_more_than_is_written_down(name: str, follow: Callable[[], Journey]) -> None:
    journey, most = follow(), WRITTEN["journeys"][name]
    assert is_kept(len(journey.functions), most["functions"], most["slack"]), journey.functions
    assert is_kept(len(journey.files), most["files"], most["slack"] // 5), journey.files
