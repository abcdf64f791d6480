"""A circuit breaker for the connection to a drafter."""

from __future__ import annotations

import threading
import time

CIRCUIT_STATES = ("closed", "half-open", "open")
# Longest backoff of a circuit breaker, unless breaker_reset_s is longer.
MAX_BACKOFF_S = 10.0


class CircuitBreaker:
    """Breaker that stops requests to a drafter whose trees do not arrive, or are invalid.

    It opens after `max_failures` failures in a row: lost requests, and replies with invalid trees. After `reset_s` seconds
    one request may try again: an answer closes the circuit, a failure opens it for twice as long as before, up to
    MAX_BACKOFF_S. The engine's thread and the connection's both report; `_lock` guards all that changes.
    """

    def __init__(self, max_failures: int, reset_s: float) -> None:
        self.state = "closed"
        self._lock = threading.Lock()
        self._max_failures = max_failures
        self._reset_s = reset_s
        self._num_failures = 0
        self._backoff_s = reset_s
        self._open_until = 0.0
        self._before_success: tuple[str, int, float] | None = None  # None if the last request failed

    @property
    def backing_off(self) -> bool:
        """Return whether the circuit is open and it is too early for another attempt."""
        return time.monotonic() < self._open_until

    def admits(self, wants_trees: bool) -> bool:
        """Return whether to send a request now; only one that wants trees may try a drafter that failed."""
        with self._lock:
            if self.state == "open" and wants_trees and not self.backing_off:
                self.state = "half-open"
            return self.state != "open"

    def succeeded(self) -> None:
        """Close the circuit."""
        with self._lock:
            self._before_success = (self.state, self._num_failures, self._backoff_s)
            self.state, self._num_failures, self._backoff_s = "closed", 0, self._reset_s

    def failed(self) -> None:
        """Count a lost request; open the circuit if it was one too many."""
        with self._lock:
            self._fail()

    def rejected(self) -> None:
        """Count the last success as a failure: the answer is invalid. A request that failed counts once."""
        with self._lock:
            if self._before_success is not None:
                self.state, self._num_failures, self._backoff_s = self._before_success
                self._fail()

    def _fail(self) -> None:
        self._before_success = None
        self._num_failures += 1
        if self.state == "half-open" or self._num_failures >= self._max_failures:
            self.state, self._open_until = "open", time.monotonic() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, max(MAX_BACKOFF_S, self._reset_s))
