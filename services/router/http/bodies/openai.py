"""The request bodies of OpenAI's two endpoints. Types are checked here, ranges by `eyas.api.validation`.

To add a sampling parameter, declare it in `Body` under its name in `SamplingParams`; `Body.call` passes it on.
`base.py` says how each other field is decided.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, model_validator

from eyas.api.request import Request, SamplingParams, StructuredOutputs
from eyas.api.validation import CONSTRAINTS, MAX_INT
from eyas.errors import InvalidRequest
from eyas.rpc.messages import GenerateCall
from eyas.services.router.http.bodies.base import (
    StrictModel,
    Text,
    Texts,
    UnusedFields,
    check_encodable,
    check_json,
    field_names,
)
from eyas.services.router.http.bodies.json_values import is_same
from eyas.services.router.http.bodies.other_servers import translated
from eyas.services.router.http.bodies.tools import EarlierCall, ToolFields

DEFAULT_COMPLETION_TOKENS = 16
MAX_COMPLETIONS = 1024
# A token id as the name of a field; `int` would also read "1_0", " 7" and digits of other scripts.
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,18}")


def _to_prompts(value: object) -> object:
    """Turn a single prompt, text or token ids, into a list of one."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_token_id(value[0])):
        value = [value]
    if not isinstance(value, list) or not value or not all(isinstance(one, str) or _is_token_ids(one) for one in value):
        raise ValueError("must be a text, a list of token ids, or a list of either that is not empty")
    return [check_encodable(prompt) if isinstance(prompt, str) else prompt for prompt in value]


def _to_text(value: object) -> object:
    """Join the text parts of a message."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(map(_is_text_part, value)):
        raise ValueError("must be text, or parts of the type 'text'; images, audio and files are not supported")
    return "\n".join(part["text"] for part in value)


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_token_id, value))


def _to_json(value: object) -> object:
    """Turn a JSON object into text, which is what an engine compiles."""
    value = check_json(value)
    return json.dumps(value) if isinstance(value, dict) else value


JsonText = Annotated[Text, BeforeValidator(_to_json)]


class StreamOptions(StrictModel):
    """Options of a stream. continuous_usage_stats: with include_usage, every event has the usage so far, as in vLLM.

    include_obfuscation is accepted and has no effect.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class JsonSchemaFormat(StrictModel):
    """OpenAI's schema of a response. name, description and strict have no effect: the schema always holds."""

    name: Text = ""
    description: Text = ""
    schema_: JsonText = Field(alias="schema")
    strict: bool = True


