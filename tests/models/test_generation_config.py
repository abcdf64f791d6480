"""Sampling defaults of a model: what generation_config.json says counts where a request names nothing."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from eyas import LLM
from eyas.api.request import SamplingParams
from eyas.errors import CheckpointError, ConfigError
from eyas.models.generation_config import sampling_defaults
from eyas.services.router.http.bodies.openai import ChatBody, CompletionBody

DEMO = "models/demo/target"


def model_with(folder: Path, **values: Any) -> str:
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps(values))
    return str(folder)


def test_recommended_parameters_are_read(tmp_path: Path) -> None:
    values = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 99}
    model = model_with(tmp_path, **values, do_sample=False, eos_token_id=1)
    expected = {name: value for name, value in values.items() if name != "max_new_tokens"} | {"max_tokens": 99}
    assert sampling_defaults(model) == expected
    assert sampling_defaults(model, "vllm") == sampling_defaults(model, "none") == {}
    (tmp_path / "generation_config.json").unlink()
    assert sampling_defaults(model) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1}, {"temperature": "hot"}, {"temperature": True}, {"top_k": 1.5}, {"top_k": -2}, {"top_p": 0},
        {"top_p": float("nan")}, {"min_p": 2}, {"repetition_penalty": 0}, {"max_new_tokens": 0}, {"temperature": 10**400},
    ],
)  # fmt: skip
def test_a_wrong_value_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: dict[str, Any]
) -> None:
    with caplog.at_level(logging.WARNING):
        found = sampling_defaults(model_with(tmp_path, **{"min_p": 0.5, "top_p": 0.5, **wrong}))
    assert set(found) == {"min_p", "top_p"} - set(wrong)
    assert next(iter(wrong)) in caplog.text


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    model = model_with(tmp_path)
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(CheckpointError, match="generation_config"):
        sampling_defaults(model)


@pytest.mark.parametrize("body", [CompletionBody(prompt="x"), ChatBody(messages=[{"role": "user", "content": "x"}])])
def test_defaults_count_where_a_body_names_nothing(body: CompletionBody | ChatBody) -> None:
    defaults = {"temperature": 0.5, "top_k": 3}
    assert body.sampling(defaults, 7, logprobs=None) == SamplingParams(max_tokens=7, temperature=0.5, top_k=3)
    named = type(body).model_validate({**body.model_dump(exclude_unset=True), "temperature": 1.0, "top_k": 0})
    assert named.sampling(defaults, 7, logprobs=None) == SamplingParams(max_tokens=7)
    null = type(body).model_validate({**body.model_dump(exclude_unset=True), "temperature": None, "top_k": 0})
    assert null.sampling(defaults, 7, logprobs=None) == SamplingParams(max_tokens=7, temperature=0.5)


def test_a_local_model_uses_its_defaults(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "top_k": 1, "max_new_tokens": 5}))
    with LLM(str(tmp_path)) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(top_k=1, max_tokens=5)
        texts = {llm.generate("def main")[0].outputs[0].text for _ in range(3)}
        greedy = llm.generate("def main", SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].text
        assert texts == {greedy}
    with LLM(str(tmp_path), generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    with pytest.raises(ConfigError, match="generation_config"):
        LLM(str(tmp_path), generation_config="yes")  # type: ignore[arg-type]
