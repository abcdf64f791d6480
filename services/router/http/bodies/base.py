"""Parts that all request bodies share: JSON within bounds, strict models, and the fields that have no effect.

A field is decided in one of three ways. A model that uses it declares it. One that changes no result at any value stands
in `UnusedFields`. One that is not supported stands in `NEUTRAL`, with the values that ask for nothing. Others are unknown.
Unsupported fields are refused. Of the others, `other_servers.py` has those that another server knows, and `FieldPolicy`
says what becomes of the rest. docs/http.md has the tables, which `make chart` writes.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import cache, partial
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope

from eyas.api.validation import check_sizes
from eyas.config.router import UnknownFields
from eyas.errors import InvalidRequest
from eyas.rpc.admission import LARGE_REQUEST_BYTES
from eyas.services.router.client_threads import ClientThreads
from eyas.services.router.http.bodies.json_values import is_same
from eyas.services.router.http.bodies.other_servers import IGNORED, near_names

ModelT = TypeVar("ModelT", bound=BaseModel)

# Fields of OpenAI, vLLM, Anthropic and others with the values that ask for nothing. They count as absent; so does null.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "access_programs": (),
    "adapter_id": ("",),
    "allowed_token_ids": (),
    "audio": (),
    "background": (False,),
    "best_of": (1,),
    "chat_template": ("",),
    "container": (),
    "context_management": ([], {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "conversation": (),
    "custom_logit_processor": ("",),
    "disable_additional_properties": (False,),
    "disable_fallback": (False,),
    "early_stopping": (False,),
    "echo": (False,),
    "ec_transfer_params": ({},),
    "function_call": ("none",),
    "functions": ([],),
    "image": ({"context_compression": "auto"}, {"context_compression": "disabled"}),
    "image_data": ([], ""),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logit_processors": ([],),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "lora": ([], {}, ""),
    "lora_path": ([], ""),
    "mcp_servers": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "seed": (-1,),
    "session_params": ({},),
    "suffix": ("",),
    "thinking": ({"type": "disabled"},),
    "thinking_token_budget": (-1,),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "truncation": ("disabled",),
    "truncation_side": ("left", "right"),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
    "user_profile_id": (),
    "workspace_id": (),
    # of messages
    "annotations": ([],),
    "refusal": (),
    "tool_calls": ([],),
}


MAX_OBJECTS = 2**14
MAX_ESCAPES = 3 * 2**20  # a body of 16 MiB has room for 2.8 million of six bytes
MAX_FIELDS = 256
MAX_NAME_LENGTH = 256  # of a field, in errors
MAX_NUMBER_LENGTH = 128

# Fields that are logged when they are first ignored; names of clients' own making could be any number.
MAX_LOGGED_FIELDS = 256

_MAX_ENTRIES = {"messages": 2**12, "input": 2**12, "metadata": 256}
_SLICE_BYTES = 2**16
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % MAX_NUMBER_LENGTH)

log = logging.getLogger(__name__)


class FieldPolicy:
    """Policy for the fields that a model here does not have. Safe for use from any thread.

    Args:
        unknown: of fields that no server knows.
        of_endpoints: the fields of all endpoints, which are never ignored.
    """

    def __init__(self, unknown: UnknownFields = "refuse", of_endpoints: Collection[str] = ()) -> None:
        self._unknown = unknown
        self._of_endpoints = frozenset(of_endpoints)
        self._logged = set[str]()

    def ignored(self, names: Collection[str], known: frozenset[str]) -> set[str]:
        """Return which of the names to leave out. known: the fields of the model."""
        found = {name for name in names if name in IGNORED or self._is_unknown(name, known)}
        for name in found - self._logged:
            if len(self._logged) < MAX_LOGGED_FIELDS:
                self._logged.add(name)
                shown = name[:MAX_NAME_LENGTH]
                log.info("The field %r of requests has no counterpart here. It is ignored from now on.", shown)
        return found

    def _is_unknown(self, name: str, known: frozenset[str]) -> bool:
        """Return whether a field is to be ignored because no server knows it, and it is no known name misspelt."""
        if self._unknown == "refuse" or name in NEUTRAL or name in self._of_endpoints:
            return False
        return not near_names(name, known)


def parse_body(data: bytes, model: type[ModelT], max_values: int, policy: FieldPolicy | None = None) -> ModelT:
    """Parse and validate a body. Meant for a thread if it is long: no single step keeps other threads waiting for long.

    Raises InvalidRequest, and pydantic's ValidationError.
    """
    _check_num_values(data, max_values)
    try:
        value = json.loads(str(data, "utf-8-sig"))  # the values of other encodings are not counted
        return model.model_validate(value, context=policy)
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


class StrictModel(BaseModel):
    """A body or a part of one. Types are exact, null and neutral values count as absent, a FieldPolicy decides about others.

    MEANT: fields whose neutral values ask for something here.
    """

    MEANT: ClassVar[frozenset[str]] = frozenset()

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def translated(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of an object under the names and in the forms of this model. The object stays as it is.

        Raises InvalidRequest for what has no meaning here.
        """
        return data

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any, info: ValidationInfo) -> Any:
        """Translate the fields and drop neutral values."""
        if not isinstance(data, dict):
            return data
        data = cls.translated(data)
        check_sizes(data)
        if len(data) > MAX_FIELDS:
            raise InvalidRequest(f"an object has {len(data)} fields; give {MAX_FIELDS} at most")
        for name, most in _MAX_ENTRIES.items():
            if isinstance(entries := data.get(name), list | dict) and len(entries) > most:
                raise InvalidRequest(f"{name} has {len(entries)} entries; give {most} at most", name)
        neutral = {name: NEUTRAL.get(name, ()) for name in data.keys() - cls.MEANT}
        kept = {
            name: value
            for name, value in data.items()
            if value is not None and not any(is_same(value, one) for one in neutral.get(name, ()))
        }
        if unknown := kept.keys() - field_names(cls):
            policy = info.context if isinstance(info.context, FieldPolicy) else FieldPolicy()
            ignored = policy.ignored(unknown, field_names(cls))
            kept = {name: value for name, value in kept.items() if name not in ignored}
        return kept


