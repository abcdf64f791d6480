"""`eyas bench serve URL`: load on any server of OpenAI's API; latencies, throughput, goodput and acceptance."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, Literal, get_args

import httpx

from eyas.bench.report import Table, number
from eyas.config.checks import above_zero, at_least, one_of, require
from eyas.errors import ConfigError, MissingPackage, Unavailable

Endpoint = Literal["completions", "chat"]
Latency = Literal["ttft", "itl", "tpot", "e2e"]
TITLES: Mapping[Latency, str] = {
    "ttft": "time to first token, ms",
    "itl": "inter-token latency, ms",
    "tpot": "time per output token, ms",
    "e2e": "end to end, ms",
}
PERCENTILES = (50, 90, 95, 99)
# Common words, most of them one token in most vocabularies: the server says how many tokens a prompt had.
WORDS = (
    "the of and to in is was for on are with as his they be at one have this from or had by hot but some what there we can "
    "out other were all your when up use word how said an each she which do their time if will way about many then them "
    "would write like so these her long make thing see him two has look more day could go come did my sound no most number "
    "who over know water than call first people may down side been now find any new work part take get place made live"
)
MAX_SHOWN = 200
DEFAULT_CONCURRENCY = 16
TIMEOUT_S = 600.0
# What a server's answer in another form than OpenAI's raises here, or a URL.
ODD_ANSWERS = (httpx.HTTPError, httpx.InvalidURL, ValueError, AttributeError, TypeError, KeyError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of `eyas bench serve`.

    Attributes:
        request_rate: requests a second, with random gaps; 0 sends each one as soon as `concurrency` allows.
        concurrency: most requests at once; 0 sets no limit. None: DEFAULT_CONCURRENCY, or no limit with a request rate.
        input_tokens: about how many each random prompt has. prompts: file to take prompts from instead. dataset: one of the
            hub instead, by its id.
        goodput: milliseconds that a request must keep to count as good, by latency.
    """

    url: str
    model: str = ""
    endpoint: Endpoint = "completions"
    num_prompts: int = 100
    request_rate: float = 0.0
    concurrency: int | None = None
    prompts: Path | None = None
    dataset: str = ""
    input_tokens: int = 256
    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    goodput: Mapping[Latency, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        one_of(Endpoint, endpoint=self.endpoint)
        at_least(1, num_prompts=self.num_prompts, input_tokens=self.input_tokens, max_tokens=self.max_tokens)
        at_least(0, request_rate=self.request_rate, concurrency=self.limit, temperature=self.temperature)
        for latency in self.goodput:
            one_of(Latency, goodput=latency)
        above_zero(**{f"goodput {name}": limit for name, limit in self.goodput.items()})
        require("://" in self.url, f"the URL is {self.url!r}; give one such as http://127.0.0.1:8000")
        try:
            httpx.URL(self.base)
        except httpx.InvalidURL as error:
            raise ConfigError(f"the URL is {self.url!r}: {error}; give one such as http://127.0.0.1:8000") from None
        require(not (self.prompts and self.dataset), "prompts and dataset are both given; leave one out")

    @property
    def limit(self) -> int:
        """The most requests at once; 0 for no limit."""
        if self.concurrency is not None:
            return self.concurrency
        return 0 if self.request_rate else DEFAULT_CONCURRENCY

    @property
    def base(self) -> str:
        """The URL without the part that all endpoints have."""
        return self.url.rstrip("/").removesuffix("/v1")


def read_goodput(texts: Sequence[str]) -> dict[Latency, float]:
    """Return the limits in texts such as ttft:200, in milliseconds. Raises ConfigError."""
    found: dict[Any, float] = {}
    for text in texts:
        name, _, limit = text.replace("=", ":").partition(":")
        try:
            found[name] = float(limit)
        except ValueError:
            known = ", ".join(get_args(Latency))
            raise ConfigError(
                f"goodput is {text!r}; give a latency and its milliseconds, such as ttft:200; known: {known}"
            ) from None
    return found


@dataclass
class RequestTimes:
    """Times and counts of one request, as a client saw it. Times are seconds of one clock.

    Attributes:
        chunks: when each one with text came.
        num_output_tokens: by the server's count, or else that of the chunks.
        accepted, rejected: drafted tokens, if the server says so.
        num_steps, num_step_tokens: verify steps and their tokens.
    """

    started: float
    chunks: list[float] = field(default_factory=list)
    ended: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    accepted: int = 0
    rejected: int = 0
    num_steps: int = 0
    num_step_tokens: float = 0.0
    error: str = ""

    @property
    def is_answered(self) -> bool:
        """True if text came, and no error."""
        return bool(self.chunks) and not self.error

    def latencies(self) -> dict[Latency, float]:
        """Milliseconds of each kind; the inter-token latency is the mean of this request's gaps."""
        first, num_later = self.chunks[0], max(self.num_output_tokens - 1, 1)
        gaps = self.gaps() or [0.0]
        return {
            "ttft": 1e3 * (first - self.started),
            "itl": 1e3 * fmean(gaps),
            "tpot": 1e3 * (self.chunks[-1] - first) / num_later,
            "e2e": 1e3 * (self.ended - self.started),
        }

    def gaps(self) -> list[float]:
        """Return seconds between chunks. One chunk may hold several tokens."""
        return [later - earlier for earlier, later in zip(self.chunks, self.chunks[1:], strict=False)]


@dataclass(frozen=True)
class Percentiles:
    """A latency over all requests, in milliseconds."""

    mean: float
    by_percent: Mapping[int, float]

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Summarise at least one value."""
        cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
        return cls(fmean(values), {percent: cuts[percent - 1] for percent in PERCENTILES})


@dataclass(frozen=True)
class ServeResults:
    """The load in numbers.

    Attributes:
        tau: mean tokens of a verify step; None if the server does not say.
        accepted_share: of drafted tokens; None likewise.
        goodput: requests a second that kept all limits; None without limits.
        errors: messages and how often each came.
    """

    seconds: float
    num_done: int
    num_failed: int
    num_prompt_tokens: int
    num_output_tokens: int
    latencies: Mapping[Latency, Percentiles]
    goodput: float | None
    tau: float | None
    accepted_share: float | None
    errors: Mapping[str, int]

    @classmethod
    def of(cls, settings: ServeSettings, requests: Sequence[RequestTimes], seconds: float) -> ServeResults:
        """Summarise what was seen in `seconds`. Raises Unavailable if no request was answered."""
        done = [request for request in requests if request.is_answered]
        errors = Counter(request.error or "no text came" for request in requests if not request.is_answered)
        if not done:
            raise Unavailable(f"none of {len(requests)} requests was answered: {errors.most_common(1)[0][0]}")
        own = [request.latencies() for request in done]
        values = {name: [each[name] for each in own] for name in get_args(Latency)}
        values["itl"] = [1e3 * gap for request in done for gap in request.gaps()] or [0.0]
        good = [each for each in own if all(each[name] <= limit for name, limit in settings.goodput.items())]
        accepted, rejected = sum(r.accepted for r in done), sum(r.rejected for r in done)
        num_steps = sum(r.num_steps for r in done)
        return cls(
            seconds=seconds,
            num_done=len(done),
            num_failed=len(requests) - len(done),
            num_prompt_tokens=sum(request.num_prompt_tokens for request in done),
            num_output_tokens=sum(request.num_output_tokens for request in done),
            latencies={name: Percentiles.of(found) for name, found in values.items()},
            goodput=len(good) / seconds if settings.goodput else None,
            tau=sum(r.num_step_tokens for r in done) / num_steps if num_steps else None,
            accepted_share=accepted / (accepted + rejected) if accepted + rejected else None,
            errors=dict(errors),
        )

    def tables(self) -> list[Table]:
        """Return the page."""
        rows = [
            ("requests", f"{self.num_done} answered, {self.num_failed} failed, in {self.seconds:.1f} s"),
            ("requests/s", number(self.num_done / self.seconds)),
            ("output tokens/s", number(self.num_output_tokens / self.seconds)),
            ("all tokens/s", number((self.num_prompt_tokens + self.num_output_tokens) / self.seconds)),
        ]
        if self.goodput is not None:
            rows.append(("goodput, requests/s", number(self.goodput)))
        if self.tau is not None:
            rows.append(("tokens per verify step (tau)", f"{self.tau:.2f}"))
        if self.accepted_share is not None:
            rows.append(("drafted tokens accepted", f"{self.accepted_share:.1%}"))
        rows += [(f"error: {message}", f"{count} times") for message, count in self.errors.items()]
        times = [
            (TITLES[name], *map(number, (found.mean, *found.by_percent.values()))) for name, found in self.latencies.items()
        ]
        columns = ("latency", "mean", *(f"p{percent}" for percent in PERCENTILES))
        return [Table("Throughput", ("", "value"), tuple(rows)), Table("Latencies", columns, tuple(times))]


async def run_load(settings: ServeSettings, api_key: str, on_done: Callable[[RequestTimes], object]) -> ServeResults:
    """Send all requests and summarise them. on_done: called with each one that has ended.

    Raises Unavailable if nothing answers, and ConfigError for prompts that cannot be read.
    """
    prompts = load_texts(settings)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=settings.base, headers=headers, timeout=TIMEOUT_S, limits=limits) as client:
        template = await _template(settings, client)
        slots = asyncio.Semaphore(settings.limit or len(prompts))

        async def ask(prompt: Any) -> RequestTimes:
            # With a rate, a request begins when it arrives: the wait for a slot counts.
            arrived = time.perf_counter() if settings.request_rate else None
            async with slots:
                times = await _ask(settings, client, template, prompt, arrived)
            on_done(times)
            return times

        started = time.perf_counter()
        tasks = [asyncio.create_task(ask(prompt)) async for prompt in _arrivals(settings, prompts, slots)]
        requests = await asyncio.gather(*tasks)
        return ServeResults.of(settings, requests, time.perf_counter() - started)


async def _arrivals(settings: ServeSettings, prompts: Sequence[Any], slots: asyncio.Semaphore) -> AsyncIterator[Any]:
    """Yield the prompts when their requests begin: at random moments of a rate, or one after the other."""
    gaps, moment = random.Random(settings.seed), time.perf_counter()
    for prompt in prompts:
        if settings.request_rate:
            moment += gaps.expovariate(settings.request_rate)
            await asyncio.sleep(max(moment - time.perf_counter(), 0.0))
        yield prompt


async def _template(settings: ServeSettings, client: httpx.AsyncClient) -> dict[str, Any]:
    """Return what all bodies have. The server says which model it serves. Raises Unavailable."""
    try:
        response = await client.get("/v1/models")
        served = response.json().get("data") or [{}]
        response.raise_for_status()
        owner, listed = served[0].get("owned_by"), served[0].get("id", "")
    except ODD_ANSWERS as error:
        raise Unavailable(f"{settings.base}/v1/models does not answer: {error}; check the URL and --api-key") from error
    own: dict[str, Any] = {"return_speculation": True} if owner == "eyas" else {}
    if settings.ignore_eos:
        own["ignore_eos"] = True
    return own | {
        "model": settings.model or listed,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _ask(
    settings: ServeSettings, client: httpx.AsyncClient, template: dict[str, Any], prompt: Any, arrived: float | None
) -> RequestTimes:
    """Send one request and follow its stream. arrived: when it began; None for now."""
    is_chat = settings.endpoint == "chat"
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    body = template | ({"messages": messages} if is_chat else {"prompt": prompt})
    times = RequestTimes(time.perf_counter() if arrived is None else arrived)
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code >= 400:
                text = (await response.aread()).decode(errors="replace")
                times.error = f"{response.status_code}: {text[:MAX_SHOWN]}"
            async for line in response.aiter_lines():
                if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                    read_event(times, json.loads(data), time.perf_counter())
    except ODD_ANSWERS as error:
        times.error = f"{type(error).__name__}: {error}"
    times.ended = time.perf_counter()
    times.num_output_tokens = times.num_output_tokens or len(times.chunks)
    return times


def read_event(times: RequestTimes, event: Mapping[str, Any], now: float) -> None:
    """Count an event of a stream."""
    if error := event.get("error"):
        times.error = str(error.get("message", error) if isinstance(error, Mapping) else error)[:MAX_SHOWN]
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls")):
            times.chunks.append(now)
    if usage := event.get("usage"):
        details = usage.get("completion_tokens_details") or {}
        times.num_prompt_tokens = int(usage.get("prompt_tokens") or 0)
        times.num_output_tokens = int(usage.get("completion_tokens") or 0)
        times.accepted = int(details.get("accepted_prediction_tokens") or 0)
        times.rejected = int(details.get("rejected_prediction_tokens") or 0)
    if stats := (event.get("metrics") or {}).get("speculative_decoding"):
        times.num_steps = stats.get("num_spec_steps") or 0
        times.num_step_tokens = times.num_steps * (stats.get("mean_acceptance_length") or 0.0)


def load_texts(settings: ServeSettings) -> list[Any]:
    """Return as many prompts as asked for: texts, or lists of messages for chats. Raises ConfigError."""
    if not settings.prompts and not settings.dataset:
        source, words = random.Random(settings.seed), WORDS.split()
        return [" ".join(source.choices(words, k=settings.input_tokens)) for _ in range(settings.num_prompts)]
    found = list[Any]()
    where = settings.prompts or settings.dataset
    for row in _file_rows(settings.prompts) if settings.prompts else _dataset_rows(settings.dataset):
        if (prompt := _prompt_of(row, settings.endpoint)) is not None:
            found.append(prompt)
        if len(found) == settings.num_prompts:
            return found
    require(bool(found), f"{where} holds no prompts; give rows with prompt, text, turns, messages or conversations")
    return [found[index % len(found)] for index in range(settings.num_prompts)]


def _file_rows(file: Path) -> Iterator[Any]:
    """Yield the rows of JSON Lines, or of a JSON list such as ShareGPT's. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8")
        yield from (
            json.loads(text) if text.lstrip().startswith("[") else map(json.loads, filter(str.strip, text.splitlines()))
        )
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read prompts from {file}: {error!r}; give JSON Lines or a JSON list") from error


def _dataset_rows(name: str) -> Iterator[Any]:
    """Yield the rows of a data set of the hub. Raises ConfigError."""
    try:
        from datasets import load_dataset

        parts = load_dataset(name, streaming=True)
        yield from parts.get("train") or next(iter(parts.values()))
    except ImportError as error:
        raise MissingPackage("a data set of the hub", "datasets", "train") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the data set {name!r}: {error}") from error


def _prompt_of(row: Any, endpoint: Endpoint) -> Any:
    """Return the prompt of a row: a text, or messages up to the first of the user's for chats; None without one."""
    if not isinstance(row, Mapping):
        return row if isinstance(row, str) else None
    chat = row.get("messages") or row.get("conversations")
    if isinstance(chat, list) and chat and isinstance(chat[0], Mapping):
        roles = {"human": "user", "gpt": "assistant"}
        said = [(turn.get("role") or turn.get("from"), turn.get("content") or turn.get("value")) for turn in chat]
        messages = [{"role": roles.get(role, role), "content": content} for role, content in said]
        users = [index for index, message in enumerate(messages) if message["role"] == "user"]
        if not users:
            return None
        if not all(isinstance(message["content"], str) for message in messages[: users[0] + 1]):
            return None
        return messages[: users[0] + 1] if endpoint == "chat" else messages[users[0]]["content"]
    turns = row.get("turns")
    texts = (
        turns[0] if isinstance(turns, list) and turns else None,
        *(row.get(key) for key in ("prompt", "text", "question")),
    )
    return next((text for text in texts if isinstance(text, str) and text), None)
