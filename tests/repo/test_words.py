"""The repository speaks of Eyas alone: of nobody's machine, of no registry, of nothing left to do."""

import re

from tests.repo.repository import ROOT, files, name

DATA = ROOT / "models"
CONTAINERS = ROOT / "deploy" / "helm" / "templates"  # paths in these are in a container
PLACES = re.compile(r"(?<![\w./-])/(?:work|tmp|home|root|Users|opt|mnt)\b")
REGISTRIES = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|--(?:extra-)?index-[u]rl|--find-[l]inks")
LEFT_OVERS = re.compile(r"\b(?:[T]ODO|[F]IXME|[X]XX)\b|\bissue #?\d|<{7} |>{7} ")


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    """Where the pattern occurs in text that people wrote; data, weights and pictures excluded."""
    found = []
    for path in files():
        if (DATA in path.parents and path.suffix != ".md") or path.suffix == ".png":
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{name(path)}:{number}: {line.strip()}")
    return found


def test_no_text_names_a_place_on_somebodys_machine() -> None:
    in_containers = f"{name(CONTAINERS)}/"
    found = [line for line in lines_with(PLACES) if not line.startswith(in_containers)]
    assert not found


def test_no_text_names_a_package_registry() -> None:
    assert not lines_with(REGISTRIES)


def test_nothing_is_left_over() -> None:
    assert not lines_with(LEFT_OVERS)
