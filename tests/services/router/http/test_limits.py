"""What one client may hold of the HTTP server: bytes, connections and time; and how long one body may keep it busy."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from eyas.config import LimitsConfig
from eyas.errors import InvalidRequest
from eyas.rpc.admission import MemoryBudget
from eyas.services.router import client_threads
from eyas.services.router.auth.keys import ApiKeys, plain_keys
from eyas.services.router.dispatch.generation import MAX_CONCURRENT_COMPLETIONS
from eyas.services.router.http.bodies.base import parse_body
from eyas.services.router.http.bodies.openai import Body, ChatBody, CompletionBody
from eyas.services.router.http.writers.json_blocks import LARGE_NUM_VALUES, json_blocks, pieces
from eyas.services.router.http.writers.openai import ResponseWriter
from tests.support.services.http_router import (
    ALL,
    CHAT,
    PROMPT_TEXT,
    TOKENIZER,
    Script,
    echo,
    get,
    http_router,
    http_server,
    post,
    until,
    worker,
)
from tests.support.services.scripted_verifier import MODEL, PROMPT, TOKENS

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
LIMITS = LimitsConfig(header_timeout_s=0.5, body_timeout_s=0.5, idle_timeout_s=1, max_header_bytes=4096)


@asynccontextmanager
async def connection(base: str, sent: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """Open a connection, and send some bytes."""
    reader, writer = await asyncio.open_connection(*base.removeprefix("http://").split(":"))
    try:
        writer.write(sent)
        yield reader
    finally:
        writer.close()


async def response(base: str, sent: bytes) -> bytes:
    """Return what the server sends until it closes the connection, which drops the response if bytes are unread."""
    async with connection(base, sent) as reader, asyncio.timeout(20):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


async def test_a_kept_connection_ends_when_idle_or_half_used() -> None:
    async with http_server(echo, limits=LIMITS) as base:
        whole = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
        assert (await response(base, whole)).count(b"200 OK") == 1
        reader, writer = await asyncio.open_connection(*base.removeprefix("http://").split(":"))
        async with asyncio.timeout(20):
            for sent in (whole, b"\r\n" + whole):
                writer.write(sent)
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            writer.write(b"GET /")
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_a_long_body_that_must_wait_too_long_is_429(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_threads, "MAX_WAITING", 0)
    async with http_router(url) as base:
        answer = await post(base, "/v1/completions", ALL | {"prompt": "a" * 20_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")


async def test_without_a_key_no_body_is_awaited(url: str) -> None:
    async with http_router(url, keys=ApiKeys(plain_keys(["one"], "test")), limits=LIMITS) as base:
        found = await response(base, HEAD + b"Content-Length: 16000000\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 401 ")


async def test_connections_are_limited_in_all_and_by_peer() -> None:
    async def check(limits: LimitsConfig) -> None:
        async with http_server(echo, limits=limits) as base:
            async with connection(base, b"GET"), connection(base, b"GET"):
                refused = await response(base, b"")
                assert refused.startswith(b"HTTP/1.1 503 "), refused
                assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["code"] == "unavailable"
            async with asyncio.timeout(60):
                while b"503" in await response(base, b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"):
                    await asyncio.sleep(0.01)

    await check(LimitsConfig(max_connections_per_peer=2))
    await check(LimitsConfig(max_connections=2))


async def test_unfinished_bodies_share_a_memory_budget(url: str) -> None:
    limits = LimitsConfig(max_request_bytes=2**20, max_pending_bytes=2**20)
    script = Script(TOKENS, gate=asyncio.Event())
    async with worker(url, script), http_router(url, limits=limits) as base:
        long = ALL | {"user": "u" * 900_000}
        first = asyncio.create_task(post(base, "/v1/completions", long))
        await until(lambda: bool(script.calls))
        second = await post(base, "/v1/completions", long)
        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        assert "limits.max_pending_bytes" in second.json()["error"]["message"]
        assert script.gate
        script.gate.set()
        assert (await first).status_code == 200

        async def is_served() -> bool:
            return (await post(base, "/v1/completions", long)).status_code == 200

        await until(is_served)  # the first request is counted a moment longer than its response takes


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", ALL | {"n": 64, "logprobs": 1, "temperature": 1}),
        ("/v1/chat/completions", CHAT | {"n": 64, "logprobs": True, "top_logprobs": 1, "temperature": 1}),
        ("/v1/completions", ALL | {"prompt": [PROMPT_TEXT] * 128, "max_tokens": 1, "prompt_logprobs": 1, "stream": True}),
    ],
    ids=["completions", "chat", "prompts, streamed"],
)
async def test_output_that_never_fits_the_memory_budget_is_refused(url: str, path: str, asked: dict[str, Any]) -> None:
    """Streams keep none of their output, but log-probabilities of prompts come at once."""
    limits = LimitsConfig(max_request_bytes=2**18, max_pending_bytes=2**18)
    async with worker(url, Script(TOKENS)), http_router(url, limits=limits) as base:
        refused = await post(base, path, asked)
        assert refused.status_code == 400, refused.text
        assert f"above the {2**18} that a key or address may hold of limits.max_pending_bytes" in refused.text
        for more in ({"n": 1}, {"stream": True}):
            answered = await post(base, path, asked | {name: PROMPT_TEXT for name in asked if name == "prompt"} | more)
            assert answered.status_code == 200
            assert "limits.max_pending_bytes" not in answered.text


async def test_log_probabilities_of_prompts_are_counted_beforehand(url: str) -> None:
    """A key may hold half of the memory; what others hold now gives 429, and nothing is computed for either."""
    limits = LimitsConfig(max_request_bytes=2**16, max_pending_bytes=2**20)
    asked = ALL | {"prompt": [5] * 500, "prompt_logprobs": 1, "max_tokens": 1}
    script = Script((5,) * 600, gate=asyncio.Event())
    async with worker(url, script), http_router(url, limits=limits) as base:
        first = asyncio.create_task(post(base, "/v1/completions", asked))
        await until(lambda: len(script.calls) == 1)
        second = await post(base, "/v1/completions", asked | {"stream": True})
        assert (second.status_code, "try again" in second.text) == (429, True)
        never = await post(base, "/v1/completions", asked | {"prompt": [[5] * 500] * 2})
        assert (never.status_code, "limits.max_pending_bytes" in never.text) == (400, True)
        assert script.gate
        script.gate.set()
        assert len((await first).json()["choices"][0]["prompt_logprobs"]) == 500
        assert len(script.calls) == 1


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 5}], ids=["prompt_logprobs", "echo"])
def test_the_log_probabilities_of_a_long_prompt_fit(asked: dict[str, Any]) -> None:
    body = CompletionBody(model="m", prompt=[[5] * 30_000], **asked)  # type: ignore[arg-type]
    writer = ResponseWriter(body, "id", "m", TOKENIZER, [range(30_000)])
    with MemoryBudget(LimitsConfig()).reservation("a key") as take:
        writer.reserve(take)


class LongestStep:
    """Counts the calls that the event loop's thread makes without a pause: a time that does not depend on the machine."""

    def __init__(self) -> None:
        self.longest = 0
        self._count = 0

    async def __aenter__(self) -> "LongestStep":
        self._task = asyncio.create_task(self._tick())
        sys.setprofile(self._profile)
        return self

    async def __aexit__(self, *error: object) -> None:
        sys.setprofile(None)
        self._task.cancel()

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        self._count += event in ("call", "c_call")

    async def _tick(self) -> None:
        while True:
            self.longest, self._count = max(self.longest, self._count), 0
            await asyncio.sleep(0)


