"""The processes that share one target (tensor parallelism), as vLLM has them: rank 0 drives, the other ranks follow.

Commands go over a socket from rank 0 to each other rank. A byte comes back for each pass, whether the rank had memory for
it. The end of the connection shows at once, on this machine or another, that a process has died. Sums and gathered outputs
go through torch.distributed.
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
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from eyas.errors import EyasError, Unavailable
from eyas.models.inputs import Segment
from eyas.models.parallel.commands import Command, CommandDecoder, CommandEncoder, InitKVCache

log = logging.getLogger(__name__)

# How long ranks wait for one another at the start: pods of a group may start minutes apart.
_START_SECONDS = 600.0
# How long rank 0 waits for the others to stop.
STOP_SECONDS = 5.0
# How long rank 0 waits after a failure to learn whether another rank has died.
_FAILURE_SECONDS = 1.0
# How long a rank lives on without rank 0.
_ORPHAN_SECONDS = 5
_PORT_KEY = "eyas/commands"
# What a rank answers to a pass.
HAD_MEMORY, NO_MEMORY = b"1", b"0"


@dataclass(frozen=True)
class RankInfo:
    """One of `size` processes.

    Attributes:
        device: the one that it computes on, "cpu" or "cuda:N".
        address, port: where rank 0 listens; with port 0, rank 0 takes a free port and starts the other ranks on its
            machine.
        has_store: whether another process keeps the store of torch.distributed there already, as torchrun does.
    """

    rank: int
    size: int
    device: str
    address: str = "127.0.0.1"
    port: int = 0
    has_store: bool = False


class TargetWorkers:
    """The other ranks, as rank 0 sees them; none without connections. Commands come from one thread.

    Args:
        connections: by rank.
        processes: those that rank 0 has started.
    """

    def __init__(self, connections: Mapping[int, Connection] | None = None, processes: Sequence[BaseProcess] = ()) -> None:
        self._connections = connections or {}
        self.size = len(self._connections) + 1
        self._processes = processes
        self._encoder = CommandEncoder()
        self._lock = threading.Lock()
        self._failure_callbacks: list[Callable[[str], None]] = []
        self._close_callbacks: list[Callable[[], None]] = []
        self._failure = ""
        self._closing = False
        self._failed = threading.Event()
        if connections:
            threading.Thread(target=self._watch_connections, name="ranks", daemon=True).start()
            atexit.register(self.close)

    def init_kv_cache(self, command: InitKVCache) -> AbstractContextManager[None]:
        """Let the others allocate slots and build the planned backend; the body must do the same.

        Earlier slots are dropped. Raises Unavailable if a rank is gone.
        """
        return self._in_step(command) if self._connections else nullcontext()

    def forward(self, segments: Sequence[Segment]) -> AbstractContextManager[None]:
        """Let the others run a forward pass; the body must run the same. Raises Unavailable if a rank is gone.

        A rank without memory for the pass finishes its exchanges and says so. Then the body's result is of no use, and
        torch.OutOfMemoryError is raised here, with all ranks in step. The body may raise it for the same reason.
        """
        return self._in_step(segments, self._check_memory)

    def register_failure_callback(self, callback: Callable[[str], None]) -> None:
        """Call `callback` once with the reason when the ranks fail, from any thread; at once if they have already failed."""
        with self._lock:
            self._failure_callbacks.append(callback)
            failure = self._failure
        if failure:
            callback(failure)

    def before_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` before the ranks leave their group, unless one is gone by then."""
        self._close_callbacks.append(callback)

    def close(self) -> None:
        """Stop the other ranks. No command may follow. Runs by itself when Python ends; a second call does nothing."""
        if self._closing or not self._connections:
            return
        self._closing = True
        if not self._failure:
            with suppress(OSError):
                self._send(None)
            for callback in self._close_callbacks:
                callback()
        if not self._failure or dist.get_backend() == "gloo":  # NCCL waits for all ranks: for ever, if one is gone
            dist.destroy_process_group()
        for process in self._processes:
            process.join(0 if self._failure else STOP_SECONDS)
            process.kill()
            process.join()
        for connection in self._connections.values():
            connection.close()

    def _check_memory(self) -> None:
        """Wait until each rank has begun all of its pass. Raises torch.OutOfMemoryError if one had no memory for it."""
        failed = [str(rank) for rank, own in self._connections.items() if own.recv_bytes() == NO_MEMORY]
        if failed:
            raise torch.OutOfMemoryError(f"rank {', '.join(failed)} of {self.size} has no memory for the pass")

    @contextmanager
    def _in_step(self, command: Command, agree: Callable[[], None] | None = None) -> Iterator[None]:
        """Send a command, run the body and `agree`. A body that does not finish leaves the ranks out of step, which is a
        failure. With `agree` one that raises torch.OutOfMemoryError has done its part."""
        if self._failure:
            raise Unavailable(self._failure)
        finished = False
        try:
            self._send(command)
            try:
                yield
            except torch.OutOfMemoryError:
                if agree is not None:
                    agree()
                raise
            if agree is not None:
                agree()
            finished = True
        except torch.OutOfMemoryError as error:
            if agree is None:
                raise Unavailable(self._failure_reason(f": {error}")) from error
            finished = True
            raise
        except (OSError, EOFError, RuntimeError) as error:
            raise Unavailable(self._failure_reason(f": {error}")) from error
        finally:
            if not finished:
                self._failure_reason()

    def _send(self, command: Command | None) -> None:
        message = self._encoder.encode(command)
        for connection in self._connections.values():
            connection.send_bytes(message)

    def _failure_reason(self, error: str = "") -> str:
        """Return why the ranks failed: if one has died, that is the reason, and it is known within a moment."""
        if not self._failed.wait(_FAILURE_SECONDS):
            self.fail(f"rank 0 failed in the middle of a step, which leaves the ranks out of step{error}")
        return self._failure

    def _watch_connections(self) -> None:
        """Wait until the other side ends a connection."""
        by_file = {connection.fileno(): rank for rank, connection in self._connections.items()}
        poll = select.poll()
        for file in by_file:
            poll.register(file, select.POLLRDHUP)
        ended = poll.poll()
        if not self._closing:
            ranks = ", ".join(f"{by_file[file]}" for file, _ in ended)
            self.fail(f"rank {ranks} of {self.size} is gone; its own output says why")

    def fail(self, reason: str) -> None:
        """Let no further step run, and call the failure callbacks; later calls do nothing. From any thread."""
        with self._lock:
            if self._failure:
                return
            self._failure = reason
            callbacks = tuple(self._failure_callbacks)
        log.critical("%s", reason)
        for callback in callbacks:
            callback(reason)
        self._failed.set()


