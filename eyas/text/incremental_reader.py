"""Reads text that comes in pieces, without depending on where the pieces end.

A reader is a generator that yields where it needs more text to decide. So its code has the order of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from typing import TypeAlias

Steps: TypeAlias = Generator[None, None, None]

_SLICE = 1024  # characters of a piece that are read at once: the work on what is not read yet stays linear
MAX_HEADER = 1024  # characters that may stand before a part that is passed on as it comes
WHITE_SPACE = " \t\r\n"
_SPACE = re.compile(f"[{WHITE_SPACE}]*")


class TextReader:
    """Text and the generator that reads it.

    Attributes:
        rest: what came and is not read yet.
        least_cut: characters of a marker that the end of the text may cut. Fewer are text.
    """

    def __init__(self, least_cut: int = 2) -> None:
        self.rest = ""
        self.least_cut = least_cut
        self._is_complete = False
        self._steps: Steps | None = None

    def run(self, steps: Steps) -> None:
        """Begin to read with a generator."""
        self._steps = steps
        next(steps, None)

    def push(self, text: str) -> None:
        """Take the next piece."""
        assert self._steps is not None
        for start in range(0, len(text), _SLICE):
            self.rest += text[start : start + _SLICE]
            next(self._steps, None)

    def finish(self) -> None:
        """Let the generator read the rest: no further piece comes."""
        assert self._steps is not None
        self._is_complete = True
        next(self._steps, None)

    def take(self, length: int) -> str:
        text, self.rest = self.rest[:length], self.rest[length:]
        return text

    def more(self) -> Generator[None, None, bool]:
        """Wait for more text; return False if there will be none."""
        if self._is_complete:
            return False
        yield
        return True

    def pass_on(self, emit: Callable[[str], None], marker: str = "") -> Steps:
        """Emit everything, up to the marker if one is given, which stays."""
        if marker:
            found = yield from self.until((marker,), emit)
            self.rest = found + self.rest
            return
        while True:
            if self.rest:
                emit(self.take(len(self.rest)))
            if not (yield from self.more()):
                return

    def until(self, markers: tuple[str, ...], emit: Callable[[str], None]) -> Generator[None, None, str]:
        """Emit the text before the first marker as it comes; remove and return the marker, or return "" at the end.

        The beginning of a marker that the end cuts is left out.
        """
        while True:
            found = min(((at, marker) for marker in markers if (at := self.rest.find(marker)) >= 0), default=None)
            if found is not None:
                emit(self.take(found[0]))
                return self.take(len(found[1]))
            keep = max(overlap(self.rest, marker) for marker in markers)
            if self._is_complete and keep < self.least_cut:
                keep = 0
            if len(self.rest) > keep:
                emit(self.take(len(self.rest) - keep))
            if not (yield from self.more()):
                self.rest = ""
                return ""

    def begins_with(self, *texts: str) -> Generator[None, None, str]:
        """Return the first of the texts that comes next; empty if none does."""
        for text in texts:
            while len(self.rest) < len(text) and text.startswith(self.rest):
                if not (yield from self.more()):
                    break
            if self.rest.startswith(text):
                return text
        return ""

    def is_cut(self, *markers: str) -> bool:
        """Return whether the text ended before one of the markers, or inside of it; without any, whether it ended here."""
        return self._is_complete and any(marker.startswith(self.rest) for marker in markers or ("",))

    def skip(self, *texts: str) -> Generator[None, None, str]:
        """Remove and return the first of the texts that comes next; return an empty one if none does."""
        return self.take(len((yield from self.begins_with(*texts))))

    def skip_end(self, *texts: str) -> Generator[None, None, bool]:
        """Remove the first of the texts that comes next, also if the output ends inside of it; return whether one did."""
        found = yield from self.skip(*texts)
        if not found and self.is_cut(*texts):
            found = self.take(len(self.rest))
        return bool(found)

    def take_while(self, characters: re.Pattern[str]) -> Generator[None, None, str]:
        """Remove and return the characters that match, MAX_HEADER at most."""
        taken = ""
        while True:
            found = characters.match(self.rest)
            taken += self.take(min(found.end() if found else 0, MAX_HEADER - len(taken)))
            if self.rest or not (yield from self.more()):
                return taken

    def skip_space(self) -> Generator[None, None, str]:
        return self.take_while(_SPACE)


class JsonValue:
    """Finder of the end of one JSON object, list or string without parsing it."""

    _PAIRS: Mapping[str, str] = {"{": "}", "[": "]"}
    _QUOTES = '"'

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._closers: list[str] = []
        self._quote = ""
        self._is_escaped = False

    @property
    def is_open(self) -> bool:
        """Return whether the value has begun and has no end yet."""
        return bool(self._closers or self._quote)

    def scan(self, text: str, start: int = 0) -> int:
        """Return how many characters from `start` belong to the value. is_broken: the one after them cannot."""
        for at in range(start, len(text)):
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                self._is_escaped = text[at] == "\\"
                self._quote = "" if text[at] == self._quote else self._quote
            elif not self._add(text[at]):
                self.is_broken = True
                return at - start
            if not self._closers and not self._quote:
                self.is_done = True
                return at + 1 - start
        return len(text) - start

    def _add(self, character: str) -> bool:
        """Take a character outside of strings; return whether it may stand there."""
        if character in self._QUOTES:
            self._quote = character
        elif character in self._PAIRS:
            self._closers.append(self._PAIRS[character])
        elif character in self._PAIRS.values():
            return bool(self._closers) and self._closers.pop() == character
        else:
            return bool(self._closers) and self._may_be_plain(character)
        return True

    def _may_be_plain(self, character: str) -> bool:
        """Return whether a character may stand between brackets, quotes and the like."""
        return character in " \t\r\n,:+-." or (character.isascii() and character.isalnum())


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)