def long_bodies() -> list[tuple[dict[str, Any], str]]:
    """Fields of a body that is too long, and what the error says."""
    return [
        ({"stop": ["s"] * 300_000}, "more than 262144 values"),
        ({"stop": ["s"] * 100_000}, "stop has 100000 entries; give 128 at most"),
        ({"stop": "s" * 300_000}, "stop has a text of 300000 characters; give 1024 at most"),
        ({"logit_bias": {str(i): 1 for i in range(600_000)}}, "more than 16384 lists, objects and fields"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias has 2000 entries; give 1024 at most"),
        ({"stop_token_ids": [5] * 100_000}, "stop_token_ids has 100000 entries"),
        ({"bad_words": ["s"] * 100_000}, "bad_words has 100000 entries"),
        ({"bad_token_ids": [[5]] * 10_000}, "bad_token_ids has 10000 entries"),
        ({"prompt": [1000] * 2_500_000}, "more than 262144 values"),
        ({"prompt": [1000] * 200_000}, "prompt of 200000 tokens exceeds the context length 2048"),
        ({"prompt": [[5]] * 10_000, "n": 1}, "more than 1024 completions"),
        ({"prompt": [[]] * 100_000}, "more than 16384 lists, objects and fields"),
        ({"metadata": {str(i): "" for i in range(20_000)}}, "more than 16384 lists, objects and fields"),
        ({"session_id": "s" * 257}, "session_id has 257 characters"),
        ({"f" * 1_000_000: 1}, "is not a known field; leave it out"),
        ({"metadata": {"f" * 1_000_000: 1}}, "Input should be a valid string"),
        ({"max_tokens": "\x7f" * 1_000_000}, "max_tokens is '"),
    ]


async def test_no_body_keeps_the_event_loop_busy(url: str) -> None:
    script = Script(TOKENS)
    async with worker(url, script), http_router(url) as base, httpx.AsyncClient(base_url=base, timeout=60) as client:
        for changes, message in long_bodies():
            data = json.dumps(ALL | changes).encode()
            async with LongestStep() as step:
                answer = await client.post("/v1/completions", content=data, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, answer.text
            assert message in answer.json()["error"]["message"], answer.text
            assert len(answer.content) < 2000
            assert step.longest < 30_000, (message, step.longest)
        answer = await client.post("/v1/completions", json=ALL | {"model": "m" * 1_000_000})
        assert (answer.status_code, len(answer.content) < 500) == (404, True)
        assert script.calls == []
        assert (await get(base, "/live")).status_code == 200


async def test_many_prompts_start_in_small_steps(url: str) -> None:
    script = Script(TOKENS)
    async with worker(url, script), http_router(url) as base:
        many = {"prompt": [list(PROMPT)] * 100, "logit_bias": {str(i): 1.0 for i in range(500)}, "max_tokens": 1}
        async with LongestStep() as step:
            answer = await post(base, "/v1/completions", ALL | many)
        assert answer.status_code == 200, answer.text
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(100))
        assert len(script.calls) == 100
        assert step.longest < 30_000, step.longest


@pytest.mark.parametrize(("num_prompts", "n"), [(150, 1), (4, 40)])
async def test_a_body_runs_a_bounded_number_of_completions(url: str, num_prompts: int, n: int) -> None:
    script, num_completions = Script(TOKENS, gate=asyncio.Event()), num_prompts * n
    changes = {"prompt": [list(PROMPT)] * num_prompts, "n": n, "temperature": 1.0, "max_tokens": 3}
    async with worker(url, script), http_router(url) as base:
        answer = asyncio.create_task(post(base, "/v1/completions", ALL | changes))
        await until(lambda: len(script.calls) == MAX_CONCURRENT_COMPLETIONS)
        for _ in range(5):
            assert (await get(base, "/live")).status_code == 200
        assert len(script.calls) == MAX_CONCURRENT_COMPLETIONS
        assert script.gate
        script.gate.set()
        choices = (await answer).json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(num_completions))
        assert len(script.calls) == num_completions


