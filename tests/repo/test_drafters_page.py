"""The page of drafters tells of every method, and of none that there is not."""

import re

from eyas.drafters.registry import METHODS
from tests.repo.repository import ROOT

HEADING = re.compile(r"^## (\w+)$", re.MULTILINE)


def test_every_method_has_a_heading_and_every_heading_a_method() -> None:
    page = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
    assert sorted(HEADING.findall(page)) == sorted(METHODS)


def test_the_readme_names_every_method() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in METHODS if f"`{name}`" not in readme] == []
