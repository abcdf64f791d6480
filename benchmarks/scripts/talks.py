"""Measures the methods of the EAGLE talks on a published model: `python -m benchmarks.scripts.talks`, or `make talks`.

The model is Gemma 3 270M, as `benchmarks.scripts.gemma` fetches it; --model names another. Data, features, heads and
measurements are kept in the folder of the run, and the same command goes on where it was stopped.
"""

from __future__ import annotations

import ast
import json
import os
import random
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from benchmarks.scripts.gemma import TREE, check_same, fetch, run_eyas
from eyas.bench.report import Report, Table
from eyas.errors import ConfigError, EyasError

RECIPES = Path("examples/gemma")
WINDOW = 512
# Beginnings of texts of the kinds that are measured, in words of our own. The target continues each at temperature 1.
OPENERS = (
    *("Question:", "Q:", "What is", "Who was", "Why do", "How does", "When did", "Where is", "How many", "Which of these"),
    *("Translate German to English:", "Übersetzung:", "Die", "Der Präsident", "English: It rains.\nGerman:", "Summarize:"),
    *("Summary:", "(CNN) --", "LONDON, England --", "The government said on Monday that", "By our reporter\n", "Problem:"),
    *("Solve the following:", "A farmer has", "If x =", "There are 12 students in a class.", "Solution:", "Let", "Answer:"),
    *("Write an email", "Write a story about", "Explain", "Describe", "Imagine that you are", "Compose", "Dear", "The"),
    *("In"),
    *("Once upon a time", "This article", "It was", "According to", "A study published in", "The history of", "Passage:"),
    *("Document [1]", "Wikipedia:", "Title:", "The following is a list of", "Step 1:", "First,", "User:", "Assistant:"),
    *("Review:", "The movie", "Top 10", "Tips for", "How to make", "def ", "import", "#include"),
)
# Tokens that the target adds to an opener, and to the first tokens of a text.
OPENED, CONTINUED, BEGINNING = 112, 128, 40
# Documentation: least and most characters of a text, and about how many a token has.
LEAST, MOST = 400, 2000
PER_TOKEN = 3.5
LETTERS = 0.75
# Spec-Bench's kinds. Its first 80 questions are those of MT-bench, whose categories count as one kind.
KINDS = {"translation": "translation", "summarization": "summarisation", "qa": "question answering"}
KINDS |= {"math_reasoning": "mathematical reasoning", "rag": "retrieval-augmented"}
MULTI_TURN = "multi-turn"
# Draft budgets that are measured, in words.
BUDGETS = {
    "auto": "As served: trees that do not pay are left out.",
    "fixed": "Every step has a whole tree, whether it pays or not.",
}
# Steps at the end of a run that count for its figures.
LAST = 10
# The methods that are measured, with the run that trains the head of each; an empty one needs none.
METHODS = {
    "sps": "small", "prompt_lookup": "", "suffix": "", "lookahead": "", "rest": "", "medusa": "medusa", "hydra": "hydra",
    "eagle1": "eagle1", "eagle2": "eagle1", "eagle3": "eagle3", "dspark": "dspark", "eagle3+suffix": "eagle3",
    "dspark+suffix": "dspark",
}  # fmt: skip

app = typer.Typer()


