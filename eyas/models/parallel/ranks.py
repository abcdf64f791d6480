"""The processes of one target as rank 0 sees them: how it leads them, and what tells that one is gone.

Orders go over a socket from rank 0 to each other rank. Nothing comes back over it but its end, which tells at once, on this
machine or another, that a process has died. Sums and gathered outputs go through torch.distributed.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Protocol

import torch.distributed as dist

from eyas.errors import Unavailable
from eyas.models.cuda.plan import Plan
from eyas.models.inputs import Segment
from eyas.models.parallel.orders import Allot, Forward, Order, Stop, order_to_bytes

log = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
_BLAME_SECONDS = 1.0


@dataclass(frozen=True)
class Place:
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


class Ranks(Protocol):
    """The other ranks, as rank 0 sees them."""

    size: int

    def allot(self, num_slots: int, plan: Plan) -> AbstractContextManager[None]:
        """The others make room for so many slots, forget those before, and prepare passes as planned; the body must do the
        same. Raises Unavailable if one is gone."""
        ...

    def forward(self, segments: Sequence[Segment]) -> AbstractContextManager[None]:
        """The others run a forward pass over the segments; the body must run the same. Raises Unavailable if one is gone."""
        ...

    def watch(self, lost: Callable[[str], None]) -> None:
        """`lost` is called once with the reason when a rank is gone, from any thread; at once if one is already."""
        ...

    def before_close(self, release: Callable[[], None]) -> None:
        """`release` is called before the ranks part, unless one is gone by then."""
        ...

    def close(self) -> None:
        """Send the others home, if that has not been done. No order may follow. Happens by itself at the end of Python."""
        ...


class Alone:
    """Rank 0 without others."""

    size = 1

    def allot(self, num_slots: int, plan: Plan) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, segments: Sequence[Segment]) -> AbstractContextManager[None]:
        return nullcontext()

    def watch(self, lost: Callable[[str], None]) -> None: ...

    def before_close(self, release: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


class Leader:
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
    def allot(self, num_slots: int, plan: Plan) -> Iterator[None]:
        with self._in_step():
            self._send(Allot(num_slots, plan))
            yield

    @contextmanager
    def forward(self, segments: Sequence[Segment]) -> Iterator[None]:
        with self._in_step():
            self._send(Forward(segments))
            yield

    def watch(self, lost: Callable[[str], None]) -> None:
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
        message = order_to_bytes(order)
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
