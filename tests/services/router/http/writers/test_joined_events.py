"""Events of a stream: one for each step while the client keeps up, joined ones while its socket is busy."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from eyas.api.outputs import TextChunk, TextDecoder
from eyas.api.request import Chunk, TokenLogprob, VerifyStep
from eyas.errors import Unavailable
from eyas.services.router.dispatch.generation import Put, ready_chunks
from eyas.services.router.http.bodies.openai import ChatBody, CompletionBody
from eyas.services.router.http.streaming import EventStream
from eyas.services.router.http.tool_constraints import ChatOutput
from eyas.services.router.http.writers.openai import ResponseWriter
from eyas.text.chat_parser import ChatFormat
from eyas.text.tokenizer import TextStream
from tests.support.services.http_router import TOKENIZER

TOKENS = (300, 500, 700, 900, 1100, 1300, 1500, 1700)
PROMPT = (5, 6, 7)
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "stream": True}
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
        """The events so far, without the one with the usage."""
        lines = (line.removeprefix("data: ") for line in self.data.decode().splitlines() if line.startswith("data: {"))
        return [event for event in map(json.loads, lines) if event["choices"]]


async def sent(
    body: CompletionBody | ChatBody,
    indices: Sequence[int] = (0,),
    is_busy: bool = False,
    new_parser: Any = None,
) -> Client:
    """Send a token of each completion at a time to a client, which may be busy from the first event to the last token."""
    client = Client()
    writer = ResponseWriter(body, "cmpl-1", "demo", TOKENIZER, [PROMPT], new_parser=new_parser)
    decoders = {index: TextDecoder(TextStream(TOKENIZER), (), len(PROMPT), 0, index) for index in indices}

    async def work(put: Put) -> None:
        for number, token in enumerate(TOKENS):
            if number == 1 and is_busy:
                await client.is_waited_for.wait()
            for index in indices:
                reason = "length" if token == TOKENS[-1] else None
                logprobs = (TokenLogprob(token, -0.5),) if body.wants_logprobs else ()
                chunk = Chunk("r", (token,), (False,), VerifyStep(0, 0, 0), reason, logprobs=logprobs)
                await put(decoders[index].add(chunk))
            while not is_busy and len(client.events) < len(indices) * (number + 1):
                await asyncio.sleep(0)
        client.is_free.set()

    chunks = ready_chunks(work, asyncio.Event())
    events = writer.events(chunks)
    first = await anext(events)
    if is_busy:
        client.is_free.clear()
    await EventStream(writer, first, events, {}, 60.0)({}, client.receive, client.send)
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


async def test_a_client_that_keeps_up_gets_an_event_for_each_step() -> None:
    client = await sent(ChatBody(**CHAT))
    assert len(client.events) == len(TOKENS)
    assert joined(client.events)["text"] == TOKENIZER.decode(TOKENS)


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
    has_ended = asyncio.Event()
    is_cancelled = asyncio.Event()

    async def work(put: Put) -> None:
        try:
            await put(TextChunk(Chunk("r", (1,), (False,))))
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    chunks = ready_chunks(work, has_ended)
    assert len(await anext(chunks)) == 1
    has_ended.set()
    with pytest.raises(Unavailable):
        await anext(chunks)
    assert is_cancelled.is_set()
