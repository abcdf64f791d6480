"""Events of a stream: one for each step while the client keeps up, joined ones while its socket is busy."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any

import pytest

from eyas.api.outputs import TextChunk, TextDecoder
from eyas.api.request import Chunk, FinishReason, TokenLogprob, VerifyStep, VerifyStepDetails
from eyas.errors import Unavailable
from eyas.services.router.dispatch.generation import ReadyQueue, ready_chunks
from eyas.services.router.http.bodies.anthropic import MessagesBody
from eyas.services.router.http.bodies.openai import ChatBody, CompletionBody
from eyas.services.router.http.bodies.responses import ResponsesBody
from eyas.services.router.http.streaming import WAITING_COMMENT, EventStream
from eyas.services.router.http.tool_constraints import ChatOutput
from eyas.services.router.http.writers.anthropic import MessagesWriter
from eyas.services.router.http.writers.openai import ResponseWriter, StreamWriter, stream_events
from eyas.services.router.http.writers.responses import ResponsesWriter
from eyas.text.chat_parser import ChatFormat
from eyas.text.tokenizer import TextStream
from tests.support.services.http_router import TOKENIZER

TOKENS = (300, 500, 700, 900, 1100, 1300, 1500, 1700)
PROMPT = (5, 6, 7)
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "stream": True}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "x", "stream": True}
MESSAGES = MessagesBody(**CHAT, max_tokens=8)
RESPONSES = ResponsesBody.model_validate({"model": "demo", "input": "x", "stream": True})
SHOWN: dict[str, Any] = {"logprobs": True, "return_token_ids": True, "return_verify_steps": True}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


class Client:
    """A client that takes what is sent while its socket is free."""

    def __init__(self) -> None:
        self.is_free = asyncio.Event()
        self.is_free.set()
        self.is_waited_for = asyncio.Event()
        self.data = b""

    async def send(self, message: Any) -> None:
        if not self.is_free.is_set():
            self.is_waited_for.set()
            await self.is_free.wait()
        self.data += message.get("body", b"")

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events so far, without usage and errors."""
        lines = (line.removeprefix("data: ") for line in self.data.decode().splitlines() if line.startswith("data: {"))
        return [event for event in map(json.loads, lines) if event.get("choices")]


async def sent(
    body: CompletionBody | ChatBody,
    indices: Sequence[int] = (0,),
    is_busy: bool = False,
    new_parser: Any = None,
    failing: Sequence[int] = (),
    write: Callable[[ResponseWriter], StreamWriter] = lambda chat: chat,
) -> Client:
    """Send a token of each completion at a time to a client, which may be busy from the first event to the last token.

    Args:
        failing: choices that an error ends in place of the last token.
        write: turns the writer of a chat into that of an API.
    """
    client = Client()
    writer = write(ResponseWriter(body, "cmpl-1", "demo", TOKENIZER, [PROMPT], new_parser=new_parser, created=0))
    decoders = {index: TextDecoder(TextStream(TOKENIZER), (), len(PROMPT), 0, index) for index in indices}

    async def work(queue: ReadyQueue) -> None:
        for number, token in enumerate(TOKENS):
            if number == 1 and is_busy:
                await client.is_waited_for.wait()
            for index in indices:
                reason: FinishReason | None = "length" if token == TOKENS[-1] else None
                logprobs = (TokenLogprob(token, -0.5),) if body.wants_logprobs else ()
                chunk = Chunk("r", (token,), (False,), VerifyStep(0, 0, 0), reason, logprobs=logprobs)
                if reason and index in failing:
                    chunk = Chunk("r", finish_reason="error", message="a step failed")
                queue.add(decoders[index].add(chunk))
            while not is_busy and len(client.events) < len(indices) * (number + 1):
                await asyncio.sleep(0)
        client.is_free.set()

    chunks = ready_chunks(work, set())
    events = stream_events(writer, chunks, body.name_of)
    if is_busy:
        client.is_free.clear()
    await EventStream(writer, events, {}, 60.0)({}, client.receive, client.send)
    return client


