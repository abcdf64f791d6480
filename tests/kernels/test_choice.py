"""The seam at which kernels are chosen: both sides have the same functions."""

import inspect
from types import ModuleType

import pytest

from eyas.kernels.choice import tree_kernels
from eyas.kernels.plain import layers as plain_layers
from eyas.kernels.plain import trees as plain_trees


def parameters(module: ModuleType) -> dict[str, list[str]]:
    """Names of the parameters of a module's public functions, also of compiled ones."""
    functions = {name: getattr(found, "py_func", found) for name, found in vars(module).items() if name[0] != "_"}
    return {
        name: list(inspect.signature(function).parameters)
        for name, function in functions.items()
        if inspect.isfunction(function) and function.__module__ == module.__name__
    }


def test_kernels_of_trees_have_the_signatures_of_plain_ones() -> None:
    compiled = pytest.importorskip("eyas.kernels.cpu.trees", reason="numba is not installed")
    theirs, plain = parameters(compiled), parameters(plain_trees)
    shared = theirs.keys() & plain.keys()
    assert theirs.keys() - plain.keys() == {"take_best", "tree_words"}
    assert {name: theirs[name] for name in shared} == {name: plain[name] for name in shared}


def test_kernels_of_layers_have_the_signatures_of_plain_ones() -> None:
    """A kernel may take more at the end."""
    compiled = pytest.importorskip("eyas.kernels.cuda.layers", reason="triton is not installed")
    theirs, plain = parameters(compiled), parameters(plain_layers)
    shared = theirs.keys() & plain.keys()
    assert len(shared) == 11
    assert all(theirs[name][: len(plain[name])] == plain[name] for name in shared)


@pytest.mark.parametrize("found", [True, False])
def test_numba_decides_which_kernels_of_trees_run(found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = pytest.importorskip("eyas.kernels.cpu.trees", reason="numba is not installed")
    monkeypatch.setattr("eyas.kernels.choice.has_numba", lambda: found)
    assert tree_kernels.__wrapped__() is (compiled if found else plain_trees)
