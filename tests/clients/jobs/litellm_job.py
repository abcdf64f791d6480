"""LiteLLM as a library: its providers for OpenAI's API, for vLLM and for Anthropic's API."""

from __future__ import annotations

from typing import Any

import litellm
from checks import MESSAGES, MODEL, PROMPT, URL, WEATHER, check, require

litellm.suppress_debug_info = True
tool = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}


def asked(provider: str, base: str, **more: Any) -> dict[str, Any]:
    """The arguments of a chat."""
    shared = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none", "max_tokens": 16, "num_retries": 0}
    return {**shared, "messages": MESSAGES, **more}


for provider, base in (("openai", f"{URL}/v1"), ("hosted_vllm", f"{URL}/v1"), ("anthropic", URL)):
    with check(f"{provider}: chat"):
        answer = litellm.completion(**asked(provider, base))
        require(answer.usage.completion_tokens > 0, "no usage")
    with check(f"{provider}: chat, streamed"):
        parts = [*litellm.completion(**asked(provider, base, stream=True))]
        require(parts and parts[-1].choices[0].finish_reason, "no end")
    with check(f"{provider}: tools"):
        forced = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        called = litellm.completion(**asked(provider, base, **forced) | {"max_tokens": 64})
        require(called.choices[0].message.tool_calls[0].function.name == "get_weather", "no call")
with check("openai: JSON schema"):
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    answer = litellm.completion(**asked("openai", f"{URL}/v1", response_format=schema) | {"max_tokens": 64})
    require("city" in answer.choices[0].message.content, "no object")
with check("text-completion-openai: completions"):
    completion = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt=PROMPT, api_base=f"{URL}/v1", api_key="none", max_tokens=16
    )
    require(completion.choices[0].text, "no text")
with check("openai: responses"):
    response = litellm.responses(
        model=f"openai/{MODEL}", input="Add two numbers.", api_base=f"{URL}/v1", api_key="none", max_output_tokens=16
    )
    require(response.usage.output_tokens > 0, "no usage")
