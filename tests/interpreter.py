"""Kernels of Triton where there is no GPU: they run in its interpreter, and not at all while a graph is captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from torch import Tensor

from tests.launches import Launch, recorded

Out = TypeVar("Out")
# Arguments that the kernels of attention write.
WRITTEN = ("partials", "sums", "out")


def run_again(run: Callable[[], Out]) -> Callable[[], Out]:
    """A stand-in for a captured graph: runs the same closure again on its static inputs.

    As on CUDA, its kernels do not run during the capture.
    """
    with recorded(_clear):
        run()
    return run


def _clear(launch: Launch) -> None:
    """Numbers where a kernel would have left some."""
    for name in WRITTEN:
        if isinstance(memory := launch.arguments.get(name), Tensor):
            memory.zero_()


def fixed_products(patch: pytest.MonkeyPatch) -> None:
    """Let `tl.dot` sum in one order for all rows of a tile, as a GPU does.

    On some processors NumPy's library sums the last rows of a tile in another order than the first ones.
    """
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, acc: Any, *_: Any) -> Any:
        products = a.data[..., None] * b.data[..., None, :, :]
        return interpreter.TensorHandle(products.sum(-2, dtype=acc.data.dtype) + acc.data, acc.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def patch_once_a_launch() -> None:
    """Let the interpreter patch `triton.language` once a launch, not at each call of a function inside a kernel.

    The calls take a third of its time and change nothing. Nor does it look for overflows: compiled kernels do not either.
    """
    from triton.runtime import interpreter

    plain, patched = interpreter._patch_lang, set[int]()

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        def restore(self) -> None:
            patched.clear()
            super().restore()

    def patch(fn: Callable[..., object]) -> Scope:
        if id(fn.__globals__) in patched:
            return Scope()
        patched.add(id(fn.__globals__))
        scope: Scope = plain(fn)
        return scope

    interpreter._LangPatchScope, interpreter._patch_lang = Scope, patch
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
