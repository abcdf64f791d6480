"""Anthropic's own client against /v1/messages."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic, NotFoundError
from checks import MESSAGES, MODEL, URL, WEATHER, check, require

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
asked: dict[str, Any] = {"model": MODEL, "max_tokens": 16, "messages": MESSAGES, "system": "Be brief."}
asked["extra_body"] = {"seed": 1}
tool: dict[str, Any] = {"name": "get_weather", "description": "The weather.", "input_schema": WEATHER}

with check("messages"):
    message = client.messages.create(**asked)
    require(message.usage.output_tokens > 0 and message.stop_reason, "no usage or reason")
with check("messages, streamed"):
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    require([block.text for block in final.content] == [block.text for block in message.content], "another text than whole")
    require(text == "".join(block.text for block in final.content), "another text than the events")
with check("messages, continued"):
    begun = [*MESSAGES, {"role": "assistant", "content": "def add("}]
    require(client.messages.create(**asked | {"messages": begun}).content, "no text")
with check("count_tokens"):
    counted = client.messages.count_tokens(model=MODEL, messages=asked["messages"], system="Be brief.")
    require(
        counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0), "another count"
    )
with check("tools"):
    one_call = {"type": "any", "disable_parallel_tool_use": True}
    forced: dict[str, Any] = {"tools": [tool], "tool_choice": one_call, "max_tokens": 64}
    called = client.messages.create(**asked | forced)
    require(called.stop_reason == "tool_use", f"stop reason {called.stop_reason}")
    require(called.content[-1].input["city"] in ("Paris", "Oslo"), "no arguments")
with check("tools, streamed"):
    with client.messages.stream(**asked | forced) as stream:
        blocks = stream.get_final_message().content
    require(blocks[-1].type == "tool_use" and blocks[-1].input["city"], "no call")
with check("errors"):
    try:
        client.messages.create(**asked | {"model": "other"})
    except NotFoundError as error:
        require(error.body["error"]["type"] == "not_found_error", "another type")
    else:
        require(False, "no error")
for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, {"type": "disabled"}):
    with check(f"thinking, {thinking['type']}"):
        message = client.messages.create(**asked | {"thinking": thinking, "max_tokens": 1040})
        require({block.type for block in message.content} <= {"thinking", "text"}, "other blocks")
with check("thinking, enabled, streamed"):
    given = asked | {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1040}
    with client.messages.stream(**given) as stream:
        require(stream.get_final_message().usage.output_tokens > 0, "no usage")
