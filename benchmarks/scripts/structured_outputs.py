"""Costs of structured outputs, and their effect on acceptance: the demo models with and without grammars.

Counts processor time, of all threads. Writes a dated report: `python -m benchmarks.scripts.structured_outputs`.
"""

from __future__ import annotations

import json
import random
import string
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from eyas.api.request import GenerationStats, Request, SamplingParams, StructuredOutputs
from eyas.bench.report import Report, Table, number
from eyas.config import DraftingConfig, EngineConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.engine.build import assemble_engine, load_model
from eyas.engine.engine import Engine
from eyas.engine.grammar_manager import GrammarManager
from eyas.grammar.compiler import Grammar, GrammarCompiler, OutputMatchers
from eyas.protocol.tree import DraftTree
from eyas.sampling.acceptance import LogitRows
from eyas.sampling.logit_rules import TokenMasks
from eyas.services.local.compare import read_prompts
from eyas.text.tokenizer import load_tokenizer

MODELS = Path("models/demo")
TREE = TreeConfig(num_draft_tokens=16, num_steps=5, top_k=4)
METHODS = {"eagle3": "eagle3-full", "sps": "small", "prompt_lookup": ""}
KINDS = {"eagle3": ("none", "root", "paths"), "sps": ("none", "root", "paths"), "prompt_lookup": ("none", "root")}
LARGE_VOCAB = 128 * 1024
_FIELDS = {
    "name": {"type": "string", "maxLength": 16},
    "line": {"type": "integer"},
    "kind": {"enum": ["function", "class", "module"]},
    "arguments": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
}
CONSTRAINTS: Mapping[str, StructuredOutputs] = {
    "record": StructuredOutputs(
        json={"type": "object", "properties": _FIELDS, "required": list(_FIELDS), "additionalProperties": False},
        whitespace_pattern="",
    ),
    "object": StructuredOutputs(json_object=True),
    "code": StructuredOutputs(regex=r"def [a-z_]{1,12}\([a-z]{1,5}\):\n    return [a-z_.]{1,20}\n"),
}

NOTE = (
    "tau counts tokens and is exact; every output equals that of plain constrained decoding. The kinds of masks take turns, "
    "and of equal runs the quickest counts, because other programs use the machine. The time spent waiting for masks is "
    "wall time, mostly of a busy machine. masks: what the drafter gets: none, the root's, which a remote drafter gets, or "
    "those of the paths of the tree while it grows, which a drafter in the engine's process gets."
)


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        seconds: processor time of all threads.
        waited: the part that the engine's thread waits for masks once the logits are there.
        num_steps: verify steps.
        tokens: all of them.
    """

    method: str
    constraint: str
    temperature: float
    drafter: str
    seconds: float
    waited: float
    num_steps: float
    tokens: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def tau(self) -> float:
        """Mean tokens of a step."""
        return (self.num_tokens - len(self.tokens)) / max(self.num_steps, 1)

    def and_also(self, other: Outcome) -> Outcome:
        """Both runs as one."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in ("seconds", "waited", "num_steps", "tokens")}
        return replace(self, **sums)


@dataclass(frozen=True)
class MaskCost:
    """Masks of a step, in milliseconds: processor time and wall time to compute them, processor time to apply them."""

    constraint: str
    batch: int
    milliseconds: float
    wall: float
    applied: float


class _Stopwatch:
    """Counts the time that an engine waits for masks."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = 0.0
        manager = engine.grammars
        start = manager.start

        def timed(*args: Any) -> Callable[[], TokenMasks]:
            wait = start(*args)

            def waiting() -> TokenMasks:
                started = time.perf_counter()
                masks = wait()
                self.seconds += time.perf_counter() - started
                return masks

            return waiting

        manager.start = timed  # type: ignore[method-assign]


def build(method: str) -> Engine:
    """Return an engine with the method's demo model; "plain" has none."""
    target, head = str(MODELS / "target"), str(MODELS / METHODS[method]) if METHODS.get(method) else ""
    opened = DraftHead(head, method) if method != "plain" else None
    fuser = opened.build_fuser(target, "float32", "cpu") if opened else None
    config = EngineConfig(max_kv_tokens=16384, draft_budget="fixed")
    drafter = opened.build_drafter(target, "float32", "cpu", TREE, DraftingConfig()) if opened else None
    return assemble_engine(load_model(target, fuser, "float32", "cpu", config), fuser, config, TREE, drafter)