def joined(events: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """Return what a client makes of the events of a choice."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return {
        "text": "".join(choice["delta"].get("content", "") for choice in choices),
        "reasoning": "".join(choice["delta"].get("reasoning_content", "") for choice in choices),
        "logprobs": [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", [])],
        "token_ids": [token for choice in choices for token in choice.get("token_ids", [])],
        "steps": [step for choice in choices for step in choice.get("verify_steps", [])],
        "reason": choices[-1]["finish_reason"],
    }


@pytest.mark.parametrize("asked", [{}, SHOWN], ids=["text", "all"])
async def test_steps_while_the_client_is_busy_are_one_event(asked: dict[str, Any]) -> None:
    body = ChatBody(**CHAT, **asked, **USAGE)
    fast, slow = await sent(body), await sent(body, is_busy=True)
    assert (len(fast.events), len(slow.events)) == (len(TOKENS), 2)
    assert joined(slow.events) == joined(fast.events)
    assert slow.data.splitlines()[-4:] == fast.data.splitlines()[-4:], "the usage and the end"


async def test_steps_of_several_choices_are_joined_by_choice() -> None:
    body = ChatBody(**CHAT, n=2, temperature=1.0)
    slow = await sent(body, indices=(0, 1), is_busy=True)
    assert len(slow.events) <= 4
    for index in (0, 1):
        assert joined(slow.events, index)["text"] == TOKENIZER.decode(TOKENS)


@pytest.mark.parametrize("is_busy", [False, True])
async def test_steps_before_an_error_are_sent(is_busy: bool) -> None:
    client = await sent(ChatBody(**CHAT, **SHOWN), is_busy=is_busy, failing=(0,))
    assert joined(client.events)["token_ids"] == list(TOKENS[:-1])
    assert "a step failed" in client.data.decode().splitlines()[-4]


async def test_an_error_of_one_choice_loses_no_step_of_another() -> None:
    body = ChatBody(**CHAT, **SHOWN, n=2, temperature=1.0)
    client = await sent(body, indices=(0, 1), is_busy=True, failing=(0,))
    assert joined(client.events, 0)["token_ids"] == list(TOKENS[:-1])
    assert joined(client.events, 1)["token_ids"] == list(TOKENS)
    assert "a step failed" in client.data.decode()


@pytest.mark.parametrize(
    ("body", "writer", "delta"),
    [
        (MESSAGES, MessagesWriter, "content_block_delta"),
        (RESPONSES, partial(ResponsesWriter, RESPONSES), "response.output_text.delta"),
    ],
    ids=["messages", "responses"],
)
async def test_steps_are_joined_in_other_apis(body: MessagesBody | ResponsesBody, writer: Any, delta: str) -> None:
    client = await sent(body.chat(), is_busy=True, write=writer)
    lines = (line.removeprefix("data: ") for line in client.data.decode().splitlines() if line.startswith("data: {"))
    deltas = [event["delta"] for event in map(json.loads, lines) if event["type"] == delta]
    texts = [each if isinstance(each, str) else each["text"] for each in deltas]
    assert len(texts) == 2
    assert "".join(texts) == TOKENIZER.decode(TOKENS)


async def test_steps_of_a_tool_call_are_joined() -> None:
    body = ChatBody.model_validate(CHAT | {"tools": [{"type": "function", "function": {"name": "add"}}]})
    tokens = TOKENIZER.encode('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    parser = ChatOutput(body, "demo", ChatFormat(tool_call_parser="hermes"), TOKENIZER, PROMPT).new_parser
    writer = ResponseWriter(body, "cmpl-1", "demo", TOKENIZER, [PROMPT], new_parser=parser)
    [event] = writer.events(steps(*(Chunk("r", (token,), (False,)) for token in tokens)))
    [call] = event["choices"][0]["delta"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 1}


def steps(*chunks: Chunk) -> list[TextChunk]:
    """Return chunks that are all ready at once."""
    decoder = TextDecoder(TextStream(TOKENIZER), (), len(PROMPT), 0, 0)
    return list(map(decoder.add, chunks))


async def stream_of(*ready: list[TextChunk]) -> AsyncGenerator[list[TextChunk], None]:
    for chunks in ready:
        yield chunks


@pytest.mark.parametrize("body", [ChatBody(**CHAT, return_verify_steps=True), CompletionBody(**COMPLETION, logprobs=20)])
async def test_large_joined_events_let_others_run(body: ChatBody | CompletionBody) -> None:
    """A thread makes them, so that the event loop has turns for other clients."""
    details = VerifyStepDetails(TOKENS, (0,) * len(TOKENS), (0.0,) * len(TOKENS), method="eagle3")
    logprobs = (TokenLogprob(300, -0.5, tuple(range(300, 320)), (-1.0,) * 20),) if body.wants_logprobs else ()
    large = Chunk("r", (300,), (False,), VerifyStep(0, 0, 0, details=details), logprobs=logprobs)
    writer = ResponseWriter(body, "cmpl-1", "demo", TOKENIZER, [PROMPT])
    events = stream_events(writer, stream_of(steps(*[large] * 64)), body.name_of)
    num_turns = 0

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    assert len((await anext(events))["choices"]) == 1
    other.cancel()
    await events.aclose()
    assert num_turns > 0


async def test_no_comment_follows_an_event_that_took_long() -> None:
    client = Client()
    writer = ResponseWriter(ChatBody(**CHAT), "cmpl-1", "demo", TOKENIZER, [PROMPT])

    async def send(message: Any) -> None:
        if b"choices" in message.get("body", b""):
            await asyncio.sleep(0.5)
        await client.send(message)

    async def events() -> AsyncGenerator[dict[str, Any], None]:
        for event in writer.events(steps(Chunk("r", (300,), (False,)))):
            yield event
        for _ in range(5):  # the next step takes a moment
            await asyncio.sleep(0)

    await EventStream(writer, events(), {}, 0.2)({}, client.receive, send)
    assert len(client.events) == 1
    assert WAITING_COMMENT not in client.data


async def test_a_comment_that_took_long_breaks_no_event() -> None:
    """A client that reads slowly holds up a comment, and then the blocks of a large event."""
    client = Client()
    writer = ResponseWriter(ChatBody(**CHAT), "cmpl-1", "demo", TOKENIZER, [PROMPT])

    async def send(message: Any) -> None:
        await asyncio.sleep(0.1 if b"waiting" in message.get("body", b"") else 0.06)
        await client.send(message)

    async def events() -> AsyncGenerator[dict[str, Any], None]:
        yield {"choices": [{}], "large": []}
        await asyncio.sleep(0.12)
        yield {"choices": [{}], "large": list(range(30_000))}

    await EventStream(writer, events(), {}, 0.05)({}, client.receive, send)
    assert WAITING_COMMENT in client.data
    assert [event["large"] for event in client.events] == [[], list(range(30_000))]


async def test_all_events_have_the_same_head() -> None:
    client = await sent(ChatBody(**CHAT), is_busy=True)
    heads = [{name: event[name] for name in ("id", "object", "created", "model")} for event in client.events]
    assert heads == heads[:1] * len(heads)
    assert heads[0]["object"] == "chat.completion.chunk"


@pytest.mark.parametrize("asked", [{}, {"logprobs": True}], ids=["text", "logprobs"])
async def test_reasoning_is_joined_but_not_its_logprobs(asked: dict[str, Any]) -> None:
    """The writers of other APIs leave out as many of an event's log-probabilities as it has tokens of reasoning."""
    body = ChatBody(**CHAT, **asked)
    parser = ChatOutput(body, "demo", ChatFormat(reasoning_parser="deepseek_r1"), TOKENIZER, PROMPT).new_parser
    slow = await sent(body, is_busy=True, new_parser=parser)
    assert len(slow.events) == (len(TOKENS) if asked else 2)
    assert joined(slow.events)["reasoning"] == TOKENIZER.decode(TOKENS)


async def test_a_router_that_stops_ends_its_streams() -> None:
    running = set[asyncio.Task[None]]()
    is_cancelled = asyncio.Event()

    async def work(queue: ReadyQueue) -> None:
        try:
            queue.add(TextChunk(Chunk("r", (1,), (False,))))
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    chunks = ready_chunks(work, running)
    assert len(await anext(chunks)) == 1
    for task in running:
        task.cancel()
    with pytest.raises(Unavailable):
        await anext(chunks)
    assert is_cancelled.is_set()
    assert not running
