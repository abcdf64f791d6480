"""The kernels compile for a GPU without having one, and use the instructions that make them fast."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from eyas.models.cuda import kernel

def compile(fn, pointers, numbers, constants):
    signature = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    places = list(signature)
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
    source = ASTSource(fn, signature, {(places.index(name),): value for name, value in constants.items()}, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 2})

kind, window, softcap, rows = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
data = {name: f"*{kind}" for name in ("query", "keys", "values")}
floats = {"partials": "*fp32", "sums": "*fp32"}
ints = {name: "*i32" for name in ("words", "tiles", "slots", "positions")}
numbers = {"scaling": "fp32", "rows": "i32", "splits": "i32"}
shape = {"NUM_KV": 8, "GROUP": 4, "WIDTH": 128, "WINDOW": window, "SOFTCAP": softcap}
blocks = {"BLOCK_M": rows, "BLOCK_N": kernel._keys_per_block(128 * (4 if kind == "fp32" else 2)), "BLOCK_D": 128}
made = compile(kernel._attend_parts, {**data, **floats, **ints}, numbers, {**shape, **blocks})
assert made.metadata.shared <= 227 * 1024, made.metadata.shared
assert "cp.async" in made.asm["ptx"], "keys are not loaded ahead"
assert kind == "fp32" or "mma" in made.asm["ptx"], "no matrix instructions"
numbers = {"rows": "i32", "splits": "i32"}
constants = {"NUM_HEADS": 32, "WIDTH": 128, "BLOCK_S": 32, "BLOCK_D": 128}
compile(kernel._combine, {**floats, "out": f"*{kind}"}, numbers, constants)
"""


@pytest.mark.parametrize(("kind", "window", "softcap", "rows"), [("bf16", 0, 0.0, 64), ("fp32", 512, 50.0, 16)])
def test_the_kernels_compile_for_hopper(kind: str, window: int, softcap: float, rows: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", COMPILE, kind, f"{window}", f"{softcap}", f"{rows}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
