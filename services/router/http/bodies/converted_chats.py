"""Chats that the bodies of other APIs become."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from eyas.services.router.http.bodies.body_errors import invalid_body
from eyas.services.router.http.bodies.openai import ChatBody, SamplingBody


def chat_body(**fields: Any) -> ChatBody:
    """Return the body of a chat that another API's body asks for. Raises InvalidRequest."""
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        raise invalid_body(error.errors()) from None


def chat_with(body: SamplingBody, **fields: Any) -> ChatBody:
    """Return the chat that another API's body asks for. Raises InvalidRequest.

    fields: those that are not shared; None leaves one out.
    """
    shared = {name: getattr(body, name) for name in SamplingBody.model_fields if name in body.model_fields_set}
    return chat_body(**shared | fields)
