"""What Dynamo traces of the pass of a fused target on CUDA, where there is none."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from eyas.kernels.arguments import UNSCALED
from eyas.models.backends.attention_metadata import Tiling, bucket_shape, max_words, view
from eyas.models.backends.cuda import KernelBackend
from tests.support.devices.launches import META

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

    from tests.support.weightless import llama, weightless

    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": NUM_LAYERS, "pad_token_id": 0}
    target = llama(NUM_LAYERS) if family == "llama" else weightless(AutoConfig.for_model(family, **sizes))
    torch._dynamo.reset()
    counters.clear()
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
    return {"graphs": graphs, "breaks": dict(counters["graph_break"])}


def _without_values(node: Any) -> Any:
    """A tensor of the shape that Dynamo found for a result."""
    found = node.meta["example_value"] if isinstance(node, torch.fx.Node) else node
    return torch.empty(tuple(found.shape), dtype=found.dtype, device=META) if isinstance(found, Tensor) else found
