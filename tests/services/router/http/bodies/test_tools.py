"""Tools and reasoning in chats: what reaches the template, what the output must match, and what the client gets."""

import json
from typing import Any

import pytest

from tests.support.services.http_router import CHAT, TOKENIZER, Script, http_router, post, served, worker
from tests.support.services.scripted_verifier import PROMPT, TOKENS

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "strict": True}}
PLAIN = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
HERMES = PLAIN + "{# <tool_call> </think> #}"
SHOWN = "{{ [messages, tools] | tojson }}{{ bos_token }}{# <tool_call> #}"
CALLS = (
    '<think>Hm</think>Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def script(text: str) -> Script:
    """Return a verifier that answers CHAT with a text."""
    return Script((*PROMPT, *TOKENIZER.encode_rendered(text)))


def asked(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in CHAT.items() if name != "max_tokens"} | fields


async def answer(url: str, text: str, **fields: Any) -> Any:
    """Return the answer to a request whose output is a text."""
    request = asked(max_tokens=len(TOKENIZER.encode_rendered(text)), **fields)
    async with served(url, script(text), template=HERMES) as client:
        return await client.chat.completions.create(**request)


def structural_tag(tokens: Script) -> dict[str, Any]:
    (call,) = tokens.calls
    structured = call.request.sampling.structured_outputs
    assert structured is not None
    tag: dict[str, Any] = json.loads(structured.structural_tag)
    return tag


async def test_calls_and_reasoning_have_fields_of_their_own(url: str) -> None:
    message = (await answer(url, CALLS, tools=[ADD, NOW])).choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == ("Well.", "Hm", "Hm")
    first, second = message.tool_calls
    assert (first.type, first.function.name, first.function.arguments) == ("function", "add", '{"a": 1}')
    assert (second.function.name, second.function.arguments) == ("now", "{}")
    assert first.id != second.id


async def test_calls_stream_with_index_id_and_name_first(url: str) -> None:
    async with served(url, script(CALLS), template=HERMES) as client:
        events = await client.chat.completions.create(**asked(tools=[ADD, NOW], stream=True))
        deltas = [event.choices[0].delta async for event in events]
    assert "".join(delta.content or "" for delta in deltas) == "Well."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm"
    pieces = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in pieces if call.id] == [(0, "add"), (1, "now")]
    for index, arguments in enumerate(['{"a": 1}', "{}"]):
        own = [call for call in pieces if call.index == index]
        assert own[0].id
        assert not any(call.id or call.function.name for call in own[1:])
        assert "".join(call.function.arguments or "" for call in own) == arguments


@pytest.mark.parametrize("stream", [False, True])
async def test_a_finished_call_has_its_own_finish_reason(url: str, stream: bool) -> None:
    """The verifier ends with "length" at the last token; a stop string ends the text before."""
    request = asked(tools=[ADD], stop=["END"], stream=stream)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    for text, reason in ((call, "tool_calls"), ("No.", "stop")):
        async with served(url, script(f"{text}END and more"), template=HERMES) as client:
            answered: Any = await client.chat.completions.create(**request)
            last = [event async for event in answered][-1] if stream else answered
        assert last.choices[0].finish_reason == reason


async def test_reasoning_can_be_left_out_and_its_tokens_are_counted(url: str) -> None:
    kept, dropped = (
        await answer(url, "<think>a b c</think>d"),
        await answer(url, "<think>a b c</think>d", extra_body={"include_reasoning": False}),
    )
    assert (kept.choices[0].message.reasoning, dropped.choices[0].message.reasoning) == ("a b c", None)
    assert dropped.choices[0].message.content == "d"
    assert (
        kept.usage.completion_tokens_details.reasoning_tokens == dropped.usage.completion_tokens_details.reasoning_tokens > 0
    )


async def test_one_call_is_returned_without_parallel_tool_calls(url: str) -> None:
    assert len((await answer(url, CALLS, tools=[ADD, NOW], parallel_tool_calls=False)).choices[0].message.tool_calls) == 1


async def test_choice_none_leaves_calls_in_the_text(url: str) -> None:
    choice = (await answer(url, '<tool_call>{"name": "add"}</tool_call>', tools=[ADD], tool_choice="none")).choices[0]
    assert (choice.message.tool_calls, choice.message.content) == (None, '<tool_call>{"name": "add"}</tool_call>')


async def shown(url: str, **fields: Any) -> Any:
    """Return the messages and tools that the template gets."""
    tokens = Script(TOKENS * 20)
    async with served(url, tokens, template=SHOWN) as client:
        await client.chat.completions.create(**asked(max_tokens=1, **fields))
    return json.loads(TOKENIZER.decode(tokens.calls[0].request.prompt_ids))


