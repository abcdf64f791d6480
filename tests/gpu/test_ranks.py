"""Tensor parallelism on several GPUs: captured sums, and ranks that stop in time."""

import multiprocessing

import pytest
import torch

from eyas.api.request import Request, SamplingParams
from eyas.config import TreeConfig
from eyas.engine.build import assemble_engine, gather_ranks, load_model
from eyas.models.backends.base import BackendKind
from eyas.models.backends.cuda import plan_backend
from eyas.models.parallel.workers import RankInfo
from tests.support.bad_drafters import RandomDrafter
from tests.support.runs import assert_plain, run
from tests.support.tiny import fixed_config

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

TREE = TreeConfig(num_draft_tokens=12, num_steps=4, top_k=4)
REQUESTS = [
    Request(f"{n}", tuple(range(3, 3 + n)), SamplingParams(24, temperature, top_p=top_p, seed=n, ignore_eos=True))
    for n, temperature, top_p in ((1, 0.0, 1.0), (7, 0.9, 1.0), (30, 0.0, 1.0), (11, 0.9, 1.0), (13, 0.9, 0.9))
]


@pytest.mark.parametrize("kind", [BackendKind.GRAPHS, BackendKind.KERNEL])
@pytest.mark.parametrize("size", [2, 4])
def test_float32_over_ranks_equals_the_plain_cpu_loop(
    tiny_target: str, kind: BackendKind, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.models.parallel.workers.STOP_SECONDS", 60)
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    config = fixed_config(
        max_kv_tokens=1024, max_prefill_tokens=16, cuda_graphs=kind is BackendKind.GRAPHS, tensor_parallel_size=size
    )
    ranks = gather_ranks(RankInfo(0, size, "cuda"), tiny_target, "float32")
    processes = multiprocessing.active_children()
    try:
        target = load_model(tiny_target, None, "float32", "cuda", config, ranks)
        assert plan_backend(target, config, TREE, 256).kind is kind
        engine = assemble_engine(target, None, config, TREE, RandomDrafter(48), ranks)
        chunks = run(engine, REQUESTS)
    finally:
        ranks.close()
    assert [process.exitcode for process in processes] == [0] * (size - 1), "parted by themselves"
    assert_plain(tiny_target, REQUESTS, chunks)
