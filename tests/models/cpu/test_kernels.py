"""Functions compiled with numba, where nothing can be kept on disk."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")


def test_a_kernel_runs_where_no_folder_can_be_written_to() -> None:
    from eyas.sampling.cpu_kernels import kernel

    names: dict[str, object] = {}
    exec("def double(x):\n    return 2 * x", names)  # numba finds no folder for a function without a file
    double = kernel()(names["double"])
    assert double(3) == 6
    assert double._cache.cache_path is None
