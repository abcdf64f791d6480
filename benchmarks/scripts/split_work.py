"""Measures what `eyas serve`, with its services as processes, costs and gains on this machine against `LLM` in one process.

Both decode the same prompts in turn, plainly and with drafts. Writes a dated report:
`python -m benchmarks.scripts.split_work`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

import typer

from benchmarks.scripts.demo import PROMPTS, read_prompts
from benchmarks.scripts.streaming_work import child_process, cpu_seconds, read_events
from eyas.api.request import SamplingParams
from eyas.bench.report import Report, Spread, Table, number
from eyas.errors import EyasError
from eyas.llm import LLM
from eyas.progress import Progress, progress
from eyas.services.local.cluster import Cluster, free_port, running_cluster
from eyas.services.local.demo import warm_up
from eyas.services.local.serve import plan

Mode = Literal["plain", "speculative"]
Contender = Literal["one process", "split"]
MODES: tuple[Mode, ...] = ("plain", "speculative")
SERVICES = ("router", "verifier", "draft", "redis")
NAME = "served"


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement.

    Attributes:
        clients: streams at once, or prompts of one batch of `LLM`.
        num_tokens: of each prompt, greedy.
    """

    model: str
    draft_model: str
    method: str
    clients: tuple[int, ...]
    num_tokens: int
    repeats: int


class Run(NamedTuple):
    """One run of all clients. cpu_us: processor time of each process, in microseconds a token."""

    texts: tuple[str, ...]
    tokens_per_s: float
    cpu_us: dict[str, float]


@dataclass(frozen=True)
class SplitWork:
    """A contender's work for one number of clients.

    Attributes:
        tokens_per_s: of all clients together.
        cpu_us: processor time of each process for a token, in microseconds.
        identical: all texts equal the ones of the first contender's plain run.
    """

    contender: Contender
    mode: Mode
    num_clients: int
    tokens_per_s: Spread
    cpu_us: Mapping[str, float]
    identical: bool