class Worker:
    """A rank other than 0, joined to rank 0. Raises Unavailable when rank 0 is not found."""

    def __init__(self, info: RankInfo) -> None:
        try:
            store = _store(info)
            port = int(store.get(_PORT_KEY))
            self._connection = _connection(socket.create_connection((info.address, port), _START_SECONDS))
            self._connection.send_bytes(f"{info.rank}".encode())
            _join_group(info, store)
        except (OSError, RuntimeError) as error:
            raise Unavailable(f"rank {info.rank} finds no rank 0 at {info.address}:{info.port}: {error}") from error
        self._stopped = False
        threading.Thread(target=self._end_without_driver, name="rank 0", daemon=True).start()

    def commands(self) -> Iterator[Command]:
        """Yield what rank 0 commands, until it stops this rank. Raises Unavailable when rank 0 is gone."""
        decoder = CommandDecoder()
        try:
            while (command := decoder.decode(self._connection.recv_bytes())) is not None:
                yield command
        except (EOFError, OSError) as error:
            raise Unavailable("rank 0 is gone") from error
        self._stopped = True
        signal.alarm(0)

    def report(self, had_memory: bool) -> None:
        """Send rank 0 whether there was memory for a pass, once all of it is under way or its exchanges are finished."""
        with suppress(OSError):  # rank 0 is gone, which the next command shows
            self._connection.send_bytes(HAD_MEMORY if had_memory else NO_MEMORY)

    def close(self) -> None:
        """Leave the group, after the last command."""
        self._connection.close()
        dist.destroy_process_group()

    def _end_without_driver(self) -> None:
        """End this process soon after rank 0 is gone: a sum that waits for a dead rank may never return."""
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLRDHUP)
        poll.poll()
        if not self._stopped:
            signal.alarm(_ORPHAN_SECONDS)


