"""Goodput under ten times the load that a fleet can serve: requests arrive whether or not earlier ones are done.

Every step waits for a draft tree over a slow connection, as it would wait for a large model's forward pass. So the capacity
is one of time and slots, not of this machine's processors, on which the clients run too.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np

from tests.chaos.answers import Answer, Received
from tests.chaos.fleet import HOST, Fleet, FleetSettings, running
from tests.chaos.traffic import Clients, RequestDied

# Requests that gRPC refuses at once, as a client with a retry policy expects.
REFUSALS = {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}
FACTORS = (1.0, 1.4, 1.8, 2.4)
OVERLOAD = 10.0

FLEET = FleetSettings(
    num_verifiers=2,
    drafters=("sps", "sps"),
    draft_timeout_s=1.0,
    disk_full_ratio=0.0,
    clock_skew_ratio=0.0,
    extra=(("verifier", "engine.max_num_seqs=4"), ("verifier", "engine.max_queued_requests=4")),
)


@dataclass(frozen=True)
class OverloadSettings:
    """seconds: of each level of load. deadline_s: a later answer is worth nothing. delay_s: of each connection."""

    seconds: float = 10.0
    deadline_s: float = 5.0
    delay_s: float = 0.04
    seed: int = 0


@dataclass(frozen=True)
class LoadLevel:
    """What came of one rate of requests. goodput: tokens per second of complete and right answers before their deadline.

    num_late: requests that met their deadline first. p99_refusal_s: time until a refused request learned of it.
    """

    requests_per_s: float
    num_requests: int
    num_good: int
    num_refused: int
    num_late: int
    num_wrong: int
    other_failures: dict[str, int]
    goodput: float
    p99_refusal_s: float


@dataclass(frozen=True)
class OverloadResult:
    """levels: around the capacity; overloaded: at ten times the load of the best of them."""

    levels: tuple[LoadLevel, ...]
    overloaded: LoadLevel

    @property
    def peak(self) -> LoadLevel:
        return max(self.levels, key=lambda level: level.goodput)

    @property
    def ratio(self) -> float:
        """Goodput at ten times the load over the goodput at the peak."""
        return self.overloaded.goodput / self.peak.goodput


async def overload(fleet: Fleet, answers: Sequence[Answer], settings: OverloadSettings) -> OverloadResult:
    """Find the load with the most goodput, then offer ten times as much."""
    async with running(fleet):
        for drafter in fleet.drafters:
            drafter.proxy.delay_s = settings.delay_s
        clients = Clients(f"{HOST}:{fleet.router.port}", f"http://{HOST}:{fleet.http_port}", answers, settings.seed)
        try:
            capacity = await _capacity(clients, answers, settings)
            levels = [await _offer(clients, answers, capacity * factor, settings) for factor in FACTORS]
            best = max(levels, key=lambda level: level.goodput)
            overloaded = await _offer(clients, answers, OVERLOAD * best.requests_per_s, settings)
        finally:
            await clients.close()
    return OverloadResult(tuple(levels), overloaded)


async def _capacity(clients: Clients, answers: Sequence[Answer], settings: OverloadSettings) -> float:
    """Requests per second that are done while every slot is busy."""
    num_slots, rng, done = 8, random.Random(settings.seed), 0
    end = time.monotonic() + settings.seconds

    async def keep_asking() -> None:
        nonlocal done
        while time.monotonic() < end:
            await _read(clients, Received(rng.choice(answers)), 60.0, {})
            done += time.monotonic() < end

    await asyncio.gather(*(keep_asking() for _ in range(num_slots)))
    return done / settings.seconds


@dataclass
class _Tally:
    num_good: int = 0
    num_good_tokens: int = 0
    refusal_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    num_wrong: int = 0


async def _offer(clients: Clients, answers: Sequence[Answer], rate: float, settings: OverloadSettings) -> LoadLevel:
    """Send requests at random times, `rate` a second. Tokens count from deadline_s on, until the last request is sent."""
    rng, tally, tasks = random.Random(settings.seed), _Tally(), list[asyncio.Task[None]]()
    started = time.monotonic()
    warm, end = started + settings.deadline_s, started + settings.deadline_s + settings.seconds
    arrival = started
    while (arrival := arrival + rng.expovariate(rate)) < end:
        await asyncio.sleep(max(arrival - time.monotonic(), 0))
        tasks.append(asyncio.create_task(_ask(clients, rng.choice(answers), tally, warm, end, settings.deadline_s)))
    await asyncio.gather(*tasks)
    late = tally.failures.pop("DEADLINE_EXCEEDED", 0)
    return LoadLevel(
        requests_per_s=rate,
        num_requests=len(tasks),
        num_good=tally.num_good,
        num_refused=len(tally.refusal_s),
        num_late=late,
        num_wrong=tally.num_wrong,
        other_failures=dict(tally.failures),
        goodput=tally.num_good_tokens / settings.seconds,
        p99_refusal_s=float(np.percentile(tally.refusal_s, 99)) if tally.refusal_s else 0.0,
    )


async def _ask(clients: Clients, answer: Answer, tally: _Tally, warm: float, end: float, deadline_s: float) -> None:
    """Send one request; if it ends well, its tokens between `warm` and `end` count."""
    received, began, before = Received(answer), time.monotonic(), dict[float, int]()
    try:
        await _read(clients, received, deadline_s, before)
    except RequestDied as died:
        if died.code in REFUSALS:
            tally.refusal_s.append(time.monotonic() - began)
        else:
            tally.failures[died.code] += 1
    tally.num_wrong += bool(received.mismatch())
    if received.finished and not received.mismatch():
        at = [max((num for moment, num in before.items() if moment < limit), default=0) for limit in (warm, end)]
        tally.num_good += at[1] > at[0]
        tally.num_good_tokens += at[1] - at[0]


async def _read(clients: Clients, received: Received, timeout_s: float, num_items: dict[float, int]) -> None:
    """Read an answer to its end. num_items: gets the number of tokens at each moment when some came."""
    async with aclosing(clients.stream(received, "", "", timeout_s)) as parts:  # type: ignore[type-var]
        async for _ in parts:
            num_items[time.monotonic()] = received.num_items


def short(answers: Sequence[Answer], most_tokens: int) -> list[Answer]:
    """The answers with one completion, cut to `most_tokens`: requests of one size, so that load means one thing."""
    cut = []
    for answer in answers:
        if len(answer.tokens) == 1 and len(answer.tokens[0]) > most_tokens:
            sampling = replace(answer.sampling, max_tokens=most_tokens)
            cut.append(Answer(answer.prompt, sampling, (answer.tokens[0][:most_tokens],), ("",), ("length",)))
    return cut
