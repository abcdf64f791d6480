"""What `make demo` measures: plain and speculative decoding of the same prompts, as a client of the router sees them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal

import grpc

from eyas.bench.results import first_difference
from eyas.errors import RequestFailed, Unavailable
from eyas.request import GenerationStats, Request, SamplingParams
from eyas.rpc import convert
from eyas.rpc.messages import NO_DRAFTER, ROUND_TRIP_KEY, GenerateCall, TextChunk
from eyas.rpc.server import status_error
from eyas.v1 import generation_pb2_grpc

Mode = Literal["plain", "speculative"]

CALL_SECONDS = 60.0
WARM_UP_SECONDS = 20.0
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Prompt:
    """A prompt and its source."""

    source: str
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class DemoAnswer:
    """One finished request.

    seconds: from sending the request to its last chunk.
    round_trip: mean time from verifier to drafter and back, in ms; None without drafting.
    """

    token_ids: tuple[int, ...]
    stats: GenerationStats
    seconds: float
    round_trip: float | None


@dataclass(frozen=True)
class DemoComparison:
    """The answers to the same prompts, decoded plainly and speculatively with the same sampling."""

    sampling: SamplingParams
    prompts: Sequence[Prompt]
    plain: list[DemoAnswer] = field(default_factory=list)
    speculative: list[DemoAnswer] = field(default_factory=list)

    @property
    def stats(self) -> GenerationStats:
        """Speculation statistics, summed over all prompts."""
        total = GenerationStats()
        for answer in self.speculative:
            total.merge(answer.stats)
        return total

    @property
    def round_trip(self) -> float:
        """Mean time from verifier to drafter and back, in ms."""
        return fmean([answer.round_trip for answer in self.speculative if answer.round_trip is not None] or [0.0])

    def speed(self, mode: Mode) -> float:
        """Tokens per second over all prompts, time to the first token included."""
        answers = self.plain if mode == "plain" else self.speculative
        return sum(len(answer.token_ids) for answer in answers) / sum(answer.seconds for answer in answers)

    def differences(self) -> list[str]:
        """One line for each prompt whose outputs differ."""
        found = []
        for prompt, plain, speculative in zip(self.prompts, self.plain, self.speculative, strict=True):
            if plain.token_ids != speculative.token_ids:
                at = first_difference(plain.token_ids, speculative.token_ids)
                found.append(f"{prompt.source} at temperature {self.sampling.temperature}: outputs differ from token {at}")
        return found


class DemoClient:
    """Sends one request at a time to a router."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = generation_pb2_grpc.GenerationStub(channel)

    def stream(self, call: GenerateCall) -> Iterator[TextChunk]:
        """Yield the chunks of a call. Raises the EyasError of its status."""
        try:
            for message in self._stub.Generate(convert.generate_call_to_proto(call), timeout=CALL_SECONDS):
                yield convert.text_chunk_from_proto(message)
        except grpc.RpcError as error:
            raise status_error(error) from error

    def ask(self, prompt: Prompt, sampling: SamplingParams, mode: Mode) -> DemoAnswer:
        """Decode a prompt to the end. Raises EyasError when the call or the generation fails."""
        drafter = NO_DRAFTER if mode == "plain" else ""
        call = convert.generate_call_to_proto(GenerateCall(Request("", prompt.token_ids, sampling), drafter=drafter))
        started = time.perf_counter()
        answers = self._stub.Generate(call, timeout=CALL_SECONDS)
        try:
            chunks = [convert.text_chunk_from_proto(message) for message in answers]
        except grpc.RpcError as error:
            raise status_error(error) from error
        seconds = time.perf_counter() - started
        token_ids = tuple(token for chunk in chunks for token in chunk.chunk.token_ids)
        last = chunks[-1]
        if last.chunk.finish_reason not in ("stop", "length") or last.totals is None:
            raise RequestFailed(f"{prompt.source}: ended with {last.chunk.finish_reason}: {last.chunk.message}")
        return DemoAnswer(
            token_ids, last.totals.stats or GenerationStats(), seconds, _round_trip(answers.trailing_metadata())
        )

    def warm_up(self, prompt: Prompt) -> None:
        """Return once both modes work. Raises Unavailable if no draft tree arrives in time."""
        sampling = SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=0.0, ignore_eos=True)
        deadline = time.monotonic() + WARM_UP_SECONDS
        self.ask(prompt, sampling, "plain")
        while not self.ask(prompt, sampling, "speculative").stats.num_drafted:
            if time.monotonic() > deadline:
                raise Unavailable(f"no draft tree arrived within {WARM_UP_SECONDS:.0f} s; see the draft service's log")

    def compare(self, comparison: DemoComparison, prompt: Prompt) -> None:
        """Decode one more prompt in both modes; the mode that goes first alternates."""
        turns: list[Mode] = ["plain", "speculative"]
        for mode in turns if len(comparison.plain) % 2 == 0 else reversed(turns):
            answers = comparison.plain if mode == "plain" else comparison.speculative
            answers.append(self.ask(prompt, comparison.sampling, mode))


def read_prompts(file: Path) -> list[Prompt]:
    """Read the prompts of a JSON Lines file with source, text and token_ids."""
    entries = map(json.loads, file.read_text().splitlines())
    return [Prompt(entry["source"], entry["text"], tuple(entry["token_ids"])) for entry in entries]


def _round_trip(metadata: Sequence[tuple[str, str | bytes]]) -> float | None:
    values = [float(value) for key, value in metadata if key == ROUND_TRIP_KEY]
    return values[0] if values else None
