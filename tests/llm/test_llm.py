"""The engine in one process, as `from eyas import LLM` gives it."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from eyas import LLM, EyasError, RequestOutput, SamplingParams
from eyas.cli.main import app
from eyas.config import EngineConfig, TreeConfig
from eyas.device.placement import may_run_compiled, use_threads
from eyas.engine.build import assemble_engine
from eyas.errors import CheckpointError, ConfigError, InvalidRequest
from eyas.models.loading import load_target
from eyas.models.placement import pass_dtype, resolve_placement
from tests.support.tiny import DEMO, write_head

TARGET, HEAD = str(DEMO / "target"), str(DEMO / "eagle3")
GREEDY = SamplingParams(max_tokens=24, temperature=0)
PROMPTS = ["import os\n\ndef main(", "class Queue:\n"]


def texts(results: list[RequestOutput]) -> list[tuple[list[int], str]]:
    """Tokens and text of every completion."""
    return [(one.token_ids, one.text) for result in results for one in result.outputs]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=3)])
def test_speculative_results_equal_plain_ones(plain_llm: LLM, eagle3_llm: LLM, sampling: SamplingParams) -> None:
    both = (llm.generate(PROMPTS, sampling) for llm in (plain_llm, eagle3_llm))
    for (one,), (other,) in ((plain.outputs, drafted.outputs) for plain, drafted in zip(*both, strict=True)):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert other.stats.num_verify_steps < one.stats.num_verify_steps
        assert other.stats.acceptance_length > 1
        assert one.stats.num_drafted == 0


def test_a_stop_string_cuts_text_but_keeps_its_last_token(plain_llm: LLM, eagle3_llm: LLM) -> None:
    whole = plain_llm.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    stop = whole.text[8:13]
    results = [
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=24, temperature=0, stop=(stop,)))[0].outputs[0]
        for llm in (plain_llm, eagle3_llm)
    ]
    assert results[0].token_ids == results[1].token_ids == whole.token_ids[: len(results[0].token_ids)]
    assert results[0].text == results[1].text == whole.text[: whole.text.index(stop)]
    assert (results[0].finish_reason, results[0].stop_reason) == ("stop", stop)


def test_token_ids_and_text_mean_the_same(plain_llm: LLM) -> None:
    by_text = plain_llm.generate(PROMPTS, GREEDY)
    assert [result.prompt for result in by_text] == PROMPTS
    ids = [result.prompt_token_ids for result in by_text]
    for prompts in (ids, [{"prompt_token_ids": one} for one in ids], [{"prompt": one} for one in PROMPTS]):
        assert texts(plain_llm.generate(prompts, GREEDY)) == texts(by_text)
    assert texts(plain_llm.generate(np.array(ids[0]), GREEDY)) == texts(by_text[:1])


def test_a_result_reports_cached_prompt_tokens(eagle3_llm: LLM) -> None:
    first = eagle3_llm.generate("import sys\n\nclass Tree:", GREEDY)[0]
    turn = first.prompt_token_ids + first.outputs[0].token_ids + [282]
    second = eagle3_llm.generate([turn], GREEDY)[0]
    assert second.num_cached_tokens == len(turn) - 2, "the last token emitted had no KV yet"
    assert texts(eagle3_llm.generate([turn], GREEDY)) == texts([second])


def test_the_seed_of_a_result_repeats_it(plain_llm: LLM) -> None:
    first = plain_llm.generate(PROMPTS[0], SamplingParams(max_tokens=8))[0]
    again = plain_llm.generate(PROMPTS[0], SamplingParams(max_tokens=8, seed=first.outputs[0].seed))
    assert texts(again) == texts([first])


@pytest.mark.parametrize(
    ("prompts", "sampling", "reason"),
    [
        (["fine", ""], GREEDY, "prompt 1: the prompt is empty"),
        ([[5, 6], ["x"]], GREEDY, "prompt 1: 'x' is not a token id"),
        ([[5, 4096]], GREEDY, r"prompt holds token id 4096, outside the vocabulary \[0, 4096\)"),
        (["a"], SamplingParams(stop_token_ids=(9999,)), "stop_token_ids holds token id 9999"),
        (["a"], SamplingParams(max_tokens=5000), "exceed the context length 2048"),
        (["a", "b"], [GREEDY], "2 prompts but 1 sampling params"),
        (["a"], {"max_tokens": 3}, "sampling_params holds {'max_tokens': 3}; give SamplingParams"),
        (["a", "b"], [GREEDY, None], "sampling_params holds None; give SamplingParams"),
        (None, GREEDY, "prompts is None; give a prompt, or a list of them"),
    ],
)
def test_a_bad_prompt_is_named_and_leaves_nothing_behind(
    plain_llm: LLM, prompts: list, sampling: object, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        plain_llm.generate(prompts, sampling)  # type: ignore[arg-type]
    assert len(plain_llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].token_ids) == 24


def test_an_interruption_leaves_nothing_behind(eagle3_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = eagle3_llm.generate(PROMPTS, GREEDY)
    step, calls = eagle3_llm.llm_engine.step, iter(range(100))

    def interrupted() -> list:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(eagle3_llm.llm_engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        eagle3_llm.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    eagle3_llm.llm_engine.check()
    assert not eagle3_llm.llm_engine.has_work
    assert texts(eagle3_llm.generate(PROMPTS, GREEDY)) == texts(expected)


def test_unloadable_weights_are_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    for error, reason, options in (
        (CheckpointError, "no checkpoint folder", {"model": "./nowhere"}),
        (ConfigError, "needs a draft head", {"model": TARGET, "method": "eagle3"}),
        (ConfigError, "unknown drafter 'eagle9'", {"model": TARGET, "draft_model": HEAD, "method": "eagle9"}),
        (ConfigError, "dtype is 'float8'", {"model": TARGET, "dtype": "float8"}),
        (ConfigError, "device 'nope' cannot be used", {"model": TARGET, "device": "nope"}),
        (ConfigError, "threads is -1; it must be at least 0", {"model": TARGET, "threads": -1}),
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


@pytest.mark.parametrize(
    ("settings", "has_units", "passes"),
    [
        ({}, False, "float32"),
        ({}, True, "bfloat16"),
        ({"has_kernels": True}, True, "float32"),
        ({"has_kernels": True, "threads": 4}, True, "bfloat16"),
        ({"has_kernels": True, "experts": 4}, True, "bfloat16"),
        ({"engine": EngineConfig(deterministic=True)}, True, "float32"),
        ({"engine": EngineConfig(tensor_parallel_size=2)}, False, "bfloat16"),
        ({"device": "cuda:1", "engine": EngineConfig(deterministic=True)}, False, "bfloat16"),
        ({"experts": 4}, False, "bfloat16"),
    ],
)
def test_half_weights_are_multiplied_in_float32(
    settings: dict[str, Any], has_units: bool, passes: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("eyas.models.placement.multiplies_halves", lambda _: has_units)
    has_kernels = settings.get("has_kernels", False)
    monkeypatch.setattr("eyas.models.placement.multiplies_tiles", lambda: has_kernels)
    (tmp_path / "config.json").write_text(json.dumps({"num_local_experts": settings.get("experts", 0)}))
    device, engine = settings.get("device", "cpu"), settings.get("engine", EngineConfig())
    threads = settings.get("threads")
    assert pass_dtype(str(tmp_path), "bfloat16", device, engine, threads) == passes
    assert pass_dtype(str(tmp_path), "float32", device, engine, threads) == "float32"


def test_streamed_pieces_join_to_the_whole_output(plain_llm: LLM, eagle3_llm: LLM) -> None:
    asked = [replace(GREEDY, logprobs=1), SamplingParams(max_tokens=24, temperature=0.9, seed=4, n=2)]
    expected = plain_llm.generate(PROMPTS, asked)
    tokens: dict[tuple[str, int], list[int]] = {}
    pieces: dict[tuple[str, int], str] = {}
    for output in eagle3_llm.stream(PROMPTS, asked):
        for one in output.outputs:
            key = (output.request_id, one.index)
            assert len(one.logprobs or one.token_ids) == len(one.token_ids)
            tokens[key] = tokens.get(key, []) + one.token_ids
            pieces[key] = pieces.get(key, "") + one.text
    assert [(tokens[key], pieces[key]) for key in sorted(tokens)] == texts(expected)


def test_a_stream_that_is_left_early_frees_everything(eagle3_llm: LLM) -> None:
    for output in eagle3_llm.stream(PROMPTS[0], GREEDY):
        assert not output.finished
        break
    assert not eagle3_llm.llm_engine.has_work
    eagle3_llm.llm_engine.check()


def test_calls_inside_a_stream_do_not_disturb_it(plain_llm: LLM, eagle3_llm: LLM) -> None:
    stop = replace(GREEDY, stop=(plain_llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].text[8:13],))
    expected, inner = plain_llm.generate(PROMPTS[0], GREEDY), plain_llm.generate(PROMPTS[1], stop)
    pieces = []
    for output in eagle3_llm.stream(PROMPTS[0], GREEDY):
        assert texts(eagle3_llm.generate(PROMPTS[1], stop)) == texts(inner)
        pieces.append(output.outputs[0].text)
    assert "".join(pieces) == expected[0].outputs[0].text


def test_chat_continues_the_rendered_template(plain_llm: LLM, eagle3_llm: LLM) -> None:
    template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}{% if shout %}!{% endif %}def "
    messages = [{"role": "user", "content": "main"}]
    (answer,) = eagle3_llm.chat(messages, GREEDY, chat_template=template)
    assert answer.prompt == "# user: main\ndef "
    ids = plain_llm.get_tokenizer().encode_rendered(answer.prompt)
    assert texts([answer]) == texts(plain_llm.generate([ids], GREEDY))
    shouted = eagle3_llm.chat([messages, messages], GREEDY, chat_template=template, chat_template_kwargs={"shout": True})
    assert [one.prompt for one in shouted] == ["# user: main\n!def "] * 2


def test_progress_goes_to_a_class_like_tqdm(plain_llm: LLM) -> None:
    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            bars.append(self)
            self.total, self.done, self.closed = total, 0, False

        def update(self, count: int) -> None:
            self.done += count

        def close(self) -> None:
            self.closed = True

    bars: list[Bar] = []
    plain_llm.generate(PROMPTS, GREEDY, use_tqdm=Bar)
    assert [(bar.total, bar.done, bar.closed) for bar in bars] == [(2, 2, True)]


def test_a_seeded_llm_draws_the_same_seeds_again() -> None:
    warm = SamplingParams(max_tokens=8)
    engine = EngineConfig(max_kv_tokens=1024)
    results = []
    for _ in range(2):
        with LLM(TARGET, seed=5, engine=engine) as llm:
            results.append(texts([*llm.generate(PROMPTS[0], warm), *llm.generate(PROMPTS[0], warm)]))
    assert results[0] == results[1]
    assert results[0][0] != results[0][1]


def test_a_missing_target_is_not_blamed_on_the_head() -> None:
    with pytest.raises(CheckpointError, match="nowhere") as caught:
        LLM("./nowhere", HEAD)
    assert "method" not in str(caught.value)


def test_a_missing_tokenizer_is_missed_before_weights_are_read(tiny_target: str, tmp_path: Path) -> None:
    shutil.copy(f"{tiny_target}/config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        LLM(str(tmp_path))


def pretend_cores(monkeypatch: pytest.MonkeyPatch, cores: int, variable: str = "") -> None:
    """Pretend that this process has some cores, numba, and OMP_NUM_THREADS, if one is given."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr("eyas.device.placement.num_cores", lambda: cores)
    monkeypatch.setattr("eyas.device.placement.has_numba", lambda: True)


