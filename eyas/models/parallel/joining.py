"""How the processes of one target find one another: a place in, a leader or a follower out. Knows no tensors of theirs."""

from __future__ import annotations

import multiprocessing
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from eyas.errors import EyasError, Unavailable
from eyas.models.parallel.orders import Allot, Forward, Order, Stop, order_from_bytes
from eyas.models.parallel.ranks import Leader, Place

# How long ranks wait for one another at the start: pods of a group may start minutes apart.
_START_SECONDS = 600.0
_END_SECONDS = 5
_PORT_KEY = "eyas/orders"


def lead(place: Place, work: Callable[[Place], None]) -> Leader:
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
    return Leader(links, processes)


class Follower:
    """A rank other than 0, joined to it, with its process to itself. Raises Unavailable when rank 0 is not to be found."""

    def __init__(self, place: Place) -> None:
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

    def orders(self) -> Iterator[Allot | Forward]:
        """What rank 0 wants, until it wants no more. Raises Unavailable when rank 0 is gone."""
        while not isinstance(order := self._receive(), Stop):
            yield order
        self._stopped = True
        signal.alarm(0)

    def leave(self) -> None:
        """Part from the other ranks, once there are no more orders."""
        self._link.close()
        dist.destroy_process_group()

    def _receive(self) -> Order:
        try:
            return order_from_bytes(self._link.recv_bytes())
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


def _store(place: Place) -> TCPStore:
    keeps = place.rank == 0 and not place.has_store
    timeout = timedelta(seconds=_START_SECONDS)
    return TCPStore(place.address, place.port, place.size, keeps, timeout, wait_for_workers=False)


def _join_group(place: Place, store: Store) -> None:
    device = torch.device(place.device)
    bound = torch.device("cuda", device.index or 0) if device.type == "cuda" else None
    backend = "nccl" if bound else "gloo"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, device_id=bound)


def _start(place: Place, work: Callable[[Place], None]) -> BaseProcess:
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=_work, args=(place, work, torch.get_num_threads()), name=f"rank {place.rank}", daemon=True
    )
    process.start()
    return process


def _work(place: Place, work: Callable[[Place], None], num_threads: int) -> None:
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
