"""What the storm does to the members of a fleet, drawn from a seed, and which wait of a client it caused.

At any time at least one verifier works without a fault, so that every failed request counts against the router. Faults on
verifiers come one after the other; those on drafters, Redis and connections come beside them.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from signal import SIGCONT, SIGSTOP

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.chaos.fleet import HOST, Fleet, Member, clean

# How long a verifier must have worked before it counts as one that is left, or may be hit again.
SETTLED_S = 1.0
# A wait that begins so soon after a fault is blamed on it, if no other fault is there: the router may still be at work.
AFTERMATH_S = 0.5
MIN_GAP_S = 0.05
# Longer than keepalive pings wait, with which hanging peers are noticed.
LONGEST_S = 9.0
# The share of kill -9 among the faults of verifiers and of drafters; the others last for seconds.
VERIFIER_KILL_RATIO, DRAFTER_KILL_RATIO = 0.93, 0.98

Action = Callable[["Injector", Member], Awaitable[None]]


@dataclass
class Fault:
    """One fault. kind: what was done to which kind of member. ended: None while it lasts. longest_gap_s: of any client."""

    kind: str
    began: float
    ended: float | None = None
    longest_gap_s: float = 0.0

    def overlaps(self, began: float, ended: float, aftermath_s: float = 0.0) -> bool:
        return self.began <= ended and (self.ended is None or began <= self.ended + aftermath_s)


@dataclass
class FaultLog:
    """All faults so far. gaps: the longest wait that each fault caused, by kind."""

    gaps: dict[str, list[float]] = field(default_factory=dict)
    longest_unexplained_gap_s: float = 0.0
    recent: list[Fault] = field(default_factory=list)

    def begin(self, kind: str) -> Fault:
        """Note that a fault begins."""
        self.recent.append(Fault(kind, time.monotonic()))
        return self.recent[-1]

    def end(self, fault: Fault) -> None:
        """Note that a fault is over."""
        fault.ended = time.monotonic()

    def blame(self, began: float, ended: float) -> None:
        """Find the cause of a client's wait: a fault on a verifier before any other, the earliest first.

        Of faults on verifiers, one during the wait comes before one that was over when the wait began.
        """
        if ended - began < MIN_GAP_S:
            return
        causes = [fault for fault in self.recent if fault.overlaps(began, ended, AFTERMATH_S)]
        if not causes:
            self.longest_unexplained_gap_s = max(self.longest_unexplained_gap_s, ended - began)
            return

        def rank(fault: Fault) -> tuple[bool, bool, float]:
            return not fault.kind.startswith("verifier"), not fault.overlaps(began, ended), fault.began

        cause = min(causes, key=rank)
        cause.longest_gap_s = max(cause.longest_gap_s, ended - began)

    def settle(self, horizon_s: float = 60.0) -> None:
        """Sum up the faults that can no longer be the cause of a wait."""
        old = time.monotonic() - horizon_s
        for fault in [fault for fault in self.recent if fault.ended is not None and fault.ended < old]:
            self.gaps.setdefault(fault.kind, []).append(fault.longest_gap_s)
            self.recent.remove(fault)


@dataclass
class Quota:
    """How many kills are wanted; None for as many as come."""

    wanted: int | None
    done: int = 0

    @property
    def reached(self) -> bool:
        return self.wanted is not None and self.done >= self.wanted


class Injector:
    """Breaks a fleet until it is stopped. seed: draws the faults and their order. longest_s: of any fault."""

    def __init__(
        self, fleet: Fleet, seed: int, verifier_kills: int | None, drafter_kills: int | None, longest_s: float = LONGEST_S
    ) -> None:
        self.fleet = fleet
        self.longest_s = longest_s
        self.rngs = {kind: random.Random(f"{seed} {kind}") for kind in ("verifier", "draft", "redis")}
        self.log = FaultLog()
        self.verifier_kills, self.drafter_kills = Quota(verifier_kills), Quota(drafter_kills)
        self._restarts: set[asyncio.Task[None]] = set()

    @property
    def done(self) -> bool:
        """Whether all wanted kills have happened; never without wanted kills."""
        wanted = [quota for quota in (self.verifier_kills, self.drafter_kills) if quota.wanted is not None]
        return bool(wanted) and all(quota.reached for quota in wanted)

    async def run(self, num_drafter_loops: int) -> None:
        """Inject faults until cancelled; then every fault is over and every member works again."""
        loops = [self._hit_verifiers(), self._hit_redis(), *(self._hit_drafters() for _ in range(num_drafter_loops))]
        try:
            async with asyncio.TaskGroup() as group:
                for loop in loops:
                    group.create_task(loop)
        finally:
            await self._repair()

    async def _repair(self) -> None:
        """End every fault and start what is down."""
        await asyncio.gather(*self._restarts, return_exceptions=True)
        for member in self.fleet.members:
            if member.proxy.partitioned:
                member.proxy.reset()
            member.proxy.heal()
            member.signal(SIGCONT)
            if member.process is None:
                await self.fleet.start(member)
        await self.fleet.wait_ready()

    async def _hit_verifiers(self) -> None:
        """One fault after the other, each on a verifier that has settled, while another one has settled too."""
        witness, rng = self.fleet.verifiers[0], self.rngs["verifier"]
        while True:
            settled = clean(self.fleet.verifiers, SETTLED_S)
            if len(settled) > 1:
                await self._hit_one_of(settled, witness, self.verifier_kills, VERIFIER_KILL_RATIO)
            await asyncio.sleep(rng.uniform(0, 0.3))

    async def _hit_drafters(self) -> None:
        witness, rng = self.fleet.drafters[0], self.rngs["draft"]
        while True:
            if victims := clean(self.fleet.drafters, rng.uniform(0.1, 1.0)):
                await self._hit_one_of(victims, witness, self.drafter_kills, DRAFTER_KILL_RATIO)
            await asyncio.sleep(rng.uniform(0, 0.2))

    async def _hit_one_of(self, victims: Sequence[Member], witness: Member, quota: Quota, kill_ratio: float) -> None:
        """Kill a member, or do something else to one. The witness lives on: its memory shows what the others' ends cost."""
        rng, mortal = self.rngs[witness.kind], [member for member in victims if member is not witness]
        if rng.random() >= kill_ratio:
            victim = rng.choice(victims)
            await self.hit(victim, rng.choice([*LASTING, *(ENDING if victim in mortal else ())]))
        elif mortal and not quota.reached:
            await self.hit(rng.choice(mortal), kill_member)
            quota.done += 1

    async def _hit_redis(self) -> None:
        while True:
            await asyncio.sleep(self.rngs["redis"].uniform(5, 25))
            if self.fleet.redis.ready_at is not None:
                await self.hit(self.fleet.redis, self.rngs["redis"].choice((kill_for_a_while, empty, vanish, *LASTING)))

    async def hit(self, member: Member, action: Action) -> None:
        """Do one thing to a member and note it."""
        fault = self.log.begin(f"{member.kind} {NAMES[action]}")
        member.num_faults += 1
        try:
            await action(self, member)
        finally:
            member.num_faults -= 1
            self.log.end(fault)

    async def last(self, member: Member, *seconds: float) -> None:
        """Wait for one of these times."""
        await asyncio.sleep(min(self.rngs[member.kind].choice(seconds), self.longest_s))

    def restart(self, member: Member) -> None:
        """Start a killed member again in the background."""
        task = asyncio.create_task(self.fleet.start(member))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)


