"""instructor: objects from chats, in each of its modes for OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import instructor
from checks import MESSAGES, MODEL, URL, check, require
from openai import OpenAI
from pydantic import BaseModel

# The schema holds by a grammar, so the object counts.
OBJECTS = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "JSON_O1", "RESPONSES_TOOLS", "RESPONSES_TOOLS_WITH_INBUILT_TOOLS")
# The schema is left to the prompt. Only a model that follows instructions fills it, so the request counts.
ACCEPTED = ("JSON", "MD_JSON")
LEFT_OUT = {"FUNCTIONS": "deprecated; instructor warns and sends TOOLS"}
OTHER_APIS = (
    *("ANTHROPIC", "BEDROCK", "CEREBRAS", "COHERE", "FIREWORKS", "GEMINI", "GENAI", "MISTRAL", "OPENROUTER"),
    *("PERPLEXITY", "VERTEXAI", "WRITER", "XAI"),
)


class Answer(BaseModel):
    """A schema that any model can fill under a grammar."""

    city: Literal["Paris", "Oslo"]
    is_warm: bool


client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 64, "seed": 1, "max_retries": 0}


def patched(mode: str) -> instructor.Instructor:
    return instructor.from_openai(client, mode=getattr(instructor.Mode, mode))


with check("every mode of OpenAI's API"):
    names = {mode.name for mode in instructor.Mode if not mode.name.startswith(OTHER_APIS)}
    missing = names - {*OBJECTS, *ACCEPTED, *LEFT_OUT, "PARALLEL_TOOLS"}
    require(not missing, f"no check of {sorted(missing)}")
for mode in OBJECTS:
    with check(f"mode {mode}"):
        given = {name: value for name, value in asked.items() if name != "seed" or not mode.startswith("RESPONSES")}
        given |= {"parallel_tool_calls": False} if "TOOLS" in mode else {}
        require(isinstance(patched(mode).chat.completions.create(**given, response_model=Answer), Answer), "no object")
with check("mode PARALLEL_TOOLS"):
    # instructor leaves the choice to the model; the body forces calls, and no more than fit.
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    found = list(
        patched("PARALLEL_TOOLS").chat.completions.create(**asked, extra_body=forced, response_model=Iterable[Answer])
    )
    require(found and all(isinstance(one, Answer) for one in found), "no objects")
with check("mode PARALLEL_TOOLS, the model's choice accepted"):
    try:
        patched("PARALLEL_TOOLS").chat.completions.create(**asked, response_model=Iterable[Answer])
    except Exception as error:
        require("Error code: 4" not in str(error), str(error).replace("\n", " "))
for mode in ACCEPTED:
    with check(f"mode {mode}, request accepted"):
        try:
            patched(mode).chat.completions.create(**asked, response_model=Answer)
        except Exception as error:
            require("Error code: 4" not in str(error), str(error).replace("\n", " "))
with check("partial objects, streamed"):
    partials = [*patched("JSON_SCHEMA").chat.completions.create_partial(**asked, response_model=Answer)]
    require(partials and partials[-1].city in ("Paris", "Oslo"), "no object")
