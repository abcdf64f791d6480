"""Measures the connection between verifier and drafter: packing, sockets and threads.

A RemoteDrafter runs here and a draft service with a trivial drafter in another process. Writes a dated report:
`python -m benchmarks.scripts.round_trip`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.scripts.streaming_work import child
from eyas.bench.report import Report, Table, number
from eyas.config import DraftClientConfig, ServerConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.errors import EyasError, Unavailable
from eyas.progress import Progress, progress
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree
from eyas.rpc.messages import DrafterInfo, ModelInfo
from eyas.rpc.server import RpcServer
from eyas.services.draft.servicer import DraftServicer
from eyas.services.draft.worker import DraftWorker
from eyas.services.verifier.draft_client import RemoteDrafter
from eyas.v1 import draft_pb2, draft_pb2_grpc

NODES, WIDTH, DEPTH = 24, 5, 5
NEW_TOKENS = 5
NUM_WARM_UPS = 100
CONTEXT_LENGTH = 131072
START_SECONDS = 120.0
NEEDS = DrafterNeeds(features=True)


@dataclass(frozen=True)
class Case:
    """Content of a round trip: fused features of NEW_TOKENS positions per session there, a tree of NODES nodes back."""

    num_sessions: int
    feature_size: int
    dtype: str
    vocab_size: int


@dataclass(frozen=True)
class RoundTrip:
    """Percentiles 50, 90 and 99 of the round trips of one case, in ms."""

    case: Case
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement.

    Attributes:
        repeats: measured rounds of each case.
    """

    repeats: int
    tree_nodes: int = NODES
    tree_depth: int = DEPTH
    new_tokens: int = NEW_TOKENS


SMALL = [Case(sessions, 256, "float32", 4096) for sessions in (1, 8)]
LARGE = [Case(sessions, 4096, "bfloat16", 128256) for sessions in (1, 8)]


class TrivialDrafter(LocalDrafter):
    """Drafter that replies to every commit with the same tree below its last token; keeps no state."""

    needs = NEEDS

    def __init__(self, vocab_size: int) -> None:
        self._tokens = tuple(np.random.default_rng(0).integers(0, vocab_size, NODES).tolist())
        self._parents = tuple(max(node - WIDTH, 0) for node in range(NODES))
        self._log_probs = tuple(-0.1 * node for node in range(NODES))

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [DraftTree.of((c.tokens[-1], *self._tokens[1:]), self._parents, self._log_probs) for c in contexts]

    def release(self, sessions: Sequence[str]) -> None:
        pass


def main(
    repeats: Annotated[int, typer.Option(help="Measured rounds of each case.")] = 2000,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Measure rounds between a verifier's RemoteDrafter and a draft service in another process."""
    torch.set_num_threads(1)
    try:
        with progress() as shown:
            trips = [measure(case, repeats, shown) for case in (*SMALL, *LARGE)]
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    program = "python -m benchmarks.scripts.round_trip"
    Report.here("round-trip", program, "cpu", Settings(repeats), trips, [table(trips)]).publish(out)


def measure(case: Case, repeats: int, progress: Progress) -> RoundTrip:
    """Measure one round trip after the other. Raises Unavailable when the service does not answer."""
    tokens = tuple(np.random.default_rng(1).integers(0, case.vocab_size, NEW_TOKENS).tolist())
    features = torch.randn(NEW_TOKENS, case.feature_size).to(getattr(torch, case.dtype))
    ms = []
    with drafting(case) as drafter:
        label = f"{case.num_sessions} sessions, {case.feature_size} x {case.dtype}"
        for index in progress.track(range(NUM_WARM_UPS + repeats), label):
            contexts = [_context(f"{s}", index, tokens, features) for s in range(case.num_sessions)]
            started = time.perf_counter()
            drafts = drafter.request(contexts)()
            ms.append(1e3 * (time.perf_counter() - started))
            if any(not isinstance(draft, DraftTree) for draft in drafts):
                raise Unavailable(f"round {index} of {case} came back without a tree")
    return RoundTrip(case, *np.percentile(ms[NUM_WARM_UPS:], (50, 90, 99)).tolist())


def table(trips: Sequence[RoundTrip]) -> Table:
    """Return the table of the report."""
    rows = [
        (
            f"{t.case.num_sessions}",
            f"{NEW_TOKENS} x {t.case.feature_size} {t.case.dtype}",
            *map(number, (t.p50, t.p90, t.p99)),
        )
        for t in trips
    ]
    note = (
        f"From a verifier's contexts to its trees of {NODES} nodes, ms: packing, both directions over one stream on "
        "localhost, unpacking; the drafter itself does nothing."
    )
    return Table("Round trip", ("sessions", "features", "p50", "p90", "p99"), tuple(rows), note)


@contextmanager
def drafting(case: Case) -> Iterator[RemoteDrafter]:
    """A connection to a draft service in another process; both end with the block."""
    with child(_serve, case) as (address, _):
        drafter = RemoteDrafter(address, NEEDS, DraftClientConfig(draft_timeout_s=5.0))
        try:
            _wait_for(drafter)
            yield drafter
        finally:
            drafter.close()


def _wait_for(drafter: RemoteDrafter) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not drafter.connected:
        if time.monotonic() > deadline:
            raise Unavailable(f"no stream to {drafter.address} within {START_SECONDS:.0f} s")
        time.sleep(0.01)


def _context(session: str, index: int, tokens: tuple[int, ...], features: torch.Tensor) -> DraftContext:
    first = index == 0
    return Commit(
        session=session,
        epoch=0,
        start_position=index * NEW_TOKENS,
        tokens=tokens,
        features=features[1:] if first else features,
        noise=NoiseKey(0),
        budget=TreeBudget(NODES, DEPTH),
    )


async def _serve(starter: Connection, case: Case) -> None:
    """Serve in the other process: send the address, then serve until stopped."""
    torch.set_num_threads(1)
    model = ModelInfo("trivial", "", case.vocab_size, CONTEXT_LENGTH)
    info = DrafterInfo(model, "trivial", NEEDS.features, NEEDS.samples, case.feature_size)
    server = RpcServer(ServerConfig())
    with DraftWorker(TrivialDrafter(case.vocab_size), info) as worker:
        draft_pb2_grpc.add_DraftServicer_to_server(DraftServicer([worker]), server.aio)
        starter.send(await server.start([draft_pb2.DESCRIPTOR.services_by_name["Draft"].full_name]))
        await asyncio.Event().wait()


if __name__ == "__main__":
    typer.run(main)
