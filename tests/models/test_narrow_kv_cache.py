"""Keys and values of 8 bits: what is kept, that kernels read it as plain operations do, and equality of the outputs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.api.request import Request, SamplingParams
from eyas.cache.kv_cache import KV_CACHE_DTYPES, KVCache, KVShape, bytes_per_slot, load_rows
from eyas.config import EngineConfig, TreeConfig
from eyas.engine.build import assemble_engine
from eyas.errors import CheckpointError, ConfigError
from eyas.kernels.arguments import AttentionRule, KVScales
from eyas.kernels.plain import layers as plain_layers
from eyas.kernels.plain.layers import store_rows
from eyas.models.backends.attention_metadata import Tiling, pack_with_metadata, tight_shape
from eyas.models.layers.attention import attend
from eyas.models.layers.norms import HeadLayout
from eyas.models.loading import load_target
from tests.support.bad_drafters import RandomDrafter
from tests.support.devices.random_passes import make_pass, num_slots
from tests.support.runs import outputs_of, run
from tests.support.tiers import tiered
from tests.support.tiny import change_tensors, shared_target, write_target

NARROW = ("fp8_e4m3", "fp8_e5m2")
CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "bits"), [("fp8_e4m3", 3), ("fp8_e5m2", 2)])
def test_rows_are_rounded_to_the_bits_of_their_type(name: str, bits: int) -> None:
    rows = torch.randn(40, 2, 8, generator=torch.Generator().manual_seed(0)) + 3
    rows[0, 0, 0], rows[0, 0, 1] = 1e9, -1e9
    cache = KVCache(50, [KVShape(2, 8, 8)], 0, torch.float32, CPU, KV_CACHE_DTYPES[name], [KVScales(0.5, 2.0)])
    slots = torch.randperm(50, generator=torch.Generator().manual_seed(1))[:40]
    store_rows(cache.keys[0], slots, rows, cache.scales[0].key)
    found = load_rows(cache.keys[0], slots, torch.float32) * cache.scales[0].key
    most = torch.finfo(KV_CACHE_DTYPES[name]).max
    assert found[0, 0, :2].tolist() == [most / 2, -most / 2], "what is too large for the type"
    error = (found - rows).abs() / rows.abs()
    assert 2.0 ** -(bits + 3) < error[1:].max() <= 2.0 ** -(bits + 1)


def test_a_token_takes_half_of_the_memory() -> None:
    shapes = [KVShape(8, 128, 128)] * 32
    assert bytes_per_slot(shapes, 64, torch.bfloat16) == 32 * 2 * 8 * 128 * 2 + 128
    assert bytes_per_slot(shapes, 64, torch.bfloat16, torch.float8_e5m2) == 32 * 2 * 8 * 128 + 128


@pytest.mark.parametrize("name", NARROW)
def test_kernels_write_and_read_what_plain_operations_do(name: str) -> None:
    layer_kernels = pytest.importorskip("eyas.kernels.cuda.layers", reason="triton is not installed")
    generator = torch.Generator().manual_seed(0)
    dtype, heads, scales = KV_CACHE_DTYPES[name], HeadLayout(4, 2, 16, None), KVScales(0.5, 2.0)
    segments = make_pass(sizes := [(True, 5, 40), (False, 3, 7)])
    slots, size = torch.cat([torch.from_numpy(s.slots) for s in segments]), num_slots(sizes)
    # numbers of the type itself, not turned: the interpreter rounds up to powers of two wrongly
    qkv = 2 * torch.randn(8, 8, 16, generator=generator).to(dtype).float()
    qkv[0, 4:, :2] = torch.tensor([1e9, -1e9])
    cos, sin = torch.ones(1, 8, 16), torch.zeros(1, 8, 16)
    pools = [KVCache(size, [KVShape(2, 16, 16)], 0, torch.float32, CPU, dtype, [scales]) for _ in range(2)]
    for cache in pools:
        for pool in (cache.keys[0], cache.values[0]):
            store_rows(pool, torch.arange(size), torch.randn(size, 2, 16, generator=torch.Generator().manual_seed(3)), 1.0)
    query = plain_layers.rotate_and_store(qkv, heads, (cos, sin), pools[0].keys[0], pools[0].values[0], slots, scales)
    layer_kernels.rotate_and_store(qkv, heads, (cos, sin), pools[1].keys[0], pools[1].values[0], slots, scales)
    for mine, theirs in ((pools[0].keys, pools[1].keys), (pools[0].values, pools[1].values)):
        assert torch.equal(mine[0].view(torch.uint8), theirs[0].view(torch.uint8))
    keys, values = (
        load_rows(pool, torch.arange(size + 1), torch.float32) for pool in (pools[0].keys[0], pools[0].values[0])
    )
    for fixed_part in (0, 64):
        tiling = Tiling(2, 2, 4, max_rows=16, fixed_part=fixed_part)
        packed = pack_with_metadata(segments, tight_shape(segments, tiling), size, CPU)
        found = attend(query, pools[0].keys[0], pools[0].values[0], packed, AttentionRule(0.3 * 0.25))
        torch.testing.assert_close(
            found, attend(query, keys, values, packed, AttentionRule(0.3 * 0.25)), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("name", tiered(NARROW, NARROW[:1]))
@pytest.mark.parametrize("deterministic", [False, True])
def test_drafts_do_not_change_the_tokens(name: str, deterministic: bool, tiny_target: str) -> None:
    config = EngineConfig(max_kv_tokens=400, max_prefill_tokens=16, deterministic=deterministic, kv_cache_dtype=name)
    params = [SamplingParams(12, temperature, seed=seed, ignore_eos=True) for seed, temperature in enumerate((0.0, 0.9))]
    outputs = []
    for drafter in (None, RandomDrafter(48)):
        engine = assemble_engine(shared_target(tiny_target), None, config, TreeConfig(7, 4, 4), drafter)
        assert engine.runner.kv_cache.keys[0].dtype == KV_CACHE_DTYPES[name]
        requests = [Request(f"{sampling.seed}", tuple(range(3, 24)), sampling) for sampling in params]
        outputs.append(outputs_of(run(engine, requests)))
    assert outputs[0] == outputs[1]


def test_scales_come_from_the_checkpoint(tmp_path: Path) -> None:
    folder = write_target(tmp_path, layers=2)
    names = ("attn.k_scale", "attn.v_scale")
    scales = {f"model.layers.{layer}.self_attn.{name}": torch.tensor(0.01 + layer) for layer in (0, 1) for name in names}
    change_tensors(folder, **scales)
    target = load_target(str(folder))
    assert target.new_kv_cache(4).scales == [KVScales()] * 2, "keys and values as wide as the model"
    target.set_kv_cache_dtype("fp8")
    assert target.kv_scales[1] == pytest.approx(KVScales(1.01, 1.01))
    assert target.new_kv_cache(4).scales == list(target.kv_scales)
    change_tensors(folder, **{scales.popitem()[0]: None})
    target = load_target(str(folder))
    target.set_kv_cache_dtype("auto")
    with pytest.raises(CheckpointError, match="v_scale of layer 1 is missing"):
        target.set_kv_cache_dtype("fp8")


def test_a_gpu_without_the_type_is_named(tiny_target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target(tiny_target)
    target.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is fp8, which A100 does not have: .* 8\.0, .* fp8_e5m2 or auto"):
        target.set_kv_cache_dtype("fp8")
    target.set_kv_cache_dtype("fp8_e5m2")
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int4'"):
        replace(EngineConfig(), kv_cache_dtype="int4")
