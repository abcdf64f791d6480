"""The `eyas` command: what its help imports, its version, and subcommands of one and two words."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas import __version__
from eyas.cli.main import SUBCOMMANDS, app
from eyas.errors import install_command

HEAVY = {"torch", "transformers", "tokenizers", "numpy", "grpc", "google.protobuf", "pydantic", "yaml", "fastapi", "redis"}
IMPORTED_BY = """
import sys
from pathlib import Path
from eyas.cli.main import main
for arguments in sys.argv[1:]:
    sys.argv[1:] = arguments.split()
    try:
        main()
    except SystemExit:
        print("imported:", *sys.modules)
"""


def modules_after(*commands: str) -> set[str]:
    """What one process has imported after these commands."""
    process = [sys.executable, "-c", IMPORTED_BY, *commands]
    done = subprocess.run(process, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.count("imported:") == len(commands)
    return set(done.stdout.rpartition("imported:")[2].split())


def test_help_and_version_import_nothing_heavy() -> None:
    assert not HEAVY & modules_after("--help", "--version")


def test_help_of_a_subcommand_imports_no_torch() -> None:
    assert not {"torch", "transformers"} & modules_after("bench offline --help", "serve --help", "serve router --help")


def test_the_version_is_the_package_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"eyas {__version__}\n"


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_can_be_loaded(name: str) -> None:
    result = CliRunner().invoke(app, [*name.split(), "--help"], prog_name="eyas")
    assert result.exit_code == 0, result.output
    assert f"Usage: eyas {name} " in re.sub(r"\x1b\[[\d;]*m", "", result.output)


def test_an_unknown_subcommand_names_the_nearest() -> None:
    result = CliRunner().invoke(app, ["srve"])
    assert result.exit_code == 2
    assert "Did you mean 'serve'?" in result.output


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "eyas.services.local.serve", raising=False)
    monkeypatch.delitem(sys.modules, "eyas.services.local.cluster", raising=False)
    monkeypatch.setitem(sys.modules, "grpc_health.v1", None)
    result = CliRunner().invoke(app, ["serve", "model"])
    assert result.exit_code == 1
    assert install_command("serve") in result.output


def test_a_package_that_is_missed_later_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "eyas.bench.serve", raising=False)
    monkeypatch.setitem(sys.modules, "httpx", None)
    result = CliRunner().invoke(app, ["bench", "serve", "http://x"])
    assert result.exit_code == 1
    assert f"needs the package httpx; run: {install_command('bench')}" in result.output


def test_a_path_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (file := tmp_path / "file.txt").write_text("some text")
    arguments = ["datastore", "build", f"{file}", "--model", "models/demo/target", "--out", f"{file}/folder"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == f"error: [Errno 20] Not a directory: '{file}/folder'"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("generate text --dtype float32 --max-num-seqs 3", "leave out --dtype, --max-num-seqs: a PROMPT without a MODEL"),
        ("generate no/model text --session s", "leave out --session: a MODEL runs in this process"),
        ("chat http://127.0.0.1:1 --method eagle3", "leave out --method: a server chooses that itself"),
        ("chat no/model --model name", "leave out --model: a local model needs no name"),
        ("run-batch f --url http://127.0.0.1:1 --set router.a=1", "leave out --set: the server at --url has that set"),
    ],
)
def test_options_that_would_do_nothing_are_refused(words: str, problem: str) -> None:
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 1
    assert problem in " ".join(result.output.split())


def test_a_variable_of_the_environment_is_no_option() -> None:
    """It may be there for other commands."""
    result = CliRunner(env={"EYAS_API_KEY": "secret"}).invoke(app, ["chat", "no/model"])
    assert "leave out" not in result.output


def test_an_empty_prompt_is_refused_before_the_model_is_loaded() -> None:
    assert not {"torch", "transformers"} & modules_after("generate models/demo/target")
    result = CliRunner().invoke(app, ["generate", "models/demo/target"], input="")
    assert "there is no prompt; give one, or send it to standard input" in result.output
