"""Progress of long work: one line on a terminal, lines with the time elsewhere."""

import io
import threading

from rich.console import Console

from eyas.progress import Progress, progress

ERASE = "\x1b[2K"


class Lines(io.StringIO):
    """A file that says when a text has been written a number of times."""

    def __init__(self, text: str, count: int) -> None:
        super().__init__()
        self.is_written = threading.Event()
        self._text, self._count = text, count

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count(self._text) >= self._count:
            self.is_written.set()
        return written


def test_lines_come_at_once_and_again_without_changes() -> None:
    file = Lines("training\n", 2)
    with Progress(Console(file=file), interval_s=0.01) as shown:
        shown.show("reading")
        assert file.getvalue().startswith("[    0 s] reading\n")
        shown.show("training")
        assert file.is_written.wait(60)
    assert "\x1b" not in file.getvalue()


def test_a_text_that_waits_comes_after_an_interval() -> None:
    file = Lines("loading", 1)
    with Progress(Console(file=file), interval_s=3600, waits=True) as shown:
        shown.show("loading")
    assert not file.getvalue()
    with Progress(Console(file=file), interval_s=0.01, waits=True) as shown:
        shown.show("loading")
        assert file.is_written.wait(60)


def test_a_text_that_cannot_wait_is_a_line_of_its_own() -> None:
    with Progress(Console(file=(file := io.StringIO())), interval_s=3600) as shown:
        shown.show("starting")
        shown.show("ready", at_once=True)
        shown.show("idle")
    assert file.getvalue() == "[    0 s] starting\n[    0 s] ready\n"


def test_counts_are_numbers_and_bytes_are_a_share() -> None:
    with Progress(Console(file=(file := io.StringIO())), interval_s=3600) as shown:
        assert list(shown.track(["a", "b"], "steps")) == ["a", "b"]
        shown.show("steps", 1, 2, at_once=True)
        shown.show("writing", total=10**9)
        shown.advance(25 * 10**7)
        shown.print("[a line] that stays")
        shown.show("writing", 5 * 10**8, 10**9, at_once=True)
        shown.show("rows", 3, at_once=True)
    lines = [line.partition("] ")[2] for line in file.getvalue().splitlines()]
    assert lines == ["steps: 0 of 2", "steps: 1 of 2", "that stays", "writing: 50%", "rows: 3"]


def test_a_terminal_has_one_line_that_is_wiped_out() -> None:
    console = Console(file=(file := io.StringIO()), force_terminal=True, width=80)
    with Progress(console) as shown:
        shown.show("steps", 3, 10)
        shown.print("a result")
    assert "steps: 3 of 10" in file.getvalue()
    assert "a result\n" in file.getvalue()
    assert file.getvalue().endswith(ERASE)


def test_progress_that_is_not_shown_does_nothing() -> None:
    with progress(is_shown=False) as shown:
        shown.show("reading", 1, 2, at_once=True)
        shown.advance()
        shown.print("text")
        assert list(shown.track([1], "items")) == [1]
