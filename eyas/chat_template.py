"""Chat templates: render the messages of a chat as the text that a model was trained to continue.

Templates come with checkpoints and are not trusted: they run in Jinja's sandbox, with the variables of transformers.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eyas.chat_output import ChatFormat, detect_format
from eyas.config import ServedModel
from eyas.errors import CheckpointError, ConfigError, InvalidRequest
from eyas.tokenizer import fetch_file, tokenizer_settings

_FILE = "chat_template.jinja"

log = logging.getLogger(__name__)


class ChatTemplate:
    """A compiled chat template. special_tokens: by the names that templates use, such as bos_token.

    model: for errors. tool_source: the template of chats with tools, if it is another one. form: becomes `format`, how the
    model writes reasoning and calls; None takes what the template shows. Raises ConfigError if a template does not compile.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        model: str,
        tool_source: str = "",
        form: ChatFormat | None = None,
    ) -> None:
        self.format = detect_format(source + tool_source) if form is None else form
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
            self._tool_template = _environment().from_string(tool_source) if tool_source else self._template
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the chat template of {model} does not compile: {error}; set another chat_template"
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any], continues_last: bool = False) -> str:
        """Return the prompt for the assistant's next message.

        extra: more variables, such as enable_thinking. continues_last: end with the content of the last message, which the
        assistant is to continue. Raises InvalidRequest if the template rejects the messages.
        """
        variables = {**self._special_tokens, "tools": None, "documents": None, "add_generation_prompt": True, **extra}
        try:
            template = self._tool_template if variables["tools"] else self._template
            text = template.render(variables | {"messages": list(messages)})
            text.encode()
        except Exception as error:  # a template can raise whatever Python can
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", "messages") from error
        return _cut_after(text, str(messages[-1].get("content", ""))) if continues_last else text


def load_template(model: ServedModel) -> ChatTemplate | None:
    """Return the chat template of a model; None if it has none. Raises ConfigError or CheckpointError for a bad one."""
    sources = {"default": _read(model.chat_template)} if model.chat_template else _find(model.tokenizer)
    source, tool_source = sources.get("default", ""), sources.get("tool_use", "")
    if not source:
        return None
    form = _format(model, source + tool_source)
    return ChatTemplate(source, special_tokens(model.tokenizer), model.name, tool_source, form)


def special_tokens(tokenizer: str) -> dict[str, str]:
    """Return the special tokens of a tokenizer by the names that templates use. Raises CheckpointError."""
    settings = tokenizer_settings(tokenizer)
    texts = {name: _token_text(token) for name, token in settings.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text}


def _format(model: ServedModel, template: str) -> ChatFormat:
    """Return the format that the model's settings name, or else that its template shows."""
    shown = detect_format(template)
    tools, reasoning = model.tool_call_parser, model.reasoning_parser
    return ChatFormat(
        shown.tool_call_parser if tools == "auto" else "" if tools == "none" else tools,
        shown.reasoning_parser if reasoning == "auto" else "" if reasoning == "none" else reasoning,
    )


def _cut_after(text: str, content: str) -> str:
    """Return a rendered chat up to its last message's content. Templates may strip white space around it."""
    for form in (content, content.rstrip(), content.lstrip(), content.strip()):
        if form and (at := text.rfind(form)) >= 0:
            return text[: at + len(form)]
    reason = "the chat template does not show the last message, so that it cannot be continued; end with a user's message"
    raise InvalidRequest(reason, "messages")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the chat_template {path}: {error}") from error


def _find(tokenizer: str) -> dict[str, str]:
    """Return the tokenizer's templates by name: from chat_template.jinja, else from its settings."""
    try:
        file = fetch_file(tokenizer, _FILE)
    except CheckpointError as error:
        log.warning("cannot look for a chat template: %s", error)
        file = None
    if file is not None:
        return {"default": _read(str(file))}
    template = tokenizer_settings(tokenizer).get("chat_template") or ""
    if isinstance(template, list):
        return {str(entry["name"]): str(entry["template"]) for entry in template}
    return {"default": str(template)}


def _token_text(token: object) -> str:
    """Return a special token's text; tokenizer_config.json has it as a string or inside an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # jinja2's own escapes HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = time.strftime
    return environment


class _GenerationBlock(Extension):
    """Renders the body of {% generation %} unchanged; the tag marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the statements up to {% endgeneration %}."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
