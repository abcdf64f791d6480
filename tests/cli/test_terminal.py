"""`eyas generate` and `eyas chat` with a local model, and what they report before they load anything."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from eyas import LLM, SamplingParams
from eyas.cli.main import app
from tests.support.tiny import fixed_config

TARGET = "models/demo/target"
DRAFTED = (TARGET, "--draft-model", "models/demo/eagle3", "--validate-head", "never")
GREEDY = ("--temperature", "0", "--max-tokens", "12")
MISTAKES = {
    "generate ./nowhere x": "error: no checkpoint folder at './nowhere'",
    f"generate {TARGET} x --draft-model ./nowhere": "error: no checkpoint folder at './nowhere'",
    "chat ./nowhere": "error: no checkpoint folder at './nowhere'",
    "serve ./nowhere": "error: no checkpoint folder at './nowhere'",
    f"serve {TARGET} --draft-model ./nowhere": "error: no checkpoint folder at './nowhere'",
    "generate nowhere.gguf": "error: no file at 'nowhere.gguf'",
    f"generate {TARGET} x y": "error: 'y' is one word too many",
    "generate x --address 127.0.0.1:1 --method eagle3": "error: a PROMPT without a MODEL goes to a router",
    "chat http://127.0.0.1:9": "error: UNAVAILABLE: cannot reach http://127.0.0.1:9/v1/chat/completions",
}
PROMPTS = ("How do I load model.gguf", "long " * 2000, f"{'long ' * 2000}.gguf", "x" * 300, f"{'y' * 300}\n.gguf")
WITHOUT_TORCH = """
import contextlib, io, json, sys
sys.modules["torch"] = None
from eyas.cli.main import main
found = {}
for command in sys.argv[1:]:
    sys.argv, sys.stdin, printed = ["eyas", *command.split()], io.StringIO("x\\n"), io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
    found[command] = code, printed.getvalue()
print(json.dumps(found))
"""

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("EYAS_ADDRESS", raising=False)

    def run(*words: str, text: str = "") -> Result:
        return CliRunner().invoke(app, words, input=text)

    return run


def tokens_of(result: Result) -> list[int]:
    assert result.exit_code == 0, result.output
    chunks = [json.loads(line) for line in result.stdout.splitlines()]
    return [token for chunk in chunks for token in chunk.get("token_ids", ())]


@pytest.mark.slow
def test_a_local_model_continues_standard_input(run: Run, plain_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.llm.LLM", partial(LLM, engine=fixed_config()))  # whether drafts pay depends on the machine
    drafted = run("generate", *DRAFTED, *GREEDY, "--json", text="def main():\n")
    plain = run("generate", *DRAFTED, "def main():", *GREEDY, "--json", "--method", "none")
    expected = plain_llm.generate("def main():", SamplingParams(max_tokens=12, temperature=0))[0].outputs[0]
    assert tokens_of(drafted) == tokens_of(plain) == expected.token_ids
    last = [json.loads(result.stdout.splitlines()[-1]) for result in (drafted, plain)]
    assert last[0]["stats"]["num_drafted"] > 0 == last[1]["stats"]["num_drafted"]
    assert [each["num_cached_tokens"] for each in last] == [0, 0]  # what compiles has not computed the prompt


class _Screen(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]


def test_loading_is_said_on_a_terminal_and_wiped_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (True, False):
        monkeypatch.setattr(sys, "stderr", screen := _Screen(is_terminal))
        LLM(TARGET, engine=fixed_config())
        assert (f"loading {TARGET}" in screen.getvalue()) is is_terminal
        assert screen.getvalue().endswith("\x1b[2K") is is_terminal, "the line is erased"


@pytest.mark.slow
def test_chat_keeps_the_history_until_reset(run: Run, plain_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.llm.LLM", partial(LLM, engine=fixed_config()))
    said = ["class Queue:", "def pop(self):"]
    result = run("chat", *DRAFTED, *GREEDY, text=f"{said[0]}\n{said[1]}\n/reset\n{said[0]}\n/exit\nnever\n")
    assert result.exit_code == 0, result.output
    messages: list[dict[str, Any]] = []
    expected = ""
    for text in (*said, None, said[0]):
        if text is None:
            messages = []
            continue
        messages.append({"role": "user", "content": text})
        answer = plain_llm.chat(messages, SamplingParams(max_tokens=12, temperature=0))[0].outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        expected += f"{answer}\n"
    assert result.stdout == expected


@pytest.fixture(scope="module")
def reports() -> dict[str, tuple[int, str]]:
    """Exit status and standard error of each mistake, all in one process without torch."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *MISTAKES]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=True, timeout=100)
    found: dict[str, tuple[int, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_is_no_model(prompt: str, run: Run) -> None:
    """Nor a file of one: it goes to a router, which takes no method."""
    result = run("generate", prompt, "--address", "127.0.0.1:1", "--method", "eagle3")
    assert "a PROMPT without a MODEL goes to a router" in f"{result.output}{result.exception}"


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes_are_reported_without_torch(command: str, reports: dict[str, tuple[int, str]]) -> None:
    code, printed = reports[command]
    assert (code, printed.count("\n")) == (1, 1), printed
    assert printed.startswith(MISTAKES[command])
