"""The release: its workflow runs targets that exist, its notes are the changelog's, and pages install from where Eyas is."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from deploy.notes import notes
from eyas.cli.main import SUBCOMMANDS
from eyas.errors import REPOSITORY, MissingPackage, install_command
from tests.support.repository import ROOT, files, name

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


def test_no_text_installs_eyas_from_an_index() -> None:
    own = {ROOT / "eyas" / "errors.py", ROOT / "docs" / "quickstart.md", ROOT / "CHANGELOG.md", Path(__file__)}
    texts = [path for path in files() if path.suffix in {".md", ".py", ".yaml", ".yml", ".toml", ".sh", ".html", ".txt"}]
    wrong = re.compile(r"eyas\[|pip install (?:-\w+ )*'?eyas\b")
    assert not [name(path) for path in texts if path not in own and wrong.search(path.read_text(encoding="utf-8"))]
    lines = re.findall(r"^pip install .*$", (ROOT / "docs" / "quickstart.md").read_text(), re.MULTILINE)
    assert lines == [
        "pip install '.[serve]'",
        f"pip install 'eyas[serve] @ git+{REPOSITORY}'",
        "pip install '.[serve]' triton",
    ]


def test_the_command_for_an_extra_names_the_checkout() -> None:
    assert install_command("bench") == f"pip install -e '{ROOT}[bench]'"
    assert str(MissingPackage("the chart", "matplotlib", "bench")).endswith(f"matplotlib; run: {install_command('bench')}")


def test_every_extra_that_an_error_names_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    code = "".join(
        path.read_text(encoding="utf-8") for path in files() if path.suffix == ".py" and ROOT / "eyas" in path.parents
    )
    calls = re.findall(r"""(?:install_command\(|MissingPackage\([^()]*, )["'](\w+)["']\)""", code)
    assert len(calls) >= 10
    assert {*calls, *(each.extra for each in SUBCOMMANDS.values())} <= extras.keys()