def run(engine: Engine, stopwatch: _Stopwatch, method: str, name: str, requests: Sequence[Request], drafter: str) -> Outcome:
    """Generate one request after the other. drafter: which masks it gets, see NOTE."""
    stats, tokens = GenerationStats(), list[tuple[int, ...]]()
    root_masks, stopwatch.seconds = engine.grammars.root_masks, 0.0
    if drafter == "none":
        engine.grammars.root_masks = lambda tokens_of: {}  # type: ignore[method-assign]
    engine.draft_manager.use_path_masks(engine.grammars.path_masks if drafter == "paths" else lambda paths: dict)
    started = time.process_time()
    for request in requests:
        engine.submit(request)
        output: list[int] = []
        while engine.has_work:
            for chunk in engine.step():
                stats.add(chunk)
                output += chunk.token_ids
        tokens.append(tuple(output))
    seconds = time.process_time() - started
    engine.grammars.root_masks = root_masks  # type: ignore[method-assign]
    temperature = requests[0].sampling.temperature
    return Outcome(method, name, temperature, drafter, seconds, stopwatch.seconds, stats.num_verify_steps, tuple(tokens))


def interleaved(
    engine: Engine,
    stopwatch: _Stopwatch,
    method: str,
    name: str,
    requests: Sequence[Request],
    kinds: Sequence[str],
    repeats: int,
) -> list[Outcome]:
    """Return one outcome for each kind of masks. Kinds take turns, and of equal runs of a request the quickest counts."""
    best: dict[tuple[str, str], Outcome] = {}
    for request in requests:
        for kind in kinds * repeats:
            found = run(engine, stopwatch, method, name, [request], kind)
            best[kind, request.id] = min(found, best.get((kind, request.id), found), key=lambda outcome: outcome.seconds)
    return [reduce(Outcome.and_also, (best[kind, request.id] for request in requests)) for kind in kinds]


def requests_of(constraint: StructuredOutputs | None, temperature: float, num_prompts: int) -> list[Request]:
    """Return a request for each of the first demo prompts, each with a seed of its own."""
    sampling = SamplingParams(max_tokens=64, temperature=temperature, structured_outputs=constraint)
    prompts = read_prompts(MODELS / "prompts.jsonl")[:num_prompts]
    return [Request(f"{i}", prompt.token_ids[:48], replace(sampling, seed=i)) for i, prompt in enumerate(prompts)]


def measure(num_prompts: int, repeats: int, methods: Sequence[str]) -> list[Outcome]:
    """Methods and constraints at two temperatures; each speculative output is compared with the plain one."""
    outcomes: list[Outcome] = []
    for method in ("plain", *methods):
        engine = build(method)
        stopwatch = _Stopwatch(engine)
        for temperature in (0.0, 0.8):
            for name, constraint in ({"free": None} | dict(CONSTRAINTS)).items():
                requests = requests_of(constraint, temperature, num_prompts)
                kinds = KINDS[method] if constraint and method != "plain" else ("root",)
                for outcome in interleaved(engine, stopwatch, method, name, requests, kinds, repeats):
                    plain = next((o for o in outcomes if (o.constraint, o.temperature) == (name, temperature)), outcome)
                    assert outcome.tokens == plain.tokens, f"{method} differs from plain decoding: {name}, {temperature}"
                    outcomes.append(outcome)
                    spent = 1e3 * outcome.seconds / outcome.num_tokens
                    typer.echo(
                        f"{method} {name} {temperature} {outcome.drafter}: tau {outcome.tau:.2f}, {spent:.2f} ms a token"
                    )
    return outcomes


def compile_seconds() -> dict[str, float]:
    """Processor time to compile each constraint, in milliseconds; the tokenizer is loaded before."""
    compiler = GrammarCompiler(str(MODELS / "target"), 4096, frozenset({1}))
    compiler.compile(StructuredOutputs(regex="a"))
    found = {}
    for name, constraint in CONSTRAINTS.items():
        started = time.process_time()
        compiler.compile(constraint)
        found[name] = 1e3 * (time.process_time() - started)
    return found


