"""The bodies of /tokenize and /detokenize, as in vLLM: texts or chats to token ids, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi.responses import JSONResponse
from pydantic import FailFast, Field, model_validator

from eyas.errors import InvalidRequest
from eyas.rpc.messages import ModelInfo
from eyas.services.router.http.bodies import StrictModel
from eyas.services.router.http.requests import ChatBody, Message, Text, chat_body
from eyas.tokenizer import Tokenizer


class TokenizeBody(StrictModel):
    """The body of /tokenize: a prompt, or the messages of a chat, which the model's template renders.

    add_special_tokens: by default true for a prompt, and false for a chat, whose template has them.
    return_token_strs: return the tokens as the vocabulary writes them too.
    """

    model: Text = ""
    prompt: Text | None = None
    messages: Annotated[list[Message], FailFast()] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _check_source(self) -> TokenizeBody:
        if (self.prompt is None) == (not self.messages):
            raise InvalidRequest("give either prompt or messages", "prompt")
        return self

    def chat(self) -> ChatBody:
        """Return the chat of the messages. Raises InvalidRequest."""
        names = self.model_fields_set & set(ChatBody.model_fields)
        return chat_body(**{name: getattr(self, name) for name in names})

    def response(self, token_ids: Sequence[int], info: ModelInfo, tokenizer: Tokenizer) -> JSONResponse:
        """Return the response. Meant for a thread: it may be long."""
        names = [tokenizer.tokenizer.id_to_token(token) for token in token_ids] if self.return_token_strs else None
        counted = {"count": len(token_ids), "max_model_len": info.max_model_len}
        return JSONResponse(counted | {"tokens": list(token_ids), "token_strs": names})


class DetokenizeBody(StrictModel):
    """The body of /detokenize."""

    model: Text = ""
    tokens: Annotated[list[int], FailFast()]

    def response(self, info: ModelInfo, tokenizer: Tokenizer) -> JSONResponse:
        """Return the response: the text with its special tokens. Meant for a thread. Raises InvalidRequest."""
        outside = next((token for token in self.tokens if not 0 <= token < info.vocab_size), None)
        if outside is not None:
            raise InvalidRequest(f"tokens holds id {outside}, outside the vocabulary [0, {info.vocab_size})", "tokens")
        return JSONResponse({"prompt": tokenizer.decode(self.tokens, skip_special_tokens=False)})
