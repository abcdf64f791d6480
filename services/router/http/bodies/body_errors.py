"""Words for what is wrong with a body: which field, and what to write instead."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

from eyas.errors import InvalidRequest
from eyas.services.router.http.bodies.base import MAX_NAME_LENGTH, NEUTRAL, StrictModel, field_names
from eyas.services.router.http.bodies.openai import (
    ChatBody,
    CompletionBody,
    Message,
    ResponseFormat,
    StreamOptions,
    StructuredOutputsBody,
)
from eyas.services.router.http.bodies.other_servers import RENAMED, RESHAPED, near_names
from eyas.services.router.http.bodies.tools import EarlierCall, FunctionDefinition

MAX_GUESSES = 3  # what an unknown field may have meant


def invalid_body(errors: Sequence[Any]) -> InvalidRequest:
    """Turn pydantic's first error about a body into one that says what to change."""
    error = errors[0]
    location, param = error["loc"], _path(error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] in ("model_type", "dataclass_type"):
        message = message.partition(" or instance of ")[0]  # of a class of ours
    if error["type"] == "extra_forbidden":
        return InvalidRequest(_unknown_field(param, str(location[-1])), param)
    if location in ((), ("body",)):  # the second is FastAPI's, for a body without its header
        return InvalidRequest("the body must be a JSON object, sent with the header 'Content-Type: application/json'")
    if error["type"] == "missing":
        return InvalidRequest(f"{param} is missing; give it", param)
    return InvalidRequest(f"{param} is {reprlib.repr(error['input'])}: {message}", param)


def _path(location: Sequence[int | str]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    return path[:MAX_NAME_LENGTH].encode(errors="replace").decode()


def _unknown_field(param: str, name: str) -> str:
    bodies: dict[str, type[StrictModel]] = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}
    if others := [path for path, body in bodies.items() if param in body.model_fields]:
        return f"{param} is a field of {' and '.join(others)}, and not of this endpoint; leave it out or call another one"
    if name in NEUTRAL:
        return f"{param} is not supported; leave it out"
    parts = (Message, EarlierCall, FunctionDefinition, StreamOptions, ResponseFormat, StructuredOutputsBody)
    known = [one for model in (*bodies.values(), *parts) for one in field_names(model)]
    similar = near_names(name, frozenset([*known, *RENAMED, *RESHAPED]) - {name})
    guesses = " or ".join(similar[:MAX_GUESSES])
    return f"{param} is not a known field; {f'did you mean {guesses}?' if guesses else 'leave it out'}"
