"""The commands of `eyas train` from the command line: text to data, a head measured and written in another layout."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from eyas import LLM, SamplingParams
from eyas.cli.main import app
from eyas.cli.train import peak_memory
from eyas.models.heads.block import load_block_head
from eyas.train.data import read_prepared
from eyas.train.draft_vocabulary import draft_vocabulary, vocabulary_coverage
from tests.support.tiny_block import tiny_block_head
from tests.train.small_runs import prepared, settings, tiny_target, write_ids

QUESTION = [{"role": "user", "content": '{"ab": 12, "ab": '}]
TEMPLATE = "{{ 'true' if enable_thinking | default(true) else '12' }}{% for m in messages %}{{ m.content }}{% endfor %}"


def train(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def succeeded(*arguments: object) -> str:
    result = train(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With a chat template that has a variable."""
    folder = tiny_target(tmp_path_factory.mktemp("commands"))
    (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_regenerate_and_prepare_pass_template_variables(target: str, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": QUESTION}) + "\n")
    llm, answers = LLM(target, dtype="float32", device="cpu"), {}
    for variables in ({}, {"enable_thinking": False}):
        out, data = tmp_path / f"{len(variables)}.jsonl", tmp_path / f"data{len(variables)}"
        given = ["--model", target, "--chat-template-kwargs", json.dumps(variables)]
        options = ("--temperature", 0, "--max-tokens", 8, "--batch", 2, "--device", "cpu", "--dtype", "float32")
        printed = succeeded("regenerate", tmp_path / "chats.jsonl", *given, "--out", out, *options)
        assert "1 entries: 1 answered, 0 failed" in printed
        messages = json.loads(out.read_text())["messages"]
        (expected,) = llm.chat([QUESTION], SamplingParams(8, 0.0), use_tqdm=False, chat_template_kwargs=variables)
        assert messages == [*QUESTION, {"role": "assistant", "content": expected.outputs[0].text}]
        answers[len(variables)] = expected.outputs[0].text
        printed = succeeded("prepare", out, *given, "--out", data, "--heldout", 0, "--min-loss-tokens", 1)
        assert "1 documents, 0 held out" in printed
        assert read_prepared(data).chat_template_kwargs == variables
    assert answers[0] != answers[1], "the variable changes the prompt"


def test_prepare_prints_coverage_and_what_is_left_out(target: str, tmp_path: Path) -> None:
    (Path(target) / "chat_template.jinja").write_text("{{ messages | length }}" + TEMPLATE)
    ids, chats = write_ids(tmp_path / "ids.jsonl", 6), tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [*QUESTION, {"role": "assistant", "content": "ab"}]}) + "\n")
    given = ["prepare", ids, chats, "--model", target, "--out", tmp_path / "data", "--heldout", 0]
    printed = succeeded(*given, "--draft-vocab-size", 47)
    assert "6 documents, 0 held out; 144 tokens, 138 supervised; 1 documents left out" in printed
    assert "1 turns of the assistant are not supervised" in printed
    assert "a draft vocabulary of 47 tokens holds 100.00% of the supervised tokens" in printed
    (Path(target) / "chat_template.jinja").write_text(TEMPLATE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--chat-template-kwargs", "[1]"), "--chat-template-kwargs is '[1]'; it must be a JSON object such as"),
        (("--chat-template-kwargs", "enable_thinking"), "it must be a JSON object"),
        (("--draft-vocab-size", "-1"), "draft_vocab_size is -1"),
        (("--draft-vocab-size", "49"), "--draft-vocab-size is 49"),
        (("--max-length", "0"), "max_length is 0"),
        (("--heldout", "1"), "heldout is 1.0"),
    ],
)
def test_wrong_options_are_one_line_that_names_them(
    options: tuple[str, str], message: str, target: str, tmp_path: Path
) -> None:
    ids = write_ids(tmp_path / "ids.jsonl", 3)
    result = train("prepare", ids, "--model", target, "--out", tmp_path / "data", *options)
    assert result.exit_code == 1
    (error,) = (line for line in result.stderr.splitlines() if not line.startswith("["))  # of progress
    assert error.startswith("error: ")
    assert message in error


def test_a_run_begins_with_the_coverage_of_its_vocabulary(target: str, tmp_path: Path) -> None:
    prepared(tmp_path, target)
    (tmp_path / "run.json").write_text(json.dumps(asdict(settings(tmp_path, target, head__draft_vocab_size=24))))
    expected = vocabulary_coverage(tmp_path / "data", draft_vocabulary(tmp_path / "data", 24, 48))
    assert 0.5 < expected < 0.9
    printed = succeeded("run", "--config", tmp_path / "run.json", "--dry-run")
    assert f"the draft vocabulary of 24 tokens holds {expected:.2%} of the supervised training tokens" in printed


def test_memory_is_given_for_each_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three GPUs the head takes the first and target_device the last."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", [5 << 30, 0, 3 << 20].__getitem__)
    found = peak_memory()
    assert found.pop("cpu") > 1 << 20
    assert found == {"cuda:0": 5 << 30, "cuda:2": 3 << 20}


def test_eval_measures_a_head_and_export_writes_it(target: str, tmp_path: Path) -> None:
    head = tiny_block_head("dspark-reduced", target)
    succeeded(
        "prepare", write_ids(tmp_path / "ids.jsonl", 8), "--model", target, "--out", tmp_path / "data", "--heldout", 0.3
    )
    printed = succeeded(
        "eval", head, "--model", target, "--data", tmp_path / "data", "--temperature", 0, "--num-prompts", 2,
        "--max-tokens", 8, "--num-draft-tokens", 6, "--device", "cpu",
    )  # fmt: skip
    tau = float(printed.partition("temperature 0: tau ")[2].split(",")[0])
    assert 1 <= tau <= 5
    assert "written to" in succeeded("export", head, "--model", target, "--out", tmp_path / "head", "--to", "specforge")
    found, expected = load_block_head(str(tmp_path / "head"), target), load_block_head(head, target)
    assert found.config == expected.config
    for name, tensor in expected.state_dict().items():
        assert tensor.equal(found.state_dict()[name]), name
