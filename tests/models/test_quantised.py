"""A target whose weights transformers quantises works like any other."""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from eyas import LLM
from eyas.api.request import Request, SamplingParams
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.engine.build import assemble_engine
from eyas.errors import CheckpointError, ConfigError
from eyas.models.checkpoint import Checkpoint
from eyas.models.heads.block import load_block_head, serve
from eyas.models.heads.eagle import load_fuser, load_head
from eyas.models.heads.hydra import load_hydra
from eyas.models.heads.layers import Float8Linear, linear, quantise_head
from eyas.models.heads.medusa import load_medusa
from eyas.models.hidden_states import FINAL_NORM_OUTPUT
from eyas.models.layers.fused import is_batch_invariant
from eyas.models.loading import load_target
from tests.models.backends.test_launches import OpaqueLinear
from tests.models.layers.test_fused import assert_equal_to_unfused, is_fused, use_torch
from tests.models.test_more_families import rank_of
from tests.models.test_target import run as run_segments
from tests.models.test_target import segment
from tests.support.bad_drafters import RandomDrafter
from tests.support.devices.rank_threads import RankThreads
from tests.support.families import config_of, write_model
from tests.support.family_configs import SERVED
from tests.support.runs import outputs_of, run
from tests.support.tiers import tiered
from tests.support.tiny import (
    change_config,
    change_tensors,
    fixed_config,
    write_checkpoint,
    write_eagle1_head,
    write_head,
    write_spelling_tokenizer,
    write_target,
)
from tests.support.tiny_block import tiny_block_head
from tests.support.tiny_medusa_hydra import tiny_heads

needs_torchao = pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs the package torchao")


