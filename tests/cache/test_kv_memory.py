"""How many slots an engine gets by default."""

import logging

import pytest
import torch

from eyas.cache import kv_cache as kv
from eyas.cache.kv_cache import KVCache, KVShape, bytes_per_slot, slots_that_fit
from eyas.config import EngineConfig, TreeConfig
from eyas.engine.build import assemble_engine
from eyas.errors import ConfigError
from eyas.models.loading import load_target

CPU = torch.device("cpu")
SHAPES = [KVShape(2, 8, 8), KVShape(2, 8, 6), KVShape(4, 16, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slot_costs_what_its_pools_take(dtype: torch.dtype) -> None:
    pools = KVCache(10, SHAPES, 24, dtype, CPU)
    assert 11 * bytes_per_slot(SHAPES, 24, dtype) == sum(
        pool.numel() * pool.element_size() for pool in (*pools.keys, *pools.values, pools.features)
    )


def test_slots_take_their_fraction_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "free_ram", lambda: 2**20)
    assert slots_that_fit(1024, 0.5, CPU) == 512
    with pytest.raises(ConfigError, match="no room for the KV cache"):
        slots_that_fit(2**20, 0.5, CPU)


def test_a_cpu_allocates_no_more_slots_than_useful() -> None:
    assert slots_that_fit(1, 1.0, CPU) == kv.MAX_SLOTS_ON_CPU


def test_an_engine_reports_its_slot_counts(
    tiny_target: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "MAX_SLOTS_ON_CPU", 4096)
    with caplog.at_level(logging.INFO):
        engine = assemble_engine(load_target(tiny_target), None, EngineConfig(), TreeConfig(), None)
    assert engine.load.free_kv_tokens == kv.MAX_SLOTS_ON_CPU
    assert f"KV cache: {kv.MAX_SLOTS_ON_CPU} tokens" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_allocates_its_fraction_of_free_memory() -> None:
    device = torch.device("cuda")
    free = torch.cuda.mem_get_info(device)[0]
    assert slots_that_fit(2**20, 0.5, device) == pytest.approx(free / 2**21, rel=0.05)
