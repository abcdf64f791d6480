"""What the pages name exists: drafting methods, configuration keys, files."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from eyas.api import validation
from eyas.cache.kv_cache import KVShape, bytes_per_slot
from eyas.config import DraftConfig, RouterConfig, VerifierConfig
from eyas.drafters.registry import METHODS
from eyas.models.backends.attention_metadata import FIXED_PART, Tiling
from eyas.models.backends.pass_memory import WORKSPACES, PassSizes, graph_bytes, launched_bytes
from tests.support.repository import ROOT, files, name, python_files, syntax

DOCS = ROOT / "docs"
PAGES = [path for path in files() if path.suffix == ".md" and (DOCS in path.parents or path.parent == ROOT)]
HISTORY = {"CHANGELOG.md"}  # keys and files of their time
OTHERS = {"docs/operations.md", "docs/telemetry.md"}  # the chart's values, telemetry attributes; checked by their own tests
CODE = re.compile(r"`([^`\n]+)`")
KEY = re.compile(r"[a-z]\w*(?:\.[a-z]\w*)+")
FILE = re.compile(r"(?:eyas|services|tests|docs|deploy|benchmarks|examples|protos|models)/[\w./-]*\w")
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
SERVICES = {"router": RouterConfig, "verifier": VerifierConfig, "draft": DraftConfig}


def keys(config: type, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a config; a list of values counts as one key."""
    types = get_type_hints(config)
    for field in fields(config):
        kind = types[field.name]
        is_block = is_dataclass(kind) and isinstance(kind, type)
        yield from keys(kind, f"{prefix}{field.name}.") if is_block else (f"{prefix}{field.name}",)


KEYS = {service: list(keys(config)) for service, config in SERVICES.items()}
KNOWN = {key for own in KEYS.values() for key in own}
BLOCKS = {".".join(key.split(".")[:depth]) for key in KNOWN for depth in range(1, key.count(".") + 1)}


def words(page: Path) -> Iterator[str]:
    """The words in backticks on a page."""
    yield from CODE.findall(page.read_text(encoding="utf-8"))


def test_every_method_has_a_heading_and_every_heading_a_method() -> None:
    page = (DOCS / "drafters.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^## (\w+)$", page, re.MULTILINE)) == sorted(METHODS)


def test_the_readme_names_every_method() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [method for method in METHODS if f"`{method}`" not in readme] == []


def test_ranges_on_the_page_of_sampling_are_the_codes() -> None:
    text = (ROOT / "docs" / "sampling.md").read_text().partition("## Ranges")[2]
    rows = re.findall(r"^\| (`[^|]*) \| ([^|]+) \| ([^|]+) \|", text, re.MULTILINE)
    found = {name: (low, float(high)) for names, low, high in rows for name in re.findall("`(.*?)`", names)}
    code = {**validation.INT_RANGES, **validation.OPTIONAL_INT_RANGES, **validation.REAL_RANGES}
    lows = {name: "above 0" if 0 < low < 1e-9 else f"{low:g}" for name, (low, *_) in code.items()}
    assert found == {name: (lows[name], float(high)) for name, (_, high, *_) in code.items()}


def test_keys_on_the_pages_exist() -> None:
    wrong = []
    for page in PAGES:
        for word in words(page) if name(page) not in HISTORY | OTHERS else ():
            key = re.split(r"[:= ]", word)[0]
            if (
                KEY.fullmatch(key)
                and key.split(".")[0] in BLOCKS
                and not key.startswith("http.server.")
                and key not in KNOWN | BLOCKS
            ):
                wrong.append(f"{name(page)}: {key}")
    assert not [entry for entry in wrong if not entry.endswith((".yaml", ".json", ".md", ".py", ".jinja"))]


def test_settings_of_services_on_the_pages_exist() -> None:
    named = [
        (page, service, key)
        for page in PAGES
        for service, key in re.findall(r"--set (router|verifier|draft)\.([\w.]+)=", page.read_text(encoding="utf-8"))
        if name(page) not in HISTORY | OTHERS
    ]
    assert len(named) > 10
    assert not [f"{name(page)}: {service}.{key}" for page, service, key in named if key not in KEYS[service]]


def test_files_on_the_pages_exist() -> None:
    named = [(page, word) for page in PAGES for word in words(page) if name(page) not in HISTORY and FILE.fullmatch(word)]
    assert not [
        f"{name(page)}: {word}" for page, word in named if not (ROOT / word).exists() and not (ROOT / f"{word}.py").exists()
    ]


