"""`eyas bench offline` from its options to its report, on tiny models."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from eyas.bench import offline
from eyas.bench.results import SpeedComparison
from eyas.bench.settings import OfflineSettings, groups, load_prompts
from eyas.bench.timing import STAGES
from eyas.cli.main import app
from eyas.errors import ConfigError
from eyas.progress import Progress

SIZES = ["--max-tokens", "6", "--groups", "2", "--num-draft-tokens", "6", "--num-steps", "2", "--top-k", "2"]
CASES = ["--batch", "1", "--batch", "3", "--temperature", "0", "--temperature", "0.8"]
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "offline", *arguments])


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"token_ids": list(range(3, 3 + n))}) + "\n" for n in (4, 9, 6, 12)))
    return file


def test_a_report_holds_every_comparison(tiny_target: str, tiny_head: str, prompts: Path, tmp_path: Path) -> None:
    result = bench(
        "--model", tiny_target, "--draft-model", tiny_head, "--prompts", f"{prompts}", "--out", f"{tmp_path}", *CASES,
        *SIZES, "--draft-budget", "fixed",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    said = result.stderr.splitlines()
    assert said[0].startswith(f"loading torch and {tiny_target}")
    assert [line.partition(":")[0] for line in said if "speculative / plain" in line] == [
        "temperature 0, batch 1", "temperature 0, batch 3", "temperature 0.8, batch 1", "temperature 0.8, batch 3",
    ]  # fmt: skip
    (file,) = tmp_path.glob("*-offline-cpu.json")
    data = json.loads(file.read_text())
    found = data["results"]
    assert data["settings"]["threads"] == torch.get_num_threads()
    assert [(c["temperature"], c["batch"], c["num_groups"]) for c in found["comparisons"]] == [
        (0.0, 1, 4), (0.0, 3, 2), (0.8, 1, 4), (0.8, 3, 2),
    ]  # fmt: skip
    for c in found["comparisons"]:
        greedy = c["temperature"] == 0
        lookup = {"generate, prompt lookup"} if greedy and c["batch"] == 1 else set()
        others = ({"generate"} if greedy else set()) | lookup
        assert set(c["tokens_per_second"]) == {"plain", "speculative"} | others
        assert len(c["ratios"]) == len(c["identical"]) == 1 + 2 * len(others)
        assert all(a["num_identical"] == a["num_outputs"] == c["batch"] * c["num_groups"] for a in c["identical"].values())
        assert 1 <= c["tau"] <= 3
        assert len(c["acceptance_by_depth"]) == 2
        assert {way: set(times["stages_ms"]) for way, times in c["stages"].items()} == {
            way: set(STAGES) for way in ("plain", "speculative")
        }
    assert data["settings"]["max_tokens"] == 6
    assert {"python", "eyas", "torch", "transformers"} <= set(data["versions"])
    assert "## Stages of a step" in file.with_suffix(".md").read_text()


def test_without_a_draft_head_plain_decoding_is_measured(tiny_target: str, tmp_path: Path) -> None:
    result = bench("--model", tiny_target, "--out", f"{tmp_path}", "--batch", "1", *SIZES)
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("*.json")
    found = json.loads(file.read_text())["results"]
    assert set(found["comparisons"][0]["ratios"]) == {"plain / generate", "plain / generate, prompt lookup"}
    assert found["comparisons"][0]["tau"] is None
    assert "## Acceptance" not in file.with_suffix(".md").read_text()


def test_a_quick_run_measures_one_batch_size_of_few_prompts(tiny_target: str, prompts: Path, tmp_path: Path) -> None:
    result = bench("--model", tiny_target, "--prompts", f"{prompts}", "--out", f"{tmp_path}", "--quick")
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("*.json")
    data = json.loads(file.read_text())
    assert [(c["batch"], c["num_groups"]) for c in data["results"]["comparisons"]] == [(1, 3)]
    assert data["settings"]["max_tokens"] == 48


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--max-tokens", "1"], "max_tokens is 1"),
        (["--batch", "0"], "batch and groups"),
        (["--num-prompts", "-1"], "num_prompts is -1"),
        (["--dtype", "float8"], "dtype is 'float8'; it must be one of auto, float32"),
        (["--draft-budget", "on"], "draft_budget is 'on'; it must be one of auto, fixed, adaptive"),
        pytest.param(["--device", "cuda"], "device 'cuda' cannot be used here", marks=NO_CUDA),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--draft-model", "nowhere/at/all"], "nowhere/at/all"),
    ],
)
def test_unmeasurable_settings_are_refused_in_one_line(tiny_target: str, arguments: list[str], reason: str) -> None:
    result = bench("--model", tiny_target, *arguments)
    assert result.exit_code == 1
    assert [line for line in result.stderr.splitlines() if line.startswith("error:") and reason in line]


def test_an_interrupted_run_has_given_its_comparisons(tiny_target: str, prompts: Path) -> None:
    """Of as many batches as were asked for, though there are more prompts."""
    found = list[SpeedComparison]()

    def keep_two(comparison: SpeedComparison) -> None:
        found.append(comparison)
        if len(found) == 2:
            raise KeyboardInterrupt

    settings = OfflineSettings(
        tiny_target, prompts=prompts, batches=(1, 2, 3), num_groups=1, max_groups=2, max_tokens=3, dtype="float32",
        device="cpu",
    )  # fmt: skip
    with Progress() as progress, pytest.raises(KeyboardInterrupt):
        offline.measure(settings, progress, keep_two)
    assert [(each.batch, each.num_groups) for each in found] == [(1, 2), (2, 2)]


def test_batches_use_every_prompt_and_start_again() -> None:
    prompts = [(i,) for i in range(5)]
    assert groups(prompts, 2, at_least=1) == [[(0,), (1,)], [(2,), (3,)], [(4,), (0,)]]
    assert len(groups(prompts, 8, at_least=3)) == 3


def test_a_prompt_file_without_prompts_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    for content in ("", "not json", '{"other": 1}'):
        file.write_text(content)
        with pytest.raises(ConfigError, match=r"prompts\.jsonl"):
            load_prompts(OfflineSettings("unused", prompts=file), vocab_size=48)


def test_text_prompts_are_encoded_by_the_targets_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "import os"}\n')
    (prompt,) = load_prompts(OfflineSettings("models/demo/target", prompts=file), vocab_size=4096)
    assert len(prompt) > 1
