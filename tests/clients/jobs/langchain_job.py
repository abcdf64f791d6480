"""LangChain's integration of OpenAI: models, streams, structured output and tools."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any, Literal

from checks import MODEL, PROMPT, URL, check, require
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """The answer."""

    city: Literal["Paris", "Oslo"]
    is_warm: bool


@tool
def get_weather(city: Literal["Paris", "Oslo"]) -> str:
    """Return the weather."""
    return city


shared: dict[str, Any] = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0, "seed": 1}
chat = ChatOpenAI(**shared, max_tokens=64)
with check("completions"):
    require(OpenAI(**shared, max_tokens=16).invoke(PROMPT), "no text")
with check("chat"):
    message = ChatOpenAI(**shared, max_tokens=16).invoke("Add two numbers.")
    require(message.usage_metadata["output_tokens"] > 0, "no usage")
with check("chat, streamed"):
    require([*ChatOpenAI(**shared, max_tokens=16, stream_usage=True).stream("Add two numbers.")], "no parts")
with check("chat, batch"):
    require(len(ChatOpenAI(**shared, max_tokens=16).batch(["a", "b", "c"])) == 3, "not three answers")
for method in ("json_schema", "function_calling"):
    with check(f"structured output, {method}"):
        require(isinstance(chat.with_structured_output(Answer, method=method).invoke("Oslo?"), Answer), "no object")
with check("tools"):
    called = chat.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False).invoke("Oslo?")
    require(called.tool_calls[0]["name"] == "get_weather", "no call")
with check("an agent's loop"):
    turns: list[Any] = [HumanMessage("Oslo?")]
    for choice in ("any", "get_weather", "none"):
        turns.append(chat.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False).invoke(turns))
        turns += [get_weather.invoke(call) for call in turns[-1].tool_calls]
    require([turn.type for turn in turns] == ["human", "ai", "tool", "ai", "tool", "ai"], "not two calls and an answer")
    require(turns[-1].content and not turns[-1].tool_calls, "no answer")
with check("tool calls, streamed"):
    pieces = [*chat.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False).stream("Oslo?")]
    whole = reduce(add, pieces)
    require(whole.tool_calls[0]["args"]["city"] in ("Paris", "Oslo"), "no call")
with check("Responses API"):
    responses = ChatOpenAI(**{name: value for name, value in shared.items() if name != "seed"}, use_responses_api=True)
    require(responses.invoke("Add two numbers.", max_output_tokens=16).usage_metadata["output_tokens"] > 0, "no usage")
