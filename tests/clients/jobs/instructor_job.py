"""instructor: objects from chats, in each of its modes."""

from __future__ import annotations

from typing import Any, Literal

import instructor
from checks import MESSAGES, MODEL, URL, check, require
from openai import OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """A schema that any model can fill under a grammar."""

    city: Literal["Paris", "Oslo"]
    is_warm: bool


client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 64, "seed": 1, "max_retries": 0}
for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"):
    with check(f"mode {mode}"):
        patched = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
        given = {name: value for name, value in asked.items() if name != "seed" or mode != "RESPONSES_TOOLS"}
        given |= {"parallel_tool_calls": False} if "TOOLS" in mode else {}
        require(isinstance(patched.chat.completions.create(**given, response_model=Answer), Answer), "no object")
# These modes leave the schema to the prompt. Only a model that follows instructions fills it, so the request counts here.
for mode in ("JSON", "MD_JSON"):
    with check(f"mode {mode}, request accepted"):
        patched = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
        try:
            patched.chat.completions.create(**asked, response_model=Answer)
        except Exception as error:
            require("Error code: 4" not in str(error), str(error).replace("\n", " "))
with check("partial objects, streamed"):
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    partials = [*patched.chat.completions.create_partial(**asked, response_model=Answer)]
    require(partials and partials[-1].city in ("Paris", "Oslo"), "no object")
