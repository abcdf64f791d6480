"""Files, functions and names keep to the limits of the style: one subject in a file, one name for one class."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from benchmarks.scripts.count_code import calls_to_attention
from eyas import LLM
from tests.repo.repository import GENERATED, name, python_files, syntax

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60
MAX_RETURNED = 2
MAX_TEST_NAME = 60
MAX_CALLS = 51
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "handler", "handlers"}

CODE = python_files("eyas", "services")
TESTS = python_files("tests")
TEST_NAME = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    """The syntax of all code."""
    return [(path, syntax(path)) for path in CODE]


@cache
def functions() -> list[tuple[Path, Function]]:
    return [(path, node) for path, tree in trees() for node in ast.walk(tree) if isinstance(node, Function)]


def num_file_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def num_lines(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def num_returned(node: Function) -> int:
    """Size of the tuple that the annotation promises; tuple[int, ...] is one value of any length."""
    match node.returns:
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=parts)) if not is_ellipsis(parts[-1]):
            return len(parts)
    return 1


def is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def test_files_have_at_most_800_lines() -> None:
    assert not {name(p): n for p in CODE + TESTS if (n := num_file_lines(p)) > MAX_FILE_LINES}


def test_functions_have_at_most_60_lines() -> None:
    assert not {f"{name(p)}:{f.name}": n for p, f in functions() if (n := num_lines(f)) > MAX_FUNCTION_LINES}


def test_file_names_are_specific() -> None:
    assert not [name(p) for p in CODE + TESTS if p.stem in BANNED_NAMES]


def test_every_package_has_an_init() -> None:
    packages = {p.parent for p in CODE} | {GENERATED}
    assert not [name(package) for package in packages if not (package / "__init__.py").is_file()]


def test_modules_have_a_docstring() -> None:
    assert not [name(path) for path, tree in trees() if tree.body and not ast.get_docstring(tree)]


def test_functions_return_two_values_at_most() -> None:
    assert not {f"{name(p)}:{f.name}": n for p, f in functions() if (n := num_returned(f)) > MAX_RETURNED}


def test_no_public_class_name_exists_twice() -> None:
    where = defaultdict(list)
    for path, tree in trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(name(path))
    assert not {title: paths for title, paths in where.items() if len(paths) > 1}


def test_few_functions_lie_between_generate_and_attention() -> None:
    calls = calls_to_attention(LLM("models/demo/target", "models/demo/eagle3", validate_head="never"))
    assert calls[0] == "eyas.llm.LLM.generate"
    assert len(calls) <= MAX_CALLS, calls


def test_test_names_have_at_most_60_characters() -> None:
    names = [(path, found) for path in TESTS for found in TEST_NAME.findall(path.read_text(encoding="utf-8"))]
    assert len(names) > 1000
    assert not [f"{name(path)}:{found}" for path, found in names if len(found) > MAX_TEST_NAME]