async def kill_member(injector: Injector, member: Member) -> None:
    """Kill -9, and start it again at once."""
    await member.kill()
    injector.restart(member)


async def kill_for_a_while(injector: Injector, member: Member) -> None:
    """Kill -9, and start it again seconds later."""
    await member.kill()
    await injector.last(member, 0.5, 2.0, 4.0)
    await injector.fleet.start(member)


async def vanish(injector: Injector, member: Member) -> None:
    """Power cut: the process ends, and no packet says so. It starts again at once."""
    member.proxy.silence()
    await member.kill()
    await injector.fleet.start(member)


async def pause(injector: Injector, member: Member) -> None:
    """SIGSTOP for a while; sometimes for longer than keepalive pings wait."""
    member.signal(SIGSTOP)
    await injector.last(member, 0.3, 1.5, LONGEST_S)
    member.signal(SIGCONT)


async def reset(injector: Injector, member: Member) -> None:
    """Abort its connections."""
    member.proxy.reset()


async def half_open(injector: Injector, member: Member) -> None:
    """Its connections pass nothing any more; new ones work."""
    member.proxy.silence()
    await injector.last(member, LONGEST_S)


async def partition(injector: Injector, member: Member) -> None:
    """It cannot be reached for a while; then its connections are reset."""
    member.proxy.partitioned = True
    await injector.last(member, 0.5, LONGEST_S)
    member.proxy.partitioned = False
    member.proxy.reset()


async def delay(injector: Injector, member: Member) -> None:
    """Every packet is late."""
    member.proxy.delay_s = injector.rngs[member.kind].choice((0.02, 0.1, 0.3))
    await injector.last(member, 0.5, 2.0)
    member.proxy.delay_s = 0.0


async def lose(injector: Injector, member: Member) -> None:
    """Packets are lost and sent again, several times."""
    for _ in range(injector.rngs[member.kind].randrange(1, 4)):
        member.proxy.hold()
        await injector.last(member, 0.2, 0.4, 0.8)
        member.proxy.release()
        await asyncio.sleep(0.1)


async def corrupt(injector: Injector, member: Member) -> None:
    """A byte of each connection is wrong."""
    member.proxy.damage()
    await asyncio.sleep(0.2)


async def empty(injector: Injector, member: Member) -> None:
    """Redis loses everything."""
    with suppress(RedisError, OSError):
        async with Redis(host=HOST, port=member.port, socket_timeout=1.0) as client:
            await client.flushall()


async def freeze(injector: Injector, member: Member) -> None:
    """A regular expression holds the interpreter until the watchdog ends the process. It starts again at once."""
    await member.freeze()
    injector.restart(member)


LASTING: Sequence[Action] = (pause, reset, half_open, partition, delay, lose, corrupt)
ENDING: Sequence[Action] = (vanish, freeze)
NAMES: Mapping[Action, str] = {
    kill_member: "kill -9", kill_for_a_while: "down", vanish: "power cut", pause: "SIGSTOP", reset: "connection reset",
    half_open: "half-open", partition: "partition", delay: "delay", lose: "loss", corrupt: "corruption", empty: "emptied",
    freeze: "freeze",
}  # fmt: skip
