"""Latent attention: a slot holds one latent for all heads, and absorbed and expanded products agree with transformers."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas.cache.kv_cache import KV_CACHE_DTYPES, KVShape, bytes_per_slot
from eyas.kernels.arguments import KVScales
from eyas.models.backends.cuda import why_no_kernel
from eyas.models.layers import attention, latent
from eyas.models.layers.latent import LatentProjection, latent_projection
from eyas.models.loading import load_target, target_of
from eyas.models.target import TargetModel
from tests.models.test_more_families import PREFIX, SLOTS, check_exact, tree_segment, write
from tests.models.test_sinks import logits_of
from tests.models.test_target import expected, run, segment
from tests.support.families import write_wrapped
from tests.support.reference import load_reference

# Values wider than keys without rotation and as wide; two attentions in a layer.
KINDS = ("deepseek_v3", "glm4_moe_lite", "longcat_flash")
SHAPE = KVShape(1, 12, 8, is_latent=True)


def projections(target: TargetModel) -> list[LatentProjection]:
    return [found for module in target.model.modules() if (found := latent_projection(module))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_holds_one_latent_of_each_attention(kind: str, tmp_path: Path) -> None:
    target = load_target(write(kind, tmp_path))
    num_layers = len(projections(target))
    assert target.kv_shapes == [SHAPE] * num_layers
    assert target.heads_per_kv == 4
    assert bytes_per_slot(target.kv_shapes, 0, torch.float32) == num_layers * 12 * 4
    kv_cache = target.new_kv_cache(400)
    run(target, [segment(PREFIX, 0, SLOTS[:37], SLOTS[:0])], kv_cache)
    for keys, values in zip(kv_cache.keys, kv_cache.values, strict=True):
        assert values.data_ptr() == keys.data_ptr(), "values are stored again"
        assert torch.equal(values, keys[..., :8])
    assert "latent attention" in why_no_kernel(target)


@pytest.mark.parametrize(("kind", "elements"), [(KINDS[0], 1), (KINDS[1], 1 << 25), (KINDS[2], 1)])
def test_expanded_keys_equal_absorbed_queries(
    kind: str, elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head by head and all at once; in chunks behind a prefix, and in a tree."""
    folder = write(kind, tmp_path)
    target = load_target(folder)
    absorbed = logits_of(target, target)
    monkeypatch.setattr(attention, "MOST_ABSORBED_ROWS", 2)
    monkeypatch.setattr(latent, "EXPANDED_ELEMENTS", elements)
    monkeypatch.setattr(LatentProjection, "absorb", None)
    torch.testing.assert_close(logits_of(target, target), absorbed, atol=1e-4, rtol=1e-4)


def test_long_segments_beside_short_ones_expand_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two long segments of other lengths, a tree and a single row in one pass."""
    folder = write("deepseek_v3", tmp_path)
    target = load_target(folder)
    monkeypatch.setattr(attention, "MOST_ABSORBED_ROWS", 8)
    kv_cache = target.new_kv_cache(400)
    run(target, [segment(PREFIX, 0, SLOTS[:37], SLOTS[:0])], kv_cache)
    lengths = (37, 30, 1)
    starts = (100, 150, 200)
    segments = [segment(PREFIX[:n], 0, SLOTS[at : at + n], SLOTS[:0]) for n, at in zip(lengths, starts, strict=True)]
    *found, nodes = run(target, [*segments, tree_segment()], kv_cache)
    for logits, length in zip(found, lengths, strict=True):
        torch.testing.assert_close(logits, expected(folder, PREFIX[:length]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(nodes, run(target, [tree_segment()], kv_cache)[0], atol=1e-4, rtol=1e-4)


def test_wrong_parts_of_the_projection_show_in_logits(tmp_path: Path) -> None:
    folder = write("glm4_moe_lite", tmp_path)
    target = load_target(folder)
    check_exact(target, folder)
    right = logits_of(target, target)
    for projection in projections(target):
        keys, values = projection.parts
        projection.weight.data = torch.cat([keys.roll(1, 0), values], 1).flatten(0, 1)  # keys of another head
    assert not torch.allclose(logits_of(target, target), right, atol=1e-2)


def test_latents_of_8_bits_have_one_scale(tmp_path: Path) -> None:
    """As values are read from keys, the scale of values is not used."""
    target = load_target(write("deepseek_v3", tmp_path))
    whole = logits_of(target, target)
    target.kv_scales = [KVScales(0.03, 0.5)] * len(target.kv_shapes)
    target.kv_dtype = KV_CACHE_DTYPES["fp8"]
    narrow = logits_of(target, target)
    assert float((narrow - whole).abs().mean()) < 0.2 * float(whole.abs().mean())


def rename(folder: str, **names: Any) -> dict[str, Any]:
    """Write a config as Moonshot publishes it, with code that is not run. Returns what it was."""
    file = Path(folder, "config.json")
    config: dict[str, Any] = json.loads(file.read_text())
    code = {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    file.write_text(json.dumps({**config, **code, **names}))
    return config


@pytest.mark.filterwarnings("error")
def test_kimi_k2_is_read_as_the_architecture_that_it_has(tmp_path: Path) -> None:
    folder = write("deepseek_v3", tmp_path)
    whole = expected(folder, PREFIX)
    rename(folder, model_type="kimi_k2")
    target = load_target(folder)
    (found,) = run(target, [segment(PREFIX, 0, SLOTS[:37], SLOTS[:0])], target.new_kv_cache(400))
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)
    assert target.kv_shapes == [SHAPE] * 3


def test_the_text_part_of_kimi_k25_may_have_its_own_name(tmp_path: Path) -> None:
    folder = write_wrapped("kimi_k25", tmp_path)
    config = rename(folder)
    rename(folder, text_config={**config["text_config"], "model_type": "kimi_k2"})
    target = load_target(folder)
    assert type(target.model).__name__ == "DeepseekV3ForCausalLM"
    check_exact(target, folder)


def test_a_model_that_is_loaded_already_keeps_its_own_form(tmp_path: Path) -> None:
    folder = write("deepseek_v3", tmp_path)
    model = load_reference(folder)
    target = target_of(model)
    assert target.kv_shapes == [SHAPE._replace(key_width=12)] * 3
    (found,) = run(target, [segment(PREFIX, 0, SLOTS[:37], SLOTS[:0])], target.new_kv_cache(400))
    torch.testing.assert_close(found, expected(folder, PREFIX), atol=1e-4, rtol=1e-4)
    assert isinstance(model.get_submodule("model.layers.0.self_attn.kv_b_proj"), torch.nn.Linear)


@pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs the package torchao")
@pytest.mark.filterwarnings("ignore")
def test_a_quantised_projection_is_dequantised_once(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    plain = write("deepseek_v3", tmp_path / "plain")
    scheme: Any = TorchAoConfig(Int8WeightOnlyConfig(version=2))
    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, quantization_config=scheme)
    model.save_pretrained(tmp_path / "quantised")
    target = load_target(str(tmp_path / "quantised"))
    assert type(projections(target)[0].weight.data) is torch.Tensor
    assert target.kv_shapes == [SHAPE] * 3
    with torch.inference_mode():
        whole = model(input_ids=torch.tensor([PREFIX])).logits[0]
    (found,) = run(target, [segment(PREFIX, 0, SLOTS[:37], SLOTS[:0])], target.new_kv_cache(400))
    torch.testing.assert_close(found, whole, atol=1e-3, rtol=1e-3)
    assert len(run(target, [tree_segment()], target.new_kv_cache(400))[0]) == 7
