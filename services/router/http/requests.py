"""The request bodies of OpenAI's two endpoints. Types are checked here, ranges by `eyas.validation`.

To add a sampling parameter, declare it in `Body` under its name in `SamplingParams`; `Body.call` passes it on.
An unknown field is rejected, never ignored. Null and values that ask for nothing count as absent.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    model_validator,
)

from eyas.errors import InvalidRequest
from eyas.request import Request, SamplingParams, StructuredOutputs
from eyas.rpc.messages import GenerateCall
from eyas.validation import check_sizes

DEFAULT_COMPLETION_TOKENS = 16

ModelT = TypeVar("ModelT", bound=BaseModel)

# OpenAI's fields that are not supported, with the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_processors": (),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_UNSUPPORTED_IN_MESSAGES = ("tool_calls", "refusal", "tool_call_id")


def _check_encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no character") from None
    return text


def _to_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _to_prompts(value: object) -> object:
    """Turn a single prompt, text or token ids, into a list of one."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_token_id(value[0])):
        value = [value]
    if not isinstance(value, list) or not value or not all(isinstance(one, str) or _is_token_ids(one) for one in value):
        raise ValueError("must be a text, a list of token ids, or a list of either that is not empty")
    return [_check_encodable(prompt) if isinstance(prompt, str) else prompt for prompt in value]


def _to_text(value: object) -> object:
    """Join the text parts of a message."""
    if not isinstance(value, list):
        return value
    if not all(map(_is_text_part, value)):
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
    return json.dumps(value) if isinstance(value, dict) else value


Text = Annotated[str, AfterValidator(_check_encodable)]
JsonText = Annotated[Text, BeforeValidator(_to_json)]
Texts = Annotated[list[Text], BeforeValidator(_to_list)]


# JSON

MAX_OBJECTS = 2**14
MAX_ESCAPES = 3 * 2**20  # a body of 16 MiB has room for 2.8 million of six bytes
MAX_FIELDS = 256
MAX_NAME_LENGTH = 256  # of a field, in errors
MAX_NUMBER_LENGTH = 128

_MAX_ENTRIES = {"messages": 2**12, "metadata": 256}
_SLICE_BYTES = 2**16
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % MAX_NUMBER_LENGTH)


def parse_body(data: bytes, model: type[ModelT], max_values: int) -> ModelT:
    """Parse and validate a body. Meant for a thread if it is long: no single step keeps other threads waiting for long.

    Raises InvalidRequest, and pydantic's ValidationError.
    """
    _check_num_values(data, max_values)
    try:
        return model.model_validate(json.loads(str(data, "utf-8-sig")))  # the values of other encodings are not counted
    except (ValueError, RecursionError) as error:
        if isinstance(error, ValidationError):
            raise
        raise InvalidRequest(f"the body is not JSON: {error}") from None


def _check_num_values(data: bytes, max_values: int) -> None:
    """Raises InvalidRequest for a body of too many values. Python parses the whole of a body without a pause."""
    num_values, num_objects, num_escapes, is_string, backslash = 1, 0, 0, False, b""
    for start in range(0, len(data), _SLICE_BYTES):
        piece = backslash + data[start : start + _SLICE_BYTES]
        num_escapes += piece.count(b"\\")
        piece = piece.replace(rb"\\", b"")
        backslash = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(b"\\").replace(rb"\"", b"").split(b'"')
        outside = b"".join(parts[1 if is_string else 0 :: 2])
        is_string ^= len(parts) % 2 == 0
        num_values += outside.count(b",")
        num_objects += outside.count(b"[") + outside.count(b"{") + outside.count(b":")
        if num_values > max_values:
            reason = f"the body holds more than {max_values} values; send text instead of token ids, or several requests"
            raise InvalidRequest(reason)
        if num_objects > MAX_OBJECTS:
            raise InvalidRequest(f"the body holds more than {MAX_OBJECTS} lists, objects and fields; send several requests")
        if num_escapes > MAX_ESCAPES:
            raise InvalidRequest(f"the body holds more than {MAX_ESCAPES} escapes in its texts; send UTF-8 as it is")
        if _LONG_NUMBER.search(outside):
            raise InvalidRequest(f"the body holds a number of {MAX_NUMBER_LENGTH} digits or more; round it")


