"""Texts name no private machine, no registry and nothing left to do, and use plain words."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.support.repository import ROOT, files, name, python_files, syntax

DATA = ROOT / "models"
CONTAINERS = ROOT / "deploy" / "helm" / "templates"  # paths in these are in a container
PLACES = re.compile(r"(?<![\w./-])/(?:work|tmp|home|root|Users|opt|mnt)\b")
REGISTRIES = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|--(?:extra-)?index-[u]rl|--find-[l]inks")
LEFT_OVERS = re.compile(r"\b(?:[T]ODO|[F]IXME|[X]XX)\b|\bissue #?\d|<{7} |>{7} ")

# Words that the style rules out; brackets keep this file from matching itself.
RULED_OUT = re.compile(
    r"(?:\b|_)(?:[t]old|[t]ells?|[h]ears?|[h]eard|[a]new|[w]hoever|[n]obody|[l]essons?|[o]f which|[s]o many|[i]n vain)"
    r"(?:\b|_)",
    re.IGNORECASE,
)
WRITTEN_BY_PROGRAMS = ("benchmarks/results/", "tests/clients/README.md")
TEXTS_OF_MODELS = "eyas/models/heads/validation.txt"


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    """The lines of text in which the pattern occurs; data, weights and pictures excluded."""
    found = []
    for path in files():
        if (DATA in path.parents and path.suffix != ".md") or path.suffix == ".png":
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines() if pattern.search(text) else (), 1):
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


def test_plain_words_are_used() -> None:
    assert not [line for line in lines_with(RULED_OUT) if not line.startswith((TEXTS_OF_MODELS, "benchmarks/results/"))]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a page that are no table, heading, picture or code, by their numbers; without marks of lists."""
    is_code, before = False, ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        is_code ^= text.startswith("```")
        is_indented = line.startswith("    ") and not before
        if not is_code and not is_indented and not text.startswith(("|", "#", "<", "[!", "![", "```")):
            yield number, re.sub(r"^\s*(?:[-*]|\d+\.)\s+", lambda mark: "." * len(mark[0]), line)
        before = "" if is_indented else text


def test_pages_are_wrapped_at_100_columns() -> None:
    pages = [p for p in files() if p.suffix == ".md" and not name(p).startswith(WRITTEN_BY_PROGRAMS)]
    lines = ((page, number, line) for page in pages for number, line in prose(page))
    assert not [f"{name(page)}:{number}" for page, number, line in lines if len(line) > 100 and " " in line[:100].strip()]


# A docstring begins with a verb or a noun. Fields are listed one a line, below "Args:" or "Attributes:".
MOST = tomllib.loads((ROOT / "tests" / "repo" / "ratchets.toml").read_text(encoding="utf-8"))["docstrings"]
NO_OPENING = re.compile(r"(?:What|Whether|Those|How|As|Also|Of|Such|Where|When|Why|Who|Which)\b")
FIELD = re.compile(r"(?:^|(?<=[.;] ))(\w+(?:, \w+)*): ")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings() -> Iterator[tuple[str, Documented, str]]:
    """Place, node and text of every docstring of the code."""
    for path in python_files("eyas", "services", "benchmarks", "deploy", "docs"):
        for node in ast.walk(syntax(path)):
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                yield f"{name(path)}:{getattr(node, 'lineno', 1)}", node, text


def fields_of(node: Documented) -> set[str]:
    """The parameters of a function, the annotated names of a class."""
    if isinstance(node, ast.ClassDef):
        return {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    if isinstance(node, ast.Module):
        return set()
    return {one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = [f"{place}: {text[:40]}" for place, _, text in docstrings() if NO_OPENING.match(text)]
    assert len(found) <= MOST["openings"], found


def test_docstrings_list_one_field_a_line() -> None:
    run_on = [
        f"{place}: {line.strip()}"
        for place, node, text in docstrings()
        if "Attributes:" not in text and "Args:" not in text
        for line in text.splitlines()
        if len([names for names in FIELD.findall(line.strip()) if names.split(", ")[0] in fields_of(node)]) > 1
    ]
    assert len(run_on) <= MOST["run_on"], run_on
