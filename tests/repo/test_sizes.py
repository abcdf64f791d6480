"""Files, functions and rooms stay small enough to read, and carry names that say something."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.repo.repository import GENERATED, name, python_files, syntax

MAX_FILE_LINES = 250
MAX_FUNCTION_LINES = 40
MAX_ROOM_FILES = 9
MAX_RETURNED = 2
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "handler", "handlers"}

CODE = python_files("eyas", "services")
TESTS = python_files("tests")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[Path, Function]]:
    for path in CODE:
        for node in ast.walk(syntax(path)):
            if isinstance(node, Function):
                yield path, node


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


def test_files_fit_250_lines() -> None:
    long = {name(p): n for p in CODE + TESTS if (n := len(p.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES}
    assert not long


def test_functions_fit_one_screen() -> None:
    long = {f"{name(p)}:{f.name}": n for p, f in functions() if (n := num_lines(f)) > MAX_FUNCTION_LINES}
    assert not long


def test_eyas_and_services_stay_small() -> None:
    rooms = Counter(name(p.parent) for p in CODE + TESTS if p.stem not in {"__init__", "__main__", "conftest"})
    assert not {room: n for room, n in rooms.items() if n > MAX_ROOM_FILES}


def test_file_names_say_something() -> None:
    assert not [name(p) for p in CODE + TESTS if p.stem in BANNED_NAMES]


def test_every_package_has_an_init() -> None:
    rooms = {p.parent for p in CODE} | {GENERATED}
    assert not [name(room) for room in rooms if not (room / "__init__.py").is_file()]


def test_modules_have_a_docstring() -> None:
    assert not [name(p) for p in CODE if not ast.get_docstring(syntax(p)) and p.read_text(encoding="utf-8").strip()]


def test_functions_return_two_values_at_most() -> None:
    wide = {f"{name(p)}:{f.name}": n for p, f in functions() if (n := num_returned(f)) > MAX_RETURNED}
    assert not wide