@pytest.mark.parametrize(
    ("threads", "variable", "placements", "cores", "expected"),
    [
        (0, "", [("cpu", "float32")], 2, 1),
        (0, "", [("cpu", "float32"), ("cpu", "float32")], 2, 1),
        (0, "", [("cpu", "float32"), ("cpu", "bfloat16")], 2, 3),
        (0, "", [("cuda", "float32")], 2, 3),
        (0, "", [("cpu", "float32")], 3, 3),
        (0, "3", [("cpu", "float32")], 2, 3),
        (0, "", [], 2, 3),
        (2, "3", [("cuda", "bfloat16")], 3, 2),
    ],
)
def test_torch_takes_one_thread_where_kernels_can_run(
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    variable: str,
    placements: list[tuple[str, str]],
    cores: int,
    expected: int,
) -> None:
    pretend_cores(monkeypatch, cores, variable)
    torch.set_num_threads(3)
    try:
        use_threads(threads, *placements)
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(("threads", "variable", "cores"), [(0, "", 2), (0, "", 3), (0, "2", 2), (1, "2", 3), (2, "", 2)])
@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_it_is_foreseen_where_compiled_kernels_run(
    device: str, threads: int, variable: str, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cores(monkeypatch, cores, variable)
    torch.set_num_threads(2)
    try:
        foreseen = may_run_compiled(device, threads)
        use_threads(threads, (device, "float32"))
        assert may_run_compiled(device, None) == foreseen
        assert (torch.get_num_threads() == 1) == foreseen
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "offline"],
        ["bench", "methods", "--prompts", "nowhere", "--method", "suffix"],
        ["check", "equality"],
        ["check", "head", "--draft-model", "nowhere", "--method", "eagle3"],
    ],
)
def test_every_command_takes_the_threads_that_an_llm_takes(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cores(monkeypatch, 2)
    torch.set_num_threads(3)
    try:
        assert CliRunner().invoke(app, [*arguments, "--model", "nowhere", "--device", "cpu"]).exit_code
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)


def test_a_context_longer_than_the_models_is_refused(tiny_target: str, tmp_path: Path) -> None:
    reason = re.escape("max_model_len is 257, but ") + ".* is made for 256 tokens"
    with pytest.raises(ConfigError, match=reason):
        LLM(tiny_target, max_model_len=257, tokenizer=TARGET)
    shutil.copy(f"{tiny_target}/config.json", tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load_target(str(tmp_path), max_model_len=257)  # before it misses the weights
    build = partial(assemble_engine, load_target(tiny_target), None, tree=TreeConfig(), drafter=None)
    with pytest.raises(ConfigError, match=reason):
        build(engine=EngineConfig(max_model_len=257, max_kv_tokens=512))
    engine = build(engine=EngineConfig(max_model_len=256, max_kv_tokens=512))
    assert engine.max_model_len == 256
