"""Chooses kernels for arrays on the host: numba's, or plain ones with the same signatures. Its callers do not ask."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from eyas.device.host import has_numba
from eyas.errors import install_command

T = TypeVar("T")


@cache
def tree_kernels() -> Any:
    """Return the kernels for draft trees on the host: numba's, loaded or compiled at the first call, or NumPy's."""
    if not has_numba():
        from eyas.kernels.plain import trees as plain

        return plain
    from eyas.kernels.cpu import trees as compiled

    compiled.compile_kernels()
    return compiled


def compiled_or(compiled: Callable[[], T], plain: Callable[[], T]) -> T:
    """Return what the first builds on numba's kernels, or the second without them."""
    return compiled() if has_numba() else plain()


def describe_compiled() -> str:
    """Return which of the kernels that numba compiles for this processor are there already."""
    if not has_numba():
        return f"nothing: numba is missing; run: {install_command('cpu')}"
    folder = Path(__file__).with_name("cpu")
    tag = f"{sys.version_info.major}{sys.version_info.minor}"
    sources = sorted(file for file in folder.glob("*.py") if "@kernel" in file.read_text(encoding="utf-8"))
    ready = [file for file in sources if any(folder.glob(f"__pycache__/{file.stem}.*.py{tag}.nbi"))]
    names = ", ".join(file.stem for file in ready)
    return f"{len(ready)} of {len(sources)} modules{': ' * bool(names)}{names}"