def test_decisions_are_short_and_in_the_index_once() -> None:
    decisions = {page.name: page.read_text(encoding="utf-8") for page in (DOCS / "decisions").glob("[0-9]*.md")}
    assert not [page for page, text in decisions.items() if len(text.splitlines()) > 40]
    index = (DOCS / "decisions" / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\((\d{4}-[\w-]+\.md)\)", index)) == sorted(decisions)


def test_lab_notes_are_ten_pages_of_what_is_known_now() -> None:
    notes = {page.name: page.read_text(encoding="utf-8") for page in (DOCS / "lab-notes").glob("*.md")}
    assert len(notes) <= 10
    assert sum(len(text.split()) for text in notes.values()) <= 12_000
    assert set(re.findall(r"\(([\w-]+\.md)\)", notes.pop("README.md"))) == notes.keys()


def test_tests_on_the_pages_exist() -> None:
    named = [found for page in PAGES for found in TEST.findall(page.read_text(encoding="utf-8"))]
    assert len(named) > 20
    assert not [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / file).is_file() or f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]


def texts(tree: ast.AST) -> Iterator[str]:
    """The strings of a module; values of f-strings are left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def code_texts() -> list[str]:
    """Every string of the code."""
    return [text for path in python_files("eyas", "services") for text in texts(syntax(path))]


def test_errors_that_troubleshooting_quotes_are_in_the_code() -> None:
    rows = re.findall(r"^\| (.*?\".*?) \|", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    quoted = [error for row in rows for error in re.findall(r'"([^"]+)"', row)]
    assert len(quoted) > 4
    patterns = {error: re.compile(".*?".join(map(re.escape, error.split("..."))), re.DOTALL) for error in quoted}
    assert not [error for error, pattern in patterns.items() if not any(map(pattern.search, code_texts()))]


# Methods without a head for the demo model.
WITHOUT_REPORT = {"dflash", "dflash2", "mtp"}


def test_speedups_on_the_page_of_results_are_the_reports() -> None:
    """Rows of a method: speedup and tau at three temperatures, and the time of a draft at the first."""
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    ((report,),) = [re.findall(r"\(\.\./(benchmarks/results/[\w-]*methods-cpu[\d-]*\.md)\)", page)]
    measured = re.findall(r"^\| ([\w+]+) \| ([\d.]+) \(.*?\| ([\d.]+) \|", (ROOT / report).read_text(), re.MULTILINE)
    rows = re.findall(
        r"^\| `([\w+]+)` \| ([\d.]+),(?: tau)? ([\d.]+) \| (.*?), (.*?) \| (.*?), (.*?) \|", page, re.MULTILINE
    )
    assert {row[0] for row in rows} == (METHODS.keys() - WITHOUT_REPORT) | {"eagle3+prompt_lookup", "dspark+prompt_lookup"}
    for method, *figures in rows:
        assert figures == [figure for name, *both in measured if name == method for figure in both], method


def test_slots_on_the_page_of_llama_are_computed() -> None:
    page = " ".join((DOCS / "operations.md").read_text(encoding="utf-8").split())
    slot = bytes_per_slot([KVShape(8, 128, 128)] * 32, 4096, torch.bfloat16)
    assert f"a slot of the verifier | 128 KiB + 8 KiB | {slot // 2**10} KiB |" in page
    rows = re.findall(r"= ([\d.]+) GiB \| ([\d.]+) GiB \| ([\d,]+) \|", page)
    assert len(rows) == 3
    sizes = PassSizes(128256, 4096, 14336, 32, 8, 128, 2, num_aux=3)
    tiling = Tiling(4, 8, 132, library_rows=256)
    reserved = graph_bytes(sizes, 1024, 32, tiling) + launched_bytes(sizes, 512 + 32 * 60, 1024 + 32, 512, tiling, 131072)
    reserved += WORKSPACES + 4 * 32 * 131072  # slot tables
    assert f"subtracts {reserved / 2**30:.1f} GiB" in page
    for length, text in ((131072, "is up to {:.1f} GiB"), (32768, "{:.1f} GiB with `engine.max_model_len: 32768`")):
        fixed = replace(tiling, longest=length, fixed_part=FIXED_PART)
        whole = graph_bytes(sizes, 1024, 32, fixed) + launched_bytes(sizes, 512 + 32 * 60, 1024 + 32, 512, fixed)
        assert text.format((whole + WORKSPACES + 4 * 32 * length) / 2**30) in page
    for free, kept, tokens in rows:
        assert float(kept) == pytest.approx(0.85 * (float(free) - reserved / 2**30), abs=0.06)
        assert int(tokens.replace(",", "")) == pytest.approx(float(kept) * 2**30 / slot, rel=0.02)
