"""EaModel: the class of the EAGLE authors' repository, as its scripts call it."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas import LLM, SamplingParams
from eyas import ea_model as compat
from eyas.ea_model import EaModel
from eyas.errors import ConfigError, InvalidRequest

BASE, HEAD = "models/demo/target", "models/demo/eagle3"
PROMPT = "import os\n\ndef main("

# What the README and the evaluation scripts of the EAGLE repository do with a model.
SCRIPT = """
import argparse
try:
    from ..model.ea_model import EaModel
    from ..model.utils import *
except:
    from eagle.model.ea_model import EaModel
    from eagle.model.kv_cache import initialize_past_key_values
    from eagle.model.utils import *
parser = argparse.ArgumentParser()
parser.add_argument("--base-model-path")
parser.add_argument("--ea-model-path")
args = parser.parse_args()
model = EaModel.from_pretrained(
    base_model_path=args.base_model_path, ea_model_path=args.ea_model_path, total_token=16, depth=4, top_k=6,
    torch_dtype=torch.float32, low_cpu_mem_usage=True, device_map="cpu", use_eagle3=True,
)
tokenizer = model.get_tokenizer()
model.eval()
assert not model.training
logits_processor = prepare_logits_processor(temperature=0.7)
input_ids = torch.as_tensor(tokenizer(["class Queue:"], add_special_tokens=False).input_ids)
output_ids, new_token, idx = model.eagenerate(input_ids, temperature=0.0, max_new_tokens=24, log=True, is_llama3=True)
plain_ids, plain_token, plain_idx = model.naivegenerate(input_ids, temperature=0.0, max_new_tokens=24, log=True)
assert torch.equal(output_ids, plain_ids) and int(new_token) == int(plain_token) and int(idx) < int(plain_idx)
print(tokenizer.decode(output_ids[0]))
"""


@pytest.fixture(scope="module")
def model() -> EaModel:
    return EaModel.from_pretrained(
        base_model_path=BASE, ea_model_path=HEAD, total_token=24, depth=4, top_k=8, max_kv_tokens=4096
    )


def prompt_ids(model: EaModel) -> torch.Tensor:
    return torch.as_tensor(model.tokenizer([PROMPT]).input_ids)


def test_greedy_ids_equal_plain_decoding(model: EaModel, plain_llm: LLM) -> None:
    ids = prompt_ids(model)
    drafted, num_new, last_step = model.eagenerate(ids, max_new_tokens=40, log=True)
    assert torch.equal(drafted, model.naivegenerate(ids, max_new_tokens=40))
    assert drafted.dtype == ids.dtype
    expected = plain_llm.generate([ids[0].tolist()], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))[0]
    assert drafted[0, ids.shape[1] :].tolist() == expected.outputs[0].token_ids[:num_new]
    assert last_step < num_new - 2, "drafts were accepted"


def test_generators_yield_growing_ids(model: EaModel) -> None:
    ids = prompt_ids(model)
    whole = model.eagenerate(ids, max_new_tokens=24)
    for generate in (model.ea_generate, model.naive_generate):
        grown = list(generate(ids, max_new_tokens=24))
        lengths = [one.shape[1] for one in grown]
        assert lengths == sorted(set(lengths))
        assert all(torch.equal(one, whole[:, : one.shape[1]]) for one in grown)
        assert torch.equal(grown[-1], whole)
    assert torch.equal(model.ea_generate(ids, max_new_tokens=24, log=True)[0], whole)


def test_torchs_seed_repeats_sampled_ids(model: EaModel) -> None:
    ids = prompt_ids(model)
    found = []
    for generate, seed in ((model.eagenerate, 3), (model.naivegenerate, 3), (model.eagenerate, 4)):
        torch.manual_seed(seed)
        found.append(generate(ids, temperature=0.9, top_p=0.95, top_k=50.0, max_new_tokens=24).tolist())
    assert found[0] == found[1] != found[2]


def test_max_length_counts_the_prompt(model: EaModel) -> None:
    ids = prompt_ids(model)
    assert model.eagenerate(ids, max_length=ids.shape[1] + 5).shape[1] <= ids.shape[1] + 5
    with pytest.raises(InvalidRequest, match="leaves no room below 4"):
        model.eagenerate(ids, max_length=4)
    with pytest.raises(InvalidRequest, match=r"shape \(2, 3\); give one prompt"):
        model.eagenerate(torch.ones(2, 3, dtype=torch.long))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"load_in_8bit": True}, "load_in_8bit=True is not supported"),
        ({"ea_model_path": None}, "give both"),
        ({"device_map": {"a": "cuda:0", "b": "cuda:1"}}, "names the devices cuda:0, cuda:1"),
        ({"total_tokens": 5}, "total_tokens is no argument"),
    ],
)
def test_what_eyas_does_not_have_is_refused(options: dict[str, Any], reason: str) -> None:
    load: Callable[..., EaModel] = EaModel.from_pretrained
    with pytest.raises(ConfigError, match=reason):
        load(**{"base_model_path": BASE, "ea_model_path": HEAD, "device_map": "cpu", **options})


@pytest.mark.slow
def test_a_script_of_the_eagle_repository_runs_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `python -m eyas.ea_model` runs it, in this process."""
    script = tmp_path / "gen_answer.py"
    script.write_text(f"import neighbour\n{SCRIPT}")
    (tmp_path / "neighbour.py").touch()
    monkeypatch.setattr(sys, "argv", ["compat", str(script), "--base-model-path", BASE, "--ea-model-path", HEAD])
    monkeypatch.setattr(sys, "path", sys.path.copy())
    before = set(sys.modules)
    try:
        runpy.run_path(compat.__file__, run_name="__main__")
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("eagle", "neighbour"):
                del sys.modules[name]
    assert "class Queue:" in capsys.readouterr().out
