"""pydantic-ai: agents with typed output, over chats, responses and Anthropic's messages."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from checks import MODEL, URL, check, require
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Answer(BaseModel):
    """A schema that any model can fill under a grammar."""

    city: Literal["Paris", "Oslo"]
    is_warm: bool


openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
chat = OpenAIChatModel(MODEL, provider=openai)
responses = OpenAIResponsesModel(MODEL, provider=openai)
messages = AnthropicModel(MODEL, provider=AnthropicProvider(api_key="none", base_url=URL))
brief: dict[str, Any] = {"max_tokens": 16}
longer: dict[str, Any] = {"max_tokens": 128, "temperature": 0.0, "parallel_tool_calls": False}


async def streamed(model: Any) -> int:
    """Stream a text; return the tokens that were counted."""
    async with Agent(model).run_stream("Add two numbers.", model_settings=brief) as result:
        async for _ in result.stream_text():
            pass
        return int(result.usage.output_tokens if not callable(result.usage) else result.usage().output_tokens)


for name, model in (("chat", chat), ("responses", responses), ("messages", messages)):
    with check(f"{name}: text"):
        Agent(model, instructions="Be brief.").run_sync("Add two numbers.", model_settings=brief)
    with check(f"{name}: text, streamed"):
        require(asyncio.run(streamed(model)) > 0, "no usage")
    with check(f"{name}: ToolOutput"):
        done = Agent(model, output_type=ToolOutput(Answer)).run_sync("Oslo?", model_settings=longer)
        require(isinstance(done.output, Answer), "no object")
for name, model in (("chat", chat), ("responses", responses)):
    with check(f"{name}: NativeOutput"):
        done = Agent(model, output_type=NativeOutput(Answer)).run_sync("Oslo?", model_settings=longer)
        require(isinstance(done.output, Answer), "no object")
with check("chat: PromptedOutput, request accepted"):
    try:
        Agent(chat, output_type=PromptedOutput(Answer), retries=0).run_sync("Oslo?", model_settings=longer)
    except ModelHTTPError:
        raise
    except Exception as error:  # the demo model does not follow instructions
        require("status_code" not in str(error), str(error))
with check("chat: a tool of the agent"):
    called: list[str] = []
    agent = Agent(chat, output_type=ToolOutput(Answer))

    @agent.tool_plain
    def get_weather(city: Literal["Paris", "Oslo"]) -> str:
        """Return the weather."""
        called.append(city)
        return f"{city} is mild"

    require(isinstance(agent.run_sync("Oslo?", model_settings=longer).output, Answer), "no object")
