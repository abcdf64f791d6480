"""What rank 0 tells the others, as bytes: an order in, a message out, and back. Knows no sockets.

A message holds 32-bit integers, the kind of the order first.

How the processes of one target find one another: a place in, a leader or a follower out. Knows no tensors of theirs.

The processes of one target as rank 0 sees them: how it leads them, and what tells that one is gone.

Orders go over a socket from rank 0 to each other rank. Nothing comes back over it but its end, which tells at once, on this
machine or another, that a process has died. Sums and gathered outputs go through torch.distributed.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import IntEnum
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from eyas.errors import EyasError, Unavailable
from eyas.models.cuda.graphs import BackendKind, BackendPlan, CaptureLimits
from eyas.models.inputs import Segment
from eyas.tensors import Ints


@dataclass(frozen=True)
class InitKVCache:
    """Make room for the keys and values of so many slots, forget those before, and prepare passes as planned."""

    num_slots: int
    plan: BackendPlan


@dataclass(frozen=True)
class Forward:
    """Run one forward pass over these segments."""

    segments: Sequence[Segment]


@dataclass(frozen=True)
class Stop:
    """Nothing more will come."""


Order = InitKVCache | Forward | Stop


class _Kind(IntEnum):
    INIT_KV_CACHE = 0
    FORWARD = 1
    STOP = 2


def command_to_bytes(order: Order) -> bytes:
    """The message of an order."""
    if isinstance(order, InitKVCache):
        plan, limits = order.plan, order.plan.limits
        parts = [np.array([_Kind.INIT_KV_CACHE, order.num_slots, plan.kind, limits.rows, limits.segments, limits.prefix])]
    elif isinstance(order, Forward):
        parts = [np.array([_Kind.FORWARD]), *(part for segment in order.segments for part in _parts(segment))]
    else:
        parts = [np.array([_Kind.STOP])]
    return np.concatenate(parts).astype("<i4").tobytes()


def command_from_bytes(message: bytes) -> Order:
    """The order of a message."""
    ints = np.frombuffer(message, "<i4").astype(np.int64)
    kind = ints[0]
    if kind == _Kind.INIT_KV_CACHE:
        num_slots, way, *limits = map(int, ints[1:])
        return InitKVCache(num_slots, BackendPlan(BackendKind(way), CaptureLimits(*limits)))
    return Forward(list(_segments(ints[1:]))) if kind == _Kind.FORWARD else Stop()


def _parts(segment: Segment) -> Iterator[Ints]:
    masked = segment.visible is not None
    yield np.array([len(segment.tokens), len(segment.prefix), len(segment.logits_indices), masked], dtype=np.int64)
    yield from (segment.tokens, segment.positions, segment.slots, segment.prefix, segment.logits_indices)
    if segment.visible is not None:
        yield segment.visible.ravel().astype(np.int64)


def _segments(ints: Ints) -> Iterator[Segment]:
    while len(ints):
        rows, length, wanted, masked = map(int, ints[:4])
        ends = np.cumsum([4, rows, rows, rows, length, wanted, rows * rows * masked])
        _, tokens, positions, slots, prefix, chosen, visible, ints = np.split(ints, ends)
        mask = visible.astype(np.bool_).reshape(rows, rows) if masked else None
        yield Segment(tokens, positions, slots, prefix, mask, chosen)


# How long ranks wait for one another at the start: pods of a group may start minutes apart.
_START_SECONDS = 600.0
_END_SECONDS = 5
_PORT_KEY = "eyas/orders"


def start_workers(place: RankInfo, work: Callable[[RankInfo], None]) -> DriverWorker:
    """Gather the other ranks. work: what each of them does, with its own place; picklable where rank 0 starts them.

    Raises Unavailable when one ends before it has joined, or does not join in time.
    """
    store = _store(place)
    others = [replace(place, rank=rank, port=store.port, device=place.device_of(rank)) for rank in range(1, place.size)]
    with ExitStack() as undo:
        server = undo.enter_context(socket.create_server((place.address, 0)))
        store.set(_PORT_KEY, str(server.getsockname()[1]))
        processes = [_start(other, work) for other in others] if place.port == 0 else []
        for process in processes:
            undo.callback(process.kill)
        links = _accept(server, place.size, processes)
        _join_group(place, store)
        undo.pop_all()
    server.close()
    return DriverWorker(links, processes)


class Worker:
    """A rank other than 0, joined to it, with its process to itself. Raises Unavailable when rank 0 is not to be found."""

    def __init__(self, place: RankInfo) -> None:
        try:
            store = _store(place)
            port = int(store.get(_PORT_KEY))
            self._link = _connection(socket.create_connection((place.address, port), _START_SECONDS))
            self._link.send_bytes(f"{place.rank}".encode())
            _join_group(place, store)
        except (OSError, RuntimeError) as error:
            raise Unavailable(f"rank {place.rank} finds no rank 0 at {place.address}:{place.port}: {error}") from error
        self._stopped = False
        threading.Thread(target=self._outlive, name="rank 0", daemon=True).start()

    def commands(self) -> Iterator[InitKVCache | Forward]:
        """What rank 0 wants, until it wants no more. Raises Unavailable when rank 0 is gone."""
        while not isinstance(order := self._receive(), Stop):
            yield order
        self._stopped = True
        signal.alarm(0)

    def close(self) -> None:
        """Part from the other ranks, once there are no more orders."""
        self._link.close()
        dist.destroy_process_group()

    def _receive(self) -> Order:
        try:
            return command_from_bytes(self._link.recv_bytes())
        except (EOFError, OSError) as error:
            raise Unavailable("rank 0 is gone") from error

    def _outlive(self) -> None:
        """Wait until rank 0 is gone, and have the system end this process soon after: a sum that waits for the dead may
        never return."""
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLRDHUP)
        poll.poll()
        if not self._stopped:
            signal.alarm(_END_SECONDS)


def _store(place: RankInfo) -> TCPStore:
    keeps = place.rank == 0 and not place.has_store
    timeout = timedelta(seconds=_START_SECONDS)
    return TCPStore(place.address, place.port, place.size, keeps, timeout, wait_for_workers=False)


def _join_group(place: RankInfo, store: Store) -> None:
    device = torch.device(place.device)
    bound = torch.device("cuda", device.index or 0) if device.type == "cuda" else None
    backend = "nccl" if bound else "gloo"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, device_id=bound)


def _start(place: RankInfo, work: Callable[[RankInfo], None]) -> BaseProcess:
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=_work, args=(place, work, torch.get_num_threads()), name=f"rank {place.rank}", daemon=True
    )
    process.start()
    return process


def _work(place: RankInfo, work: Callable[[RankInfo], None], num_threads: int) -> None:
    """All that a process does which rank 0 has started. Rank 0 decides what an interrupt of both means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(num_threads)
    try:
        work(place)
    except EyasError as error:
        sys.exit(f"rank {place.rank}: {error}")


