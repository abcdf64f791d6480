"""Chat templates: render the messages of a chat as the text that a model was trained to continue.

Templates come with checkpoints and are not trusted: they run in Jinja's sandbox, with the variables of transformers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import takewhile
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
_TOOL_FILE = "additional_chat_templates/tool_use.jinja"

Messages = Sequence[Mapping[str, Any]]

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
        self._has_thinking_parts = bool(_THINKING_PART.search(source + tool_source))
        try:
            self._template = _environment().from_string(source)
            self._tool_template = _environment().from_string(tool_source) if tool_source else self._template
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the chat template of {model} does not compile: {error}; set another chat_template"
            ) from error

    def render(self, messages: Messages, extra: Mapping[str, Any], continues_last: bool = False) -> str:
        """Return the prompt for the assistant's next message.

        messages: in OpenAI's form. They are rewritten where the template cannot show them as they are.
        extra: more variables, such as enable_thinking. continues_last: end with the content of the last message, which the
        assistant is to continue. Raises InvalidRequest if the template rejects the messages.
        """
        try:
            normal = _normal(messages)
        except (AttributeError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f"messages must have OpenAI's form; reading them fails with {error!r}", "messages"
            ) from error
        text = self._text(self._fitting(normal), extra)
        return _cut_after(text, str(messages[-1].get("content", ""))) if continues_last else text

    def _text(self, messages: Messages, extra: Mapping[str, Any]) -> str:
        variables = {**self._special_tokens, "tools": None, "documents": None, "add_generation_prompt": True, **extra}
        try:
            template = self._tool_template if variables["tools"] else self._template
            text = template.render(variables | {"messages": list(messages)})
            text.encode()
        except Exception as error:  # a template can raise whatever Python can
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", "messages") from error
        return text

    def _fitting(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages in a form that this template shows whole. Many leave out what their authors did not expect.

        Raises InvalidRequest for system messages that have no place.
        """
        if any(message["role"] == "developer" for message in messages) and not self._shows_developer:
            messages = [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]
        first = [*takewhile(_is_instruction, messages)]
        if any(map(_is_instruction, messages[len(first) :])) and self._hides_later_instructions:
            reason = "the model's chat template shows system messages at the beginning only; put them there"
            raise InvalidRequest(reason, "messages")
        if first and messages[-1]["role"] != "user" and self._hides_instructions_after_users:
            messages = _with_instructions_in_user(messages[len(first) :], first)
        elif len(first) > 1 and not self._shows_two_instructions:
            messages = [first[0] | {"content": _joined_contents(first)}, *messages[len(first) :]]
        if any(len(message.get("tool_calls", ())) > 1 for message in messages) and not self._shows_two_calls:
            messages = [*_one_call_each(messages)]
        if self.format.tool_call_parser == "mistral":
            messages = [*map(_with_short_ids, messages)]
        if self.format.tool_call_parser in ("deepseek_v3", "deepseek_v31"):
            messages = [*map(_with_text_arguments, messages)]
        if self._has_thinking_parts:
            return [*map(_with_thinking_part, messages)]
        return [*map(_with_analysis, messages)] if self.format.tool_call_parser == "openai" else messages

    @cached_property
    def _shows_developer(self) -> bool:
        return bool(self._shows({"role": "developer", "content": _PROBE}, _USER))

    @cached_property
    def _shows_two_instructions(self) -> bool:
        return bool(self._shows({"role": "system", "content": "Hello"}, {"role": "system", "content": _PROBE}, _USER))

    @cached_property
    def _hides_later_instructions(self) -> bool:
        return (
            self._shows(_USER, {"role": "assistant", "content": "Hello"}, {"role": "system", "content": _PROBE}, _USER)
            is False
        )

    @cached_property
    def _hides_instructions_after_users(self) -> bool:
        return self._shows({"role": "system", "content": _PROBE}, _USER, *_calls("first")) is False

    @cached_property
    def _shows_two_calls(self) -> bool:
        return bool(self._shows(_USER, *_calls("first", _PROBE)))

    def _shows(self, *messages: dict[str, Any]) -> bool | None:
        """Whether _PROBE is in the text of these messages; None if the template refuses them."""
        function = {"name": "first", "description": "", "parameters": {"type": "object", "properties": {}}}
        has_calls = any("tool_calls" in message for message in messages)
        try:
            return _PROBE in self._text(
                messages, {"tools": [{"type": "function", "function": function}] if has_calls else None}
            )
        except InvalidRequest:
            return None