class ResponseFormat(StrictModel):
    """Constraint that the output must match, in OpenAI's form; xgrammar's structural tag, as in vLLM and SGLang; and the
    forms of TGI, llama.cpp and others: a regular expression, a grammar, and a schema beside the type.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag", "regex", "grammar"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    pattern: Text | None = None
    grammar: Text | None = None

    @classmethod
    def translated(cls, data: dict[str, Any]) -> dict[str, Any]:
        data = {name: value for name, value in data.items() if value is not None}
        target = {"regex": "pattern", "grammar": "grammar"}.get(str(data.get("type")), "schema")
        for name in ("value", "schema", "regex"):
            if name in data and target not in data:
                data[target] = data.pop(name)
        if data.get("type") == "json":
            data["type"] = "json_object"
        if data.get("type") in ("json_object", "json_schema") and "schema" in data and "json_schema" not in data:
            data |= {"type": "json_schema", "json_schema": {"schema": data.pop("schema")}}
        return data

    @model_validator(mode="after")
    def _check_parts(self) -> ResponseFormat:
        parts = {"json_schema": "json_schema", "format": "structural_tag", "pattern": "regex", "grammar": "grammar"}
        for name, of_type in parts.items():
            if (getattr(self, name) is not None) != (self.type == of_type):
                missing = "needs" if self.type == of_type else "has no"
                reason = f"response_format of the type {self.type!r} {missing} {name}; see docs/structured-outputs.md"
                raise InvalidRequest(reason, "response_format")
        return self

    @property
    def constraint(self) -> dict[str, Any]:
        """Fields of StructuredOutputs; none for free text."""
        if self.json_schema is not None:
            return {"json": self.json_schema.schema_}
        if self.format is not None:
            return {"structural_tag": {"type": self.type, "format": self.format}}
        if self.pattern is not None or self.grammar is not None:
            return {"regex": self.pattern} if self.pattern is not None else {"grammar": self.grammar}
        return {"json_object": True} if self.type == "json_object" else {}


class StructuredOutputsBody(StrictModel):
    """Constraint that the output must match, in vLLM's form; see StructuredOutputs.

    Without a constraint, its whitespace is that of the constraint in another field, or of the tools.
    """

    json_: JsonText = Field("", alias="json")
    json_object: bool = False
    regex: Text = ""
    choice: Annotated[list[Text], FailFast()] = Field(default_factory=list)
    grammar: Text = ""
    structural_tag: JsonText = ""
    disable_any_whitespace: bool = False
    whitespace_pattern: Text | None = None

    @property
    def constraint(self) -> dict[str, Any]:
        """Fields of StructuredOutputs."""
        return self.model_dump(by_alias=True, include={"json_", *CONSTRAINTS}, exclude_unset=True)


class SamplingBody(UnusedFields):
    """The fields of every endpoint that generates: OpenAI's, and from `session_id` on vLLM's and Eyas' own."""

    model: Text = ""
    stream: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    stop: Texts = Field(default_factory=list)
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    session_id: Text = ""
    cache_salt: Text = ""
    priority: int = 0
    drafter: Literal["", "none"] = ""
    num_draft_tokens: int = 0
    top_k: Annotated[int, AfterValidator(lambda value: 0 if value == -1 else value)] = 0
    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    stop_token_ids: Annotated[list[int], FailFast()] = Field(default_factory=list)
    ignore_eos: bool = False
    bad_words: Texts = Field(default_factory=list)
    bad_token_ids: Annotated[list[Annotated[list[int], FailFast()]], FailFast()] = Field(default_factory=list)
    parallel_tool_calls: bool = True
    request_id: Text = ""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: JsonText | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None
    guided_json_object: bool = False
    guided_whitespace_pattern: Text | None = None

    @classmethod
    def translated(cls, data: dict[str, Any]) -> dict[str, Any]:
        return translated(data, field_names(cls))


