"""The commands of the README work, and the Python of the pages prints what they show."""

import inspect
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from io import StringIO

import pytest
from typer.main import get_command

from eyas import LLM
from eyas.cli.main import app
from tests.support.repository import ROOT, files, name
from tests.support.tiers import nightly

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)[^)]*\)")
TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)
SHELLS = {"", "sh", "bash", "console", "shell"}
TOOLS = ("make ", "eyas ")
PAST = ("docs/decisions/", "docs/lab-notes/", "benchmarks/", "CHANGELOG")

README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_PAGES = ("README.md", "docs/quickstart.md", "docs/migrating.md", "docs/python.md", "docs/structured-outputs.md")
COMMAND = re.compile(r"^(?: {4})?(?:\.venv/bin/)?eyas (.*)$", re.MULTILINE)
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def commands() -> Iterator[list[str]]:
    """The words of every command in the README's shell blocks, without comments and the folder of the tools."""
    for language, block in FENCE.findall(README):
        for line in block.replace("\\\n", " ").splitlines() if language in SHELLS else ():
            if line.removeprefix(".venv/bin/").startswith(TOOLS):
                yield shlex.split(line.removeprefix(".venv/bin/"), comments=True)


def commands_of_pages() -> list[tuple[str, list[str]]]:
    """Page and words of every command of eyas, in blocks of either kind; pages of the past are left out."""
    pages = [path for path in files() if path.suffix == ".md" and not name(path).startswith(PAST)]
    texts = {name(page): page.read_text(encoding="utf-8").replace("\\\n", " ") for page in pages}
    return [(page, shlex.split(line, comments=True)) for page, text in texts.items() for line in COMMAND.findall(text)]


def test_readme_shows_the_two_commands() -> None:
    assert ["make", "demo"] in commands()
    assert any(words[:2] == ["eyas", "serve"] for words in commands())


def test_make_targets_of_the_readme_exist() -> None:
    asked = {word for tool, *words in commands() if tool == "make" for word in words if not re.search("=|^-", word)}
    assert asked <= set(TARGET.findall(MAKEFILE))


def misread(words: list[str]) -> str:
    """The error of a command. --help answers only after every word before it has been understood, and runs nothing."""
    try:
        with redirect_stdout(StringIO()):
            get_command(app).main([*words, "--help"], prog_name="eyas", standalone_mode=False)
    except (Exception, SystemExit) as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""


def test_eyas_commands_of_the_pages_parse() -> None:
    found = commands_of_pages()
    assert len(found) > 20
    assert len({page for page, _ in found}) > 3
    assert not [f"{page}: eyas {shlex.join(words)}: {error}" for page, words in found if (error := misread(words))]


def test_files_in_commands_of_the_pages_exist() -> None:
    words = [(page, word) for page, line in commands_of_pages() for word in line]
    paths = [(page, word) for page, word in words if word.startswith(("examples/", "models/demo/"))]
    assert len(paths) > 5
    assert not [f"{page}: {word}" for page, word in paths if not (ROOT / word).exists()]


def snippets() -> list[tuple[str, str, str]]:
    """Page, code and expected output of every Python block. The output is the text block right after it, if there is one."""
    found = []
    for page in PYTHON_PAGES:
        blocks = FENCE.findall((ROOT / page).read_text(encoding="utf-8"))
        for (language, code), (following, output) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
            if language == "python":
                found.append((page, code, output if following == "text" else ""))
    return found


@cache
def output(code: str) -> str:
    """What a snippet prints. Pages share some."""
    with redirect_stdout(StringIO()) as printed:
        exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [nightly(i) if i else i for i in range(len(snippets()))])
def test_python_of_the_pages_runs_and_prints_what_they_show(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second with a check of the head, which takes longer than all else."""
    if number != 1:
        parameters = inspect.signature(LLM.__init__).parameters.values()
        given = {one.name: one.default for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD}
        assert "validate_head" in given
        given["validate_head"] = "never"
        defaults = tuple(value for value in given.values() if value is not inspect.Parameter.empty)
        monkeypatch.setattr(LLM.__init__, "__defaults__", defaults)
    page, code, expected = snippets()[number]
    assert output(code).startswith(expected), f"{page}:\n{code}\nprints:\n{output(code)}"


def test_links_between_the_pages_lead_somewhere() -> None:
    pages = [path for path in files() if path.suffix == ".md"]
    links = [(page, link) for page in pages for link in LINK.findall(page.read_text(encoding="utf-8"))]
    assert not [f"{name(page)}: {link}" for page, link in links if not (page.parent / link).exists()]
