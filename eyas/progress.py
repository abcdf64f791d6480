"""Progress of long work: a line that rewrites itself on a terminal, elsewhere a line with the time every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Item = TypeVar("Item")
# Seconds between two lines where there is no terminal.
INTERVAL_S = 10.0
# Drawing takes time away from what is measured.
REFRESHES_PER_SECOND = 2
# A larger total counts bytes, which are shown as a share.
MAX_COUNT = 100_000

# Shows what is done now.
Show = Callable[[str], None]


def silent(text: str) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class _Activity:
    """An activity that is shown.

    Attributes:
        done, total: how far it is; 0 where that is unknown.
    """

    text: str = ""
    done: float = 0.0
    total: float = 0.0

    def __str__(self) -> str:
        if not self.total:
            return f"{self.text}: {self.done:.0f}" if self.done else self.text
        far = f"{self.done / self.total:.0%}" if self.total > MAX_COUNT else f"{self.done:.0f} of {self.total:.0f}"
        return f"{self.text}: {far}"


class Progress(AbstractContextManager["Progress"]):
    """Display of what a command does and for how long, while its context lasts. Any thread may change what it is.

    On a terminal a line and a bar are drawn, and wiped out at the end. Elsewhere the first text is printed at once, and the
    latest one at intervals, also while no new one comes. Without a console nothing is shown.

    Args:
        waits: elsewhere than on a terminal, print nothing before the first interval is over.
    """

    def __init__(self, console: Console | None = None, interval_s: float = INTERVAL_S, waits: bool = False) -> None:
        self._console, self._interval_s, self._waits = console, interval_s, waits
        self._activity = _Activity()
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._live: Live | None = None
        self._lines: threading.Thread | None = None

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        if self._console is not None and self._console.is_terminal:
            self._live = Live(
                get_renderable=self._row,
                console=self._console,
                transient=True,
                refresh_per_second=REFRESHES_PER_SECOND,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start(refresh=False)
        elif self._console is not None:
            self._lines = threading.Thread(target=self._print_lines, name="progress", daemon=True)
            self._lines.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._live is not None:
            self._live.stop()
        if self._lines is not None:
            self._lines.join()

    def show(self, text: str, done: float = 0.0, total: float = 0.0, at_once: bool = False) -> None:
        """Show what is done now.

        Args:
            done, total: how far it is, if known.
            at_once: do not wait for the next interval.
        """
        at_once = at_once or not (self._activity.text or self._waits)
        self._activity = _Activity(text, done, total)
        if at_once and self._live is not None:
            self._live.refresh()
        elif at_once and self._lines is not None:
            self._print_line()

    def advance(self, amount: float = 1.0) -> None:
        """Show that the same activity is farther."""
        self._activity = replace(self._activity, done=self._activity.done + amount)

    def track(self, items: Collection[Item], text: str) -> Iterator[Item]:
        """Yield the items, and show how many of them are done."""
        for number, item in enumerate(items):
            self.show(text, number, len(items))
            yield item

    def print(self, text: str) -> None:
        """Print a line that stays, above the one that changes."""
        if self._console is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _row(self) -> Table:
        now = self._activity
        row = Table.grid(padding=(0, 1))
        bar = [ProgressBar(now.total, now.done, width=30)] if now.total else []
        row.add_row(Text(str(now), overflow="ellipsis", no_wrap=True), *bar, f"{time.monotonic() - self._began:.0f} s")
        return row

    def _print_lines(self) -> None:
        while not self._ended.wait(self._interval_s):
            if self._activity.text:
                self._print_line()

    def _print_line(self) -> None:
        self.print(f"[{time.monotonic() - self._began:5.0f} s] {self._activity}")


def progress(is_shown: bool = True, waits: bool = False) -> Progress:
    """Return a progress on stderr; one that shows nothing unless is_shown."""
    return Progress(Console(stderr=True) if is_shown else None, waits=waits)
