"""Any model calls tools validly where a call is forced, with the tokens of plain decoding, and an agent's loop works."""

import json
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
QUESTION = {"role": "user", "content": "weather = "}


def check_call(call: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = json.loads(call.function.arguments)
    jsonschema.validate(arguments, WEATHER["function"]["parameters"])
    return arguments


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_forced_call_is_valid_and_that_of_plain_decoding(client: OpenAI, temperature: float) -> None:
    request: dict[str, Any] = {
        "model": "demo", "messages": [QUESTION], "tools": [WEATHER], "tool_choice": NAMED,
        "temperature": temperature, "seed": 7, "max_tokens": 128, "extra_body": {"return_token_ids": True},
    }  # fmt: skip
    drafted = client.chat.completions.create(**request).choices[0]
    plain = client.chat.completions.create(
        **request | {"extra_body": {"return_token_ids": True, "drafter": "none"}}
    ).choices[0]
    (call,) = drafted.message.tool_calls
    check_call(call)
    assert (drafted.finish_reason, drafted.message.content) == ("tool_calls", None)
    assert drafted.token_ids == plain.token_ids
    deltas = [event.choices[0].delta for event in client.chat.completions.create(**request, stream=True)]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments
    assert [piece.function.name for piece in pieces if piece.id] == ["get_weather"]


def test_an_agent_calls_its_tool_and_goes_on(client: OpenAI) -> None:
    """The demo model follows no instructions, so each turn says whether it calls."""
    messages: list[Any] = [QUESTION]
    for choice in ("required", NAMED, "none"):
        answer = client.chat.completions.create(
            model="demo", messages=messages, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False,
            temperature=0, max_tokens=128,
        ).choices[0]  # fmt: skip
        messages.append(answer.message)
        for call in answer.message.tool_calls or []:
            arguments = check_call(call)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(arguments | {"degrees": 9})})
    assert [one["role"] if isinstance(one, dict) else one.role for one in messages] == [
        "user", "assistant", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert messages[-1].content
    assert not messages[-1].tool_calls


def test_a_parsed_call_is_an_object(client: OpenAI) -> None:
    """OpenAI's client parses the arguments of strict functions itself."""
    answer = client.chat.completions.parse(
        model="demo", messages=[QUESTION], tools=[WEATHER], tool_choice=NAMED, parallel_tool_calls=False, max_tokens=128,
        temperature=0,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city", "days"}
