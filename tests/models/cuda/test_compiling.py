"""Every kernel compiles for GPUs that are not there, with the arguments of its real launches; none spills, and all fit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from tests.compiling import COMPILED, SHARED_KIB, WRITE
from tests.launches import launched_kernels

# After a change of Triton two minutes of compiling for each kind of GPU, on a slow processor that other tests use as well.
pytestmark = pytest.mark.timeout(1200)


def kernels_of(cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """What becomes of each kernel, in a process of its own."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.compiling", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("sm", SHARED_KIB)
def test_kernels_compile_fit_and_do_not_spill(sm: int, tmp_path: Path) -> None:
    kernels = kernels_of(tmp_path, str(sm))
    assert {kernel["name"] for kernel in kernels} == launched_kernels()
    assert not [kernel for kernel in kernels if kernel["spilled"] or kernel["shared"] > SHARED_KIB[sm] * 1024]
    attention = [kernel for kernel in kernels if kernel["name"] == "_attend_parts"]
    assert all(kernel["loads_ahead"] for kernel in attention)
    assert all(kernel["slots_ahead"] >= 2 for kernel in attention), "of the prefix, and of the segment's own keys"
    assert attention[0]["matrix"], "bfloat16 without matrix instructions"
    assert all(kernel["load_bytes"] == 16 for kernel in attention), "keys and values are not loaded in whole vectors"
    turns = {100: 2}.get(sm, 0)  # between tensor memory and registers
    assert all(kernel["conversions"] <= turns for kernel in attention[:2]), "a layout changes at every block of keys"
    for kernel in kernels:
        assert kernel["name"] != "_attend_fixed_parts" or len(kernel["products"]) == 2, "both loops multiply alike"
    plain_step, tree = attention[:2]
    assert plain_step["residents"] >= {80: 3, 90: 4}.get(sm, 2)
    assert tree["residents"] >= {90: 2}.get(sm, 1)
    again = kernels_of(tmp_path, "--again", str(sm))
    assert again
    assert all(kernel in kernels for kernel in again), f"{COMPILED} holds something else than the compiler makes. {WRITE}"
