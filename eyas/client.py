"""The way to a router's gRPC door: options of the command in, models and chunks out. Knows no screen.

What a client of a router sees: chunks in, text with its legend on a screen or JSON lines out. Knows no network.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from eyas.rpc.channel import Certificates, ChannelOptions, channel_credentials, open_sync_channel
from eyas.rpc.convert import generate_call_to_proto, models_from_proto, text_chunk_from_proto
from eyas.rpc.messages import GenerateCall, ModelInfo, TextChunk, Totals
from eyas.v1.generation_pb2 import ListModelsRequest
from eyas.v1.generation_pb2_grpc import GenerationStub

LIST_SECONDS = 10.0


@dataclass(frozen=True)
class RouterClient:
    """Where a router listens and how it is spoken to. address: host:port. api_key: empty for a router that asks for none."""

    address: str
    line: ChannelOptions
    api_key: str = field(default="", repr=False)

    def models(self) -> tuple[ModelInfo, ...]:
        """The models that can be asked for now. Raises grpc.RpcError."""
        with open_sync_channel(self.address, self.line) as channel:
            stub = GenerationStub(channel)
            answer = stub.ListModels(ListModelsRequest(), timeout=LIST_SECONDS, metadata=self._metadata)
            return tuple(models_from_proto(answer))

    def stream(self, call: GenerateCall) -> Iterator[TextChunk]:
        """Chunks of a call; leaving early cancels it. Raises grpc.RpcError."""
        with open_sync_channel(self.address, self.line) as channel:
            answers = GenerationStub(channel).Generate(generate_call_to_proto(call), metadata=self._metadata)
            try:
                yield from map(text_chunk_from_proto, answers)
            finally:
                answers.cancel()  # type: ignore[no-untyped-call]

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


def tls_line(ca: str, name: str) -> ChannelOptions:
    """TLS to a router. ca: PEM file of those who sign its certificate; empty trusts whom this machine trusts. name: whom the
    certificate is for; empty takes the host dialled. Raises ConfigError for a file that cannot be used."""
    return ChannelOptions(credentials=channel_credentials(Certificates("--ca", authority=ca).pem), name=name)


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
        line: dict[str, Any] = {"index": inner.index, "token_ids": inner.token_ids, "is_draft_token": inner.is_draft_token}
        line["text"] = chunk.text
        for name in ("logprobs", "prompt_logprobs"):
            if told := getattr(inner, name):
                line[name] = list(map(dataclasses.asdict, told))
        if inner.verify_step:
            line["round"] = dataclasses.asdict(inner.verify_step)
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
                Text.assemble(("is_draft_token by the drafter", FORESEEN_STYLE), ", ", ("the target's own", TARGET_STYLE))
            )
            self._console.print(_summary(chunk.totals, time.perf_counter() - self._started), style="dim")


def _styled(chunk: TextChunk) -> Iterator[Text]:
    """The chunk's text, token by token; text released at the end counts as the target's own."""
    at = 0
    for length, is_draft_token in zip(chunk.text_lengths, chunk.chunk.is_draft_token, strict=True):
        yield Text(chunk.text[at : at + length], FORESEEN_STYLE if is_draft_token else TARGET_STYLE)
        at += length
    yield Text(chunk.text[at:], TARGET_STYLE)


def _summary(totals: Totals, seconds: float) -> str:
    rounds = f", {totals.stats.num_verify_steps} rounds, tau {totals.stats.acceptance_length:.2f}" if totals.stats else ""
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
