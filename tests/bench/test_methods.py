"""`eyas bench methods`: what it counts, and that it runs every method that it is given."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from eyas.api.request import GenerationStats
from eyas.bench.methods import MethodScore, MethodsResults
from eyas.bench.results import Run
from eyas.bench.settings import MethodSpec, MethodsSettings, OfflineSettings, load_prompts, load_tasks
from eyas.cli.main import app
from eyas.config import TreeConfig
from eyas.drafters.base import DraftWork
from eyas.errors import ConfigError
from eyas.models.heads.block import BlockHead
from eyas.models.heads.eagle import EagleHead
from eyas.models.heads.hydra import HydraHead, PrefixLayer
from eyas.models.heads.medusa import MedusaHead
from eyas.models.loading import load_target
from eyas.models.target import TargetModel
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.support.methods import Case


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
    table = MethodsResults((MethodScore.of("plain", 0.0, tasks, plain, plain), score)).tables()[0]
    assert table.rows[1][:3] == ("eagle3", "4 (1-4)", "1.50")
    assert "code: speedup / tau" in table.columns


def test_what_drafts_cost_counts_verified_rows_and_passes() -> None:
    stats = GenerationStats(num_verify_steps=2, num_emitted=9, num_drafted=10)  # 4.5 tokens from 6 rows a step
    run, plain = Run(1.0, ((1, 2),), stats), timed(1.0, (1, 2))
    score = MethodScore.of("eagle3", 0.0, ["code"], [run], [plain], DraftWork(5, 5))
    costs = MethodsResults((MethodScore.of("plain", 0.0, ["code"], [plain], [plain]), score)).tables()[1]
    assert costs.rows == (("eagle3", "6.0", "0.75", "5", "5", "0.90", "3.00", "4.50"),)
    lookup = MethodScore.of("prompt_lookup", 0.0, ["code"], [run], [plain])
    assert MethodsResults((lookup,)).tables()[1].rows[0][3:7] == ("", "", "", "4.50")


def test_methods_are_compared_with_prompt_lookup_of_transformers() -> None:
    plain, fast, lookup = timed(4.0, (1, 2)), timed(1.0, (1, 2), 1), timed(2.0, (1, 3))
    runs = {"plain": plain, "eagle3": fast, "generate, prompt lookup": lookup}
    scores = [MethodScore.of(name, 0.0, ["code"], [run], [plain], lookup=[lookup]) for name, run in runs.items()]
    table = MethodsResults(tuple(scores)).tables()[0]
    assert table.columns[2] == "over generate with prompt lookup"
    assert [row[2] for row in table.rows] == ["0.5 (0.5-0.5)", "2 (2-2)", "1 (1-1)"]
    assert table.rows[2][-1] == "0 of 1, else from token 1"


# Where a network runs a layer; for a small draft model, a pass.
LAYER = {
    EagleHead: "finish",
    BlockHead: "project_context",
    MedusaHead: "logits",
    HydraHead: "logits",
    PrefixLayer: "finish",
    TargetModel: "forward",
}
METHODS = (
    "eagle1",
    "eagle3",
    "peagle",
    "dspark",
    "dflash",
    "medusa",
    "hydra",
    "hydra-prefix",
    "sps",
    "eagle3+prompt_lookup",
)


@pytest.mark.parametrize("method", METHODS)
def test_the_work_of_a_drafter_is_what_it_runs(
    method: str, tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # the kernels of the CPU run several layers in a call
    case = Case(method, tiny_target, tiny_head)
    drafter = case.drafter(TreeConfig(12, 4, 3))
    layers = len(load_target(case.folder).kv_shapes) if method == "sps" else 1
    count = Counter[str]()

    def counted(kind: type, name: str) -> None:
        run = getattr(kind, name)

        def call(*args: object, **kwargs: object) -> object:
            count[name] += 1
            return run(*args, **kwargs)

        monkeypatch.setattr(kind, name, call)

    for kind, name in LAYER.items():
        counted(kind, name)
    features = None if method == "sps" else torch.randn(5, drafter.needs.feature_size)
    commit = Commit("a", 0, 0, (3, 4, 5, 6, 7, 8), features, NoiseKey(0), TreeBudget(12, 9), samples=())
    (tree,) = drafter.propose([commit])
    assert isinstance(tree, DraftTree)
    assert max(tree.depths) > 1
    assert count.total() * layers == drafter.work.layers


def test_prompts_are_taken_from_all_tasks_in_turn(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"category": task, "token_ids": [i]} for i, task in enumerate(["a", "a", "a", "b", "c"])]
    file.write_text("\n".join(map(json.dumps, lines)))
    settings = MethodsSettings("", (MethodSpec("x"),), file, num_prompts=4)
    assert [(p.task, p.token_ids) for p in load_tasks(settings)] == [("a", (0,)), ("a", (1,)), ("b", (3,)), ("c", (4,))]
    taken = {n: len(load_prompts(OfflineSettings("", prompts=file, num_prompts=n), vocab_size=9)) for n in (0, 4, 6)}
    assert taken == {0: 5, 4: 4, 6: 5}
    assert len(load_prompts(OfflineSettings("", num_prompts=3), vocab_size=9)) == 3
    file.write_text("")
    with pytest.raises(ConfigError, match="holds no prompts"):
        load_tasks(settings)


def test_a_run_without_matplotlib_says_what_is_missing(
    tmp_path: Path, tiny_target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"token_ids": [3, 5, 6, 7]}))
    options = f"--model {tiny_target} --prompts {tmp_path}/prompts.jsonl --max-tokens 3 --out {tmp_path} --temperature 0"
    result = CliRunner().invoke(app, ["bench", "methods", *options.split(), "--method", "prompt_lookup"])
    assert result.exit_code == 0, result.output
    assert "no picture: the chart needs the package matplotlib" in result.output
    assert list(tmp_path.glob("*-methods-*.md"))


def test_a_run_writes_a_report_json_and_a_plot(tmp_path: Path, tiny_target: str, tiny_head: str) -> None:
    pytest.importorskip("matplotlib")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"token_ids": [i, 5, 6, 7]}) for i in range(3, 6)))
    options = f"--model {tiny_target} --prompts {prompts} --max-tokens 4 --out {tmp_path} --method prompt_lookup "
    options += f"--method eagle3={tiny_head}"
    result = CliRunner().invoke(
        app, ["bench", "methods", *options.split(), "--num-draft-tokens", "8", "--num-steps", "3", "--top-k", "2"]
    )
    assert result.exit_code == 0, result.output
    (page,) = tmp_path.glob("*-methods-*.md")
    data = json.loads(page.with_suffix(".json").read_text())
    scores = {(s["method"], s["temperature"]): s for s in data["results"]["scores"]}
    methods = ("plain", "prompt_lookup", "eagle3")
    by_transformers = {("generate", 0.0), ("generate, prompt lookup", 0.0)}
    assert {key for key, score in scores.items() if score["over_lookup"]} == {k for k in scores if k[1] == 0}
    assert page.read_text().count("over generate with prompt lookup") == 1
    assert set(scores) == {*by_transformers, *((name, t) for name in methods for t in (0.0, 0.6, 1.0))}
    assert all(score["identical"]["num_identical"] == 3 for score in scores.values())
    assert page.read_text().count("what drafts cost") == 3
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_table_may_be_of_the_methods_alone(tmp_path: Path, tiny_target: str, tiny_head: str) -> None:
    """As they serve, by the processor's clock, without transformers."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"token_ids": [4, 5, 6, 7]}))
    options = f"--model {tiny_target} --prompts {prompts} --max-tokens 4 --out {tmp_path} --method eagle3={tiny_head}"
    given = [*options.split(), "--draft-budget", "auto", "--processor-time", "--no-generate"]
    result = CliRunner().invoke(app, ["bench", "methods", *given, "--temperature", "1"])
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("*-methods-*.json")
    scores = json.loads(file.read_text())["results"]["scores"]
    assert [score["method"] for score in scores] == ["plain", "eagle3"]
    assert all(score["identical"]["num_identical"] == 1 for score in scores)
    result = CliRunner().invoke(app, ["bench", "methods", *given, "--assistant", "small"])
    assert "assistant is small, for transformers' generate, which is not to run" in f"{result.exception}{result.output}"
    result = CliRunner().invoke(app, ["bench", "methods", *given, "--quantization", "awq"])
    assert "take a checkpoint quantised by awq" in f"{result.exception}{result.output}"
