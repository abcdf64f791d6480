"""Tools have one version each, wherever it is written."""

import re

from tests.support.repository import ROOT


def test_pre_commit_pins_the_ruff_of_the_constraints() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert re.findall(r"rev: v([\d.]+)", hooks) == re.findall(r"^ruff==([\d.]+)$", constraints, re.MULTILINE)
