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
from transformers import AutoConfig

pytest.importorskip("triton", reason="triton is not installed")

from eyas.cache.kv_cache import UNSCALED
from eyas.models.cuda.backend import KernelBackend
from eyas.models.cuda.metadata import Tiling, bucket_shape, max_words, view
from tests.launches import META

NUM_LAYERS = 2
SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32064}
KERNEL = "triton_kernel_wrapper_mutation"


class NoGpu:
    """Says that Triton's GPU is an H100. Its kernels are traced, not run."""

    def get_current_target(self) -> Any:
        """What kernels are compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def trace(family: str) -> dict[str, Any]:
    """The graphs and graph breaks of a pass of 64 rows of two layers of Llama 3.1 8B's shape, or with experts."""
    import triton
    from torch._dynamo.utils import counters
    from torch.utils import _triton

    from tests.drafters.weightless import llama, weightless

    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": NUM_LAYERS, "pad_token_id": 0}
    target = llama(NUM_LAYERS) if family == "llama" else weightless(AutoConfig.for_model(family, **sizes))
    triton.runtime.driver.set_active(NoGpu())
    _triton.has_triton = lambda: True  # type: ignore[assignment]  # else Dynamo steps into Triton's launches
    tiling, graphs = Tiling(4, 8, 132), list[Counter[str]]()
    shape = bucket_shape(64, 32, tiling)
    pools = [torch.empty(1000, 8, 128, dtype=torch.bfloat16, device=META) for _ in range(NUM_LAYERS)]
    kv: Any = SimpleNamespace(keys=pools, values=pools, scales=[UNSCALED] * NUM_LAYERS)
    packed = view(torch.empty(max_words(shape), dtype=torch.int32, device=META), shape, shape.logits)

    def keep(graph: Any, _: Any) -> Any:
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append(Counter(str(getattr(node.target, "__name__", node.target)) for node in calls))
        (returned,) = next(node for node in graph.graph.nodes if node.op == "output").args
        return lambda *_: tuple(map(_without_values, returned))

    backend = KernelBackend(target, tiling, 0)
    torch.compile(backend.forward, backend=keep)(packed, kv)
    return {"graphs": graphs, "breaks": counters["graph_break"]}


def _without_values(node: Any) -> Any:
    """A tensor of the shape that Dynamo found for a result."""
    found = node.meta["example_value"] if isinstance(node, torch.fx.Node) else node
    return torch.empty(tuple(found.shape), dtype=found.dtype, device=META) if isinstance(found, Tensor) else found


# In a pass: tables and first norm; of a layer rotation, two of attention, two sums with norms, and the gate; and four
# products. Experts have five launches and a product instead of the gate and two products.
@pytest.mark.parametrize(("family", "num_launched", "num_products"), [("llama", 6, 4), ("qwen3_moe", 10, 3)])
def test_a_fused_pass_is_one_graph_without_breaks(family: str, num_launched: int, num_products: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.models.cuda.test_tracing", family]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["breaks"] == {}
    (calls,) = found["graphs"]
    assert calls[KERNEL] == 2 + NUM_LAYERS * num_launched
    assert calls["linear"] == NUM_LAYERS * num_products


if __name__ == "__main__":
    print(json.dumps(trace(sys.argv[1])))