# Models


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_values(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        check_sizes(data)
        if len(data) > MAX_FIELDS:
            raise InvalidRequest(f"an object has {len(data)} fields; give {MAX_FIELDS} at most")
        for name, most in _MAX_ENTRIES.items():
            if isinstance(entries := data.get(name), list | dict) and len(entries) > most:
                raise InvalidRequest(f"{name} has {len(entries)} entries; give {most} at most", name)
        return {name: value for name, value in data.items() if value is not None and value not in _UNSUPPORTED.get(name, ())}


class StreamOptions(_StrictModel):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class JsonSchemaFormat(_StrictModel):
    """OpenAI's schema of a response. name, description and strict have no effect: the schema always holds."""

    name: Text = ""
    description: Text = ""
    schema_: JsonText = Field(alias="schema")
    strict: bool = True


class ResponseFormat(_StrictModel):
    """What the output must match, in OpenAI's form; and xgrammar's structural tag, as in vLLM and SGLang."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_parts(self) -> ResponseFormat:
        for name, of_type in (("json_schema", "json_schema"), ("format", "structural_tag")):
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
        return {"json_object": True} if self.type == "json_object" else {}


class StructuredOutputsBody(_StrictModel):
    """What the output must match, in vLLM's form; see StructuredOutputs."""

    json_: JsonText = Field("", alias="json")
    json_object: bool = False
    regex: Text = ""
    choice: Annotated[list[Text], FailFast()] = Field(default_factory=list)
    grammar: Text = ""
    structural_tag: JsonText = ""
    disable_any_whitespace: bool = False

    @property
    def constraint(self) -> dict[str, Any]:
        """Fields of StructuredOutputs."""
        values = self.model_dump(by_alias=True, exclude_unset=True)
        return values | {"any_whitespace": not values.pop("disable_any_whitespace", False)}


class Body(_StrictModel):
    """The fields of both endpoints: OpenAI's, and from `session_id` on Eyas' own.

    user, safety_identifier and metadata are accepted and have no effect.
    """

    model: Text = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    stop: Texts = Field(default_factory=list)
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    user: str = ""
    safety_identifier: str = ""
    metadata: dict[str, str] = Field(default_factory=dict)
    session_id: Text = ""
    cache_salt: Text = ""
    priority: int = 0
    drafter: Literal["", "none"] = ""
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    stop_token_ids: Annotated[list[int], FailFast()] = Field(default_factory=list)
    ignore_eos: bool = False
    bad_words: Texts = Field(default_factory=list)
    bad_token_ids: Annotated[list[Annotated[list[int], FailFast()]], FailFast()] = Field(default_factory=list)
    prompt_logprobs: int | None = None
    return_speculation: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: JsonText | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Body:
        if self.stream_options and not self.stream:
            raise InvalidRequest("stream_options is for streams; set stream or leave it out", "stream_options")
        return self

    @property
    def ends_with_usage(self) -> bool:
        """Whether a stream ends with an event for the usage."""
        return self.return_speculation or (self.stream_options is not None and self.stream_options.include_usage)

    def sampling(self, max_tokens: int, **logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters of every prompt. logprobs: `logprobs` and `prompt_logprobs`.

        Raises InvalidRequest.
        """
        named = {field.name: getattr(self, field.name) for field in fields(SamplingParams) if hasattr(self, field.name)}
        logit_bias = tuple((_token_id(name), bias) for name, bias in self.logit_bias.items())
        structured = StructuredOutputs(**self._constraint[1]) if self._constraint else None
        values = {"max_tokens": max_tokens, "logit_bias": logit_bias, "structured_outputs": structured}
        return SamplingParams(**(named | values | logprobs))

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
        given = {name: fields for name, fields in given.items() if fields}
        if len(given) > 1:
            names = " and ".join(given)
            raise InvalidRequest(f"{names} both say what the output must match; give one of them", list(given)[1])
        return next(iter(given.items()), None)

    def _name_of_constraint(self, param: str) -> str:
        """Return this body's name of `structured_outputs`."""
        return self._constraint[0] if param == "structured_outputs" and self._constraint else param

    def call(self, prompt: str | Sequence[int], sampling: SamplingParams) -> GenerateCall:
        """Return the call for one prompt."""
        text, token_ids = (prompt, ()) if isinstance(prompt, str) else (None, tuple(prompt))
        request = Request("", token_ids, sampling, self.session_id, self.priority, cache_salt=self.cache_salt)
        return GenerateCall(request, text, self.model, self.drafter)


class CompletionBody(Body):
    """The body of /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_to_prompts)]
    max_tokens: int = DEFAULT_COMPLETION_TOKENS
    logprobs: int | None = None
    echo: bool = False

    @property
    def scores_prompt_only(self) -> bool:
        """Whether only the prompt's log-probabilities are wanted, without any output."""
        return self.echo and self.max_tokens == 0

    @property
    def wants_logprobs(self) -> bool:
        """Whether the choices have log-probabilities."""
        return self.logprobs is not None

    def name_of(self, param: str) -> str:
        """Return this body's name of a parameter of a call."""
        return "logprobs" if param == "prompt_logprobs" and self.echo else self._name_of_constraint(param)


class Message(_StrictModel):
    """A message of a chat. name: its author's, for templates that show it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_to_text)]
    name: Text = ""


class ChatBody(Body):
    """The body of /v1/chat/completions. chat_template_kwargs: more variables for the model's chat template."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_consistent(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs; set it to true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether the choices have log-probabilities."""
        return self.logprobs

    def name_of(self, param: str) -> str:
        """Return this body's name of a parameter of a call."""
        names = {"logprobs": "top_logprobs", "prompt": "messages"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names.get(param) or self._name_of_constraint(param)


def invalid_body(errors: Sequence[Any]) -> InvalidRequest:
    """Turn pydantic's first error about a body into one that says what to change."""
    error = errors[0]
    location = [part for part in error["loc"] if part != "body"]
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "json_invalid":
        return InvalidRequest(f"the body is not JSON: {message}")
    if not location:
        return InvalidRequest("the body must be a JSON object, sent with the header 'Content-Type: application/json'")
    param = _path(location)
    if error["type"] == "missing":
        return InvalidRequest(f"{param} is missing; give it", param)
    if error["type"] == "extra_forbidden":
        return InvalidRequest(_unknown_field(param, str(location[-1])), param)
    return InvalidRequest(f"{param} is {str(error['input'])[:80]!r}: {message}", param)


def _path(location: Sequence[int | str]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    return path[:MAX_NAME_LENGTH].encode(errors="replace").decode()


def _unknown_field(param: str, name: str) -> str:
    if name in _UNSUPPORTED or name in _UNSUPPORTED_IN_MESSAGES:
        return f"{param} is not supported; leave it out"
    known = [*CompletionBody.model_fields, *ChatBody.model_fields]
    similar = difflib.get_close_matches(name[:MAX_NAME_LENGTH], known, n=1)
    return f"{param} is not a known field; {f'did you mean {similar[0]}?' if similar else 'leave it out'}"


def _token_id(name: str) -> int:
    try:
        return int(name)
    except ValueError:
        raise InvalidRequest(f"logit_bias names {name[:80]!r}, which is no token id", "logit_bias") from None