@pytest.fixture(scope="module", params=["8-bit integers", "4-bit integers"])
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama whose linear layers hold integers; those of 4 bits in groups of 16 with a scale each."""
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup
    from transformers import TorchAoConfig

    plain = write_model(tmp_path_factory.mktemp("plain"), config_of("llama", num_hidden_layers=4, num_attention_heads=4))
    scheme: Any = TorchAoConfig(
        Int8WeightOnlyConfig(version=2)
        if request.param == "8-bit integers"
        else IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16))
    )
    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, quantization_config=scheme)
    folder = tmp_path_factory.mktemp("quantised")
    model.save_pretrained(folder)
    return str(folder)


@needs_torchao
@pytest.mark.filterwarnings("ignore")
def test_quantised_target_output_equals_generate(quantised: str, tmp_path: Path) -> None:
    fuser = load_fuser(str(write_head(tmp_path)), quantised)
    target = load_target(quantised, aux_hidden_state_layers=fuser.aux_hidden_state_layers)
    assert type(target.model.model.layers[0].mlp.up_proj.weight.data) is not torch.Tensor, "the weights are quantised"
    assert is_fused(target)
    assert not is_batch_invariant(target.model)
    outputs = []
    for drafter in (None, RandomDrafter(48)):
        engine = assemble_engine(
            target, fuser, fixed_config(max_kv_tokens=512), TreeConfig(num_draft_tokens=8, num_steps=4, top_k=3), drafter
        )
        outputs += outputs_of(run(engine, [Request("a", (5, 9, 11), SamplingParams(32, 0.0, seed=1))])).values()
    reference: Any = AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.float32)
    whole = reference.generate(torch.tensor([[5, 9, 11]]), do_sample=False, max_new_tokens=32)[0, 3:].tolist()
    assert outputs == [whole, whole]


@needs_torchao
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("runs_in_kernels", [True, False])
def test_quantised_layers_are_fused_around_their_products(quantised: str, runs_in_kernels: bool) -> None:
    """Queries, keys and values are one product, gate and up another, and their weights lie in its memory."""
    target = load_target(quantised, aux_hidden_state_layers=(0, 2, 3, FINAL_NORM_OUTPUT))
    layer = target.model.model.layers[1]
    fused = layer.forward.__self__
    (gate_up,) = fused.gate_up_products
    merged, parts = gate_up.weight.data, [layer.mlp.gate_proj.weight.data, layer.mlp.up_proj.weight.data]
    assert torch.equal(merged.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert merged.qdata.data_ptr() == parts[0].qdata.data_ptr()
    assert parts[1].qdata.data_ptr() == parts[0].qdata.data_ptr() + parts[0].qdata.nbytes
    if not runs_in_kernels:
        use_torch(target)
    assert_equal_to_unfused(target)


def test_layers_of_unknown_weights_are_fused_around_them(tiny_target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")

    def make_opaque(model: Any, *_: object) -> None:
        for name, module in model.named_modules():
            if name.endswith(layers):
                module.__class__ = OpaqueLinear

    monkeypatch.setattr("eyas.models.loading.optimize_for_cpu", make_opaque)
    target = load_target(tiny_target, aux_hidden_state_layers=(0, 1, FINAL_NORM_OUTPUT))
    fused = target.model.model.layers[0].forward.__self__
    assert [type(product) for product in fused.gate_up_products] == [OpaqueLinear] * 2
    assert not fused.is_plain
    use_torch(target)
    assert_equal_to_unfused(target)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("awq", "quantised by awq; install what reads them: pip install gptqmodel"),
        ("gptq", "quantised by gptq; install what reads them: pip install gptqmodel optimum"),
        ("compressed-tensors", "quantised by compressed-tensors; install what reads them: pip install compressed-tensors"),
        ("hqq", "quantised by hqq, which Eyas does not serve; it serves torchao, fp8, mxfp4"),
    ],
)
def test_unreadable_quantised_weights_are_refused_by_name(
    method: str, reason: str, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = ("gptqmodel", "optimum", "compressed_tensors")
    monkeypatch.setattr("eyas.models.checkpoint.find_spec", lambda name: None if name in missing else name)
    write_checkpoint(tmp_path, Checkpoint(tiny_target).config | {"quantization_config": {"quant_method": method}}, {})
    with pytest.raises(CheckpointError, match=reason):
        load_target(str(tmp_path))


@needs_torchao
@pytest.mark.filterwarnings("ignore")
def test_4_bit_weights_packed_for_gpus_are_refused_on_a_cpu(tiny_target: str, tmp_path: Path) -> None:
    from torchao.quantization import Int4WeightOnlyConfig
    from transformers import TorchAoConfig

    scheme: Any = TorchAoConfig(Int4WeightOnlyConfig(group_size=32))
    write_checkpoint(tmp_path, Checkpoint(tiny_target).config | {"quantization_config": scheme.to_dict()}, {})
    with pytest.raises(CheckpointError, match=r"Int4WeightOnlyConfig packs for GPUs.*IntxWeightOnlyConfig"):
        load_target(str(tmp_path))


def test_published_fp8_weights_are_served_on_a_cpu(tiny_target: str, tmp_path: Path) -> None:
    """Blocks of 128 x 128 with a scale each, as DeepSeek and Qwen publish them; without a GPU they are dequantised."""
    tensors = load_file(Path(tiny_target) / "model.safetensors")
    plain, quantised = dict(tensors), dict(tensors)
    for name in [name for name in tensors if ".layers." in name and "proj" in name]:
        scale = tensors[name].abs().max() / 448
        quantised[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        quantised[f"{name}_scale_inv"] = scale.reshape(1, 1)
        plain[name] = quantised[name].float() * scale
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    folders = [
        write_checkpoint(tmp_path / name, Checkpoint(tiny_target).config | more, held)
        for name, held, more in (("plain", plain, {}), ("fp8", quantised, {"quantization_config": scheme}))
    ]
    ours, theirs = (load_target(folder).model.state_dict() for folder in folders)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, atol=1e-6, rtol=1e-2, msg=name)


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def write_mxfp4(folder: Path) -> tuple[str, str]:
    """A gpt-oss in floats, and the same with experts of random blocks: 32 numbers of 4 bits and a power of two."""
    config = config_of("gpt_oss", **SERVED["gpt_oss"] | {"intermediate_size": 32})
    plain = Path(write_model(folder / "plain", config))
    tensors = load_file(plain / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    quantised = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors[name].shape  # the blocks lie along the inputs of each output
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(123, 127, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        numbers = torch.stack([FP4[(blocks & 15).int()], FP4[(blocks >> 4).int()]], -1).flatten(-2)
        tensors[name] = (numbers * 2.0 ** (scales.float() - 127)[..., None]).flatten(2).transpose(1, 2).contiguous()
        quantised |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del quantised[name]
    scheme = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    narrow = write_checkpoint(folder / "mxfp4", {**config.to_dict(), "quantization_config": scheme}, quantised)
    change_tensors(plain, **tensors)
    return str(plain), narrow


def test_mxfp4_experts_are_dequantised_on_a_cpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a warning; as a whole, and by each of two ranks for its part."""
    plain, narrow = write_mxfp4(tmp_path)
    expected = load_target(plain)
    with caplog.at_level("WARNING"):
        target = load_target(narrow)
    assert "weights quantised by mxfp4; they are held as float32" in caplog.text
    rows = segment(list(range(3, 20)), 0, np.arange(17), np.arange(0))
    (whole,) = run_segments(expected, [rows], expected.new_kv_cache(20))
    torch.testing.assert_close(run_segments(target, [rows], target.new_kv_cache(20))[0], whole)
    targets = [rank_of(narrow, rank) for rank in range(2)]
    parts = RankThreads(2).run(lambda rank: run_segments(targets[rank], [rows], targets[rank].new_kv_cache(20))[0])
    torch.testing.assert_close(torch.cat(parts, -1), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "num_layers"), [("eagle3", 5), ("eagle", 6)])
