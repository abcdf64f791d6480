"""Options that commands share: files of them, their completion, their help; and what `eyas env` shows."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eyas.cli.main import SUBCOMMANDS, app, load_command
from eyas.cli.options import FILE_SETTINGS, LLM_ARGUMENTS, asked_settings, llm_arguments, read_options
from eyas.errors import ConfigError
from eyas.services.local.serve import plan

# Help of fewer words say nothing that the option's name does not.
MIN_WORDS = 4
OPTIONS = """
max-model-len: 300
served_model_name: [one, two]
api-key: secret
set: [router.limits.max_connections=9]
verifier:
  engine: {max_num_seqs: 4}
"""


class _Context:
    """The parts of a click context that options are read into."""

    def __init__(self) -> None:
        self.command, self.info_name = load_command("serve"), "serve"
        self.default_map, self.meta = dict[str, Any](), dict[str, Any]()


def completions(words: str) -> set[str]:
    asked = {"_EYAS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    return set(CliRunner().invoke(app, prog_name="eyas", env=asked).output.split())


def test_a_file_sets_options_and_settings_of_services(tmp_path: Path) -> None:
    (file := tmp_path / "options.yaml").write_text(OPTIONS)
    context: Any = _Context()
    assert read_options(context, file) == file
    assert context.default_map == {"max_model_len": 300, "served_model_name": ["one", "two"], "api_key": ["secret"]}
    assert context.meta[FILE_SETTINGS] == ["router.limits.max_connections=9", "verifier.engine.max_num_seqs=4"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], 4),
        (["--set", "verifier.engine.max_num_seqs=5"], 5),
        (["--max-num-seqs", "7"], 7),
        (["--max-num-seqs", "7", "--set", "verifier.engine.max_num_seqs=5"], 5),
    ],
)
def test_the_command_line_goes_before_sections(words: list[str], expected: int, tmp_path: Path) -> None:
    (file := tmp_path / "options.yaml").write_text("verifier: {engine: {max_num_seqs: 4}}\nserved-model-name: one\n")
    with load_command("serve").make_context("serve", ["m", "--config", str(file), *words]) as context:
        settings = [each.text for each in asked_settings(context)]
        assert [each for each in settings if each.startswith("verifier.engine.max_num_seqs=")][-1].endswith(f"={expected}")
        assert context.params["served_model_name"] == ["one"]


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("verifier: {engine: {max_num_seqs: -4}}", [], "FILE: verifier.engine.max_num_seqs: "),
        ("max-num-seqs: -4", [], "FILE: max-num-seqs: "),
        ("max-num-seqs: 4", ["--max-num-seqs", "-4"], "--max-num-seqs: "),
        ("max-num-seqs: 4", ["--set", "verifier.engine.max_num_seqs=-4"], "--set verifier.engine.max_num_seqs: "),
        ("verifier: {engine: {max_num_seq: 4}}", [], "FILE: verifier.engine.max_num_seq: unknown setting"),
    ],
)
def test_a_wrong_value_is_named_as_it_was_written(text: str, words: list[str], expected: str, tmp_path: Path) -> None:
    (file := tmp_path / "options.yaml").write_text(text)
    with (
        load_command("serve").make_context("serve", ["m", "--config", str(file), *words]) as context,
        pytest.raises(ConfigError, match="^verifier: " + re.escape(expected.replace("FILE", str(file)))),
    ):
        plan("m", settings=asked_settings(context))


def test_a_section_of_no_started_service_names_the_file(tmp_path: Path) -> None:
    (file := tmp_path / "options.yaml").write_text("draft: {threads: 3}")
    with (
        load_command("serve").make_context("serve", ["m", "--config", str(file)]) as context,
        pytest.raises(ConfigError, match=re.escape(f"{file}: draft.threads: no service 'draft' is started")),
    ):
        plan("m", method="none", settings=asked_settings(context))


def test_the_command_line_goes_before_a_file(tmp_path: Path) -> None:
    (file := tmp_path / "options.yaml").write_text("max-tokens: 0\ntemperature: 0\n")
    words = ["generate", "models/demo/target", "x", "--config", str(file)]
    result = CliRunner().invoke(app, words)
    assert "max_tokens is 0" in result.stderr
    result = CliRunner().invoke(app, [*words, "--max-tokens", "-7"])
    assert "max_tokens is -7" in result.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max-modle-len: 3", "serve has no option max-modle-len; did you mean max-model-len?"),
        ("help: true", "serve has no option help"),
        ("- a list", "expected a mapping of settings, got list"),
        ("a: [", "cannot read config"),
        ("verifier: {engine: {max_num_sqs: 1}}", "did you mean engine.max_num_seqs?"),
        ("port: many", "parse string as an integer"),
        ("verifier: 5", "verifier is 5; it must hold settings of this service"),
    ],
)
def test_mistakes_in_a_file_of_options_are_named(text: str, reason: str, tmp_path: Path) -> None:
    (file := tmp_path / "options.yaml").write_text(text)
    result = CliRunner().invoke(app, ["serve", "models/demo/target", "--config", str(file)])
    assert result.exit_code != 0
    assert reason in " ".join(result.stderr.replace("│", " ").split())


def test_two_word_commands_complete() -> None:
    assert completions("eyas keys ") >= {"new"}
    assert completions("eyas bench s") == {"serve"}
    assert completions("eyas serve ro") == {"router"}
    assert completions("eyas serve router --con") == {"--config"}
    assert completions("eyas keys new --ten") == {"--tenant"}
    assert completions("eyas k") == {"keys"}
    assert completions("eyas ch") == {"chat", "check"}
    assert completions("eyas generate --draft") == {"--draft-model"}


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with options of its own, by its words."""
    for name in SUBCOMMANDS:
        command: Any = load_command(name)
        yield name, command
        yield from ((f"{name} {word}", below) for word, below in getattr(command, "commands", {}).items())


def test_every_option_has_a_help_that_says_something() -> None:
    texts = {
        f"{name} {param.name}": getattr(param, "help", None) or ""
        for name, command in commands()
        for param in command.params
        if param.name not in ("help", "install_completion", "show_completion")
    }
    assert len(texts) > 150
    assert not {name: text for name, text in texts.items() if len(text.split()) < MIN_WORDS}
    # of what, says the help itself: it is read without the option above it
    assert not {name: text for name, text in texts.items() if re.match(r"\d|Of |The same ", text)}


def test_options_of_a_model_are_arguments_of_llm() -> None:
    given = {"dtype": "auto", "max_model_len": None, "quantization": "", "max_num_seqs": 3, "top_k": 4}
    assert llm_arguments(given) == {"dtype": "auto", "max_num_seqs": 3}
    assert "max_model_len" in LLM_ARGUMENTS


def test_the_report_of_the_environment_holds_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("EYAS_API_KEY", "eyas-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    result = CliRunner().invoke(app, ["env"])
    assert result.exit_code == 0, result.output
    assert "secret" not in result.output
    found = json.loads(CliRunner().invoke(app, ["env", "--json"]).output)
    assert found["variables"]["OMP_NUM_THREADS"] == "7"
    assert {"torch", "transformers", "numpy"} <= found["packages"].keys()
    assert found["cores"].endswith(f"of {os.cpu_count()} usable")
    assert found["compiled on the CPU"]
