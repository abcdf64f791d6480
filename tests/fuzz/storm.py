"""Many malformed messages against running services: which answers they get, and what they cost."""

import asyncio
import itertools
import json
import math
import random
import signal
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio
from prometheus_client.parser import text_string_to_metric_families

from eyas.v1 import generation_pb2, worker_pb2
from tests.fuzz.bodies import Route, malformed_request, routes_of
from tests.fuzz.calls import (
    AUTHORIZED,
    CANCEL_RATIO,
    OPTIONS,
    TIMEOUT_S,
    Answer,
    Method,
    generate_request,
    implemented_methods,
    malformed_call,
)
from tests.fuzz.servers import Services
from tests.fuzz.sockets import NO_ANSWER, HttpConnection

NUM_PROMPTS = 8
SETTLED_TIMEOUT_S, PROBE_INTERVAL_S = 60.0, 0.5
MAX_FINDINGS = 200
Target = Method | Route
# Shares of the calls by the ends of their paths; every other method and route has one. A call of Speculate is many messages.
WEIGHTS = {
    "Generation/Generate": 12.0, "Draft/Speculate": 4.0, "Draft/Describe": 6.0, "/completions": 12.0, "/responses": 4.0,
    "/messages": 4.0,
}  # fmt: skip
SCHEMA = {
    "type": "object", "properties": {"a": {"enum": ["b", 1]}, "c": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a"], "additionalProperties": False,
}  # fmt: skip
EXAMPLES: dict[str, Any] = {
    "/v1/completions": {
        "model": "tiny", "prompt": "def f(x):", "max_tokens": 2, "temperature": 0.8, "top_p": 0.9, "n": 1, "stop": ["\n\n"],
        "seed": 7, "logit_bias": {"5": 1.5}, "logprobs": 2, "min_p": 0.01, "top_k": 20, "stream": False, "session_id": "s",
        "metadata": {"a": "b"}, "stop_token_ids": [9], "bad_words": ["import"], "bad_token_ids": [[3, 4]], "echo": False,
        "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True},
    },
    "/v1/chat/completions": {
        "model": "tiny", "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "def f"}],
        "max_tokens": 2, "temperature": 0.8, "seed": 7, "logprobs": True, "top_logprobs": 2, "stream": True,
        "stream_options": {"include_usage": True}, "chat_template_kwargs": {"a": 1}, "presence_penalty": 0.1,
        "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}}],
        "tool_choice": "auto", "parallel_tool_calls": False, "reasoning_effort": "low", "include_reasoning": True,
    },
    "/v1/responses": {
        "model": "tiny", "instructions": "a", "max_output_tokens": 2, "temperature": 0.8, "seed": 7, "stream": True,
        "include": ["message.output_text.logprobs"], "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}},
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "f"}]}, {"role": "assistant", "content": "a"}],
    },
    "/v1/messages": {
        "model": "tiny", "max_tokens": 2, "system": [{"type": "text", "text": "a"}], "temperature": 0.8, "seed": 7,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "def f"}]}], "stream": True,
        "stop_sequences": ["x"], "metadata": {"user_id": "u"},
    },
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": "def f"}], "system": "a"},
    "/tokenize": {"model": "tiny", "messages": [{"role": "user", "content": "def f"}], "return_token_strs": True},
    "/detokenize": {"model": "tiny", "tokens": [1, 2, 3]},
}  # fmt: skip


@dataclass(frozen=True)
class FuzzSettings:
    """How many messages, how many at once, the seed of all draws, and a part of the names of what is sent to."""

    messages: int = 20_000
    at_once: int = 48
    seed: int = 0
    only: str = ""


@dataclass(frozen=True)
class Finding:
    """An answer that no service may give, or another broken promise. what: the method or route."""

    what: str
    status: str
    details: str


