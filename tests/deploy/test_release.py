"""The release: its workflow runs targets that exist, its notes are the changelog's, and pages install from where Eyas is."""

import re
from pathlib import Path

import pytest
import yaml

from deploy.notes import notes
from tests.repo.repository import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
CHANGELOG = (
    "# Changelog\n\n## Unreleased\n\n- Later.\n\n## [0.3.0] - 2026-12-24\n\n### Added\n\n- Snow.\n\n## 0.2.0\n\n- Rain.\n"
)


def test_the_workflow_runs_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    named = [target for command in commands for target in re.findall(r"\bmake ([a-z-]+)", command)]
    assert {"wheel", "images", "sbom", "notes"} <= set(named)
    assert set(named) <= targets
    for job in jobs.values():
        assert set(job.get("needs", []) if isinstance(job.get("needs"), list) else [job.get("needs", "wheel")]) <= set(jobs)
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])


def test_a_tag_starts_the_workflow() -> None:
    text = yaml.safe_load(WORKFLOW.read_text())
    assert text[True] == {"push": {"tags": ["v*"]}}, "YAML reads the key `on` as true"


def test_the_notes_are_the_section_of_a_version() -> None:
    assert notes("0.3.0", CHANGELOG) == "### Added\n\n- Snow.\n"
    assert notes("0.2.0", CHANGELOG) == "- Rain.\n"
    with pytest.raises(ValueError, match=r"no section '0\.4\.0'"):
        notes("0.4.0", CHANGELOG)


def test_no_page_installs_eyas_from_an_index() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    found = {page: re.findall(r"^pip install .*$", page.read_text(), re.MULTILINE) for page in pages}
    wrong = [
        line
        for lines in found.values()
        for line in lines
        if re.match(r"pip install '?eyas(\[[\w,]+\])?'?(?! @ git)( |$)", line)
    ]
    assert not wrong
    urls = [Path(page).name for page, lines in found.items() if any("@ git+" in line for line in lines)]
    assert urls == ["quickstart.md"], "said once"
