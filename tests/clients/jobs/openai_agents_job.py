"""OpenAI's agents: runs over chats and over responses, with tools, typed output and streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from agents import (
    Agent,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import MODEL, URL, check, require
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
called: list[str] = []


class Answer(BaseModel):
    """A schema that any model can fill under a grammar."""

    city: Literal["Paris", "Oslo"]
    is_warm: bool


@function_tool
def get_weather(city: Literal["Paris", "Oslo"]) -> str:
    """Return the weather."""
    called.append(city)
    return f"{city} is mild"


def agent(model: Any, max_tokens: int = 16, tool_choice: str | None = None, **more: Any) -> Agent[Any]:
    """Return an agent."""
    parallel = False if more.get("tools") else None
    own = ModelSettings(max_tokens=max_tokens, temperature=0.0, tool_choice=tool_choice, parallel_tool_calls=parallel)
    return Agent(name="demo", instructions="Be brief.", model=model, model_settings=own, **more)


@contextmanager
def cut_short() -> Iterator[None]:
    """Take a text that max_tokens cut short, as the demo model's are: from responses, an agent raises that."""
    try:
        yield
    except ModelBehaviorError as error:
        require("max_output_tokens" in str(error), str(error))


async def stream_events(model: Any) -> list[str]:
    """Return the kinds of the events of a streamed run."""
    result = Runner.run_streamed(agent(model), "Add two numbers.")
    return [event.type async for event in result.stream_events()]


models = {"chat": OpenAIChatCompletionsModel(MODEL, client), "responses": OpenAIResponsesModel(MODEL, client)}


async def run_all() -> None:
    """Run every check in one event loop, which the client is bound to."""
    for name, model in models.items():
        with check(f"{name}: text"), cut_short():
            done = await Runner.run(agent(model), "Add two numbers.")
            require(done.raw_responses[0].usage.output_tokens > 0, "no usage")
        with check(f"{name}: text, streamed"), cut_short():
            require("raw_response_event" in await stream_events(model), "no events")
        with check(f"{name}: output_type"):
            done = await Runner.run(agent(model, 128, output_type=Answer), "Oslo?")
            require(isinstance(done.final_output, Answer), "no object")
        with check(f"{name}: tools"):
            called.clear()
            with cut_short():
                await Runner.run(agent(model, 96, "required", tools=[get_weather]), "Oslo?", max_turns=3)
            require(called, "the tool was not called")


asyncio.run(run_all())