@dataclass
class FuzzResult:
    """What happened.

    counts: messages by method or route and status. findings: the first broken promises. num_probes, num_wrong: valid
    requests between the malformed ones, and those whose tokens differ from plain decoding. unreturned: requests, sequences
    and sessions left behind by role. tracebacks: exceptions in the logs. standstill: the longest time in which this process
    itself did nothing, in seconds; what then gets no answer in time says nothing about a service.
    """

    seconds: float = 0.0
    standstill: float = 0.0
    stood_still_at: float = -math.inf
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    findings: list[Finding] = field(default_factory=list)
    num_findings: int = 0
    num_probes: int = 0
    num_wrong: int = 0
    num_drafted: int = 0
    unreturned: dict[str, int] = field(default_factory=dict)
    tracebacks: list[str] = field(default_factory=list)
    log_bytes: int = 0

    @property
    def num_messages(self) -> int:
        """All malformed messages that were handled or refused."""
        return sum(counter.total() for counter in self.counts.values())

    def add(self, what: str, answer: Answer, is_fine: bool) -> None:
        """Count an answer."""
        if not is_fine and time.monotonic() - self.stood_still_at < TIMEOUT_S:
            answer, is_fine = replace(answer, status=f"{answer.status}, while the client stood still"), True
        self.counts[what][answer.status] += 1
        if not is_fine:
            self.num_findings += 1
            if len(self.findings) < MAX_FINDINGS:
                self.findings.append(Finding(what, answer.status, answer.details[:2000]))

    def add_lag(self, seconds: float) -> None:
        """Note how much later than asked this process went on."""
        self.standstill = max(self.standstill, seconds)
        if seconds > TIMEOUT_S / 2:
            self.stood_still_at = time.monotonic()


class Client:
    """Sends malformed messages of every kind, or of those whose name contains `only`. Construct it by `connected`."""

    def __init__(
        self, services: Services, channels: Mapping[str, grpc.aio.Channel], methods: list[Method], only: str = ""
    ) -> None:
        self.services = services
        self.channels = channels
        self.methods = methods
        self.routes = routes_of(_open_api(services.http), EXAMPLES)
        every: list[Target] = [*methods, *self.routes]
        targets = [target for target in every if only in _label(target)]
        self._targets = targets
        self._weights = list(itertools.accumulate(_weight(target) for target in targets))

    async def send(self, connection: HttpConnection, rng: random.Random, result: FuzzResult) -> None:
        """Send one malformed message, or a stream of several, and count the answers."""
        target = rng.choices(self._targets, cum_weights=self._weights)[0]
        try:
            await self._send(target, connection, rng, result)
        except TimeoutError as error:
            await connection.close()
            result.add(_label(target), Answer("no answer in time", str(error)), False)

    async def _send(self, target: Target, connection: HttpConnection, rng: random.Random, result: FuzzResult) -> None:
        if isinstance(target, Route):
            request = malformed_request(target, rng)
            try:
                answer = await connection.send(request, rng.random() < CANCEL_RATIO)
            except TimeoutError as error:
                raise TimeoutError(request.data.decode(errors="replace")) from error
            if not (is_fine := is_http_fine(answer)):
                answer = replace(answer, details=f"{answer.details} to {request.data!r}")
            result.add(_label(target), answer, is_fine)
        else:
            for answer in await malformed_call(self.channels[target.role], target, rng):
                result.add(target.label, answer, answer.is_fine)

    async def generate(self, role: str, prompt: list[int], drafter: str) -> tuple[list[int], int]:
        """The tokens of a valid request, and how many of its tokens were drafted."""
        request = generate_request(tokens=prompt, rich=False, drafter=drafter)
        request.sampling.max_tokens = 16
        path, parse = "/eyas.v1.Generation/Generate", generation_pb2.GenerateChunk.FromString
        call: Any = self.channels[role].unary_stream(path, response_deserializer=parse)(  # type: ignore[call-arg]
            request.SerializeToString(), metadata=AUTHORIZED
        )
        chunks = [chunk async for chunk in call]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        return tokens, sum(chunk.verify_step.drafted for chunk in chunks)


