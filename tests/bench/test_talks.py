"""The tool behind `make talks` collects texts and questions, and measures the heads that are there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scripts import talks
from eyas.config.loader import load
from eyas.errors import ConfigError
from eyas.train.config import TrainConfig


def write_questions(file: Path, categories: list[str]) -> Path:
    rows = [{"category": category, "turns": [f"{category} {n}", "More."]} for category in categories for n in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_questions_are_spread_over_six_kinds(tmp_path: Path) -> None:
    """The categories of MT-bench are one kind, each with its turn."""
    given = write_questions(tmp_path / "all.jsonl", ["writing", "coding", *talks.KINDS])
    rows = [json.loads(line) for line in talks.write_questions(given, tmp_path / "some.jsonl", 2).read_text().splitlines()]
    assert [row["task"] for row in rows] == [kind for kind in (talks.MULTI_TURN, *talks.KINDS.values()) for _ in range(2)]
    assert [row["text"] for row in rows[:4]] == ["writing 0", "coding 0", "translation 0", "translation 2"]


def test_another_file_of_questions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_text('{"text": "no category"}\n')
    with pytest.raises(ConfigError, match="cannot read Spec-Bench's questions from"):
        talks.write_questions(tmp_path / "all.jsonl", tmp_path / "some.jsonl", 2)


def test_documentation_is_prose_and_each_text_once(tmp_path: Path) -> None:
    prose = "Say what a function returns and which errors it raises. " * 12
    (tmp_path / "code.py").write_text(f'"""{prose}"""\n\n\ndef short():\n    """Too short."""\n')
    (tmp_path / "page.md").write_text(prose.strip())
    (tmp_path / "table.rst").write_text("| 1 | 2 | 3 |\n" * 60)
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "licence.md").write_text(prose + "WITHOUT WARRANTY OF ANY KIND")
    assert talks.documentation(tmp_path, 10_000) == [prose.strip()]


def test_methods_without_a_trained_head_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "datastore").mkdir()
    (tmp_path / "heads" / "eagle1" / "best").mkdir(parents=True)
    head = tmp_path / "heads" / "eagle1" / "best"
    found = talks.measured_methods("model", tmp_path)
    assert found == [
        "prompt_lookup", "suffix", "lookahead", f"rest={tmp_path / 'datastore'}", f"eagle1={head}", f"eagle2={head}",
    ]  # fmt: skip


def test_a_kept_measurement_is_not_taken_for_another(tmp_path: Path) -> None:
    whole = talks.Measurement(10, 128, (0.0, 1.0), True, 1.0)
    (tmp_path / "measured-auto").mkdir()
    (tmp_path / "measured-auto" / "a.json").write_text(json.dumps({"results": {"scores": [{"method": "plain"}]}}))
    for _ in range(2):
        assert talks.measure("model", tmp_path, "auto", whole) == [{"method": "plain"}]
    with pytest.raises(ConfigError, match="holds a run with the max_tokens 128, not 32"):
        talks.measure("model", tmp_path, "auto", replace(whole, max_tokens=32))


@pytest.mark.parametrize("recipe", sorted(talks.RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_each_recipe_is_a_run(recipe: Path) -> None:
    """All read the same windows and layers, so that one store of features serves them."""
    config = load(TrainConfig, recipe, ["model=target", "data.path=data", "out=head"])
    assert (config.data.max_length, config.head.target_layer_ids or (1, 8, 17)) == (talks.WINDOW, (1, 8, 17))
    assert {recipe.stem} <= set(talks.METHODS.values())
