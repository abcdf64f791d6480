"""`make demo`: measures plain against speculative decoding of the demo model on this machine, from a checkout."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, product
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.api.outputs import TextChunk
from eyas.api.request import GenerationStats, Request, SamplingParams
from eyas.bench.results import Run, first_difference, total_stats
from eyas.cli.generate import ScreenPrinter
from eyas.client import Client, RetryPolicy
from eyas.errors import EyasError, RequestFailed
from eyas.progress import Progress
from eyas.rpc.messages import NO_DRAFTER, GenerateCall
from eyas.services.local.cluster import START_TIMEOUT_S, Cluster, free_port
from eyas.services.local.demo import ROOT, running_demo, warm_up
from eyas.services.local.serve import AssignmentsOption, exit_on_error, wait_until_ready

PROMPTS = ROOT / "models" / "demo" / "prompts.jsonl"
TEMPERATURES = (0.0, 0.8)
SEED = 2024
NUM_SHOWN_TOKENS = 64
# Of each prompt in each mode, in turn. The fastest counts: other programs can only slow a pass down.
NUM_PASSES = 3
CALL_SECONDS = 60.0

Mode = Literal["plain", "speculative"]


def demo(
    num_prompts: Annotated[int, typer.Option(help="Prompts to measure.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="New tokens of each.")] = 128,
    assignments: AssignmentsOption = None,
) -> None:
    """Measure drafting against plain decoding on the same prompts, and show it at work."""
    console = Console(highlight=False, soft_wrap=True)
    with exit_on_error(console), running_demo(free_port(), assignments or ()) as cluster:
        wait_until_ready(console, cluster, START_TIMEOUT_S)
        prompts = read_prompts(PROMPTS)
        once = RetryPolicy(max_attempts=1)
        with Client(cluster["router"].address, retry=once) as router, _name_dead_service(cluster):
            with Progress(console) as shown:
                shown.show("waiting for draft trees")
                warm_up(cluster["router"].address)
            comparisons = list[DemoComparison]()
            for prompt, temperature in zip(prompts, TEMPERATURES, strict=False):
                sampling = _sampling(temperature, max_tokens)
                comparisons.append(_measure(console, router, prompts[:num_prompts], sampling))
                _show(console, router, prompt, temperature)  # by now the draft budget knows what trees yield
        console.print(_table(comparisons))
        for comparison in comparisons:
            if reason := comparison.reason:
                console.print(f"At temperature {comparison.temperature} {reason}")
        if differences := [line for comparison in comparisons for line in comparison.differences()]:
            raise RequestFailed("speculative output differs from plain output:\n" + "\n".join(differences))


@contextmanager
def _name_dead_service(cluster: Cluster) -> Iterator[None]:
    """Raise a dead process's error instead of that of a call which failed because the process has ended."""
    try:
        yield
    except EyasError:
        cluster.check()
        raise


@dataclass(frozen=True)
class Prompt:
    """A prompt and its source."""

    source: str
    text: str
    token_ids: tuple[int, ...]


def read_prompts(file: Path) -> list[Prompt]:
    """Read the prompts of a JSON Lines file with source, text and token_ids."""
    entries = map(json.loads, file.read_text().splitlines())
    return [Prompt(entry["source"], entry["text"], tuple(entry["token_ids"])) for entry in entries]


def _ask(
    router: Client,
    prompt: Prompt,
    sampling: SamplingParams,
    mode: Mode,
    on_chunk: Callable[[TextChunk], object] = lambda _: None,
) -> Run:
    """Decode a prompt to the end. Raises EyasError when the call or the generation fails."""
    drafter = NO_DRAFTER if mode == "plain" else ""
    call = GenerateCall(Request("", prompt.token_ids, sampling), drafter=drafter)
    token_ids: list[int] = []
    started = time.perf_counter()
    for chunk in router.chunks(call, CALL_SECONDS):
        on_chunk(chunk)
        token_ids += chunk.chunk.token_ids
    seconds = time.perf_counter() - started
    if chunk.totals is None or chunk.chunk.finish_reason not in ("stop", "length"):
        raise RequestFailed(f"{prompt.source}: ended with {chunk.chunk.finish_reason}: {chunk.chunk.message}")
    return Run(seconds, (tuple(token_ids),), chunk.totals.stats or GenerationStats())


def _sampling(temperature: float, max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=SEED, ignore_eos=True)


def _show(console: Console, router: Client, prompt: Prompt, temperature: float) -> None:
    """Stream a continuation, draft tokens in another style than the tokens of the target."""
    console.rule(f"{prompt.source} at temperature {temperature}", align="left", style="dim")
    console.print(Text(prompt.text, style="dim"), end="")
    printer = ScreenPrinter(console)
    printer.start()
    _ask(router, prompt, _sampling(temperature, NUM_SHOWN_TOKENS), "speculative", printer.add)


