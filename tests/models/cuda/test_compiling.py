"""Kernels as a GPU that is not there would have them: compiled, and traced in a pass. None spills, and all fit."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from tests.compiling import COMPILED, SHARED_KIB, WRITE, compiled_again, is_up_to_date, kernels_of, known_kernels
from tests.launches import launched_kernels
from tests.models.cuda.tracing import KERNEL, NUM_LAYERS, trace

# After a change of Triton two minutes of compiling for each kind of GPU, on a slow processor that other tests use as well.
pytestmark = pytest.mark.timeout(1200)

# In a pass: tables and first norm; of a layer rotation, two of attention, two sums with norms, and the gate; and four
# products. Experts have three launches and a product instead of the gate and two products.
FAMILIES = {"llama": (6, 4), "qwen3_moe": (8, 3)}
AGAIN = 90


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process without Triton's interpreter finds. It starts once for all tests here."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.models.cuda.test_compiling"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def find_all() -> dict[str, Any]:
    """Kernels by kind of GPU, those that the file lacks, those compiled without a look at it, and traces of passes."""
    known = known_kernels()
    kernels = {sm: kernels_of(sm, known) for sm in SHARED_KIB}
    return {
        "kernels": {sm: list(each.values()) for sm, each in kernels.items()},
        "lacking": [each[key]["name"] for each in kernels.values() for key in each if key not in known],
        "again": compiled_again(AGAIN),
        "traces": {family: trace(family) for family in FAMILIES},
    }


@pytest.mark.parametrize("sm", SHARED_KIB)
def test_kernels_compile_fit_and_do_not_spill(sm: int, found: dict[str, Any]) -> None:
    kernels: Sequence[dict[str, Any]] = found["kernels"][str(sm)]
    assert {kernel["name"] for kernel in kernels} == launched_kernels()
    attention = [kernel for kernel in kernels if kernel["name"] == "_attend_parts"]
    most_spilled = {89: 8}.get(sm, 0)  # one register of attention, stored and loaded
    assert not [k for k in attention if k["spilled"] > most_spilled]
    assert not [k for k in kernels if k["spilled"] and k not in attention]
    assert not [k for k in kernels if k["shared"] > SHARED_KIB[sm] * 1024]
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
    assert tree["shared"] <= {80: 60, 89: 60, 90: 84}.get(sm, SHARED_KIB[sm]) * 1024, "masks are there as whole words"
    assert any("128x64x" in product for kernel in attention for product in kernel["products"]), "prompts in tall tiles"


def test_what_is_known_of_kernels_is_what_the_compiler_makes(found: dict[str, Any]) -> None:
    assert found["again"]
    assert all(kernel in found["kernels"][str(AGAIN)] for kernel in found["again"]), f"{COMPILED} is wrong. {WRITE}"
    lacking = sorted(set(found["lacking"]))
    assert not (lacking and is_up_to_date(known_kernels())), f"{COMPILED} lacks what becomes of {lacking}. {WRITE}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_pass_is_one_graph_without_breaks(family: str, found: dict[str, Any]) -> None:
    """Nothing in it makes the host decide."""
    num_launched, num_products = FAMILIES[family]
    assert found["traces"][family]["breaks"] == {}
    (calls,) = found["traces"][family]["graphs"]
    assert calls[KERNEL] == 2 + NUM_LAYERS * num_launched
    assert calls["linear"] == NUM_LAYERS * num_products


if __name__ == "__main__":
    print(json.dumps(find_all()))