def start_workers(info: RankInfo, run_worker: Callable[[RankInfo], None]) -> TargetWorkers:
    """Start the other ranks, or wait for them, and join them in a group.

    run_worker: what each of them runs, given its own RankInfo; picklable if rank 0 starts them.
    Raises Unavailable when a rank ends before it has joined, or does not join in time.
    """
    store = _store(info)
    on_cuda = info.device.startswith("cuda")
    others = [
        replace(info, rank=rank, port=store.port, device=f"cuda:{rank}" if on_cuda else info.device)
        for rank in range(1, info.size)
    ]
    with ExitStack() as undo:
        server = undo.enter_context(socket.create_server((info.address, 0)))
        store.set(_PORT_KEY, str(server.getsockname()[1]))
        processes = [_start_process(other, run_worker) for other in others] if info.port == 0 else []
        for process in processes:
            undo.callback(process.kill)
        connections = _accept(server, info.size, processes)
        _join_group(info, store)
        undo.pop_all()
    server.close()
    return TargetWorkers(connections, processes)


def _store(info: RankInfo) -> TCPStore:
    keeps = info.rank == 0 and not info.has_store
    timeout = timedelta(seconds=_START_SECONDS)
    return TCPStore(info.address, info.port, info.size, keeps, timeout, wait_for_workers=False)


def _start_process(info: RankInfo, run_worker: Callable[[RankInfo], None]) -> BaseProcess:
    # Without CUDA, which survives no fork, ranks share the time of their imports.
    multiprocessing.set_forkserver_preload(["torch", "transformers.modeling_utils"])
    spawn, forkserver = multiprocessing.get_context("spawn"), multiprocessing.get_context("forkserver")
    make: Callable[..., BaseProcess] = spawn.Process if info.device.startswith("cuda") else forkserver.Process
    args = (info, run_worker, torch.get_num_threads())
    process = make(target=_run_process, args=args, name=f"rank {info.rank}", daemon=True)
    process.start()
    return process


def _run_process(info: RankInfo, run_worker: Callable[[RankInfo], None], num_threads: int) -> None:
    """Run as the main function of a started process. It ignores Ctrl-C: rank 0 decides when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(num_threads)
    try:
        run_worker(info)
    except EyasError as error:
        sys.exit(f"rank {info.rank}: {error}")


def _accept(server: socket.socket, size: int, processes: Sequence[BaseProcess]) -> dict[int, Connection]:
    """Return a connection from every rank. Raises Unavailable when a process ends first, or time runs out."""
    connections: dict[int, Connection] = {}
    deadline = time.monotonic() + _START_SECONDS
    while missing := set(range(1, size)) - set(connections):
        ready = wait([server, *(process.sentinel for process in processes)], deadline - time.monotonic())
        if server in ready:
            connection = _connection(server.accept()[0])
            connections[int(connection.recv_bytes())] = connection
        elif ready:
            ended = ", ".join(process.name for process in processes if process.sentinel in ready)
            raise Unavailable(f"{ended} ended before it had joined; its own output says why")
        else:
            raise Unavailable(f"rank {', '.join(map(str, missing))} did not join within {_START_SECONDS:.0f} s")
    return connections


def _connection(sock: socket.socket) -> Connection:
    """Return a connection that sends at once and notices within half a minute that the other machine is gone."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(sock.detach())


def _join_group(info: RankInfo, store: Store) -> None:
    device = torch.device(info.device)
    bound = torch.device("cuda", device.index or 0) if device.type == "cuda" else None
    backend = "nccl" if bound else "gloo"
    dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.size, device_id=bound)
