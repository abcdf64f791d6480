"""Simulates the placement of many sessions on many verifiers, with the code that places real requests.

Requests, caches and time are simulated. Writes a dated report: `python -m benchmarks.scripts.sharding`.
"""

from __future__ import annotations

import random
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from eyas.bench.report import Report, Table, number
from eyas.config import RoutingConfig
from eyas.protocol.prefix_hash import BLOCK_TOKENS
from eyas.rpc.messages import Lease, Load, ModelInfo
from eyas.services.discovery.redis_registry import Placement
from eyas.services.router.dispatch.routing import Pair, RoutingRequest, WorkerSnapshot, pick
from eyas.services.router.dispatch.workers import SentBlocks

MODEL = ModelInfo("model", "target", 128_256, 131_072, "head")
ANNOUNCED = 1024
POLICIES = {
    "default": RoutingConfig(),
    "least load only": RoutingConfig(session_weight=0, prefix_weight=0, hash_weight=0),
    "hash only, no bound": RoutingConfig(
        session_weight=0, prefix_weight=0, load_weight=0, hash_weight=1, load_factor=1e9, min_bound=1_000_000
    ),
    "hash only, bound 1.25": RoutingConfig(session_weight=0, prefix_weight=0, load_weight=0, hash_weight=1),
}


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement.

    Attributes:
        num_running: requests under way at any time.
        num_turns: requests of a session.
        groups: system prompts; the first ones are the most frequent.
        cache_blocks: of one verifier.
        lease_requests: from one heartbeat to the next. Blocks hold BLOCK_TOKENS tokens.
    """

    num_verifiers: int = 100
    num_drafters: int = 50
    num_sessions: int = 100_000
    num_running: int = 3200
    num_turns: int = 2
    num_open: int = 20_000
    groups: int = 200
    system_blocks: int = 8
    turn_blocks: int = 4
    cache_blocks: int = 4096
    lease_requests: int = 500
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """One policy.

    Attributes:
        max_over_mean: greatest number of requests on a verifier over the mean, its mean over time and its worst; of
            drafters its mean over time.
        hit: share of prompt blocks found in the cache, possible: had there been one cache.
        kept: share of later turns on the verifier of the turn before.
        microseconds: CPU time of a pick.
    """

    policy: str
    max_over_mean: float
    worst_max_over_mean: float
    drafters_max_over_mean: float
    hit: float
    possible: float
    kept: float
    microseconds: float
    microseconds_p99: float


@dataclass(frozen=True)
class Moves:
    """Percentage of sessions that move when a verifier is added or removed, by what is remembered of them."""

    known: str
    one_more: float
    one_less: float


@dataclass
class Session:
    """A simulated session.

    Attributes:
        blocks: hashes of all tokens so far.
    """

    name: str
    blocks: tuple[int, ...]
    turn: int = 0
    last: Placement | None = None


@dataclass
class Simulation:
    """A cluster under a constant number of requests, and a router that sees it as real ones do."""

    settings: Settings
    config: RoutingConfig
    verifiers: list[Lease] = field(default_factory=list)
    drafters: list[Lease] = field(default_factory=list)
    in_flight: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)
    sent: SentBlocks = field(default_factory=SentBlocks)
    sessions: list[Session] = field(default_factory=list)
    _caches: dict[str, OrderedDict[int, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.settings.seed)
        self.verifiers = [verifier(index) for index in range(self.settings.num_verifiers)]
        load = Load()
        self.drafters = [
            Lease("draft", f"draft-{index}:1", f"draft-{index}", MODEL, load) for index in range(self.settings.num_drafters)
        ]
        self._caches = {lease.incarnation: OrderedDict() for lease in self.verifiers}

    def snapshot(self) -> WorkerSnapshot:
        """Return the router's view of the workers."""
        sent = self.sent.by_worker
        return WorkerSnapshot(self.verifiers, self.drafters, self.in_flight, sent_blocks=sent, counted=self.counted)

    def routing_request(self, session: Session) -> RoutingRequest:
        """Return the request of the session's next turn."""
        num_tokens = (len(session.blocks) + self.settings.turn_blocks) * BLOCK_TOKENS
        return RoutingRequest(MODEL.name, num_tokens, last=session.last, session=session.name, block_hashes=session.blocks)

    def run(self, policy: str) -> Outcome:
        """Return every turn of every session."""
        ratios: list[float] = []
        drafter_ratios: list[float] = []
        times: list[int] = []
        running: list[Pair] = []
        num_hit = num_asked = num_possible = num_kept = num_later = 0
        known: set[int] = set()
        for number_, session in enumerate(self._turns()):
            if number_ % self.settings.lease_requests == 0:
                self._announce()
            request, last = self.routing_request(session), session.last
            began = time.process_time_ns()
            pair = pick(self.snapshot(), request, self.config)
            times.append(time.process_time_ns() - began)
            assert pair is not None
            if last is not None:
                num_later += 1
                num_kept += last.verifier == pair.verifier.incarnation
            num_asked += len(request.block_hashes)
            num_possible += sum(block in known for block in request.block_hashes)
            num_hit += self._serve(pair, session)
            known.update(session.blocks)
            running.append(pair)
            self._count(pair, 1)
            if len(running) > self.settings.num_running:
                index = self._rng.randrange(len(running))
                running[index], running[-1] = running[-1], running[index]
                self._count(running.pop(), -1)
                ratios.append(self._ratio(self.verifiers))
                drafter_ratios.append(self._ratio(self.drafters))
        return Outcome(
            policy,
            float(np.mean(ratios)),
            max(ratios),
            float(np.mean(drafter_ratios)),
            num_hit / num_asked,
            num_possible / num_asked,
            num_kept / max(num_later, 1),
            float(np.mean(times)) / 1000,
            float(np.percentile(times, 99)) / 1000,
        )

    def placements(self, sessions: Sequence[Session], verifiers: Sequence[Lease], remembered: str) -> list[str]:
        """Return where each session would be placed with these verifiers. remembered: "pairs",
        "prefix_hashes" or "nothing".
        """
        workers = replace(self.snapshot(), verifiers=verifiers)
        if remembered != "pairs":
            workers = replace(workers, sent_blocks={})
        if remembered == "nothing":
            workers = replace(workers, verifiers=[replace(lease, prefix_hashes=frozenset()) for lease in verifiers])
        chosen = []
        for session in sessions:
            request = self.routing_request(session)
            pair = pick(workers, request if remembered == "pairs" else replace(request, last=None), self.config)
            assert pair is not None
            chosen.append(pair.verifier.incarnation)
        return chosen

    def _turns(self) -> Sequence[Session]:
        """Return sessions in the order of their turns: new ones start, and each open one returns later."""
        settings, rng = self.settings, self._rng
        weights = [1 / (1 + group) for group in range(settings.groups)]
        groups = rng.choices(range(settings.groups), weights, k=settings.num_sessions)
        order: list[Session] = []
        open_: list[Session] = []
        for index, group in enumerate(groups):
            system = tuple(group * 1000 + block for block in range(settings.system_blocks))
            session = Session(f"session-{index}", (*system, *self._turn_blocks(index, 0)))
            self.sessions.append(session)
            open_ += [session] * settings.num_turns
            if len(open_) > settings.num_open:
                order += self._taken(open_, settings.num_turns)
        return [*order, *self._taken(open_, len(open_))]

    def _taken(self, open_: list[Session], count: int) -> list[Session]:
        taken = []
        for _ in range(count):
            index = self._rng.randrange(len(open_))
            open_[index], open_[-1] = open_[-1], open_[index]
            taken.append(open_.pop())
        return taken

    def _turn_blocks(self, index: int, turn: int) -> tuple[int, ...]:
        first = 1_000_000 + (index * self.settings.num_turns + turn) * self.settings.turn_blocks
        return tuple(range(first, first + self.settings.turn_blocks))

    def _serve(self, pair: Pair, session: Session) -> int:
        """Run the session's turn there; return how many of its blocks were cached."""
        cache = self._caches[pair.verifier.incarnation]
        num_hit = next((index for index, block in enumerate(session.blocks) if block not in cache), len(session.blocks))
        self.sent.add(pair.verifier.incarnation, session.blocks)
        session.last = Placement(pair.verifier.incarnation, pair.drafter.incarnation if pair.drafter else "")
        session.turn += 1
        session.blocks += self._turn_blocks(int(session.name.rpartition("-")[2]), session.turn)
        for block in reversed(session.blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > self.settings.cache_blocks:
            cache.popitem(last=False)
        return num_hit

    def _count(self, pair: Pair, change: int) -> None:
        for worker in (pair.verifier, pair.drafter):
            if worker is not None:
                self.in_flight[worker.incarnation] += change

    def _ratio(self, workers: Sequence[Lease]) -> float:
        busy = [self.in_flight[worker.incarnation] for worker in workers]
        return max(busy) * len(busy) / sum(busy)

    def _announce(self) -> None:
        """Renew the leases of all verifiers, as a heartbeat does."""
        self.counted = Counter({lease.incarnation: self.in_flight[lease.incarnation] for lease in self.verifiers})
        for index, lease in enumerate(self.verifiers):
            latest = list(self._caches[lease.incarnation])[-ANNOUNCED:]
            load = replace(lease.load, num_running=self.in_flight[lease.incarnation])
            self.verifiers[index] = replace(lease, load=load, prefix_hashes=frozenset(latest))


def verifier(index: int) -> Lease:
    """Return an idle verifier."""
    return Lease("verifier", f"verifier-{index}:1", f"verifier-{index}", MODEL, Load(0, 0, 1_000_000, 64))


def moves(simulation: Simulation, num_sessions: int) -> list[Moves]:
    """Return how one verifier more, and one less, moves a sample of the sessions."""
    sessions = random.Random(1).sample(simulation.sessions, min(num_sessions, len(simulation.sessions)))
    verifiers = simulation.verifiers
    newcomer = verifier(len(verifiers))
    mean = sum(simulation.in_flight[lease.incarnation] for lease in verifiers) // len(verifiers)
    newcomer = replace(newcomer, load=replace(newcomer.load, num_running=mean))
    results = []
    labels = {
        "pairs": "pairs, as long as Redis or the router lives",
        "prefix_hashes": "prefixes only: router and Redis new",
        "nothing": "nothing: only the hash is left",
    }
    for remembered, label in labels.items():
        before = simulation.placements(sessions, verifiers, remembered)
        more = simulation.placements(sessions, [*verifiers, newcomer], remembered)
        less = simulation.placements(sessions, verifiers[:-1], remembered)
        results.append(Moves(label, _moved(before, more), _moved(before, less)))
    return results


def _moved(before: Sequence[str], after: Sequence[str]) -> float:
    return 100 * sum(one != other for one, other in zip(before, after, strict=True)) / len(before)


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """Return the table of the policies."""
    rows = [
        (
            one.policy,
            f"{one.max_over_mean:.2f} ({one.worst_max_over_mean:.2f})",
            f"{one.drafters_max_over_mean:.2f}",
            f"{one.hit:.1%} of {one.possible:.1%}",
            f"{one.kept:.1%}",
            f"{number(one.microseconds)} ({number(one.microseconds_p99)})",
        )
        for one in outcomes
    ]
    note = (
        "Requests on the busiest verifier over the mean: mean over time (worst moment), and for drafters; share of prompt "
        "blocks cached where the request went, of those computed anywhere before; later turns that met the verifier of the "
        "turn before; CPU time of a pick, mean (p99), in microseconds. Without a weight of load all share one drafter."
    )
    columns = ("weights", "verifiers max/mean", "drafters max/mean", "prefix hits", "sessions kept", "pick")
    return Table("Balance and affinity", columns, tuple(rows), note)


def moves_table(results: Sequence[Moves], settings: Settings) -> Table:
    """Return the table of scaling."""
    count = settings.num_verifiers
    rows = [(one.known, f"{one.one_more:.2f} %", f"{one.one_less:.2f} %") for one in results]
    note = (
        "Share of sessions whose next turn goes to another verifier because of the change, once a new one "
        "is as busy as the others; no less than 1/n can move when one goes."
    )
    columns = ("what is known of sessions", f"{count} to {count + 1}", f"{count} to {count - 1}")
    return Table("Sessions moved", columns, tuple(rows), note)


def main(
    sessions: Annotated[int, typer.Option(help="Sessions with the default weights, of two turns each.")] = 100_000,
    compared: Annotated[int, typer.Option(help="Sessions with each other set of weights.")] = 10_000,
    moved: Annotated[int, typer.Option(help="Sessions that are asked where they would go.")] = 20_000,
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("benchmarks/results"),
) -> None:
    """Run every policy, then let a verifier come and go."""
    settings = Settings(num_sessions=sessions)
    simulation = Simulation(settings, RoutingConfig())
    outcomes = [simulation.run("default")]
    results = moves(simulation, moved)
    for policy, config in POLICIES.items():
        outcomes.append(Simulation(replace(settings, num_sessions=compared), config).run(f"{policy}, {compared} sessions"))
    tables = [outcome_table(outcomes), moves_table(results, settings)]
    program = "python -m benchmarks.scripts.sharding"
    Report.here("sharding", program, "cpu", settings, {"policies": outcomes, "moves": results}, tables).publish(out)


if __name__ == "__main__":
    typer.run(main)
