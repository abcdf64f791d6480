"""A target whose vocabulary is padded beyond its tokenizer's: ids without text work like any other."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas import LLM, SamplingParams
from tests.support.families import config_of, write_model
from tests.support.tiny import DEMO

PADDED, KNOWN = 4160, 4096


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random target with the demo's tokenizer, whose likeliest tokens often have no text."""
    folder = tmp_path_factory.mktemp("padded")
    write_model(folder, config_of("llama", vocab_size=PADDED))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_output_embeddings().weight[KNOWN:] *= 2
    model.save_pretrained(folder)
    for file in Path(DEMO, "target").glob("token*"):
        shutil.copy(file, folder)
    return str(folder)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_above_the_tokenizers_are_emitted_without_text(padded: str, temperature: float) -> None:
    llm = LLM(padded)
    params = SamplingParams(48, temperature, seed=1, stop=("no such text",), ignore_eos=True)
    for (result,) in (request.outputs for request in llm.generate(["import os", "class Queue:"], params)):
        assert len(result.token_ids) == 48
        assert any(token >= KNOWN for token in result.token_ids)
        known = [token for token in result.token_ids if token < KNOWN]
        assert result.text == llm.get_tokenizer().decode(known)


def test_ids_without_text_work_in_prompts_and_as_stop_tokens(padded: str) -> None:
    llm = LLM(padded)
    whole = llm.generate([[5, 4150, 6]], SamplingParams(16, 0.0, ignore_eos=True))[0].outputs[0].token_ids
    at = next(index for index, token in enumerate(whole) if token >= KNOWN)
    params = SamplingParams(16, 0.0, stop_token_ids=(whole[at],), ignore_eos=True)
    cut = llm.generate([[5, 4150, 6]], params)[0].outputs[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", whole[at])
    assert cut.token_ids == whole[: whole.index(whole[at]) + 1]