def test_a_head_of_8_bits_drafts_as_its_numbers(kind: Any, num_layers: int, tiny_target: str, tmp_path: Path) -> None:
    """qkv, out, gate and up, down, lm_head; EAGLE-1's fc too."""
    folder = str(write_head(tmp_path) if kind == "eagle3" else write_eagle1_head(tmp_path))
    narrow = load_head(folder, tiny_target, kind=kind, quantization="fp8")
    plain = load_head(folder, tiny_target, "bfloat16", kind=kind)
    rounded, layers = copy.deepcopy(narrow), dict(narrow.named_modules())
    names = [name for name, layer in layers.items() if isinstance(layer, Float8Linear)]
    assert len(names) == num_layers
    for name in names:
        held, (parent, _, child) = layers[name], name.rpartition(".")
        assert held.weight.dtype == torch.float8_e4m3fn
        weight = held.weight.float() * held.scales[:, None]
        torch.testing.assert_close(weight, plain.get_submodule(name).weight.float(), rtol=2**-4, atol=4e-3)
        setattr(rounded.get_submodule(parent), child, linear(weight, held.bias))
    features, tokens = torch.randn(7, 32), torch.arange(7)
    with torch.inference_mode():
        ours, theirs = (
            head.logits(head.run(features, tokens, tokens, lambda layer, rows: rows.query)) for head in (narrow, rounded)
        )
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra-prefix"])
def test_stacked_heads_of_8_bits_guess_as_their_numbers(kind: str, tiny_target: str) -> None:
    """Blocks, output layers and the prefix layer; no weight is kept twice."""
    folder, states = tiny_heads(kind, tiny_target), torch.randn(5, 32)
    load: Any = load_medusa if kind == "medusa" else load_hydra
    plain, narrow = load(folder, tiny_target), load(folder, tiny_target, quantization="fp8")
    held = sum(tensor.numel() for tensor in narrow.parameters() if tensor.dtype == torch.float8_e4m3fn)
    kept = {"embedding"} if kind != "medusa" else set()
    assert held == sum(t.numel() for name, t in plain.named_parameters() if t.dim() > 1 and name not in kept) - (
        sum(bias.numel() for bias in plain.biases) if kind == "medusa" else 0
    )
    for layer in [layer for layer in narrow.modules() if isinstance(layer, Float8Linear)]:
        layer.forward = linear(layer.weight.float() * layer.scales[:, None], layer.bias).forward  # type: ignore[method-assign]
    rounded, ours = narrow, load(folder, tiny_target, quantization="fp8")
    with torch.inference_mode():
        if kind == "medusa":
            found = [head.logits(states, 3) for head in (ours, rounded, plain)]
        else:
            inputs = torch.randn(5, 4 * 32)
            found = [head.logits(inputs, 2) for head in (ours, rounded, plain)]
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)
    assert 0 < (found[0] - found[2]).abs().max() < 0.2 * found[2].abs().max()


