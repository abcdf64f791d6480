"""Clients that send requests through the router, over gRPC and HTTP, and compare every answer with the plain one."""

from __future__ import annotations

import asyncio
import json
import random
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc
import grpc.aio
import httpx

from eyas.api.request import Request
from eyas.rpc.channel import open_channel
from eyas.rpc.convert import generate_call_to_proto, text_chunk_from_proto
from eyas.rpc.messages import NO_DRAFTER, GenerateCall
from eyas.v1.generation_pb2_grpc import GenerationStub
from tests.chaos.answers import Answer, Mismatch, Received

REQUEST_TIMEOUT_S = 300.0
DRAFTER_RATIO, HTTP_RATIO, CANCEL_RATIO = 0.8, 0.2, 0.05
NUM_SESSIONS = 40
MAX_KEPT_FAILURES = 200
# Part of the error for a request that is refused because it lost two verifiers.
BLAMED = "two verifiers were lost"

# Called with the beginning and the end of every wait for the next part of an answer, by time.monotonic().
OnGap = Callable[[float, float], object]


class RequestDied(Exception):
    """A request ended without its answer. code: gRPC's status, or HTTP's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


@dataclass
class Counts:
    """What the clients have seen: tokens over gRPC, characters over HTTP. failures: by status.

    blamed: answers to requests that the router refused after it had lost two verifiers while each was tried.
    notes: the first failures and mismatches, for people.
    """

    num_requests: int = 0
    num_cancelled: int = 0
    num_tokens: int = 0
    num_characters: int = 0
    mismatch: Mismatch = field(default_factory=Mismatch)
    failures: Counter[str] = field(default_factory=Counter)
    blamed: set[tuple[int, ...]] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    gaps: array[float] = field(default_factory=lambda: array("f"))

    def add(self, num_items: int, is_text: bool) -> None:
        """Count what a client has received."""
        self.num_characters += num_items * is_text
        self.num_tokens += num_items * (not is_text)

    def note(self, text: str) -> None:
        """Keep a line, up to a limit."""
        if len(self.notes) < MAX_KEPT_FAILURES:
            self.notes.append(text)


class Clients:
    """The clients of one router. seed: draws what is asked, how, and what is cancelled."""

    def __init__(self, address: str, http: str, answers: Sequence[Answer], seed: int) -> None:
        self._answers = answers
        self._rng = random.Random(seed)
        self._channel = open_channel(address)
        self._stub = GenerationStub(self._channel)
        self._http = httpx.AsyncClient(base_url=http, timeout=REQUEST_TIMEOUT_S, limits=httpx.Limits(max_connections=None))
        self.counts = Counts()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()
        await self._channel.close(None)

    async def keep_asking(self, stop: asyncio.Event, on_gap: OnGap) -> None:
        """Send one request after the other until `stop`."""
        while not stop.is_set():
            await self.ask_once(on_gap)

    async def ask_once(self, on_gap: OnGap) -> None:
        """Send one request, some of them to be cancelled, and count its outcome."""
        rng, answer = self._rng, self._rng.choice(self._answers)
        drafter = "" if rng.random() < DRAFTER_RATIO else NO_DRAFTER
        session = f"{rng.randrange(NUM_SESSIONS)}" if rng.random() < 0.5 else ""
        enough = rng.randrange(1, 40) if rng.random() < CANCEL_RATIO else None
        over_http = rng.random() < HTTP_RATIO
        received, counts = Received(answer, over_http), self.counts
        parts = self._over_http(received, drafter, session) if over_http else self._over_grpc(received, drafter, session)
        counts.num_requests += 1
        try:
            await self._receive(received, parts, enough, on_gap)
        except RequestDied as died:
            if BLAMED in str(died):  # an equal request is refused for a while
                counts.blamed.add(answer.prompt)
            else:
                counts.failures[died.code] += 1
            counts.note(f"{time.strftime('%X')} failed after {received.num_items}: {died}")
        counts.num_cancelled += enough is not None and not received.finished
        if mismatch := received.mismatch():
            counts.mismatch.add(mismatch)
            counts.note(
                f"{time.strftime('%X')} {mismatch}: {answer.sampling} expected {answer.tokens}, got {received.items}"
            )

    async def _receive(self, received: Received, parts: AsyncIterator[None], enough: int | None, on_gap: OnGap) -> None:
        """Read an answer to its end, or until enough has come."""
        before, num_items = time.monotonic(), 0
        async with aclosing(parts):  # type: ignore[type-var]
            async for _ in parts:
                now = time.monotonic()
                self.counts.add(received.num_items - num_items, received.is_text)
                num_items = received.num_items
                self.counts.gaps.append(now - before)
                on_gap(before, now)
                before = now
                if enough is not None and received.num_items >= enough:
                    return
        if not received.finished:
            raise RequestDied("UNFINISHED", f"the stream ended with finish reasons {received.finish_reasons}")

    async def stream(self, received: Received, drafter: str, session: str, timeout_s: float) -> AsyncIterator[None]:
        """Read an answer over gRPC. Raises RequestDied."""
        answer = received.answer
        call = GenerateCall(Request("", answer.prompt, answer.sampling, session), drafter=drafter)
        stream = self._stub.Generate(generate_call_to_proto(call), timeout=timeout_s)
        try:
            async for message in stream:
                chunk = text_chunk_from_proto(message).chunk
                received.items[chunk.index] += chunk.token_ids
                received.finish_reasons[chunk.index] = chunk.finish_reason or ""
                yield
        except grpc.aio.AioRpcError as error:
            raise RequestDied(error.code().name, error.details() or "") from error
        finally:
            stream.cancel()

    def _over_grpc(self, received: Received, drafter: str, session: str) -> AsyncIterator[None]:
        return self.stream(received, drafter, session, REQUEST_TIMEOUT_S)

    async def _over_http(self, received: Received, drafter: str, session: str) -> AsyncIterator[None]:
        sampling = received.answer.sampling
        body = {
            "model": "tiny",
            "prompt": received.answer.prompt,
            "stream": True,
            "drafter": drafter,
            "session_id": session,
            **{name: getattr(sampling, name) for name in ("max_tokens", "temperature", "seed", "n", "ignore_eos")},
        }
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    raise RequestDied(f"HTTP {response.status_code}", (await response.aread()).decode())
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        _add_event(received, json.loads(line.removeprefix("data: ")))
                        yield
        except httpx.HTTPError as error:
            raise RequestDied("HTTP", repr(error)) from error


def _add_event(received: Received, event: dict[str, object]) -> None:
    """Add an event of a completion's stream. Raises RequestDied for an error."""
    if "error" in event:
        raise RequestDied("HTTP event", f"{event['error']}")
    for choice in event["choices"]:  # type: ignore[attr-defined]
        received.items[choice["index"]] += choice["text"]
        received.finish_reasons[choice["index"]] = choice["finish_reason"] or ""