async def test_earlier_turns_reach_the_template_as_it_expects_them(url: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"a": '}}
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": [call, broken], "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "1"}]},
        {"role": "assistant", "content": "Done", "reasoning": "Ah", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "Again."},
    ]
    (user, calls, result, done, _), tools = await shown(url, messages=messages, tools=[ADD, NOW])
    assert user == {"role": "user", "content": "Add."}
    assert [one["function"]["arguments"] for one in calls["tool_calls"]] == [{"a": 1}, '{"a": ']
    assert (calls["content"], calls["reasoning_content"]) == ("", "Hm")
    assert result == {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "1"}
    assert (done["reasoning_content"], done["reasoning"], "tool_calls" in done) == ("Ah", "Ah", False)
    now = {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert tools == [ADD, {"type": "function", "function": now}]


async def test_tools_that_may_not_be_called_are_not_shown(url: str) -> None:
    assert (await shown(url, tools=[ADD], tool_choice="none"))[1] is None
    assert (await shown(url))[1] is None


async def constraint(url: str, template: str = HERMES, **fields: Any) -> Any:
    tokens = Script(TOKENS * 20)
    async with served(url, tokens, template=template) as client:
        await client.chat.completions.create(**asked(max_tokens=1, **fields))
    return structural_tag(tokens)["format"]


ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]}
FLAT_ALLOWED = {"mode": "auto", "tools": [{"type": "function", "name": "add"}]}
PLAIN_HERMES = PLAIN + "{# <tool_call> #}"
NAMED = {"type": "function", "function": {"name": "add"}}
CLOSED = {**ADD["function"]["parameters"], "additionalProperties": False}


@pytest.mark.parametrize("template", [PLAIN_HERMES, PLAIN], ids=["hermes", "unknown format"])
async def test_a_named_tool_must_be_called(url: str, template: str) -> None:
    found = await constraint(url, template, tools=[ADD, NOW], tool_choice=NAMED)
    begin, head, schema, tail, end = found["elements"]
    assert (begin["value"], end["value"]) == ("<tool_call>", "</tool_call>")
    assert (head["value"], tail["value"]) == ('\n{"name": "add", "arguments": ', "}\n")
    assert schema == {"type": "json_schema", "json_schema": CLOSED}


async def test_reasoning_may_precede_a_forced_call(url: str) -> None:
    reasoning, _ = (await constraint(url, HERMES, tools=[ADD], tool_choice="required"))["elements"]
    assert reasoning["type"] == "optional"
    reasoning, _ = (await constraint(url, HERMES + "<think>\n", tools=[ADD], tool_choice="required"))["elements"]
    assert reasoning["type"] == "sequence"


@pytest.mark.parametrize("allowed", [{"allowed_tools": ALLOWED}, {"allowed_tools": FLAT_ALLOWED}, FLAT_ALLOWED, ALLOWED])
async def test_only_allowed_tools_are_called_and_all_are_shown(url: str, allowed: dict[str, Any]) -> None:
    tools, choice = [ADD, NOW | {"function": {"name": "now"}}], {"type": "allowed_tools", **allowed}
    auto = json.dumps(await constraint(url, PLAIN_HERMES, tools=tools, tool_choice=choice))
    assert "add" in auto
    assert "now" not in auto
    required = json.loads(json.dumps(choice).replace("auto", "required"))
    forced = json.dumps(await constraint(url, PLAIN_HERMES, tools=tools, tool_choice=required))
    assert "add" in forced
    assert "now" not in forced
    assert len((await shown(url, tools=tools, tool_choice=choice))[1]) == 2


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "at least one tool"),
        ({"type": "allowed_tools", "mode": "none", "tools": [{"type": "function", "name": "add"}]}, "at least one tool"),
        ({"type": "allowed_tools", **FLAT_ALLOWED, "tools": [{"type": "mcp", "server_label": "s"}]}, "at least one tool"),
        ({"type": "allowed_tools", **FLAT_ALLOWED, "tools": [{"type": "function", "name": "sub"}]}, "names 'sub'"),
        ({"type": "file_search"}, "allowed_tools"),
    ],
)
async def test_a_wrong_choice_says_what_it_must_be(url: str, choice: dict[str, Any], reason: str) -> None:
    chat = asked(tools=[ADD], tool_choice=choice)
    response = {"model": "demo", "input": "x", "tools": [{"type": "function", "name": "add"}], "tool_choice": choice}
    async with worker(url, Script(TOKENS)), http_router(url, template=HERMES) as base:
        for path, body in (("/v1/chat/completions", chat), ("/v1/responses", response)):
            error = (await post(base, path, body)).json()["error"]
            assert error["param"] == "tool_choice"
            assert reason in error["message"]
