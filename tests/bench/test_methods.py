"""`eyas bench methods`: what it counts, and that it runs every method that it is given."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas.bench.methods import MethodScore, MethodsResults
from eyas.bench.results import Run
from eyas.bench.settings import MethodSpec, MethodsSettings, load_tasks
from eyas.cli import app
from eyas.errors import ConfigError
from eyas.request import GenerationStats


def timed(seconds: float, tokens: tuple[int, ...], rounds: int = 0) -> Run:
    stats = GenerationStats(num_verify_steps=rounds, num_emitted=len(tokens), num_drafted=rounds)
    return Run(seconds, (tokens,), stats, draft_seconds=0.01 * rounds)


def test_speedups_are_taken_prompt_by_prompt_and_by_task() -> None:
    tasks = ["code", "chat", "chat"]
    plain = [timed(4.0, (1, 2)), timed(2.0, (3, 4)), timed(2.0, (5, 6))]
    fast = [timed(1.0, (1, 2), 1), timed(2.0, (3, 4), 2), timed(0.5, (5, 7), 1)]
    score = MethodScore.of("eagle3", 0.0, tasks, fast, plain)
    assert score.overall.speedup.values == (4.0, 1.0, 4.0)
    assert [(task.task, task.speedup.values, task.tau) for task in score.tasks] == [
        ("code", (4.0,), 2.0),
        ("chat", (1.0, 4.0), 4 / 3),
    ]
    assert score.draft_ms == pytest.approx(10)
    assert f"{score.identical}" == "2 of 3, else from token 1"
    (table,) = MethodsResults(1, (MethodScore.of("plain", 0.0, tasks, plain, plain), score)).tables()
    assert table.rows[1][:3] == ("eagle3", "4 (1-4)", "1.50")
    assert "code: speedup / tau" in table.columns


def test_prompts_are_taken_from_all_tasks_in_turn(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"category": task, "token_ids": [i]} for i, task in enumerate(["a", "a", "a", "b", "c"])]
    file.write_text("\n".join(map(json.dumps, lines)))
    settings = MethodsSettings("", (MethodSpec("x"),), file, num_prompts=4)
    assert [(p.task, p.token_ids) for p in load_tasks(settings)] == [("a", (0,)), ("a", (1,)), ("b", (3,)), ("c", (4,))]
    file.write_text("")
    with pytest.raises(ConfigError, match="holds no prompts"):
        load_tasks(settings)


@pytest.mark.parametrize("matplotlib", ["there", "missing"])
def test_a_run_writes_a_report_json_and_a_plot(
    matplotlib: str, tmp_path: Path, tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if matplotlib == "missing":
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    else:
        pytest.importorskip("matplotlib")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"token_ids": [i, 5, 6, 7]}) for i in range(3, 6)))
    options = f"--model {tiny_target} --prompts {prompts} --max-tokens 8 --out {tmp_path} --method prompt_lookup "
    options += f"--method eagle3={tiny_head}"
    result = CliRunner().invoke(
        app, ["bench", "methods", *options.split(), "--num-draft-tokens", "8", "--num-steps", "3", "--top-k", "2"]
    )
    assert result.exit_code == 0, result.output
    (page,) = tmp_path.glob("*-methods-*.md")
    data = json.loads(page.with_suffix(".json").read_text())
    scores = {(s["method"], s["temperature"]): s for s in data["results"]["scores"]}
    methods = ("plain", "prompt_lookup", "eagle3")
    assert set(scores) == {("generate", 0.0), *((name, t) for name in methods for t in (0.0, 0.6, 1.0))}
    assert all(score["identical"]["num_identical"] == 3 for score in scores.values())
    with_law = {key for key, score in scores.items() if score["unshared_noise_tau"] is not None}
    assert with_law == {("eagle3", 0.6), ("eagle3", 1.0)}
    assert all(scores[key]["unshared_noise_tau"] >= 1 and scores[key]["unshared_noise_seconds"] > 0 for key in with_law)
    assert page.read_text().count("and the same without shared noise") == 2
    if matplotlib == "missing":
        assert "no picture: the chart needs matplotlib" in result.output
    else:
        assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_method_is_refused_with_the_known_ones(tmp_path: Path, tiny_target: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"token_ids": [5]}))
    options = ["--model", tiny_target, "--prompts", str(prompts), "--method", "eagle9"]
    result = CliRunner().invoke(app, ["bench", "methods", *options])
    assert result.exit_code == 1
    assert "unknown drafter 'eagle9'; known: eagle1, eagle2, eagle3" in result.output
