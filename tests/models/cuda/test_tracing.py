"""Dynamo traces the pass of a fused target on CUDA as one graph: nothing in it makes the host decide."""

import json
import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from eyas.cache.kv_cache import UNSCALED
from eyas.models.cuda.backend import KernelBackend
from eyas.models.cuda.metadata import Tiling, bucket_shape, max_words, view
from tests.launches import META

KERNEL = "triton_kernel_wrapper_mutation"


class NoGpu:
    """Says that Triton's GPU is an H100. Its kernels are traced, not run."""

    def get_current_target(self) -> Any:
        """What kernels are compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def trace(num_layers: int) -> dict[str, Any]:
    """The graphs and graph breaks of a pass of 64 rows of Llama 3.1 8B with as many layers."""
    import triton
    from torch._dynamo.utils import counters
    from torch.utils import _triton

    from tests.drafters.weightless import llama

    triton.runtime.driver.set_active(NoGpu())
    _triton.has_triton = lambda: True  # type: ignore[assignment]  # else Dynamo steps into Triton's launches
    tiling, graphs = Tiling(4, 8, 132), list[Counter[str]]()
    shape = bucket_shape(64, 32, tiling)
    pools = [torch.empty(1000, 8, 128, dtype=torch.bfloat16, device=META) for _ in range(num_layers)]
    kv: Any = SimpleNamespace(keys=pools, values=pools, scales=[UNSCALED] * num_layers)
    packed = view(torch.empty(max_words(shape), dtype=torch.int32, device=META), shape, shape.logits)

    def keep(graph: Any, _: Any) -> Any:
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append(Counter(str(getattr(node.target, "__name__", node.target)) for node in calls))
        (returned,) = next(node for node in graph.graph.nodes if node.op == "output").args
        return lambda *_: tuple(map(_without_values, returned))

    backend = KernelBackend(llama(num_layers), tiling, 0)
    torch.compile(backend.forward, backend=keep)(packed, kv)
    return {"graphs": graphs, "breaks": counters["graph_break"]}


def _without_values(node: Any) -> Any:
    """A tensor of the shape that Dynamo found for a result."""
    found = node.meta["example_value"] if isinstance(node, torch.fx.Node) else node
    return torch.empty(tuple(found.shape), dtype=found.dtype, device=META) if isinstance(found, Tensor) else found


def test_a_fused_pass_is_one_graph_without_breaks() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.models.cuda.test_tracing"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["breaks"] == {}
    (calls,) = found["graphs"]
    # tables and first norm; of a layer rotation, two of attention, two sums with norms, and the gate; and four products
    assert calls[KERNEL] == 2 + 2 * 6
    assert calls["linear"] == 2 * 4


if __name__ == "__main__":
    print(json.dumps(trace(2)))
