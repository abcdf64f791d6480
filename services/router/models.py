"""The models of a router: tokenizers, chat templates and names, without their workers."""

from __future__ import annotations

from dataclasses import dataclass

from eyas.config import ServedModel
from eyas.text.chat_template import ChatTemplate, load_template
from eyas.text.content_text import ContentText
from eyas.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class RouterModel:
    """What a router knows of a model without its workers.

    Attributes:
        template: None if it has none.
        content: encodes its chats, if names of special tokens in them are text.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    content: ContentText | None = None
    aliases: tuple[str, ...] = ()


def load_model(model: ServedModel) -> RouterModel:
    """Load the files of a model. Raises ConfigError or CheckpointError for bad ones."""
    tokenizer = load_tokenizer(model.tokenizer)
    content = ContentText(tokenizer) if model.special_tokens_in_content == "text" else None
    return RouterModel(model.name, tokenizer, load_template(model), content, model.aliases)
