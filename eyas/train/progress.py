"""Progress of a long command: a line that rewrites itself on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

# Seconds between two lines where there is no terminal.
INTERVAL_S = 10.0

# Shows what is done now.
Show = Callable[[str], None]


def silent(text: str) -> None:
    """Show nothing."""


@contextmanager
def progress(is_shown: bool = True, interval_s: float = INTERVAL_S) -> Iterator[Show]:
    """Show on stderr what is done, and for how long. Yields what to call with each new activity, or its new figures.

    Without a terminal the first text is printed at once, and the latest one every interval_s seconds, also while no new one
    comes. is_shown: False shows nothing.
    """
    console = Console(stderr=True)
    if not is_shown:
        yield silent
    elif console.is_terminal:
        with console.status("") as status:
            yield lambda text: status.update(text)
    else:
        with _Lines(interval_s) as lines:
            yield lines.show


class _Lines:
    """Prints the latest text at intervals, with the seconds since the start, from a thread of its own."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s, self._began = interval_s, time.monotonic()
        self._text = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def show(self, text: str) -> None:
        """Take the text for the next lines."""
        self._text = text
        if self._thread.ident is None:
            self._print()
            self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._print()

    def _print(self) -> None:
        print(f"[{time.monotonic() - self._began:5.0f} s] {self._text}", file=sys.stderr, flush=True)