def write_large_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with LARGE_VOCAB tokens: the demo's, and random words behind them."""
    tokenizer = json.loads((MODELS / "target" / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, rng = tokenizer["model"]["vocab"], random.Random(0)
    while len(vocab) < LARGE_VOCAB:
        word = "".join(rng.choices(string.ascii_letters, k=rng.randint(3, 12)))
        vocab.setdefault(rng.choice(("", "\u0120")) + word, len(vocab))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def large_vocabulary() -> list[MaskCost]:
    """Return masks of the trees of one step and of 32 requests, and their use, with a synthetic
    vocabulary of 128 Ki tokens.
    """
    costs = []
    with TemporaryDirectory() as name:
        write_large_tokenizer(Path(name))
        compiler = GrammarCompiler(name, LARGE_VOCAB, frozenset({1}))
        for title, constraint in CONSTRAINTS.items():
            grammar, ids = compiler.compile(constraint), _output_of(name, title)
            for batch in (1, 32):
                costs.append(_mask_cost(title, grammar, ids, batch))
    return costs


def _output_of(model: str, title: str) -> list[int]:
    """Return the tokens of a text that matches a constraint."""
    text = {
        "record": '{"name":"abc","line":12,"kind":"function","arguments":["a","bc"]}',
        "object": '{"name": "abc", "line": 12, "kind": {"a": [1, 2]}}',
        "code": "def read_file(path):\n    return path.read_text\n",
    }[title]
    ids: list[int] = load_tokenizer(model).tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _mask_cost(title: str, grammar: Grammar, ids: Sequence[int], batch: int) -> MaskCost:
    """Return the cost of a step whose trees are chains of 5 tokens with 2 wrong siblings at each node, 16 nodes."""
    manager = GrammarManager(frozenset({1}), LARGE_VOCAB)
    sampling = SamplingParams(seed=0, structured_outputs=CONSTRAINTS[title])
    requests = [Request(f"{i}", (5,), sampling) for i in range(batch)]
    for request in requests:
        manager.add(request, OutputMatchers(grammar.matcher(), grammar.matcher()))
    seconds, applied, wall, count = 0.0, 0.0, 0.0, 0
    logits = torch.zeros(16 * batch, LARGE_VOCAB)
    for start in range(0, len(ids) - 5, 5):
        tokens = (5, *ids[:start])
        tree = _tree(tokens[-1], ids[start : start + 5])
        rows = [LogitRows(request, tokens, tree) for request in requests]
        before, began = time.process_time(), time.perf_counter()
        masks = manager.start(rows)()
        seconds, wall = seconds + time.process_time() - before, wall + time.perf_counter() - began
        before = time.process_time()
        masks.applied(logits, rows)
        applied, count = applied + time.process_time() - before, count + 1
    return MaskCost(title, batch, 1e3 * seconds / count, 1e3 * wall / count, 1e3 * applied / count)


def _tree(root: int, ids: Sequence[int]) -> DraftTree:
    tokens, parents, parent = [root], [0], 0
    for token in ids:
        tokens += [token, 7, 8]
        parents += [parent] * 3
        parent = len(tokens) - 3
    return DraftTree.of(tokens, parents, (0.0,) * len(tokens))


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """Return the outcomes as rows."""
    times = "processor ms a step", "processor ms a token", "ms waiting for masks a step"
    columns = ("method", "constraint", "temperature", "masks", "tau", *times)
    rows = tuple(
        (o.method, o.constraint, number(o.temperature), o.drafter if o.constraint != "free" and o.method != "plain" else "",
         number(o.tau), number(1e3 * o.seconds / max(o.num_steps, 1)), number(1e3 * o.seconds / o.num_tokens),
         number(1e3 * o.waited / max(o.num_steps, 1)))
        for o in outcomes
    )  # fmt: skip
    return Table("Steps", columns, rows, NOTE)


def main(
    num_prompts: Annotated[int, typer.Option(help="How many of the demo prompts.")] = 8,
    repeats: Annotated[int, typer.Option(help="Equal runs; the quickest counts.")] = 3,
    method: Annotated[list[str] | None, typer.Option(help="Methods; all by default.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Measure, and write a dated report."""
    torch.set_num_threads(1)
    outcomes, compiled = measure(num_prompts, repeats, method or tuple(METHODS)), compile_seconds()
    rows = tuple((name, number(milliseconds)) for name, milliseconds in compiled.items())
    large = large_vocabulary()
    columns = ("constraint", "requests", "processor ms for masks a step", "wall ms", "processor ms to apply them")
    cells = tuple((c.constraint, f"{c.batch}", number(c.milliseconds), number(c.wall), number(c.applied)) for c in large)
    tables = [
        table_of(outcomes),
        Table("Compiling", ("constraint", "processor ms"), rows),
        Table("Vocabulary of 128 Ki, trees of 16 nodes; 6 match", columns, cells),
    ]
    settings = {
        "num_prompts": num_prompts,
        "repeats": repeats,
        "max_tokens": 64,
        "tree": TREE,
        "constraints": dict(CONSTRAINTS),
    }
    results = {
        "steps": [{**vars(o), "tokens": o.num_tokens} for o in outcomes],
        "compiling": compiled,
        "large": [vars(c) for c in large],
    }
    report = Report.here("structured-outputs", "benchmarks.scripts.structured_outputs", "cpu", settings, results, tables)
    report.publish(out)


if __name__ == "__main__":
    typer.run(main)
