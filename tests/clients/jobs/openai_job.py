"""OpenAI's own client: every endpoint that it has and Eyas serves."""

from __future__ import annotations

from typing import Any, Literal

from checks import MESSAGES, MODEL, PROMPT, URL, WEATHER, check, require
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
completion: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "seed": 1}
chat: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "seed": 1}
tool = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}


class Answer(BaseModel):
    """A schema that any model can fill under a grammar."""

    city: Literal["Paris", "Oslo"]
    is_warm: bool


with check("models"):
    require([model.id for model in client.models.list()] == [MODEL], "another list of models")
    require(client.models.retrieve(MODEL).id == MODEL, "the model is not found")
with check("completions"):
    whole = client.completions.create(**completion)
    require(whole.choices[0].text and whole.usage.completion_tokens == 16, "no text or usage")
with check("completions, streamed"):
    parts = [*client.completions.create(**completion, stream=True, stream_options={"include_usage": True})]
    require("".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text, "another text")
    require(parts[-1].usage.completion_tokens == 16, "no usage")
with check("completions, n and log-probabilities"):
    many = client.completions.create(**completion | {"n": 2, "logprobs": 3, "echo": True, "prompt": [PROMPT]} | {"n": 1})
    require(many.choices[0].logprobs.token_logprobs[-1] is not None, "no log-probabilities")
    require(len(client.completions.create(**completion | {"n": 2}).choices) == 2, "not two choices")
with check("chat"):
    answer = client.chat.completions.create(**chat)
    require(answer.choices[0].message.role == "assistant", "no message")
with check("chat, streamed"):
    parts = [*client.chat.completions.create(**chat, stream=True)]
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    require(text == (answer.choices[0].message.content or ""), "another text than whole")
with check("chat, fields without effect"):
    client.chat.completions.create(
        **chat, user="u", store=True, metadata={"a": "b"}, service_tier="auto", parallel_tool_calls=True, verbosity="low",
        prompt_cache_key="k", safety_identifier="s",
    )  # fmt: skip
with check("chat, JSON schema (parse)"):
    parsed = client.chat.completions.parse(**chat | {"max_tokens": 64}, response_format=Answer)
    require(isinstance(parsed.choices[0].message.parsed, Answer), "no object")
with check("chat, tools"):
    forced: dict[str, Any] = {"tools": [tool], "tool_choice": "required", "max_tokens": 64, "parallel_tool_calls": False}
    called = client.chat.completions.create(**chat | forced).choices[0]
    require(called.message.tool_calls[0].function.name == "get_weather", "no call")
    require(called.finish_reason == "tool_calls", f"finish reason {called.finish_reason}")
with check("chat, tools, streamed"):
    parts = [*client.chat.completions.create(**chat | forced, stream=True)]
    calls = [call for part in parts for call in part.choices[0].delta.tool_calls or ()]
    require(calls and calls[0].function.name == "get_weather", "no call")
with check("responses"):
    response = client.responses.create(model=MODEL, input="Add two numbers.", max_output_tokens=16)
    require(response.usage.output_tokens > 0, "no usage")
with check("responses, streamed"):
    events = [*client.responses.create(model=MODEL, input="Add two numbers.", max_output_tokens=16, stream=True)]
    require(events[0].type == "response.created", "no first event")
    require(events[-1].type in ("response.completed", "response.incomplete"), f"ended with {events[-1].type}")
with check("responses, tools"):
    function: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    asked: dict[str, Any] = {"model": MODEL, "input": "Oslo?", "tools": [function], "tool_choice": "required"}
    response = client.responses.create(**asked, max_output_tokens=64, parallel_tool_calls=False)
    require([item.type for item in response.output] == ["function_call"], "no call")
with check("responses, JSON schema (parse)"):
    response = client.responses.parse(model=MODEL, input="Oslo?", text_format=Answer, max_output_tokens=128, temperature=0)
    require(isinstance(response.output_parsed, Answer), "no object")
with check("vLLM's fields (extra_body)"):
    own: dict[str, Any] = {
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "use_beam_search": False,
        "ignore_eos": True,
    }
    more: dict[str, Any] = {"skip_special_tokens": False, "return_token_ids": True, "guided_choice": ["yes", "no"]}
    chosen = client.completions.create(**completion, extra_body=own | more).choices[0]
    require(chosen.text in ("yes", "no"), f"not one of the choices: {chosen.text!r}")
with check("errors"):
    try:
        client.completions.create(**completion | {"max_tokens": 10**6})
    except BadRequestError as error:
        require(error.param == "max_tokens", f"another field: {error.param}")
    else:
        require(False, "no error")