@asynccontextmanager
async def connected(services: Services, only: str = "") -> AsyncIterator[Client]:
    """A client of running services."""
    channels = {role: grpc.aio.insecure_channel(child.address, options=OPTIONS) for role, child in services.all.items()}
    try:
        yield Client(services, channels, await implemented_methods(services, channels), only)
    finally:
        for channel in channels.values():
            await channel.close(None)


def is_http_fine(answer: Answer) -> bool:
    """Whether a service that keeps its promises may answer so."""
    return not answer.status.startswith("5") and answer.status != NO_ANSWER


async def storm(
    services: Services, settings: FuzzSettings, update: Callable[[FuzzResult], object] = lambda result: None
) -> FuzzResult:
    """Send malformed messages until there are enough, or an interrupt; between them, compare valid requests with plain
    decoding."""
    result, started, interrupted = FuzzResult(), time.monotonic(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
    async with connected(services, settings.only) as client:
        prompts = [[5 + number, 6, 7 + number] for number in range(NUM_PROMPTS)]
        plain = [(await client.generate("verifier", prompt, "none"))[0] for prompt in prompts]

        async def fire(number: int) -> None:
            rng, connection = random.Random(settings.seed << 32 | number), HttpConnection(services.http)
            try:
                while result.num_messages < settings.messages and not interrupted.is_set():
                    await client.send(connection, rng, result)
            finally:
                await connection.close()

        async def watch() -> None:
            while True:
                before = time.monotonic()
                await asyncio.sleep(1)
                result.add_lag(time.monotonic() - before - 1)
                services.check()
                update(result)

        async def compare() -> None:
            for number in itertools.count():
                tokens, num_drafted = await client.generate("router", prompts[number % NUM_PROMPTS], "")
                result.num_probes += 1
                result.num_wrong += tokens != plain[number % NUM_PROMPTS]
                result.num_drafted += num_drafted
                await asyncio.sleep(PROBE_INTERVAL_S)

        async with asyncio.TaskGroup() as around:
            beside = [around.create_task(work()) for work in (watch, compare)]
            async with asyncio.TaskGroup() as group:
                for number in range(settings.at_once):
                    group.create_task(fire(number))
            for task in beside:
                task.cancel()
        result.seconds = time.monotonic() - started
        result.unreturned = await _unreturned(client)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
    services.check()
    result.tracebacks, result.log_bytes = services.tracebacks(), services.log_bytes()
    return result


async def _unreturned(client: Client) -> dict[str, int]:
    """Requests of the router, and sequences, queued requests and sessions of the workers, that are still there after all
    calls have ended; waits for their end."""
    deadline, left = time.monotonic() + SETTLED_TIMEOUT_S, {"": 1}
    while any(left.values()) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        left = {}
        for role in ("verifier", "draft"):
            call: Any = client.channels[role].unary_unary(  # type: ignore[call-arg]
                "/eyas.v1.Worker/Status", response_deserializer=worker_pb2.WorkerStatus.FromString
            )
            load = (await call(b"", metadata=AUTHORIZED)).load
            left[role] = load.num_running + load.num_waiting
        left["router"] = await asyncio.to_thread(_active_requests, client.services.http)
    return left


def _active_requests(http: str) -> int:
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=30) as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = (sample for family in families for sample in family.samples)
    return sum(int(sample.value) for sample in samples if sample.name == "eyas_router_active_requests")


def _label(target: Target) -> str:
    """Its name in a report."""
    if isinstance(target, Route):
        return f"router HTTP {target.method} {target.path}"
    return target.label


def _weight(target: Target) -> float:
    return next((weight for end, weight in WEIGHTS.items() if target.path.endswith(end)), 1.0)


def _open_api(http: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{http}/openapi.json", timeout=30) as response:
        document: dict[str, Any] = json.load(response)
    return document
