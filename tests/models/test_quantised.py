"""A target whose weights transformers quantises works like any other."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas.config import EngineConfig, TreeConfig
from eyas.engine.build import assemble_engine
from eyas.models.heads.eagle import load_fuser
from eyas.models.target import load_target
from eyas.request import Request, SamplingParams
from tests.engine.drafters import RandomDrafter
from tests.models.families import config_of, write_model
from tests.tiny import write_head

needs_torchao = pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs the package torchao")


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama whose linear layers hold 8-bit integers."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    plain = write_model(tmp_path_factory.mktemp("plain"), config_of("llama", num_hidden_layers=4, num_attention_heads=4))
    scheme = TorchAoConfig(Int8WeightOnlyConfig(version=2))
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
    outputs = []
    for drafter in (None, RandomDrafter(48)):
        engine = assemble_engine(
            target, fuser, EngineConfig(max_kv_tokens=512), TreeConfig(num_draft_tokens=8, num_steps=4, top_k=3), drafter
        )
        engine.submit(Request("a", (5, 9, 11), SamplingParams(32, 0.0, seed=1)))
        tokens: list[int] = []
        while engine.has_work:
            tokens += [token for chunk in engine.step() for token in chunk.token_ids]
        outputs.append(tokens)
    reference: Any = AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.float32)
    whole = reference.generate(torch.tensor([[5, 9, 11]]), do_sample=False, max_new_tokens=32)[0, 3:].tolist()
    assert outputs == [whole, whole]