@cache
def field_names(model: type[BaseModel]) -> frozenset[str]:
    """Return the names of a model's fields in JSON."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def body_model(route: APIRoute) -> type[BaseModel] | None:
    """Return the model of the body that a route takes; None if it takes none."""
    found: type[BaseModel] | None = get_type_hints(route.endpoint).get("body")
    return found


class JsonRoute(APIRoute):
    """A route whose JSON body is parsed and validated before FastAPI gets it, in a thread if it is long.

    app.state: max_request_values bounds the body, field_policy is for its fields; a long one is parsed in a thread of
    `service`.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request."""
        handler, model = super().get_route_handler(), body_model(self)
        if model is None:
            return handler

        async def handle(request: Request) -> Response:
            parsed = _JsonRequest(request.scope, request.receive, model)
            await parsed.body()  # FastAPI would turn its errors into status 400
            try:
                return await handler(parsed)
            except HTTPException:
                if parsed.error is None:
                    raise
                raise parsed.error from None

        return handle


class _JsonRequest(Request):
    """A request with a body of one model. error: what `json` has raised."""

    def __init__(self, scope: Scope, receive: Receive, model: type[BaseModel]) -> None:
        super().__init__(scope, receive)
        self._model = model
        self.error: Exception | None = None

    async def json(self) -> BaseModel:
        """Return the body as its model, which FastAPI takes as it is."""
        body, state = await self.body(), self.app.state
        parse = partial(parse_body, body, self._model, state.max_request_values, state.field_policy)
        threads: ClientThreads = state.service.threads
        try:
            return parse() if len(body) <= LARGE_REQUEST_BYTES else await threads.run(self.state.caller, parse)
        except ValidationError as error:
            self.error = RequestValidationError(error.errors())
            raise self.error from None
        except Exception as error:
            self.error = error
            raise


def check_encodable(text: str) -> str:
    """Return the text. Raises ValueError for one that UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no character") from None
    return text


def check_json(value: object) -> object:
    """Return the value. Raises ValueError unless it is a JSON object or text."""
    if not isinstance(value, str | dict):
        raise ValueError("must be a JSON object, or its text")
    return value


def one_or_list(entry_type: Any, kind: str, entry: Callable[[str], object] = lambda text: text) -> BeforeValidator:
    """Let a field of a list take a text for a list of one entry.

    Args:
        kind: of the entries, for the error.
        entry: of a text.
    """

    def to_list(value: object) -> object:
        if not isinstance(value, str | list):
            raise ValueError(f"must be a string or a list of {kind}")
        return [entry(value)] if isinstance(value, str) else value

    return BeforeValidator(to_list, json_schema_input_type=str | list[entry_type])


Text = Annotated[str, AfterValidator(check_encodable)]
Texts = Annotated[list[Text], one_or_list(Text, "strings")]


class UnusedFields(StrictModel):
    """The fields of OpenAI and vLLM that change no result. They are accepted, and have no effect."""

    max_tool_calls: int = 0
    metadata: dict[str, str] = Field(default_factory=dict)
    prediction: dict[str, Any] = Field(default_factory=dict)
    prompt_cache_key: str = ""
    prompt_cache_options: dict[str, Any] = Field(default_factory=dict)
    prompt_cache_retention: str = ""
    return_mm_kwargs: bool = True
    safety_identifier: str = ""
    service_tier: str = ""
    spaces_between_special_tokens: bool = True
    store: bool = False
    stream_interval: int = 1
    user: str = ""
    verbosity: str = ""