def _accept(server: socket.socket, size: int, processes: Sequence[BaseProcess]) -> dict[int, Connection]:
    """The links of all ranks. Raises Unavailable when a process ends first, or time does."""
    links: dict[int, Connection] = {}
    deadline = time.monotonic() + _START_SECONDS
    while missing := set(range(1, size)) - set(links):
        ready = wait([server, *(process.sentinel for process in processes)], deadline - time.monotonic())
        if server in ready:
            link = _connection(server.accept()[0])
            links[int(link.recv_bytes())] = link
        elif ready:
            ended = ", ".join(process.name for process in processes if process.sentinel in ready)
            raise Unavailable(f"{ended} ended before it had joined; its own output says why")
        else:
            raise Unavailable(f"rank {', '.join(map(str, missing))} did not join within {_START_SECONDS:.0f} s")
    return links


def _connection(link: socket.socket) -> Connection:
    """A link that sends at once, and notices within half a minute that the machine on the other side is gone."""
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        link.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(link.detach())


log = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
_BLAME_SECONDS = 1.0


@dataclass(frozen=True)
class RankInfo:
    """Where a process stands. device: the one that it computes on, "cpu" or "cuda:N". address, port: where rank 0 is found;
    port 0 has rank 0 take a free one and start the others on its machine. has_store: whether somebody else already keeps the
    store of torch.distributed there, as torchrun does."""

    rank: int
    size: int
    device: str
    address: str = "127.0.0.1"
    port: int = 0
    has_store: bool = False

    def device_of(self, rank: int) -> str:
        """The device of a rank that rank 0 starts beside itself."""
        return f"cuda:{rank}" if self.device.startswith("cuda") else self.device


