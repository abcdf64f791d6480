"""A gRPC client of a router, and printers of what it receives: text on a terminal, or JSON Lines."""

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

LIST_TIMEOUT_S = 10.0

ACCEPTED_STYLE = "bold green"
TARGET_STYLE = "yellow"


@dataclass(frozen=True)
class RouterClient:
    """A client of the router at `address`, host:port. api_key: empty for a router that requires none."""

    address: str
    options: ChannelOptions
    api_key: str = field(default="", repr=False)

    def models(self) -> tuple[ModelInfo, ...]:
        """Return the models that the router serves now. Raises grpc.RpcError."""
        with open_sync_channel(self.address, self.options) as channel:
            stub = GenerationStub(channel)
            response = stub.ListModels(ListModelsRequest(), timeout=LIST_TIMEOUT_S, metadata=self._metadata)
            return tuple(models_from_proto(response))

    def stream(self, call: GenerateCall) -> Iterator[TextChunk]:
        """Yield the chunks of a call; closing the iterator early cancels it. Raises grpc.RpcError."""
        with open_sync_channel(self.address, self.options) as channel:
            responses = GenerationStub(channel).Generate(generate_call_to_proto(call), metadata=self._metadata)
            try:
                yield from map(text_chunk_from_proto, responses)
            finally:
                responses.cancel()  # type: ignore[no-untyped-call]

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


def tls_options(ca_file: str, server_name: str) -> ChannelOptions:
    """Return the options of a TLS channel to a router. Raises ConfigError for a file that cannot be used.

    ca_file: PEM file that signed the router's certificate; empty uses the system's trust store.
    server_name: expected in the certificate; empty expects the host of the address.
    """
    pem = Certificates("--ca", ca_file=ca_file).pem
    return ChannelOptions(credentials=channel_credentials(pem), server_name=server_name)


class Printer(Protocol):
    """Prints the chunks of a response as they come."""

    def add(self, chunk: TextChunk) -> None:
        """Print one chunk."""
        ...


class JsonPrinter:
    """Prints chunks as JSON Lines; the last line of each completion has its finish reason and statistics."""

    def __init__(self) -> None:
        self._started_at = time.perf_counter()

    def add(self, chunk: TextChunk) -> None:
        """Print one chunk, and the statistics after the last."""
        inner = chunk.chunk
        line: dict[str, Any] = {
            "index": inner.index,
            "token_ids": inner.token_ids,
            "is_draft_token": inner.is_draft_token,
            "text": chunk.text,
        }
        for name in ("logprobs", "prompt_logprobs"):
            if logprobs := getattr(inner, name):
                line[name] = list(map(dataclasses.asdict, logprobs))
        if inner.verify_step:
            line["verify_step"] = dataclasses.asdict(inner.verify_step)
        if chunk.seed is not None:
            line["seed"] = chunk.seed
        print(json.dumps(line), flush=True)
        if chunk.totals:
            seconds = time.perf_counter() - self._started_at
            print(json.dumps({"index": inner.index} | _statistics(chunk.totals, inner.finish_reason, seconds)), flush=True)


class ScreenPrinter:
    """Prints text as it comes, accepted draft tokens in a style of their own, and a legend and statistics after it.

    Completions are printed one after the other; the chunks of a later one wait.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_at = time.perf_counter()
        self._waiting: defaultdict[int, deque[TextChunk]] = defaultdict(deque)
        self._current = 0

    def add(self, chunk: TextChunk) -> None:
        """Print a chunk once the completions before its own are done."""
        self._waiting[chunk.chunk.index].append(chunk)
        while self._waiting[self._current]:
            self._print(self._waiting[self._current].popleft())

    def _print(self, chunk: TextChunk) -> None:
        for text in _styled(chunk):
            self._console.print(text, end="")
        if chunk.totals:
            self._current += 1
            legend = Text.assemble(("accepted draft tokens", ACCEPTED_STYLE), ", ", ("the target's own", TARGET_STYLE))
            self._console.print("\n")
            self._console.print(legend)
            self._console.print(_summary(chunk.totals, time.perf_counter() - self._started_at), style="dim")


def _styled(chunk: TextChunk) -> Iterator[Text]:
    """Yield the chunk's text token by token; text that the last chunk releases counts as the target's own."""
    start = 0
    for length, is_draft_token in zip(chunk.text_lengths, chunk.chunk.is_draft_token, strict=True):
        yield Text(chunk.text[start : start + length], ACCEPTED_STYLE if is_draft_token else TARGET_STYLE)
        start += length
    yield Text(chunk.text[start:], TARGET_STYLE)


def _summary(totals: Totals, seconds: float) -> str:
    stats = totals.stats
    steps = f", {stats.num_verify_steps} verify steps, tau {stats.acceptance_length:.2f}" if stats else ""
    return f"{totals.num_output_tokens} tokens{steps}, {totals.num_output_tokens / seconds:.1f} tokens/s"


def _statistics(totals: Totals, finish_reason: str | None, seconds: float) -> dict[str, Any]:
    statistics: dict[str, Any] = {
        "finish_reason": finish_reason,
        "num_prompt_tokens": totals.num_prompt_tokens,
        "num_cached_tokens": totals.num_cached_tokens,
        "num_output_tokens": totals.num_output_tokens,
        "seconds": round(seconds, 6),
        "tokens_per_second": round(totals.num_output_tokens / seconds, 3),
    }
    if totals.stats:
        statistics["stats"] = dataclasses.asdict(totals.stats) | {
            "acceptance_length": totals.stats.acceptance_length,
            "acceptance_by_depth": totals.stats.acceptance_by_depth,
        }
    return statistics