def main(
    model: Annotated[str, typer.Option(help="Folder or hub id of the target model.")] = "models/demo/target",
    draft_model: Annotated[str, typer.Option(help="Folder or hub id of a draft head.")] = "models/demo/eagle3",
    method: Annotated[str, typer.Option(help="Drafting method; by default the one that the draft model is for.")] = "",
    clients: Annotated[list[int], typer.Option(help="Clients at once; may be repeated.")] = [1, 4, 8],  # noqa: B006
    num_tokens: Annotated[int, typer.Option(help="Tokens of each client.")] = 128,
    repeats: Annotated[int, typer.Option(help="Runs of each case.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Measure the services of a model against one process."""
    os.environ.pop("OMP_NUM_THREADS", None)  # each has the threads that a user's command gives it
    settings = Settings(model, draft_model, method, tuple(clients), num_tokens, repeats)
    with progress() as shown:
        found = measure(settings, shown)
    program = "python -m benchmarks.scripts.split_work"
    Report.here("split-work", program, "cpu", settings, found, tables(found)).publish(out)


def measure(settings: Settings, shown: Progress) -> list[SplitWork]:
    """Measure all cases; the contenders take turns in each."""
    prompts = [prompt.token_ids for prompt in read_prompts(PROMPTS)]
    services = plan(settings.model, settings.draft_model, settings.method, [NAME])
    shown.show("starting the services and the process")
    found = list[SplitWork]()
    texts = tuple[str, ...]()
    with running_cluster(services, free_port()) as cluster, child_process(_decode, settings) as (pid, pipe):
        llm = LlmProcess(pid, pipe, settings.num_tokens)
        pipe.recv()
        for child in cluster.services:
            cluster.wait(child)
        warm_up(cluster["router"].address)
        cases: list[tuple[int, Mode]] = list(product(settings.clients, MODES))
        for num_clients, mode in shown.track(cases, "cases"):
            asked = [prompts[number % len(prompts)] for number in range(num_clients)]
            runs: dict[Contender, list[Run]] = {"one process": [], "split": []}
            for repeat in range(1 + settings.repeats):
                for contender in list(runs)[:: 1 if repeat % 2 else -1]:
                    alone = contender == "one process"
                    run = llm.run(asked, mode) if alone else run_split(cluster, settings, asked, mode)
                    runs[contender] += [run] if repeat else []  # the first warms up
            texts = texts if mode == "speculative" else runs["one process"][0].texts
            found += [summary(contender, mode, num_clients, own, texts) for contender, own in runs.items()]
    return found


def summary(contender: Contender, mode: Mode, num_clients: int, runs: Sequence[Run], expected: Sequence[str]) -> SplitWork:
    """Return the result of the runs of a case. expected: the texts of plain decoding in one process."""
    cpu_us = {name: median(run.cpu_us[name] for run in runs) for name in runs[0].cpu_us}
    identical = all(run.texts == tuple(expected) for run in runs)
    return SplitWork(contender, mode, num_clients, Spread.of([run.tokens_per_s for run in runs]), cpu_us, identical)


def run_split(cluster: Cluster, settings: Settings, prompts: Sequence[Sequence[int]], mode: Mode) -> Run:
    """Let clients of the router read a stream each, all at once."""
    common = {"model": NAME, "max_tokens": settings.num_tokens, "temperature": 0.0, "ignore_eos": True}
    bodies = [common | {"prompt": list(prompt), **({"drafter": "none"} if mode == "plain" else {})} for prompt in prompts]
    address = cluster.http.removeprefix("http://")

    async def read_all() -> list[list[dict[str, Any]]]:
        return await asyncio.gather(*(read_events(address, "/v1/completions", body) for body in bodies))

    pids = {child.name: child.process.pid for child in cluster.children}
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    started = time.perf_counter()
    streams = asyncio.run(read_all())
    seconds = time.perf_counter() - started
    num_tokens = settings.num_tokens * len(prompts)
    cpu_us = {name: 1e6 * (cpu_seconds(pid) - before[name]) / num_tokens for name, pid in pids.items()}
    texts = tuple("".join(choice["text"] for event in stream for choice in event["choices"]) for stream in streams)
    return Run(texts, num_tokens / seconds, cpu_us)


@dataclass(frozen=True)
class LlmProcess:
    """A process that decodes with an LLM what comes through the pipe."""

    pid: int
    pipe: Connection
    num_tokens: int

    def run(self, prompts: Sequence[Sequence[int]], mode: Mode) -> Run:
        """Decode prompts as one batch."""
        before = cpu_seconds(self.pid)
        started = time.perf_counter()
        self.pipe.send((prompts, self.num_tokens, mode == "speculative"))
        texts = self.pipe.recv()
        seconds = time.perf_counter() - started
        num_tokens = self.num_tokens * len(prompts)
        return Run(texts, num_tokens / seconds, {"one process": 1e6 * (cpu_seconds(self.pid) - before) / num_tokens})


def _decode(pipe: Connection, settings: Settings) -> None:
    llm = LLM(settings.model, settings.draft_model, settings.method or None)
    pipe.send("ready")
    while True:
        prompts, num_tokens, draft = pipe.recv()
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        outputs = llm.generate([list(prompt) for prompt in prompts], sampling, use_tqdm=False, draft=draft)
        pipe.send(tuple(output.outputs[0].text for output in outputs))


def tables(found: Sequence[SplitWork]) -> list[Table]:
    """Return the tables of the report."""
    alone = {(work.mode, work.num_clients): work for work in found if work.contender == "one process"}
    rows = []
    for work in found:
        base = alone[work.mode, work.num_clients]
        total = sum(work.cpu_us.values())
        rows.append(
            (
                f"{work.num_clients}",
                work.mode,
                work.contender,
                f"{work.tokens_per_s}",
                f"{work.tokens_per_s.median / base.tokens_per_s.median:.2f}",
                number(total),
                f"{total / sum(base.cpu_us.values()):.2f}",
                *(number(work.cpu_us[name]) if name in work.cpu_us else "" for name in SERVICES),
                "yes" if work.identical else "no",
            )
        )
    columns = ("clients", "mode", "contender", "tokens a second", "ratio", "CPU, us", "ratio", *SERVICES, "identical")
    note = (
        "`LLM.generate` of one batch against clients of the router who read server-sent events. CPU: processor time of all "
        "processes for a token, and of each service; the clients' own is left out. Ratios are to one process. Each has the "
        "threads that its command gives it by default. Identical: the texts equal plain decoding in one process."
    )
    return [Table("Split", columns, tuple(rows), note)]


if __name__ == "__main__":
    try:
        typer.run(main)
    except (EyasError, EOFError) as error:
        sys.exit(f"error: {error}")
