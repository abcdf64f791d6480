"""The bodies of /tokenize and /detokenize, vLLM's and llama.cpp's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import FailFast, Field, model_validator

from eyas.errors import InvalidRequest
from eyas.rpc.messages import ModelInfo
from eyas.services.router.http.bodies.base import StrictModel, Text
from eyas.services.router.http.bodies.converted_chats import chat_body
from eyas.services.router.http.bodies.openai import ChatBody, Message, RenderingFields
from eyas.text.tokenizer import Tokenizer


class TokenizeBody(RenderingFields):
    """The body of /tokenize. add_special_tokens: by default true for a prompt, false for a chat, whose template has them."""

    model: Text = ""
    prompt: Text | None = None
    messages: Annotated[list[Message], FailFast()] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    tools: list[dict[str, Any]] | None = None

    @classmethod
    def translated(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Read llama.cpp's `content`, without special tokens unless `add_special` asks for them."""
        if "content" in data and "prompt" not in data:
            rest = {name: value for name, value in data.items() if name not in ("content", "add_special")}
            data = {"add_special_tokens": data.get("add_special", False), **rest, "prompt": data["content"]}
        return super().translated(data)

    @model_validator(mode="after")
    def _check_source(self) -> TokenizeBody:
        if (self.prompt is None) == (not self.messages):
            raise InvalidRequest("give either prompt or messages", "prompt")
        return self

    def chat(self) -> ChatBody:
        """Return the chat of the messages. Raises InvalidRequest."""
        return chat_body(**{name: getattr(self, name) for name in self.model_fields_set & set(ChatBody.model_fields)})

    def response(self, token_ids: Sequence[int], info: ModelInfo, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the response. Meant for a thread: it may be long."""
        names = [tokenizer.tokenizer.id_to_token(token) for token in token_ids] if self.return_token_strs else None
        sizes = {"count": len(token_ids), "max_model_len": info.max_model_len}
        return sizes | {"tokens": list(token_ids), "token_strs": names}


class DetokenizeBody(StrictModel):
    """The body of /detokenize."""

    model: Text = ""
    tokens: Annotated[list[int], FailFast()]

    def response(self, info: ModelInfo, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the response: the text with its special tokens. Meant for a thread. Raises InvalidRequest."""
        if (outside := next((token for token in self.tokens if not 0 <= token < info.vocab_size), None)) is not None:
            raise InvalidRequest(f"tokens holds id {outside}, outside the vocabulary [0, {info.vocab_size})", "tokens")
        return {"prompt": tokenizer.decode(self.tokens, skip_special_tokens=False)}
