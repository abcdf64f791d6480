"""Engine on a GPU: the kernel at real sizes, replays without waiting, tokens in float32 and in bfloat16."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from eyas.api.request import Request, SamplingParams
from eyas.cache.kv_cache import KVCache
from eyas.config import TreeConfig
from eyas.config.engine import KVCacheDtype
from eyas.engine.build import assemble_engine
from eyas.engine.deterministic import BatchInvariantRunner
from eyas.engine.engine import Engine
from eyas.kernels.arguments import AttentionRule
from eyas.models.backends.attention_metadata import Tiling, pack_with_metadata, tight_shape, with_prompts
from eyas.models.backends.cuda import build_backend, plan_backend
from eyas.models.backends.cuda_graphs import GraphBackend
from eyas.models.inputs import pack
from eyas.models.layers.attention import attend
from eyas.models.loading import load_target
from eyas.models.target import TargetModel
from tests.sampling.test_device_syncs import ASKED
from tests.support import reference
from tests.support.bad_drafters import RandomDrafter
from tests.support.devices.random_passes import Heads, make_pass, scaling_of
from tests.support.devices.waits import recorded_waits, waits_noted
from tests.support.runs import run, tokens_of
from tests.support.sampling_drafters import BigramDrafter, bigram_logits
from tests.support.tiny import fixed_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TREE = TreeConfig(num_draft_tokens=12, num_steps=4, top_k=4)
MARGIN = 0.03  # of the largest logit: a few roundings of bfloat16 inside a tiny model
SIZES = [(True, 60, 3000), (True, 1, 5000), (True, 16, 1), (False, 200, 700), (False, 150, 0)]
PROMPTS = [tuple(range(3, 3 + n)) for n in (1, 7, 30, 11)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(14, 2, 64), Heads(8, 4, 256), Heads(32, 32, 96)])
@pytest.mark.parametrize(("window", "softcap", "library_rows"), [(None, None, 0), (512, 50.0, 0), (None, None, 100)])
def test_the_kernel_equals_the_plain_path_at_real_sizes(
    dtype: torch.dtype, heads: Heads, window: int | None, softcap: float | None, library_rows: int
) -> None:
    segments, device = make_pass(SIZES), torch.device("cuda")
    size, rows = sum(n + m for _, n, m in SIZES), sum(n for _, n, _ in SIZES)
    generator = torch.Generator("cuda").manual_seed(0)
    keys, values = (torch.randn(size + 1, heads.kv, heads.width, device=device, generator=generator) for _ in "kv")
    query = torch.randn(rows, heads.query, heads.width, device=device, generator=generator)
    query, keys, values = (x.to(dtype) for x in (query, keys, values))
    most = 16 if dtype == torch.float32 else 64
    tiling = Tiling(heads.query // heads.kv, heads.kv, 132, most, library_rows)
    packed = with_prompts(pack_with_metadata(segments, tight_shape(segments, tiling), size, device), segments, tiling)
    rule = AttentionRule(scaling_of(heads), window, softcap)
    got = attend(query, keys, values, packed, rule).float()
    query, keys, values = query.double(), keys.double(), values.double()  # which no library multiplies with fewer bits
    exact = attend(query, keys, values, pack(segments, device), rule).float()
    exactly = 5e-5 if softcap else 1e-5  # a capped score is off by 1e-5
    tolerance = exactly if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, exact, atol=tolerance, rtol=tolerance)


def test_a_replayed_pass_never_waits_for_the_device(tiny_target: str) -> None:
    target = load_target(tiny_target, device="cuda")
    kv_cache = KVCache(200, target.kv_shapes, 0, target.dtype, target.device)
    plan = plan_backend(target, fixed_config(max_kv_tokens=200), TREE, 100)
    backend = build_backend(plan, target, kv_cache)
    assert isinstance(backend, GraphBackend)
    segments = [make_pass([(True, 9, 30), (True, 5, 11)]), make_pass([(False, 90, 3)])]
    for each in segments:
        backend.forward(backend.pack(each), kv_cache)
    with waits_noted("error"):
        for each in segments:
            backend.forward(backend.pack(each), kv_cache)


def test_a_step_syncs_with_the_device_once_for_any_parameters(tiny_target: str) -> None:
    drafter, config = (
        BigramDrafter(bigram_logits(tiny_target), (3, 2)),
        fixed_config(max_kv_tokens=1024, acceptance="rejection"),
    )
    engine = assemble_engine(load_target(tiny_target, device="cuda"), None, config, TREE, drafter)
    for i, sampling in enumerate(ASKED):
        engine.submit(Request(f"{i}", tuple(range(3, 10 + i)), replace(sampling, seed=i)))
    engine.step()
    while engine.has_work:
        with recorded_waits() as waits:
            engine.step()
        assert len(waits) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_float32_equals_the_plain_cpu_loop(tiny_target: str, temperature: float, cuda_graphs: bool) -> None:
    target = load_target(tiny_target, device="cuda")
    engine = make_engine(target, TREE, cuda_graphs)
    for request, tokens in zip(requests(temperature), generate(engine, temperature), strict=True):
        assert tokens == reference.generate(tiny_target, list(request.prompt_ids), request.sampling)


def test_bfloat16_diverges_only_at_near_ties(tiny_target: str) -> None:
    target = load_target(tiny_target, "bfloat16", "cuda")
    drafted, plain = (generate(make_engine(target, tree, True), 0.0) for tree in (TREE, TreeConfig(1, 0, 1)))
    model = reference.load_reference(tiny_target)
    for request, ours, theirs in zip(requests(0.0), drafted, plain, strict=True):
        split = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if split is not None:
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([[*request.prompt_ids, *ours[:split]]])).logits[0, -1]
            assert abs(float(logits[ours[split]] - logits[theirs[split]])) <= MARGIN * float(logits.abs().max())


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_deterministic_drafts_change_no_token(
    tiny_target: str, dtype: str, kv_cache_dtype: KVCacheDtype, temperature: float
) -> None:
    """All sequences share their passes, and the plain ones are of other sizes."""
    target, outputs = load_target(tiny_target, dtype, "cuda"), []
    for tree in (TREE, TreeConfig(1, 0, 1)):
        engine = make_engine(target, tree, True, deterministic=True, kv_cache_dtype=kv_cache_dtype)
        assert isinstance(engine.runner, BatchInvariantRunner)
        assert engine.runner.keeps_batches
        outputs.append(generate(engine, temperature))
    assert outputs[0] == outputs[1]


def make_engine(target: TargetModel, tree: TreeConfig, cuda_graphs: bool, **modes: Any) -> Engine:
    config = fixed_config(max_kv_tokens=1024, max_prefill_tokens=16, cuda_graphs=cuda_graphs, **modes)
    return assemble_engine(target, None, config, tree, RandomDrafter(48) if tree.num_draft_tokens > 1 else None)


def requests(temperature: float) -> list[Request]:
    params = SamplingParams(max_tokens=24, temperature=temperature, ignore_eos=True)
    return [Request(f"{i}", prompt, replace(params, seed=i)) for i, prompt in enumerate(PROMPTS)]


def generate(engine: Engine, temperature: float) -> list[list[int]]:
    chunks = run(engine, requests(temperature))
    return [tokens_of(chunks[request.id]) for request in requests(temperature)]