@dataclass(frozen=True)
class DemoComparison:
    """The answers to the same prompts, decoded plainly and speculatively at one temperature.

    answers: of all prompts, NUM_PASSES times.
    """

    temperature: float
    prompts: Sequence[Prompt]
    answers: dict[Mode, list[Run]] = field(default_factory=lambda: {"plain": [], "speculative": []})

    @property
    def stats(self) -> GenerationStats:
        """Speculation statistics, summed over all prompts."""
        return total_stats(self.answers["speculative"])

    def speed(self, mode: Mode) -> float:
        """Return the tokens per second over the fastest passes of all prompts, time to the first token included; prompts are
        cached.
        """
        return sum(len(run.outputs[0]) for run in self.answers[mode]) / NUM_PASSES / self._seconds(mode, 0)

    def _seconds(self, mode: Mode, rank: int) -> float:
        """Return the seconds of a pass of each prompt, together: of the fastest one for rank 0, of the next one for 1."""
        passes = [self.answers[mode][first :: len(self.prompts)] for first in range(len(self.prompts))]
        return sum(sorted(answer.seconds for answer in answers)[rank] for answers in passes)

    @property
    def noise(self) -> float:
        """The share by which the next passes took longer than the fastest ones."""
        modes: tuple[Mode, Mode] = ("plain", "speculative")
        return max(self._seconds(mode, 1) / self._seconds(mode, 0) for mode in modes) - 1

    @property
    def is_different(self) -> bool:
        """True if the speeds of the modes differ by more than passes of the same mode do."""
        return abs(self.speedup - 1) > self.noise

    @property
    def reason(self) -> str:
        """A sentence on a speedup that is none, or below 1; empty for others."""
        if not self.is_different:
            return (
                "the modes differ by less than two passes of one mode do. Where trees do not pay, the draft budget leaves "
                "them out of most steps."
            )
        if self.speedup < 1:
            return (
                "drafting was slower than plain decoding: the drafter and its trees took more time than the tokens that "
                f"they saved, {self.stats.acceptance_length:.2f} of them a step. Other programs on this machine add to it."
            )
        return ""

    @property
    def speedup(self) -> float:
        """Speed of speculative over plain decoding."""
        return self.speed("speculative") / self.speed("plain")

    def differences(self) -> list[str]:
        """Return one line for each prompt and pass whose outputs differ."""
        pairs = zip(self.answers["plain"], self.answers["speculative"], strict=True)
        return [
            f"{prompt.source} at temperature {self.temperature}: outputs differ from token "
            f"{first_difference(plain.outputs[0], speculative.outputs[0])}"
            for prompt, (plain, speculative) in zip(cycle(self.prompts), pairs, strict=False)
            if plain.outputs != speculative.outputs
        ]


def _measure(console: Console, router: Client, prompts: list[Prompt], sampling: SamplingParams) -> DemoComparison:
    """Decode every prompt in both modes, pass by pass; the mode that goes first alternates."""
    comparison = DemoComparison(sampling.temperature, prompts)
    started = time.monotonic()
    with Progress(console) as shown:
        what = f"temperature {sampling.temperature}: {len(prompts)} prompts, plain and speculative, {NUM_PASSES} times"
        for done, (turn, prompt) in enumerate(shown.track(list(product(range(NUM_PASSES), prompts)), what)):
            modes: list[Mode] = ["speculative", "plain"] if (done + turn) % 2 else ["plain", "speculative"]
            for mode in modes:
                comparison.answers[mode].append(_ask(router, prompt, sampling, mode))
    console.print(f"[green]done[/] {what} in {time.monotonic() - started:.1f} s")
    return comparison


def _table(comparisons: list[DemoComparison]) -> Table:
    table = Table(
        title="Plain and speculative decoding in turn, one request at a time, as a client of the router sees it",
        caption=f"the fastest of {NUM_PASSES} passes of each prompt, as other programs slow some down; prompts are cached",
    )
    table.add_column("")
    for comparison in comparisons:
        table.add_column(f"temperature {comparison.temperature}", justify="right")
    rows: list[tuple[str, Callable[[DemoComparison], str]]] = [
        ("plain, tokens/s", lambda c: f"{c.speed('plain'):.0f}"),
        ("speculative, tokens/s", lambda c: f"{c.speed('speculative'):.0f}"),
        ("speedup", lambda c: f"{c.speedup:.2f}x" if c.is_different else f"1x, within noise of {c.noise:.0%}"),
        ("mean acceptance length (tau)", lambda c: f"{c.stats.acceptance_length:.2f}"),
        ("accepted at depth 1, 2, ...", lambda c: " ".join(f"{share:.0%}" for share in c.stats.acceptance_by_depth)),
        ("outputs identical", lambda c: "no" if c.differences() else f"yes, {len(c.prompts)} of {len(c.prompts)}"),
    ]
    for label, value in rows:
        table.add_row(label, *map(value, comparisons))
    return table


if __name__ == "__main__":
    typer.run(demo)