@pytest.mark.parametrize("kind", ["dspark", "dflash", "dflash2", "dspark-rnn"])
def test_block_heads_of_8_bits_draft_as_their_numbers(kind: str, tiny_target: str) -> None:
    folder = tiny_block_head(kind, tiny_target)
    ours, rounded = (serve(load_block_head(folder, tiny_target), "fp8") for _ in range(2))
    layers = [layer for layer in rounded.modules() if isinstance(layer, Float8Linear)]
    assert not [layer for layer in ours.modules() if isinstance(layer, torch.nn.Linear)]
    for layer in layers:
        layer.forward = linear(layer.weight.float() * layer.scales[:, None], layer.bias).forward  # type: ignore[method-assign]
    size, rows = ours.config.block_size, torch.arange(ours.config.block_size)
    before = torch.arange(ours.config.num_drafted)
    found = []
    with torch.inference_mode():
        for head in (ours, rounded):
            states = head.drafted_rows(head.run(rows, rows, lambda layer, own: own.query).view(1, size, -1))[0]
            found.append(head.step(head.backbone_logits(states), states, before, head.initial_state(len(before)))[0])
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
@pytest.mark.parametrize("method", tiered(("eagle3", "dspark", "hydra", "dflash", "dflash2", "medusa"), ("dspark",)))
def test_a_head_of_8_bits_leaves_the_output_unchanged(method: str, quantization: str, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    write_spelling_tokenizer(target)
    prompts, sampling = [{"prompt_token_ids": [5, 9, 11]}, {"prompt_token_ids": [7, 8]}], SamplingParams(20, 0.8, seed=3)
    if method == "eagle3":
        folder = str(write_head(tmp_path / "head"))
    else:
        folder = tiny_heads(method, str(target)) if method in ("medusa", "hydra") else tiny_block_head(method, str(target))
    head = {"method": method, "model": folder, "quantization": quantization}
    outputs = []
    for config in (None, head):
        with LLM(str(target), speculative_config=config, validate_head="off", max_kv_tokens=256) as llm:
            outputs.append([each.outputs[0].token_ids for each in llm.generate(prompts, sampling)])
    assert outputs[0] == outputs[1]


def test_8_bits_are_refused_where_they_cannot_be(tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8, tree = DraftingConfig(quantization="fp8"), TreeConfig(4, 2, 2)
    with pytest.raises(ConfigError, match=r"drafting.quantization is fp8, and drafter 'prompt_lookup' has no head"):
        DraftHead("", "prompt_lookup").build_drafter(tiny_target, "float32", "cpu", tree, fp8)
    with pytest.raises(ConfigError, match="quantization is 'int3'; it must be one of none, fp8, int8"):
        DraftingConfig(quantization="int3")  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A10")
    with pytest.raises(ConfigError, match=r"fp8, which an A10 does not have: its compute capability is 8\.6"):
        quantise_head(torch.nn.Linear(2, 2), torch.device("cuda"), "fp8")
    with pytest.raises(ConfigError, match=r"drafting.quantization is 'int8', .* kernels of a CPU: device is cuda:0"):
        quantise_head(torch.nn.Linear(2, 2), torch.device("cuda:0"), "int8")


def test_quantised_heads_are_refused_by_name(tiny_target: str, tmp_path: Path) -> None:
    folder = write_head(tmp_path)
    change_config(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match="a draft head quantised by fp8, which Eyas does not serve"):
        load_fuser(str(folder), tiny_target)
