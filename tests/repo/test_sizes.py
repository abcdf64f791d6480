"""Functions and names keep to the limits of the style: one name for one class. Ratchets are in `test_ratchets.py`."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from tests.support.repository import GENERATED, name, python_files, syntax

MAX_FUNCTION_LINES = 60
MAX_RETURNED = 2
MAX_TEST_NAME = 60
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


def test_test_names_have_at_most_60_characters() -> None:
    names = [(path, found) for path in TESTS for found in TEST_NAME.findall(path.read_text(encoding="utf-8"))]
    assert len(names) > 1000
    assert not [f"{name(path)}:{found}" for path, found in names if len(found) > MAX_TEST_NAME]