class TargetWorkers(Protocol):
    """The other ranks, as rank 0 sees them."""

    size: int

    def init_kv_cache(self, num_slots: int, plan: BackendPlan) -> AbstractContextManager[None]:
        """The others make room for so many slots, forget those before, and prepare passes as planned; the body must do the
        same. Raises Unavailable if one is gone."""
        ...

    def forward(self, segments: Sequence[Segment]) -> AbstractContextManager[None]:
        """The others run a forward pass over the segments; the body must run the same. Raises Unavailable if one is gone."""
        ...

    def register_failure_callback(self, lost: Callable[[str], None]) -> None:
        """`lost` is called once with the reason when a rank is gone, from any thread; at once if one is already."""
        ...

    def before_close(self, release: Callable[[], None]) -> None:
        """`release` is called before the ranks part, unless one is gone by then."""
        ...

    def close(self) -> None:
        """Send the others home, if that has not been done. No order may follow. Happens by itself at the end of Python."""
        ...


class SingleWorker:
    """Rank 0 without others."""

    size = 1

    def init_kv_cache(self, num_slots: int, plan: BackendPlan) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, segments: Sequence[Segment]) -> AbstractContextManager[None]:
        return nullcontext()

    def register_failure_callback(self, lost: Callable[[str], None]) -> None: ...

    def before_close(self, release: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


class DriverWorker:
    """Rank 0 with others. Orders come from one thread."""

    def __init__(self, links: Mapping[int, Connection], processes: Sequence[BaseProcess]) -> None:
        self.size = len(links) + 1
        self._links = dict(links)
        self._processes = processes
        self._lock = threading.Lock()
        self._watchers: list[Callable[[str], None]] = []
        self._releases: list[Callable[[], None]] = []
        self._reason = ""
        self._closing = False
        self._gone = threading.Event()
        threading.Thread(target=self._listen, name="ranks", daemon=True).start()
        atexit.register(self.close)

    @contextmanager
    def init_kv_cache(self, num_slots: int, plan: BackendPlan) -> Iterator[None]:
        with self._in_step():
            self._send(InitKVCache(num_slots, plan))
            yield

    @contextmanager
    def forward(self, segments: Sequence[Segment]) -> Iterator[None]:
        with self._in_step():
            self._send(Forward(segments))
            yield

    def register_failure_callback(self, lost: Callable[[str], None]) -> None:
        with self._lock:
            self._watchers.append(lost)
            reason = self._reason
        if reason:
            lost(reason)

    def before_close(self, release: Callable[[], None]) -> None:
        self._releases.append(release)

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if not self._reason:
            with suppress(OSError):
                self._send(Stop())
            for release in self._releases:
                release()
        if not self._reason or dist.get_backend() == "gloo":  # NCCL parts when all ranks do: with one gone, never
            dist.destroy_process_group()
        for process in self._processes:
            process.join(0 if self._reason else _STOP_SECONDS)
            process.kill()
            process.join()
        for link in self._links.values():
            link.close()

    def _send(self, order: Order) -> None:
        message = command_to_bytes(order)
        for link in self._links.values():
            link.send_bytes(message)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """A body that does not come to its end leaves the ranks out of step: they are lost, whatever the reason."""
        if self._reason:
            raise Unavailable(self._reason)
        finished = False
        try:
            yield
            finished = True
        except (OSError, RuntimeError) as error:
            raise Unavailable(self._blame(f": {error}")) from error
        finally:
            if not finished:
                self._blame()

    def _blame(self, error: str = "") -> str:
        """Why the ranks are lost. That one has died is the better reason, and known in a moment."""
        if not self._gone.wait(_BLAME_SECONDS):
            self._lose(f"rank 0 failed in the middle of a step, which leaves the ranks out of step{error}")
        return self._reason

    def _listen(self) -> None:
        """Wait for the end of a link: the other side never sends."""
        ended = wait(list(self._links.values()))
        if not self._closing:
            ranks = ", ".join(f"{rank}" for rank, link in self._links.items() if link in ended)
            self._lose(f"rank {ranks} of {self.size} is gone; its own output says why")

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._reason:
                return
            self._reason = reason
            watchers = tuple(self._watchers)
        log.critical("%s", reason)
        for lost in watchers:
            lost(reason)
        self._gone.set()