class Body(SamplingBody):
    """The fields of OpenAI's completions and chat completions."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int = 1
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    return_speculation: bool = False
    return_verify_steps: bool = False
    response_format: ResponseFormat | None = None
    return_token_ids: bool = False

    @classmethod
    def translated(cls, data: dict[str, Any]) -> dict[str, Any]:
        if "best_of" in data and is_same(data["best_of"], data.get("n", 1)):  # no more completions than are returned
            data = {name: value for name, value in data.items() if name != "best_of"}
        return super().translated(data)

    @model_validator(mode="after")
    def _check_options(self) -> Body:
        if self.stream_options and not self.stream:
            raise InvalidRequest("stream_options is for streams; set stream or leave it out", "stream_options")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")
        return self

    @property
    def has_usage_in_events(self) -> bool:
        """Return whether every event of a stream has the usage so far."""
        options = self.stream_options or StreamOptions()
        return options.include_usage and options.continuous_usage_stats

    @property
    def ends_with_usage(self) -> bool:
        """Return whether a stream ends with an event for the usage."""
        return self.return_speculation or (self.stream_options or StreamOptions()).include_usage

    @property
    def num_tokens(self) -> int | None:
        """Most tokens of a completion; None where the body names none."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Return how many likely tokens the prompt's tokens come with; None without log-probabilities of the prompt."""
        return self.prompt_logprobs

    def name_of(self, param: str) -> str:
        """Return this body's name of a parameter of a call."""
        if param == "structured_outputs" and self._constraint:
            return self._constraint[0]
        return "max_completion_tokens" if param == "max_tokens" and self.max_completion_tokens is not None else param

    def sampling(self, defaults: Mapping[str, float], max_tokens: int, **logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters of every prompt. Raises InvalidRequest.

        Args:
            defaults: of those that the body does not name.
            logprobs: `logprobs` and `prompt_logprobs`.
        """
        named = {field.name: getattr(self, field.name) for field in fields(SamplingParams) if hasattr(self, field.name)}
        named |= {name: value for name, value in defaults.items() if name not in self.model_fields_set}
        logit_bias = tuple((_token_id(name), bias) for name, bias in self.logit_bias.items())
        structured = StructuredOutputs(**self._constraint[1], **self.whitespace) if self._constraint else None
        values = {"max_tokens": max_tokens, "logit_bias": logit_bias, "structured_outputs": structured}
        return SamplingParams(**(named | values | logprobs))

    @property
    def may_call_tools(self) -> bool:
        """Return whether the request has tools."""
        return False

    @property
    def whitespace(self) -> dict[str, Any]:
        """The whitespace of JSON, as fields of StructuredOutputs."""
        structured = self.structured_outputs
        if structured is not None and structured.disable_any_whitespace:
            return {"whitespace_pattern": structured.whitespace_pattern or "", "disable_any_whitespace": True}
        pattern = structured.whitespace_pattern if structured else None
        pattern = self.guided_whitespace_pattern if pattern is None else pattern
        return {} if pattern is None else {"whitespace_pattern": pattern}

    @property
    def _constraint(self) -> tuple[str, dict[str, Any]] | None:
        """The field that says what the output must match, and it as fields of StructuredOutputs; None for free text.

        Raises InvalidRequest for two such fields.
        """
        given: dict[str, dict[str, Any]] = {}
        for name in ("response_format", "structured_outputs"):
            if value := getattr(self, name):
                given[name] = value.constraint
        for constraint in ("json", "regex", "choice", "grammar"):  # vLLM's older names
            if (value := getattr(self, f"guided_{constraint}")) is not None:
                given[f"guided_{constraint}"] = {constraint: value}
        if self.guided_json_object:
            given["guided_json_object"] = {"json_object": True}
        is_empty = given.get("structured_outputs") == {}
        given = {name: fields for name, fields in given.items() if fields}
        if not given and is_empty and not self.may_call_tools:
            return "structured_outputs", {}
        if len(given) > 1:
            names = " and ".join(given)
            raise InvalidRequest(f"{names} both say what the output must match; give one of them", list(given)[1])
        return next(iter(given.items()), None)

    def call(self, prompt: str | Sequence[int], sampling: SamplingParams) -> GenerateCall:
        """Return the call for one prompt."""
        text, token_ids = (prompt, ()) if isinstance(prompt, str) else (None, tuple(prompt))
        request = Request(
            id="",
            prompt_ids=token_ids,
            sampling=sampling,
            session=self.session_id,
            priority=self.priority,
            cache_salt=self.cache_salt,
            num_draft_tokens=self.num_draft_tokens,
            return_verify_steps=self.return_verify_steps,
        )
        call = GenerateCall(request, text, self.model, self.drafter)
        return replace(call, skip_special_tokens=self.skip_special_tokens, include_stop=self.include_stop_str_in_output)


class CompletionBody(Body):
    """The body of /v1/completions. max_completion_tokens: the same as max_tokens.

    suffix: what comes after the output, for models that fill in the middle.
    """

    is_chat: ClassVar[bool] = False

    prompt: Annotated[list[str | list[int]], BeforeValidator(_to_prompts)]
    logprobs: int | None = None
    echo: bool = False
    suffix: Text = ""
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_consistent(self) -> CompletionBody:
        if len(self.prompt) * self.n > MAX_COMPLETIONS:
            raise InvalidRequest(f"more than {MAX_COMPLETIONS} completions in one request; send several requests", "n")
        if self.suffix and self.echo:
            raise InvalidRequest("echo with suffix would show no text that ever stood so; leave one of them out", "suffix")
        if self.echo and self.logprobs is not None and self.n > 1:
            raise InvalidRequest("echo with logprobs scores the prompt once; ask for n = 1", "n")
        if self.echo and self.logprobs is not None and self.prompt_logprobs is not None:
            reason = "echo with logprobs scores the prompt already; leave prompt_logprobs out"
            raise InvalidRequest(reason, "prompt_logprobs")
        return self

    @property
    def scores_prompt_only(self) -> bool:
        """Return whether only the prompt's log-probabilities are wanted, without any output."""
        return self.echo and self.num_tokens == 0

    @property
    def wants_logprobs(self) -> bool:
        """Return whether the choices have log-probabilities."""
        return self.logprobs is not None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Return the number as for every body; an echo has them too."""
        return self.logprobs if self.echo and self.logprobs is not None else self.prompt_logprobs

    def name_of(self, param: str) -> str:
        """Return this body's name of a parameter of a call."""
        return "logprobs" if param == "prompt_logprobs" and self.echo else super().name_of(param)


class Message(StrictModel):
    """A message of a chat.

    Attributes:
        name: its author's, for templates that show it.
        tool_calls, reasoning_content: of earlier turns of the assistant.
        reasoning: the same, vLLM's newer name.
        tool_call_id: the call that a tool's message answers.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text, BeforeValidator(_to_text)] = ""
    name: Text = ""
    tool_calls: Annotated[list[EarlierCall], FailFast()] = Field(default_factory=list)
    tool_call_id: Text = ""
    reasoning_content: Text = ""
    reasoning: Text = ""

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise InvalidRequest(f"a message of the role {self.role!r} has no content; give it", "messages")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest(f"a message of the role {self.role!r} has tool_calls; only the assistant calls", "messages")
        return self

    @property
    def template_value(self) -> dict[str, Any]:
        """The message as `ChatTemplate.render` takes it."""
        value = self.model_dump(
            include={"role", "name", "tool_call_id", "reasoning_content", "reasoning"}, exclude_defaults=True
        )
        calls = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        return value | {"content": self.content} | ({"tool_calls": calls} if calls else {})


class RenderingFields(StrictModel):
    """The fields of every body whose messages a chat template renders as OpenAI's API gives them.

    Attributes:
        chat_template_kwargs, documents: variables for the model's chat template.
        continue_final_message: continue the last message instead of beginning a new one, as in vLLM; DeepSeek's and
            Mistral's mark of that message, `prefix`, or `partial` asks for it too.
    """

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    documents: list[dict[str, Any]] | None = None
    continue_final_message: bool = False

    @classmethod
    def translated(cls, data: dict[str, Any]) -> dict[str, Any]:
        match data.get("messages"):
            case [*before, {"role": "assistant", **last}] if marks := {"prefix", "partial"} & last.keys():
                continues = {"continue_final_message": True} if any(last[mark] for mark in marks) else {}
                rest = {name: value for name, value in last.items() if name not in marks}
                data = {**data, "messages": [*before, {"role": "assistant", **rest}], **continues}
        return super().translated(data)


class ChatBody(RenderingFields, Body, ToolFields):
    """The body of /v1/chat/completions.

    Attributes:
        reasoning_effort: a variable for the model's chat template.
        add_generation_prompt: begin a new message, as in vLLM.
        include_reasoning: return the reasoning of models that write it.
        thinking_token_budget: most tokens of reasoning, as in vLLM; -1 sets no limit.
    """

    is_chat: ClassVar[bool] = True

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int | None = None
    reasoning_effort: Text = ""
    include_reasoning: bool = True
    thinking_token_budget: int | None = Field(None, ge=-1, le=MAX_INT)
    add_special_tokens: bool = False
    add_generation_prompt: bool = True

    @classmethod
    def translated(cls, data: dict[str, Any]) -> dict[str, Any]:
        if is_same(data.get("top_logprobs"), 0) and not data.get("logprobs"):  # which some clients send
            data = {name: value for name, value in data.items() if name != "top_logprobs"}
        return super().translated(data)

    @model_validator(mode="after")
    def _check_consistent(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs; set it to true", "top_logprobs")
        if self.continue_final_message and self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
            reason = "continue_final_message and add_generation_prompt contradict each other; set one of them to false"
            raise InvalidRequest(reason, "continue_final_message")
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template besides the messages."""
        variables: dict[str, Any] = {"add_generation_prompt": self.add_generation_prompt and not self.continue_final_message}
        if self.documents is not None:
            variables["documents"] = self.documents
        if self.reasoning_effort:
            thinks = self.reasoning_effort != "none"
            variables |= {"reasoning_effort": self.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
        if tools := self.template_tools:
            variables["tools"] = tools
        return variables | self.chat_template_kwargs

    @property
    def wants_logprobs(self) -> bool:
        """Return whether the choices have log-probabilities."""
        return self.logprobs

    @property
    def may_call_tools(self) -> bool:
        """Return whether the request has tools."""
        return bool(self.tools)

    def name_of(self, param: str) -> str:
        """Return this body's name of a parameter of a call."""
        names = {"logprobs": "top_logprobs", "prompt": "messages"}
        if param == "structured_outputs" and not self._constraint and self.tools:
            return "tools"
        return names.get(param) or super().name_of(param)


def _token_id(name: str) -> int:
    if not _TOKEN_ID.fullmatch(name):
        raise InvalidRequest(f"logit_bias names {name[:80]!r}, which is no token id", "logit_bias")
    return int(name)
