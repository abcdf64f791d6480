"""What a client of a router sees: chunks in, text with its legend on a screen or JSON lines out. Knows no network."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from eyas.rpc.messages import TextChunk, Totals

FORESEEN_STYLE = "bold green"
TARGET_STYLE = "yellow"


class Printer(Protocol):
    """Takes the chunks of an answer as they come."""

    def add(self, chunk: TextChunk) -> None:
        """Show one chunk."""
        ...


class JsonPrinter:
    """Chunks as JSON Lines; the last line of each completion holds the finish reason and the statistics."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def add(self, chunk: TextChunk) -> None:
        """Print one chunk, and the statistics after the last."""
        inner = chunk.chunk
        line: dict[str, Any] = {"index": inner.index, "token_ids": inner.token_ids, "foreseen": inner.foreseen}
        line["text"] = chunk.text
        for name in ("logprobs", "prompt_logprobs"):
            if told := getattr(inner, name):
                line[name] = list(map(dataclasses.asdict, told))
        if inner.round:
            line["round"] = dataclasses.asdict(inner.round)
        if chunk.seed is not None:
            line["seed"] = chunk.seed
        print(json.dumps(line), flush=True)
        if chunk.totals:
            seconds = time.perf_counter() - self._started
            print(json.dumps({"index": inner.index} | _final(chunk.totals, inner.finish_reason, seconds)), flush=True)


class ScreenPrinter:
    """Text as it comes, in two styles, with a legend and the statistics below it. Completions come one after the other;
    chunks of a later one are held back."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.perf_counter()
        self._held: defaultdict[int, deque[TextChunk]] = defaultdict(deque)
        self._turn = 0

    def add(self, chunk: TextChunk) -> None:
        """Print one chunk in its turn, and the legend after the last of a completion."""
        self._held[chunk.chunk.index].append(chunk)
        while self._held[self._turn]:
            self._print(self._held[self._turn].popleft())

    def _print(self, chunk: TextChunk) -> None:
        for text in _styled(chunk):
            self._console.print(text, end="")
        if chunk.totals:
            self._turn += 1
            self._console.print("\n")
            self._console.print(
                Text.assemble(("foreseen by the drafter", FORESEEN_STYLE), ", ", ("the target's own", TARGET_STYLE))
            )
            self._console.print(_summary(chunk.totals, time.perf_counter() - self._started), style="dim")


def _styled(chunk: TextChunk) -> Iterator[Text]:
    """The chunk's text, token by token; text released at the end counts as the target's own."""
    at = 0
    for length, foreseen in zip(chunk.text_lengths, chunk.chunk.foreseen, strict=True):
        yield Text(chunk.text[at : at + length], FORESEEN_STYLE if foreseen else TARGET_STYLE)
        at += length
    yield Text(chunk.text[at:], TARGET_STYLE)


def _summary(totals: Totals, seconds: float) -> str:
    rounds = f", {totals.stats.num_rounds} rounds, tau {totals.stats.acceptance_length:.2f}" if totals.stats else ""
    return f"{totals.num_output_tokens} tokens{rounds}, {totals.num_output_tokens / seconds:.1f} tokens/s"


def _final(totals: Totals, finish_reason: str | None, seconds: float) -> dict[str, Any]:
    final: dict[str, Any] = {
        "finish_reason": finish_reason,
        "num_prompt_tokens": totals.num_prompt_tokens,
        "num_cached_tokens": totals.num_cached_tokens,
        "num_output_tokens": totals.num_output_tokens,
        "seconds": round(seconds, 6),
        "tokens_per_second": round(totals.num_output_tokens / seconds, 3),
    }
    if totals.stats:
        final["stats"] = dataclasses.asdict(totals.stats) | {
            "acceptance_length": totals.stats.acceptance_length,
            "acceptance_by_depth": totals.stats.acceptance_by_depth,
        }
    return final