@pytest.mark.parametrize("changes", [{}, {"stream": True}, {"echo": True, "logprobs": 1}])
async def test_log_probabilities_of_a_prompt_come_in_small_steps(url: str, changes: dict[str, Any]) -> None:
    script, model = Script((5,) * 6010), replace(MODEL, max_model_len=10_000)
    fields = {"prompt": [5] * 6000, "max_tokens": 10} | (changes if "echo" in changes else {"prompt_logprobs": 1} | changes)
    async with worker(url, script, model=model), http_router(url) as base, LongestStep() as step:
        answer = await post(base, "/v1/completions", ALL | fields)
    assert answer.status_code == 200, answer.text
    assert answer.text.count("-0.5") >= 5999
    assert step.longest < 60_000, step.longest  # the scripted verifier takes most of them


@pytest.mark.parametrize("length", [0, 1, 3, 200, 5000])
def test_json_is_encoded_in_small_parts(length: int) -> None:
    entries: list[Any] = [{"id": number, "text": 'ä"\n', "top": [1.0] * 20} for number in range(length)]
    value = {"a": entries, "b": [{"c": {"d": entries}}] * 3, "long": [[0] * 10_000], "e": [[], {}], "f": {}, "g": None}
    assert b"".join(json_blocks(value)).decode() == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert max(map(len, pieces(value))) <= 10 * LARGE_NUM_VALUES


