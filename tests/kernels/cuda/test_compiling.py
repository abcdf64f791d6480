"""Kernels as a GPU that is not there would have them: compiled, and traced in a pass. None spills, and all fit.

Daily one variant of each kernel, and attention's two, for one kind of GPU; nightly all variants for all kinds.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from tests.kernels.cuda.tracing import KERNEL, NUM_LAYERS, trace
from tests.support.devices.compiling import SHARED_KIB, compiled_kernels
from tests.support.devices.launches import launched_kernels

# All variants take two minutes of compiling for each kind of GPU, on a slow processor that other tests use as well.
pytestmark = pytest.mark.timeout(1200)

# The kind of GPU, and the variants of each kernel, that are compiled daily.
DAILY_SM, DAILY_VARIANTS = 90, 1
# Most bytes of shared memory of those variants of a kernel. They may only fall: lower a number when its kernel needs less.
SHARED_BYTES = {
    "_add_norm": 32,
    "_add_norms": 32,
    "_attend_fixed_parts": 49_280,
    "_attend_parts": 83_456,
    "_best_keys": 32,
    "_block_keys": 32,
    "_combine": 4096,
    "_combine_experts": 0,
    "_combine_in_order": 64,
    "_convolve": 0,
    "_convolve_paths": 0,
    "_down": 24_576,
    "_draw": 1024,
    "_frontier": 32,
    "_gate": 0,
    "_gate_up": 40_960,
    "_gumbel": 0,
    "_join_blocks": 32,
    "_keep": 256,
    "_keep_best": 16_384,
    "_list_blocks": 8192,
    "_lowest_keys": 32,
    "_masses_from": 64,
    "_norm": 32,
    "_pair_inputs": 32,
    "_product": 98_304,
    "_race": 32,
    "_rotary_tables": 0,
    "_rotate_and_store": 0,
    "_route": 1024,
    "_scan": 4096,
    "_score_blocks": 64,
    "_winners": 0,
}

# In a pass: tables and first norm; of a layer rotation, two of attention, two sums with norms, and the gate; and four
# products. Experts have three launches and a product instead of the gate and two products.
FAMILIES = {"llama": (6, 4), "qwen3_moe": (8, 3)}

Kernels = Sequence[dict[str, Any]]
RunFresh = Callable[..., Any]


@pytest.fixture(scope="module")
def run_fresh(tmp_path_factory: pytest.TempPathFactory) -> RunFresh:
    """Runs this file with arguments in a process without Triton's interpreter, and reads what it prints."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment.pop("TRITON_INTERPRET", None)

    def run(*arguments: object) -> Any:
        command = [sys.executable, "-m", "tests.kernels.cuda.test_compiling", *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="module")
def daily_kernels(run_fresh: RunFresh) -> Kernels:
    return run_fresh(DAILY_SM, DAILY_VARIANTS)


def check_kernels(sm: int, kernels: Kernels) -> None:
    """Fail if kernels spill, do not fit, or attention is not compiled as well as it was."""
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


def test_kernels_compile_fit_and_do_not_spill(daily_kernels: Kernels) -> None:
    check_kernels(DAILY_SM, daily_kernels)


def test_shared_memory_of_each_kernel_only_falls(daily_kernels: Kernels) -> None:
    found = {name: max(k["shared"] for k in daily_kernels if k["name"] == name) for name in launched_kernels()}
    assert found == SHARED_BYTES, "it may only fall, and then it is written down"


@pytest.mark.nightly
@pytest.mark.parametrize("sm", SHARED_KIB)
def test_all_variants_compile_fit_and_do_not_spill(sm: int, run_fresh: RunFresh) -> None:
    check_kernels(sm, run_fresh(sm))


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_pass_is_one_graph_without_breaks(family: str, run_fresh: RunFresh) -> None:
    """Nothing in it makes the host decide."""
    num_launched, num_products = FAMILIES[family]
    traced = run_fresh(family)
    assert traced["breaks"] == {}
    (calls,) = traced["graphs"]
    assert calls[KERNEL] == 2 + NUM_LAYERS * num_launched
    assert calls["linear"] == NUM_LAYERS * num_products


if __name__ == "__main__":
    what, *most = sys.argv[1:]
    print(json.dumps(trace(what) if what in FAMILIES else [asdict(k) for k in compiled_kernels(int(what), *map(int, most))]))
