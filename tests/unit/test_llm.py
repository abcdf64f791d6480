"""The engine in one process, as `from eyas import LLM` gives it."""

import json
from pathlib import Path

import numpy as np
import pytest

from eyas import LLM, EyasError, SamplingParams
from eyas.errors import CheckpointError, ConfigError, InvalidRequest
from eyas.models.checkpoint import resolve_placement
from tests.tiny import DEMO, write_head

TARGET, HEAD = str(DEMO / "target"), str(DEMO / "eagle3")
GREEDY = SamplingParams(max_tokens=24, temperature=0)
PROMPTS = ["import os\n\ndef main(", "class Queue:\n"]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=3)])
def test_speculative_results_equal_plain_ones(plain_llm: LLM, eagle3_llm: LLM, sampling: SamplingParams) -> None:
    for one, other in zip(plain_llm.generate(PROMPTS, sampling), eagle3_llm.generate(PROMPTS, sampling), strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert other.stats.num_verify_steps < one.stats.num_verify_steps
        assert other.stats.acceptance_length > 1
        assert one.stats.num_drafted == 0


def test_a_stop_string_cuts_text_but_keeps_its_last_token(plain_llm: LLM, eagle3_llm: LLM) -> None:
    whole = plain_llm.generate(PROMPTS[0], GREEDY)[0]
    stop = whole.text[8:13]
    results = [
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=24, temperature=0, stop=(stop,)))[0]
        for llm in (plain_llm, eagle3_llm)
    ]
    assert results[0].token_ids == results[1].token_ids == whole.token_ids[: len(results[0].token_ids)]
    assert results[0].text == results[1].text == whole.text[: whole.text.index(stop)]
    assert results[0].finish_reason == "stop"


def test_token_ids_and_text_mean_the_same(plain_llm: LLM) -> None:
    by_text = plain_llm.generate(PROMPTS, GREEDY)
    assert [r.token_ids for r in plain_llm.generate([r.prompt_token_ids for r in by_text], GREEDY)] == [
        r.token_ids for r in by_text
    ]
    assert plain_llm.generate(np.array(by_text[0].prompt_token_ids), GREEDY)[0].token_ids == by_text[0].token_ids


def test_a_result_reports_cached_prompt_tokens(eagle3_llm: LLM) -> None:
    first = eagle3_llm.generate("import sys\n\nclass Tree:", GREEDY)[0]
    turn = [*first.prompt_token_ids, *first.token_ids, 282]
    second = eagle3_llm.generate([turn], GREEDY)[0]
    assert second.num_cached_tokens == len(turn) - 2, "the last token emitted had no KV yet"
    assert eagle3_llm.generate([turn], GREEDY)[0].token_ids == second.token_ids


def test_the_seed_of_a_result_repeats_it(plain_llm: LLM) -> None:
    first = plain_llm.generate(PROMPTS[0], SamplingParams(max_tokens=8))[0]
    assert plain_llm.generate(PROMPTS[0], SamplingParams(max_tokens=8, seed=first.seed))[0].token_ids == first.token_ids


@pytest.mark.parametrize(
    ("prompts", "sampling", "reason"),
    [
        (["fine", ""], GREEDY, "prompt 1: the prompt is empty"),
        ([[5, 6], ["x"]], GREEDY, "prompt 1: 'x' is not a token id"),
        ([[5, 4096]], GREEDY, r"prompt holds token id 4096, outside the vocabulary \[0, 4096\)"),
        (["a"], SamplingParams(max_tokens=0), "max_tokens is 0"),
        (["a"], SamplingParams(max_tokens=2.5), "max_tokens is 2.5; it must be a whole number"),  # type: ignore[arg-type]
        (["a"], SamplingParams(temperature=float("nan")), "temperature is nan"),
        (["a"], SamplingParams(top_p=0.0), "top_p is 0.0"),
        (["a"], SamplingParams(top_k=2**31), "top_k is 2147483648"),
        (["a"], SamplingParams(stop_token_ids=(9999,)), "stop_token_ids holds token id 9999"),
        (["a"], SamplingParams(max_tokens=5000), "exceed the context length 2048"),
        (["a", "b"], [GREEDY], "2 prompts but 1 sampling params"),
    ],
)
def test_a_bad_prompt_is_named_and_leaves_nothing_behind(
    plain_llm: LLM, prompts: list, sampling: object, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        plain_llm.generate(prompts, sampling)  # type: ignore[arg-type]
    assert len(plain_llm.generate(PROMPTS[1], GREEDY)[0].token_ids) == 24


def test_an_interruption_leaves_nothing_behind(eagle3_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = eagle3_llm.generate(PROMPTS, GREEDY)
    step, calls = eagle3_llm._engine.step, iter(range(100))

    def interrupted() -> list:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(eagle3_llm._engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        eagle3_llm.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    eagle3_llm._engine.check()
    assert not eagle3_llm._engine.has_work
    assert [r.token_ids for r in eagle3_llm.generate(PROMPTS, GREEDY)] == [r.token_ids for r in expected]


def test_unloadable_weights_are_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    for error, reason, options in (
        (CheckpointError, "no checkpoint folder", {"model": "./nowhere"}),
        (ConfigError, "needs a draft head", {"model": TARGET, "method": "eagle3"}),
        (ConfigError, "unknown drafter 'eagle9'", {"model": TARGET, "draft_model": HEAD, "method": "eagle9"}),
        (ConfigError, "dtype is 'float8'", {"model": TARGET, "dtype": "float8"}),
        (ConfigError, "device 'nope' cannot be used", {"model": TARGET, "device": "nope"}),
        (CheckpointError, "hidden size 32", {"model": TARGET, "draft_model": str(write_head(tmp_path_factory.mktemp("h")))}),
    ):
        with pytest.raises(error, match=reason):
            LLM(**options)
        assert issubclass(error, EyasError)


def test_auto_takes_the_gpu_and_the_dtype_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolve_placement("auto", "auto", TARGET)[1] == "float32"
    assert resolve_placement("cuda:1", "float16", "./nowhere") == ("cuda:1", "float16")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for config, dtype in (
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"text_config": {"torch_dtype": "float16"}}, "float16"),
        ({}, "float32"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert resolve_placement("auto", "auto", str(tmp_path)) == ("cuda", dtype)
    assert resolve_placement("cpu", "auto", str(tmp_path)) == ("cpu", "float32")
