"""Clients that send one request after the other, and record the outputs."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from eyas.api.request import SamplingParams
from eyas.errors import EyasError
from tests.support.services.grpc_client import Generated, generate

NUM_CLIENTS = 2
AFTER = 2  # requests of each client between two steps of a test
PAUSE_S = 0.1  # a load without pauses takes all of a processor while a service stops


@dataclass
class Load:
    """Every request goes to the address that `endpoint` returns then, as through a Service."""

    endpoint: Callable[[], str]
    prompt: Sequence[int]
    sampling: SamplingParams
    outs: list[Generated] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The clients send requests until the block ends; running requests finish."""
        threads = [threading.Thread(target=self._ask_on) for _ in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            for thread in threads:
                thread.join()

    def go_on(self) -> None:
        """Return when AFTER more requests have ended."""
        enough, deadline = len(self.outs) + AFTER * NUM_CLIENTS, time.monotonic() + 250
        while len(self.outs) < enough and not self.failures:
            assert time.monotonic() < deadline, "the load stands still"
            time.sleep(0.02)

    def _ask_on(self) -> None:
        while not self._stopping.wait(PAUSE_S):
            try:
                self.outs.append(generate(self.endpoint(), self.prompt, self.sampling))
            except (EyasError, AssertionError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                return