_PROBE = "eyasprobe"
_USER: dict[str, Any] = {"role": "user", "content": "Hello"}
# Templates of Mistral's reasoning models take reasoning as a part of the content.
_THINKING_PART = re.compile(r"""\[['"]thinking['"]\]""")


def _calls(*names: str) -> list[dict[str, Any]]:
    """Return a message with calls, and their results."""
    calls = [
        {"id": f"c0000000{number}", "type": "function", "function": {"name": name, "arguments": {}}}
        for number, name in enumerate(names)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "name": "first", "content": "r"} for call in calls]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


def _is_instruction(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")


def _joined_contents(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(str(message["content"]) for message in messages)


def _with_instructions_in_user(messages: list[dict[str, Any]], first: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put instructions before the text of the last user, where the template of Mistral Nemo has them."""
    last = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        return [*first, *messages]
    user = messages[last] | {"content": _joined_contents([*first, messages[last]])}
    return [*messages[:last], user, *messages[last + 1 :]]


def _normal(messages: Messages) -> list[dict[str, Any]]:
    """Return messages as most templates expect them.

    Arguments of calls are objects, unless the model wrote no object. Results of tools have the name of the tool. Reasoning
    has all of the names that templates use.
    """
    normal = [{"role": "", **message, "content": _joined(message.get("content"))} for message in messages]
    names: dict[str, str] = {}
    for message in normal:
        if calls := message.pop("tool_calls", None):
            message["tool_calls"] = [{**call, "function": _with_object(call["function"])} for call in calls]
            names |= {call.get("id", ""): call["function"]["name"] for call in calls}
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
        if reasoning := message.get("reasoning_content") or message.get("reasoning"):
            message |= {"reasoning_content": reasoning, "reasoning": reasoning, "thinking": reasoning}
    return normal


def _joined(content: Any) -> Any:
    """Return the text of a content; its parts joined if all are text."""
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        return "\n".join(part["text"] for part in content)
    return content or ""


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**function, "arguments": arguments}


def _one_call_each(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield messages with one call each. The results of a call follow it."""
    rest = [*messages]
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield message
            continue
        results = [*takewhile(lambda following: following["role"] == "tool", rest)]
        del rest[: len(results)]
        places = {call.get("id"): place for place, call in enumerate(calls)}
        for place, call in enumerate(calls):
            yield (message if place == 0 else {"role": "assistant", "content": ""}) | {"tool_calls": [call]}
            for number, result in enumerate(results):
                if places.get(result.get("tool_call_id"), min(number, len(calls) - 1)) == place:
                    yield result


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as text; DeepSeek's templates join them with other text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [call["function"] | {"arguments": _json_text(call["function"]["arguments"])} for call in calls]
    return message | {"tool_calls": [call | {"function": own} for call, own in zip(calls, functions, strict=True)]}


def _json_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Replace ids that templates of Mistral refuse: they take nine letters and digits."""

    def short(id_: str) -> str:
        return id_ if re.fullmatch("[a-zA-Z0-9]{9}", id_) else hashlib.sha256(id_.encode()).hexdigest()[:9]

    if message["role"] == "tool":
        return message | {"tool_call_id": short(message.get("tool_call_id", ""))}
    calls = [call | {"id": short(call.get("id", ""))} for call in message.get("tool_calls", ())]
    return message | ({"tool_calls": calls} if calls else {})


def _with_thinking_part(message: dict[str, Any]) -> dict[str, Any]:
    """Move reasoning into the content, where templates of Mistral have it."""
    if not (reasoning := message.get("reasoning")):
        return message
    content = [{"type": "text", "text": message["content"]}] if message["content"] else []
    return message | {"content": [{"type": "thinking", "thinking": reasoning}, *content]}


def _with_analysis(message: dict[str, Any]) -> dict[str, Any]:
    """Join text and reasoning before a call: the template of gpt-oss takes one of them."""
    if not message.get("tool_calls"):
        return message
    parts = [part for part in (message.get("reasoning"), message["content"]) if part]
    return message | {"thinking": "\n\n".join(parts), "content": ""}


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
        tool_file = fetch_file(tokenizer, _TOOL_FILE)
        return {"default": _read(str(file))} | ({"tool_use": _read(str(tool_file))} if tool_file else {})
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