async def test_a_client_that_leaves_ends_all_completions_of_its_body(url: str) -> None:
    script = Script(TOKENS, gate=asyncio.Event())
    async with worker(url, script), http_router(url) as base:
        answer = asyncio.create_task(post(base, "/v1/completions", ALL | {"prompt": [list(PROMPT)] * 150}))
        await until(lambda: len(script.calls) == MAX_CONCURRENT_COMPLETIONS)
        answer.cancel()
        await until(lambda: script.num_cancelled == MAX_CONCURRENT_COMPLETIONS)
        assert len(script.calls) == MAX_CONCURRENT_COMPLETIONS


COUNTED = {
    "commas": (b'{"prompt": "' + b"," * 10_000 + b'"}', ""),
    "quotes": (b'{"prompt": "' + b'\\",' * 100_000 + b'"}', ""),
    "backslashes": (b'{"prompt": "' + b"\\\\" * 100_000 + b'", "stop": []}', ""),
    "slice": (b'{"prompt": "' + b"a" * 65_523 + b'\\",' + b"," * 9000 + b'"}', ""),
    "values": (b'{"prompt": "\\\\", "metadata": [' + b"1," * 5000 + b"1]}", "more than 5000 values"),
    "digits": (b'{"prompt": ' + b"1" * 1000 + b"}", "a number of 128 digits or more"),
    "escapes": (b'{"prompt": "' + b"\\n" * 3_200_000 + b'"}', "more than 3145728 escapes"),
    "lists": (b"[" * 17_000, "more than 16384 lists"),
    "nested": (b"[" * 10_000, "not JSON"),
    "utf8": (b'{"prompt": "\xff"}', "not JSON"),
    "mark": (b'\xef\xbb\xbf{"prompt": "a"}', ""),
    "utf16": ('{"prompt": "a"}'.encode("utf-16"), "not JSON"),
    "utf16le": ('{"prompt": "a"}'.encode("utf-16-le"), "not JSON"),
}


@pytest.mark.parametrize(("data", "message"), COUNTED.values(), ids=list(COUNTED))
def test_values_are_counted_outside_of_strings(data: bytes, message: str) -> None:
    if not message:
        assert parse_body(data, CompletionBody, 5000).prompt
        return
    with pytest.raises(InvalidRequest, match=message):
        parse_body(data, CompletionBody, 5000)


@pytest.mark.parametrize(
    ("model", "changes", "most"),
    [
        (CompletionBody, {"bad_token_ids": [["a"] * 1000] * 1000}, 1),
        (CompletionBody, {"stop_token_ids": ["a"] * 1000}, 1),
        (CompletionBody, {"metadata": {str(number): 1 for number in range(1000)}}, 0),
        (CompletionBody, {f"field{number}": 1 for number in range(1000)}, 0),
        (ChatBody, {"messages": [{}] * 1000}, 3),
    ],
)
def test_a_body_of_many_mistakes_is_not_checked_to_its_end(model: type[Body], changes: Any, most: int) -> None:
    with pytest.raises((ValidationError, InvalidRequest)) as raised:
        parse_body(json.dumps({"prompt": "a"} | changes).encode(), model, 2**22)
    assert isinstance(raised.value, InvalidRequest) if not most else raised.value.error_count() <= most


async def test_a_longer_prompt_needs_a_higher_limit(url: str) -> None:
    messages = []
    for limits in (replace(LimitsConfig(), max_request_values=100), LimitsConfig()):
        async with worker(url, Script(TOKENS)), http_router(url, limits=limits) as base:
            answer = await post(base, "/v1/completions", ALL | {"prompt": [5] * 5000})
            messages.append(answer.json()["error"]["message"])
    few, many = messages
    assert few == "the body holds more than 100 values; send text instead of token ids, or several requests"
    assert many == "prompt of 5000 tokens exceeds the context length 2048; shorten it"
