"""Named checks of one client. Each prints its result as a line of JSON behind MARK; the job goes on after a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MARK = "CHECK "
URL = os.environ["EYAS_URL"]
MODEL = os.environ["EYAS_MODEL"]
TOKENIZER = os.environ["EYAS_TOKENIZER"]
PROMPT = "def add(left, right):\n    return"
MESSAGES = [{"role": "user", "content": "Write a function that adds two numbers."}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@contextmanager
def check(feature: str) -> Iterator[None]:
    """Report whether the body runs without an exception."""
    problem = ""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        problem = f"{type(error).__name__}: {lines[0][:300]}"
    print(MARK + json.dumps({"feature": feature, "problem": problem}), flush=True)


def require(condition: object, problem: str) -> None:
    """Raise RuntimeError unless the condition holds."""
    if not condition:
        raise RuntimeError(problem)


def run_command(command: Sequence[str], log: Path, timeout_s: float = 300.0, offline: bool = True) -> str:
    """Run a command of this environment and return its output. Raises RuntimeError with the last line if it fails.

    offline: forbid the hub. Some clients then refuse folders as well.
    """
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")} | {"COLUMNS": "200"}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if offline else {}
    program = str(Path(sys.executable).parent / command[0])
    result = subprocess.run(
        [program, *command[1:]], capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )
    log.write_text(result.stdout + result.stderr)
    lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    require(result.returncode == 0, f"exit status {result.returncode}: {lines[-1] if lines else 'no output'}")
    return result.stdout
