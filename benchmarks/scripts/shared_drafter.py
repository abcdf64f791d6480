"""Measures what verifiers do to one another that share a drafter: a burst of one, and a drafter that another one replaces.

Verifiers and draft services run as processes on emulated devices, see `benchmarks.split`. Writes a dated report:
`python -m benchmarks.scripts.shared_drafter`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.split.results import Mode, SplitSettings, round_s
from benchmarks.split.services import Split, read_log, running_split, warm_up
from eyas.api.request import Request, SamplingParams, VerifyStep
from eyas.bench.report import Report, Table, number
from eyas.bench.settings import MethodSpec, Prompt, load_tasks
from eyas.cli.bench import RESULTS
from eyas.config import DraftAheadConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.emulation.costs import DeviceCosts
from eyas.errors import EyasError
from eyas.progress import Progress, progress
from eyas.rpc.messages import GenerateCall

# Both services draft serially; the second one takes over when the first one ends.
FIRST: Mode = "serial"
SECOND: Mode = "ahead"


@dataclass(frozen=True)
class Waits:
    """Waits of the steps of one verifier, in ms. others: requests that another verifier runs meanwhile."""

    others: int
    waits_ms: tuple[float, ...]
    late: float

    def percentile(self, share: float) -> float:
        """Return the wait that this share of the steps does not exceed."""
        return sorted(self.waits_ms)[min(int(share * len(self.waits_ms)), len(self.waits_ms) - 1)]


@dataclass(frozen=True)
class Move:
    """One session that moves.

    Attributes:
        context: its tokens then.
        num_bytes: to the second drafter until its first tree.
        refeed_ms: of the first step with a tree of it, beyond a usual step.
        plain_steps: steps without a tree between.
        gap_ms: between the last tree of the first drafter and the first one of the second.
    """

    context: int
    num_bytes: int
    refeed_ms: float
    plain_steps: int
    gap_ms: float


@dataclass(frozen=True)
class Results:
    """Results of the measurement.

    Attributes:
        verify_ms, round_ms: of a pass and of a round for one sequence, by the tables.
    """

    verify_ms: float
    round_ms: float
    burst_round_ms: float
    waits: tuple[Waits, ...]
    moves: tuple[Move, ...]


def main(
    model: Annotated[str, typer.Option(help="Target.")] = "models/demo/target",
    draft_model: Annotated[str, typer.Option(help="Draft head.")] = "models/demo/eagle3-full",
    prompts: Annotated[Path, typer.Option(help="JSON Lines.")] = Path("models/demo/prompts.jsonl"),
    verifier: Annotated[str, typer.Option(help="Cost table of the target.")] = "llama-3.1-8b@h100",
    drafter: Annotated[str, typer.Option(help="Cost table of the drafter.")] = "eagle3-8b@l40s",
    scale: Annotated[float, typer.Option(help="All times are multiplied by it; a busy machine needs more.")] = 100.0,
    num_prompts: Annotated[int, typer.Option(help="Prompts of the verifier that is watched.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Of each prompt.")] = 48,
    others: Annotated[list[int], typer.Option(help="Requests at once on the other verifier.")] = [0, 8],  # noqa: B006
    context: Annotated[list[int], typer.Option(help="Prompt tokens of a session that moves.")] = [200, 1200],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = RESULTS,
) -> None:
    """Measure waits beside a burst of another verifier, and sessions that move to another drafter."""
    head = DraftHead(draft_model)
    method = head.method
    settings = SplitSettings(
        model=model, methods=(MethodSpec(method),), prompts=prompts, num_prompts=num_prompts, draft_model=draft_model,
        verifier=verifier, drafter=drafter, scale=scale, batches=(max(1, *others),), modes=(FIRST, SECOND), verifiers=(2,),
        ahead=DraftAheadConfig(mode="never"), max_tokens=max_tokens, tree=head.resolve_tree(TreeConfig()),
        dtype="float32", device="cpu", threads=1,
    )  # fmt: skip
    try:
        with progress() as shown:
            results = measure(settings, tuple(others), tuple(context), shown)
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    program, tables = "python -m benchmarks.scripts.shared_drafter", [waits_table(results), moves_table(results)]
    Report.here("shared-drafter", program, "cpu", settings, results, tables).publish(out)


def measure(settings: SplitSettings, others: Sequence[int], contexts: Sequence[int], progress: Progress) -> Results:
    """Return all bursts beside one verifier, then one session after the other that moves. Raises EyasError."""
    costs = {name: DeviceCosts.read(getattr(settings, name)).scaled(settings.scale) for name in ("verifier", "drafter")}
    prompts, method, tree = [task.token_ids for task in load_tasks(settings)], settings.methods[0].name, settings.tree
    sampling = SamplingParams(settings.max_tokens, 0.0, ignore_eos=True, seed=0)
    waits, moves = list[Waits](), list[Move]()
    with running_split(settings, costs, method) as split:
        warm_up(split, prompts[0])
        for number in progress.track(others, "bursts"):
            waits.append(waits_beside(split, prompts, sampling, number))
    alone = replace(settings, verifiers=(1,))
    for length in progress.track(contexts, "moves"):
        with running_split(alone, costs, method) as split:
            warm_up(split, prompts[0])
            joined = tuple(token for prompt in prompts for token in prompt) * length
            moves.append(move(split, joined[:length], replace(sampling, max_tokens=160)))
    rounds = [1e3 * round_s(costs["drafter"], tree.num_steps, tree.top_k, 1 + number) for number in (0, max(others))]
    return Results(1e3 * costs["verifier"].seconds("verify", 1), rounds[0], rounds[1], tuple(waits), tuple(moves))


def waits_beside(split: Split, prompts: Sequence[Prompt], sampling: SamplingParams, others: int) -> Waits:
    """Decode the prompts one after the other on the first verifier, while the second one always has `others` requests."""
    ended, logs = threading.Event(), (*split.verifier_logs, split.logs[FIRST])
    before = [len(read_log(log)) for log in logs]

    def keep_busy(number: int) -> None:
        turn = number
        while not ended.is_set():
            split.decode(FIRST, prompts[turn % len(prompts)], replace(sampling, seed=turn), f"burst-{turn}", 1)
            turn += others

    threads = [threading.Thread(target=keep_busy, args=(number,)) for number in range(others)]
    for thread in threads:
        thread.start()
    try:
        steps = [s for n, prompt in enumerate(prompts) for s in split.decode(FIRST, prompt, sampling, f"own-{n}").steps]
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    passes = [record for log, known in zip(logs, before, strict=True) for record in read_log(log)[known:]]
    found = tuple(step.details.wait_ms for step in steps if step.details and step.drafted)
    return Waits(others, found, sum(record.late for record in passes) / len(passes))


def move(split: Split, prompt: Prompt, sampling: SamplingParams) -> Move:
    """Decode a prompt, and kill its drafter on the way. The verifier moves the session to the other one."""
    first, second = split.proxies[FIRST], split.proxies[SECOND]
    request = Request("moves", prompt, sampling, return_verify_steps=True)
    at: list[tuple[float, VerifyStep]] = []
    killed, num_tokens, context, sent, num_bytes = 0, 0, 0, 0, 0
    for chunk in split.clients[0].chunks(GenerateCall(request, drafter=first.address)):
        num_tokens += len(chunk.chunk.token_ids)
        if (step := chunk.chunk.verify_step) is None:
            continue
        at.append((time.perf_counter(), step))
        if not killed and sum(bool(each.drafted) for _, each in at) == 8:
            split.children[FIRST].process.kill()
            killed, sent = len(at), second.num_bytes
        if killed and step.drafted and len(at) > killed + 1 and second.num_bytes - sent > 4 * len(prompt):
            context, num_bytes = len(prompt) + num_tokens, second.num_bytes - sent
            break
    drafted = [(when, each) for when, each in at if each.drafted]
    (last, _), (again, step) = drafted[-2:]
    usual = [each.details.wait_ms for _, each in drafted[1:-1] if each.details]
    refeed_ms = (step.details.wait_ms if step.details else 0.0) - sum(usual) / len(usual)
    plain = sum(not each.drafted for when, each in at if last < when < again)
    return Move(context, num_bytes, refeed_ms, plain, 1e3 * (again - last))


def waits_table(results: Results) -> Table:
    """Waits of the watched verifier's steps."""
    rows = tuple(
        (
            f"{waits.others}",
            f"{len(waits.waits_ms)}",
            *(number(waits.percentile(share)) for share in (0.5, 0.9, 0.99)),
            f"{waits.percentile(0.99) / results.burst_round_ms:.2f}",
            f"{waits.late:.1%}",
        )
        for waits in results.waits
    )
    note = (
        "ms that a step of one verifier waits for its tree, while another verifier of the same drafter always has other "
        f"requests. By the tables a verify pass takes {number(results.verify_ms)} ms, a round for one sequence "
        f'{number(results.round_ms)} ms, and one for all {number(results.burst_round_ms)} ms, the unit of "p99 in rounds". '
        "At worst a step waits for the round that runs and for its own. late: passes that took longer here than emulated."
    )
    columns = ("other requests", "steps", "p50", "p90", "p99", "p99 in rounds", "late")
    return Table("Waits beside a burst", columns, rows, note)


def moves_table(results: Results) -> Table:
    """Return what each move cost."""
    rows = tuple(
        (
            f"{m.context}",
            f"{m.num_bytes / 1e3:.0f}",
            number(m.num_bytes / m.context),
            f"{m.plain_steps}",
            number(m.refeed_ms),
        )
        for m in results.moves
    )
    note = (
        "The drafter of a running request is killed, and another one takes the session over. KB: sent to it up to the step "
        "with its first tree. Plain steps: without a tree, from the last tree of the one to the first of the other. Refeed: "
        "the wait for the first tree over the mean wait before, in ms of the scaled devices."
    )
    return Table("Sessions that move", ("context", "KB", "bytes/token", "plain steps", "refeed ms"), rows, note)


if __name__ == "__main__":
    typer.run(main)
