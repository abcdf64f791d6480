"""The commands of the README work, and the code of the README and of the page on Python."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repo.repository import ROOT, files, name

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)[^)]*\)")
TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)
SHELLS = {"", "sh", "bash", "console", "shell"}
TOOLS = ("make ", "eyas ")
SINGLE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}

README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def commands() -> Iterator[list[str]]:
    """The words of every command in the README's shell blocks, without comments and the folder of the tools."""
    for language, block in FENCE.findall(README):
        for line in block.replace("\\\n", " ").splitlines() if language in SHELLS else ():
            if line.removeprefix(".venv/bin/").startswith(TOOLS):
                yield shlex.split(line.removeprefix(".venv/bin/"), comments=True)


def commands_of(tool: str) -> list[list[str]]:
    return [words for words in commands() if words[0] == tool]


def test_readme_shows_the_two_commands() -> None:
    assert ["make", "demo"] in commands_of("make")
    assert any(words[1] == "serve" for words in commands_of("eyas"))


def test_make_targets_of_the_readme_exist() -> None:
    asked = {word for words in commands_of("make") for word in words[1:] if "=" not in word and not word.startswith("-")}
    assert asked <= set(TARGET.findall(MAKEFILE))


@pytest.mark.parametrize("words", commands_of("eyas"), ids=shlex.join)
def test_eyas_commands_of_the_readme_parse(words: list[str]) -> None:
    assert not [word for word in words if word.endswith(".yaml") and not (ROOT / word).is_file()]
    check_parses([str(Path(sys.executable).parent / "eyas"), *words[1:]])


def check_parses(command: list[str]) -> None:
    """--help answers only after every word before it has been understood, and runs nothing."""
    result = subprocess.run([*command, "--help"], cwd=ROOT, env=SINGLE_THREAD, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("code", [block for language, block in FENCE.findall(README + PYTHON_PAGE) if language == "python"])
def test_python_of_the_pages_runs(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=SINGLE_THREAD, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_links_between_the_pages_lead_somewhere() -> None:
    pages = [path for path in files() if path.suffix == ".md"]
    links = [(page, link) for page in pages for link in LINK.findall(page.read_text(encoding="utf-8"))]
    assert not [f"{name(page)}: {link}" for page, link in links if not (page.parent / link).exists()]
