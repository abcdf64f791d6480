"""Chat templates: render the messages of a chat as the text that a model was trained to continue.

Templates come with checkpoints and are not trusted: they run in Jinja's sandbox, with the variables of transformers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Literal

import jinja2

from eyas.config import ServedModel
from eyas.config.file_values import named_texts, shown
from eyas.errors import CheckpointError, ConfigError, InvalidRequest
from eyas.text.chat_parser import ChatFormat, detect_format
from eyas.text.template_sandbox import BoundedSandbox, CostlyTemplate, try_templates
from eyas.text.tokenizer import fetch_file, json_settings, special_token, tokenizer_settings

# Where checkpoints keep templates, besides tokenizer_config.json.
_FILES = ("chat_template.jinja", "chat_templates/default.jinja")
_TOOL_FILES = ("additional_chat_templates/tool_use.jinja", "chat_templates/tool_use.jinja")
_JSON_FILE = "chat_template.json"

Messages = Sequence[Mapping[str, Any]]

log = logging.getLogger(__name__)


class ChatTemplate:
    """A compiled chat template. Raises ConfigError if a template does not compile.

    Args:
        special_tokens: by the names that templates use, such as bos_token.
        model: for errors.
        tool_source: the template of chats with tools, if it is another one.
        form: becomes `format`, how the model writes reasoning and calls; None takes what the template shows.
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
        self._has_documents = bool(re.search(r"\bdocuments\b", source + tool_source))
        self._sandbox = BoundedSandbox()
        try:
            self._template = self._sandbox.from_string(source)
            self._tool_template = self._sandbox.from_string(tool_source) if tool_source else self._template
        except (jinja2.TemplateError, MemoryError, RecursionError, SyntaxError, ValueError) as error:
            raise ConfigError(
                f"the chat template of {model} does not compile: {error}; set another chat_template"
            ) from error

        self._part_roles = frozenset[str]()
        try:
            self._find_part_roles()
            self._shown = {case: self._shows(*messages) for case, messages in _CASES.items()}
            self._hides_results = self._is_hidden(*_CASES["tool"])
        except CostlyTemplate as error:
            raise ConfigError(
                f"the chat template of {model} fails on a short chat: {error}; set another chat_template"
            ) from error

    def render(
        self,
        messages: Messages,
        extra: Mapping[str, Any],
        continues_last: bool = False,
        marked: Callable[[Any], Any] = lambda value: value,
    ) -> str:
        """Return the prompt for the assistant's next message.

        Raises InvalidRequest if the template rejects the messages.

        Args:
            messages: in OpenAI's form. They are rewritten where the template cannot show them as they are.
            extra: more variables, such as enable_thinking.
            continues_last: end with the content of the last message, which the assistant is to continue.
            marked: changes the values that the template gets, see `ContentText.mark`.
        """
        if extra.get("documents") and not self._has_documents:
            raise InvalidRequest("the model's chat template shows no documents; put them into a message", "documents")
        try:
            normal = _normal(messages)
        except (AttributeError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f"messages must have OpenAI's form; reading them fails with {error!r}", "messages"
            ) from error
        normal, extra = marked(normal), marked(extra)
        if not continues_last:
            return self._text(self._fitting(normal), extra)
        content, mark = normal[-1]["content"], secrets.token_hex(16)
        normal[-1]["content"] = content + mark + _AFTER_MARK
        return _cut_at(self._text(self._fitting(normal), extra), mark, content)

    def _text(self, messages: Messages, extra: Mapping[str, Any]) -> str:
        variables = {**self._special_tokens, "tools": None, "documents": None, "add_generation_prompt": True, **extra}
        messages = [self._with_parts(message) for message in messages]
        try:
            template = self._tool_template if variables["tools"] else self._template
            text = self._sandbox.rendered(template, variables | {"messages": messages})
            text.encode()
        except InvalidRequest:
            raise
        except Exception as error:  # a template can raise whatever Python can
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", "messages") from error
        return text

    def _with_parts(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with its text as a list of one part, where the template reads no other form."""
        content = message["content"]
        if not isinstance(content, str) or message["role"] not in self._part_roles:
            return message
        return {**message, "content": [{"type": "text", "text": content}] if content else []}

    def _fitting(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages in a form that this template shows whole. Many leave out what their authors did not expect.

        Raises InvalidRequest for messages that have no place.
        """
        self._check_tools_shown(messages)
        for role in {str(message["role"]) for message in messages} - {*_ROLES, "developer"}:
            if self._shows({"role": role, "content": _PROBE}, _USER) is False:
                raise InvalidRequest(f"the model's chat template shows no messages of the role {shown(role)}", "messages")
        if any(message["role"] == "developer" for message in messages) and not self._shown["developer"]:
            messages = [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]
        first = [*takewhile(_is_instruction, messages)]
        if any(map(_is_instruction, messages[len(first) :])) and self._shown["later instructions"] is False:
            reason = "the model's chat template shows system messages at the beginning only; put them there"
            raise InvalidRequest(reason, "messages")
        if first and not self._shown["system"] and self._shown["user"]:
            messages = _with_instructions_in_user(messages[len(first) :], first, at=0)
        elif first and messages[-1]["role"] != "user" and self._shown["instructions after users"] is False:
            messages = _with_instructions_in_user(messages[len(first) :], first, at=-1)
        elif len(first) > 1 and not self._shown["two instructions"]:
            messages = [first[0] | {"content": _joined_contents(first)}, *messages[len(first) :]]
        if any(len(message.get("tool_calls", ())) > 1 for message in messages) and not self._shown["two calls"]:
            messages = [*_one_call_each(messages)]
        if self.format.tool_call_parser == "mistral":
            messages = [*map(_with_short_ids, messages)]
        if self._shown["call"] is None and self._shown["call with text"]:  # as DeepSeek's, which joins it with other text
            messages = [*map(_with_text_arguments, messages)]
        if self._has_thinking_parts:
            return [*map(_with_thinking_part, messages)]
        return [*map(_with_analysis, messages)] if self.format.tool_call_parser == "openai" else messages

    def _check_tools_shown(self, messages: list[dict[str, Any]]) -> None:
        if any(message["role"] == "tool" for message in messages) and self._hides_results:
            reason = "the model's chat template shows no results of tools; put them into a user's message"
            raise InvalidRequest(reason, "messages")
        hides_calls = self._shown["call"] is False and not self._shown["call with text"]
        if any("tool_calls" in message for message in messages) and hides_calls:
            reason = "the model's chat template shows no calls of tools; put them into the content"
            raise InvalidRequest(reason, "messages")

    def _find_part_roles(self) -> None:
        """Find the roles whose text is shown only as a list of parts, as in templates of many models that see images."""
        for role in _ROLES:
            if not self._shows(*_CASES[role]):
                before, self._part_roles = self._part_roles, self._part_roles | {role}
                if not self._shows(*_CASES[role]):
                    self._part_roles = before

    def _is_hidden(self, *messages: dict[str, Any]) -> bool:
        """Return whether the text of these messages is the same without the last one. Not if the template refuses them."""
        with suppress(InvalidRequest):
            variables = {"tools": [_PROBE_TOOL]}
            return self._text(messages, variables) == self._text(messages[:-1], variables)
        return False

    def _shows(self, *messages: dict[str, Any]) -> bool | None:
        """Return whether _PROBE is in the text of these messages; None if the template refuses them."""
        has_calls = any("tool_calls" in message for message in messages)
        try:
            return _PROBE in self._text(messages, {"tools": [_PROBE_TOOL] if has_calls else None})
        except CostlyTemplate:
            raise
        except InvalidRequest:
            return None


_PROBE = "eyasprobe"
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "first", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_USER: dict[str, Any] = {"role": "user", "content": "Hello"}
# Templates of Mistral's reasoning models take reasoning as a part of the content.
_THINKING_PART = re.compile(r"""\[['"]thinking['"]\]""")


def _call(name: str, number: int = 0, arguments: object = None) -> dict[str, Any]:
    return {"id": f"c0000000{number}", "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def _calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [*calls]}


def _calls(*names: str, result: str = "r") -> list[dict[str, Any]]:
    """Return a message with calls, and their results."""
    calls = [_call(name, number) for number, name in enumerate(names)]
    results = [{"role": "tool", "tool_call_id": call["id"], "name": "first", "content": result} for call in calls]
    return [_calling(*calls), *results]


_SYSTEM: dict[str, Any] = {"role": "system", "content": _PROBE}
# Roles whose messages a template should show; the user's comes first, because the others' cases hold one.
_ROLES = ("user", "system", "assistant", "tool")
# Messages of these roles, and some that templates show only in part. What they may leave out is the probe. One that shows
# either the name or the arguments shows a call.
_CASES: Mapping[str, tuple[dict[str, Any], ...]] = {
    "user": ({"role": "user", "content": _PROBE},),
    "system": (_SYSTEM, _USER),
    "assistant": (_USER, {"role": "assistant", "content": _PROBE}, _USER),
    "tool": (_USER, *_calls("first", result=_PROBE)),
    "developer": ({"role": "developer", "content": _PROBE}, _USER),
    "two instructions": (_SYSTEM | {"content": "Hello"}, _SYSTEM, _USER),
    "later instructions": (_USER, {"role": "assistant", "content": "Hello"}, _SYSTEM, _USER),
    "instructions after users": (_SYSTEM, _USER, *_calls("first")),
    "call": (_USER, _calling(_call(_PROBE, arguments={_PROBE: 1}))),
    "call with text": (_USER, _calling(_call(_PROBE, arguments=f'{{"{_PROBE}": 1}}'))),
    "two calls": (_USER, *_calls("first", _PROBE)),
}


def _is_instruction(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")


def _joined_contents(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(str(message["content"]) for message in messages)


def _with_instructions_in_user(
    messages: list[dict[str, Any]], first: list[dict[str, Any]], at: Literal[0, -1]
) -> list[dict[str, Any]]:
    """Put instructions before the text of a user.

    at: 0 for the first user, where the template shows none; -1 for the last, where that of Mistral Nemo has them.
    """
    places = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not places:
        return [{"role": "user", "content": _joined_contents(first)}, *messages]
    place = places[at]
    user = messages[place] | {"content": _joined_contents([*first, messages[place]])}
    return [*messages[:place], user, *messages[place + 1 :]]


def _normal(messages: Messages) -> list[dict[str, Any]]:
    """Return messages as most templates expect them.

    Arguments of calls are objects, unless the model wrote no object. Results of tools have the name of the tool. Reasoning
    has all of the names that templates use.
    """
    normal = [{"role": "", **message, "content": _joined(message.get("content"))} for message in messages]
    if not normal:
        raise InvalidRequest("messages is empty; give at least one", "messages")
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


def _joined(content: Any) -> str:
    """Return the text of a content: its parts, joined. Raises InvalidRequest for what is no text."""
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        return "\n".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        reason = "a message's content must be text, or parts of the type 'text'; images, audio and files are not supported"
        raise InvalidRequest(reason, "messages")
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
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield message
            continue
        results = [*takewhile(lambda following: following["role"] == "tool", islice(messages, at, None))]
        at += len(results)
        places = {call.get("id"): place for place, call in enumerate(calls)}
        results_of = defaultdict[int, list[dict[str, Any]]](list)
        for number, result in enumerate(results):
            results_of[places.get(result.get("tool_call_id"), min(number, len(calls) - 1))].append(result)
        for place, call in enumerate(calls):
            yield (message if place == 0 else {"role": "assistant", "content": ""}) | {"tool_calls": [call]}
            yield from results_of[place]


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as text; DeepSeek's templates join them with other text."""
    calls = message.get("tool_calls")
    if not calls:
        return message

    def written(function: dict[str, Any]) -> dict[str, Any]:
        given = function["arguments"]
        return function | {"arguments": given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)}

    return message | {"tool_calls": [call | {"function": written(call["function"])} for call in calls]}


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
    name = f"{model.name} in {model.chat_template or model.tokenizer}"
    tokens = special_tokens(model.tokenizer)
    try_templates([source, *filter(None, [tool_source])], tokens, name)
    return ChatTemplate(source, tokens, name, tool_source, form)


def special_tokens(tokenizer: str) -> dict[str, str]:
    """Return the special tokens of a tokenizer by the names that templates use. Raises CheckpointError."""
    settings = tokenizer_settings(tokenizer)
    names = [name for name in settings if name.endswith("_token") and not name.startswith("add_")]
    texts = {name: special_token(settings[name]) for name in names}
    for name in names:
        if settings[name] and not texts[name]:
            log.warning("%s: %s is %s, no text; templates do not get it", tokenizer, name, shown(settings[name]))
    return {name: text for name, text in texts.items() if text}


def _format(model: ServedModel, template: str) -> ChatFormat:
    """Return the format that the model's settings name, or else that its template shows."""
    shown = detect_format(template)
    tools, reasoning = model.tool_call_parser, model.reasoning_parser
    return ChatFormat(
        shown.tool_call_parser if tools == "auto" else "" if tools == "none" else tools,
        shown.reasoning_parser if reasoning == "auto" else "" if reasoning == "none" else reasoning,
    )


# White space after the mark that ends a content; a template that strips contents takes it away.
_AFTER_MARK = "\t \t"


def _cut_at(text: str, mark: str, content: str) -> str:
    """Return a rendered chat up to the mark at the end of its last message's content.

    The mark keeps white space before it, which a template that strips contents would have taken away.
    """
    *before, after = text.split(mark)
    if not before:
        reason = "the chat template does not show the last message, so it cannot be continued; end with a user's message"
        raise InvalidRequest(reason, "messages")
    cut = "".join(part.removeprefix(_AFTER_MARK) for part in before)
    own = content.rstrip()
    return cut if after.startswith(_AFTER_MARK) or not own else cut.removesuffix(content[len(own) :])


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the chat_template {path}: {error}") from error


def _find(tokenizer: str) -> dict[str, str]:
    """Return the tokenizer's templates by name: of files of their own, else of its settings, else of chat_template.json."""
    try:
        file = _first_file(tokenizer, _FILES)
    except CheckpointError as error:
        log.warning("cannot look for a chat template: %s", error)
        file = None
    if file is not None:
        tool_file = _first_file(tokenizer, _TOOL_FILES)
        return {"default": _read(str(file))} | ({"tool_use": _read(str(tool_file))} if tool_file else {})
    found = _named(tokenizer_settings(tokenizer).get("chat_template"))
    return found or _named(json_settings(tokenizer, _JSON_FILE).get("chat_template"))


def _first_file(tokenizer: str, names: Sequence[str]) -> Path | None:
    return next((file for name in names if (file := fetch_file(tokenizer, name)) is not None), None)


def _named(value: object) -> dict[str, str]:
    """Return templates by name; a single one is the default."""
    named = {name: text for name, text in named_texts(value).items() if text and isinstance(text, str)}
    return named if "default" in named or len(named) != 1 else {"default": next(iter(named.values()))}