@app.command()
def main(  # options of the command
    questions: Annotated[Path, typer.Option(help="Spec-Bench's questions, a JSON Lines file.")],
    model: Annotated[str, typer.Option(help="GGUF file, folder or hub id; by default Gemma 3 270M is fetched.")] = "",
    work: Annotated[Path, typer.Option(help="Folder of all that is fetched, trained and measured.")] = Path("build/talks"),
    tokens: Annotated[int, typer.Option(help="Tokens of training data, half of them the target's own answers.")] = 5_000_000,
    passes: Annotated[float, typer.Option(help="Passes of each head over the data.")] = 1.0,
    head: Annotated[list[str] | None, typer.Option(help="Heads to train, by recipe; by default all. For parts.")] = None,
    per_kind: Annotated[int, typer.Option(help="Questions of each kind that are measured; 0 measures nothing.")] = 10,
    max_tokens: Annotated[int, typer.Option(help="Tokens that each question is continued by.")] = 128,
    temperature: Annotated[list[float], typer.Option(help="May be repeated.")] = [0.0, 1.0],  # noqa: B006
    budget: Annotated[list[str], typer.Option(help="Draft budgets, auto and fixed.")] = ["auto", "fixed"],  # noqa: B006
    generate: Annotated[bool, typer.Option(help="Measure transformers' generate and its prompt lookup, too.")] = True,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Prepare data, train a head of each method on them, and compare the methods by kinds of questions."""
    work.mkdir(parents=True, exist_ok=True)
    if not model:
        os.environ.setdefault("HF_HOME", str(work.resolve() / "hub"))
        model = str(fetch(work))
    check_same(work / "settings.json", {"model": model, "tokens": str(tokens)})
    data = write_data(model, work, tokens)
    recipes = head or sorted(file.stem for file in RECIPES.glob("*.yaml"))
    for name in recipes:
        train(name, model, data, work, passes)
    if not per_kind:
        return
    write_questions(questions, work / "questions.jsonl", per_kind)
    measurement = Measurement(per_kind, max_tokens, tuple(temperature), generate, passes)
    measured = {name: measure(model, work, name, measurement) for name in budget}
    settings = asdict(measurement) | {"tokens": num_tokens(data), "tree": " ".join(TREE)}
    publish(measured, work, settings, out)


@dataclass(frozen=True)
class Measurement:
    """Settings of a measurement: questions of each kind, what of them is decoded, and how long the heads were trained."""

    per_kind: int
    max_tokens: int
    temperatures: tuple[float, ...]
    generate: bool
    passes: float


def measure(model: str, work: Path, budget: str, c: Measurement) -> list[dict[str, Any]]:
    """Return the scores of all methods by `eyas bench methods`. A measurement that is there already is kept.

    transformers runs with the first draft budget alone, which does not change it. Raises ConfigError for a measurement with
    other settings.
    """
    out = work / f"measured-{budget}"
    check_same(work / f"measured-{budget}.json", {name: str(value) for name, value in asdict(c).items()})
    if not list(out.glob("*.json")):
        run_eyas(
            *("bench", "methods", f"--model={model}", f"--prompts={work / 'questions.jsonl'}"),
            *(f"--num-prompts={c.per_kind * (len(KINDS) + 1)}", f"--max-tokens={c.max_tokens}", f"--out={out}"),
            *(f"--draft-budget={budget}", "--processor-time", "--threads=1", *TREE),
            "--generate" if c.generate and budget == "auto" else "--no-generate",
            *(f"--temperature={value:g}" for value in c.temperatures),
            *(f"--method={method}" for method in measured_methods(model, work)),
        )
    results = json.loads(max(out.glob("*.json")).read_text())["results"]
    return list(results["scores"])


def write_data(model: str, work: Path, tokens: int) -> Path:
    """Return the prepared folder with stored features next to it: documentation, and as much of the target's own text.

    A quarter of the tokens continues openers, a quarter beginnings of these texts and of documentation, greedily and drawn
    in turn.
    """
    data = work / "data"
    documents, openers, beginnings = (work / f"{name}.jsonl" for name in ("documents", "openers", "beginnings"))
    opened, continued = work / "opened.jsonl", work / "continued.jsonl"
    if not (data / "prepared.json").exists():
        if not documents.exists():
            write_rows(documents, documentation(Path(sysconfig.get_path("purelib")), int(tokens / 2 * PER_TOKEN)))
        num_opened, num_continued = (max(1, tokens // 4 // length) for length in (OPENED, CONTINUED))
        write_rows(openers, (OPENERS[number % len(OPENERS)] for number in range(num_opened)))
        answer = ("train", "regenerate", f"--model={model}", "--batch=16", "--quantization=int8", "--threads=1")
        run_eyas(*answer, str(openers), f"--out={opened}", "--temperature=1", f"--max-tokens={OPENED}")
        if not beginnings.exists():
            mix_lines(beginnings, (opened, documents), num_continued)
        run_eyas(
            *(*answer, str(beginnings), f"--out={continued}", "--temperature=0", "--temperature=1"),
            *(f"--prompt-tokens={BEGINNING}", f"--max-tokens={CONTINUED}"),
        )
        texts = map(str, (documents, opened, continued))
        run_eyas("train", "prepare", *texts, f"--model={model}", f"--out={data}", f"--max-length={WINDOW}")
    settings = (f"model={model}", f"data.path={data}", f"out={work / 'unused'}", "threads=1")
    recipe, features = RECIPES / "eagle3.yaml", work / "features"
    run_eyas("train", "features", f"--config={recipe}", f"--out={features}", settings=settings)
    return data


def documentation(folder: Path, num_characters: int, seed: int = 0) -> list[str]:
    """Return texts from the documentation and docstrings of installed packages, from files in a seeded order."""
    kinds = {".md", ".rst", ".py"}
    files = sorted(file for file in folder.rglob("*") if file.suffix in kinds or file.name == "METADATA")
    random.Random(seed).shuffle(files)
    found: dict[str, None] = {}  # each text once
    for file in files:
        for text in texts_of(file):
            letters = sum(character.isalpha() or character == " " for character in text)
            if len(text) >= LEAST and letters >= LETTERS * len(text) and "WARRANT" not in text:
                found[text[:MOST].strip()] = None
        if sum(map(len, found)) >= num_characters:
            break
    return list(found)


def texts_of(file: Path) -> Iterator[str]:
    """Yield the docstrings of a Python file, or the whole of another text. A file that cannot be read has none."""
    try:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text) if file.suffix == ".py" else None
    except (OSError, ValueError, SyntaxError):
        return
    if tree is None:
        yield text
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def write_rows(file: Path, texts: Sequence[str] | Iterator[str]) -> None:
    """Write texts as rows that `eyas train` reads."""
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def mix_lines(file: Path, sources: Sequence[Path], count: int) -> None:
    """Write lines of several files in turn, as many as are asked for or there are."""
    lines = [source.read_text().splitlines(keepends=True) for source in sources]
    mixed = [line for group in zip(*lines, strict=False) for line in group]
    file.write_text("".join(mixed[:count]))


def write_questions(questions: Path, file: Path, per_kind: int) -> Path:
    """Write the first turns of some questions of each kind, kind after kind in turn. Raises ConfigError for another file."""
    try:
        entries = [json.loads(line) for line in questions.read_text(encoding="utf-8").splitlines()]
        by_kind: dict[str, list[str]] = {}
        for entry in entries:
            by_kind.setdefault(KINDS.get(entry["category"], MULTI_TURN), []).append(entry["turns"][0])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"cannot read Spec-Bench's questions from {questions}: {error!r}") from error
    spread = {kind: own[:: max(1, len(own) // per_kind)][:per_kind] for kind, own in by_kind.items()}
    rows = [{"task": kind, "text": text} for kind, own in spread.items() for text in own]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def train(name: str, model: str, data: Path, work: Path, passes: float) -> None:
    """Train the head of a recipe on stored features; a stopped run goes on."""
    steps = max(1, round(passes * num_windows(data)))  # recipes take a window in each
    settings = {
        "model": model, "data.path": data, "data.features": work / "features", "out": work / "heads" / name,
        "optimizer.max_steps": steps, "threads": 1, "save_every": 25, "log_every": 1,
    }  # fmt: skip
    settings_words = [f"{key}={value}" for key, value in settings.items()]
    run_eyas("train", "run", f"--config={RECIPES / name}.yaml", settings=settings_words)


def num_windows(data: Path) -> int:
    """Return the windows of the training data, about."""
    return max(1, num_tokens(data) // WINDOW)


def num_tokens(data: Path) -> int:
    """Return the tokens of the training data."""
    return int(json.loads((data / "prepared.json").read_text())["num_tokens"])


def measured_methods(model: str, work: Path) -> list[str]:
    """Return the methods with their heads, as far as these are trained, and the datastore of `rest`, made of the data."""
    store = work / "datastore"
    if not store.exists():
        texts = (work / name for name in ("documents.jsonl", "opened.jsonl", "continued.jsonl"))
        run_eyas("datastore", "build", *map(str, texts), f"--model={model}", f"--out={store}")
    sources = {name: work / "heads" / recipe / "best" if recipe else None for name, recipe in METHODS.items()}
    sources["rest"] = store
    return [f"{name}={folder}" if folder else name for name, folder in sources.items() if not folder or folder.exists()]


def publish(measured: Mapping[str, list[dict[str, Any]]], work: Path, settings: dict[str, Any], out: Path) -> None:
    """Write the report: tables by temperature and draft budget, how the heads were trained, and their curves."""
    tables = [
        table(scores, temperature, budget)
        for budget, scores in measured.items()
        for temperature in dict.fromkeys(score["temperature"] for score in scores)
    ]
    logs = {file.parent.name: read_log(file) for file in sorted((work / "heads").glob("*/log.jsonl"))}
    results = {"measured": measured, "trained": {name: entries[-1:] for name, entries in logs.items()}}
    tables.append(training_table(logs))
    page = Report.here("talks", "python -m benchmarks.scripts.talks", "cpu", settings, results, tables).publish(out)
    draw(logs, measured, page.with_suffix(".png"))


def table(scores: Sequence[dict[str, Any]], temperature: float, budget: str) -> Table:
    """Return speedup and tau of each method, in the mean over kinds and for each."""
    own = [score for score in scores if score["temperature"] == temperature]
    kinds = [task["task"] for task in own[0]["tasks"]]
    rows = []
    for score in own:
        speedups = list(map(_speedup, score["tasks"]))
        taus = list(map(_tau, score["tasks"]))
        cells = [
            f"{speedup:.2f} / {tau:.2f}" if tau else f"{speedup:.2f}" for speedup, tau in zip(speedups, taus, strict=True)
        ]
        found = score["identical"]
        mean_tau = f"{fmean(taus):.2f}" if all(taus) else ""
        equal = f"{found['num_identical']} of {found['num_outputs']}"
        rows.append((score["method"], f"{fmean(speedups):.2f}", mean_tau, *cells, equal))
    note = (
        f"{BUDGETS[budget]} Batch 1, one thread. Speedup over plain decoding in the same run, by processor time, median "
        "over the prompts of a kind; tau: tokens per verify step, bonus included. First come means over the kinds."
    )
    columns = ("method", "speedup", "tau", *kinds, "outputs equal to plain")
    return Table(f"Temperature {temperature:g}, {budget} draft budget", columns, tuple(rows), note)


def _speedup(task: dict[str, Any]) -> float:
    return float(task["speedup"]["median"])


def _tau(task: dict[str, Any]) -> float:
    return float(task["tau"] or 0)


def read_log(file: Path) -> list[dict[str, Any]]:
    """Return the steps of a run."""
    return [entry for line in file.read_text().splitlines() if "loss" in (entry := json.loads(line))]


def training_table(logs: Mapping[str, Sequence[dict[str, Any]]]) -> Table:
    """Return what each head has seen, how fast, and how often it agreed with the target's likeliest token at the end."""
    rows = []
    for name, entries in logs.items():
        first = entries[0]
        last = entries[-1]
        agreements = (fmean(entry["agreement_1"] for entry in part) for part in (entries[:LAST], entries[-LAST:]))
        figures = (*(f"{value:.2f}" for value in agreements), f"{last['tokens_per_second']:.0f}")
        rows.append(
            (name, f"{last['step']}", f"{last['num_tokens']}", f"{first['loss']:.2f}", f"{last['loss']:.2f}", *figures)
        )
    columns = ("head", "steps", "tokens seen", "first loss", "last loss", f"agreement, first {LAST} steps", f"last {LAST}")
    note = "Agreement: with the target's likeliest next token, of the first drafted one. Each loss is of one step."
    return Table("Training", (*columns, "tokens/s"), tuple(rows), note)


def draw(logs: Mapping[str, Sequence[dict[str, Any]]], measured: Mapping[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw the agreement of each head as it is trained, and the methods' mean speedups with the first draft budget."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, entries in logs.items():
        smooth = [fmean(entry["agreement_1"] for entry in entries[max(0, n - LAST) : n + 1]) for n in range(len(entries))]
        left.plot([entry["num_tokens"] for entry in entries], smooth, label=name)
    left.set_xlabel("tokens seen")
    left.set_ylabel(f"agreement with the target, mean of {LAST} steps")
    left.legend(fontsize=8)
    scores = next(iter(measured.values()))
    for temperature in dict.fromkeys(score["temperature"] for score in scores):
        own = [score for score in scores if score["temperature"] == temperature]
        means = [fmean(map(_speedup, score["tasks"])) for score in own]
        right.plot(means, [score["method"] for score in own], "o", label=f"temperature {temperature:g}")
    right.axvline(1.0, color="black", linewidth=0.8)
    right.set_xlabel("speedup over plain decoding, mean over kinds")
    right.legend(fontsize=8)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    try:
        app()
    except EyasError as error:
        sys.exit(f"error: {error}")
