"""The work of reading names of fields and paths of requests grows no faster than n log n."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import AddedToken

from eyas.config import LimitsConfig
from eyas.config.checks import MAX_WHITESPACE_PATTERN, is_whitespace_pattern
from eyas.rpc.admission import LARGE_REQUEST_BYTES
from eyas.services.router.http.bodies.base import MAX_FIELDS, MAX_OBJECTS, FieldPolicy, field_names, parse_body
from eyas.services.router.http.bodies.body_errors import invalid_body
from eyas.services.router.http.bodies.openai import ChatBody, CompletionBody
from eyas.services.router.http.bodies.other_servers import near_names, translated
from eyas.services.router.http.errors import instead_of
from eyas.services.router.http.fill_in_middle import FORMATS, middle_format, middle_prompt
from eyas.text.tokenizer import Tokenizer, load_tokenizer
from tests.growth.growth import Reader, check_growth, label, pairs
from tests.support.tiny import DEMO

KNOWN = field_names(ChatBody)
POLICY = FieldPolicy("ignore", KNOWN)
MESSAGE = {"role": "user", "content": "a"}

# Bodies of n objects, fields and lists in all.
BODIES: dict[str, Callable[[int], dict[str, Any]]] = {
    "made-up fields of messages": lambda n: {
        "messages": [MESSAGE | {f"field {i} {j} of mine": 1 for j in range(5)} for i in range(n // 10)]
    },
    "long names": lambda n: {"messages": [MESSAGE | {"x" * 60 + str(i): 1} for i in range(n // 5)]},
    "near misses": lambda n: {"messages": [MESSAGE | {f"tool_call_i{i}": 1} for i in range(n // 5)]},
    "fields of other servers": lambda n: {"messages": [MESSAGE | {"token_ids": [1]} for _ in range(n // 5)]},
    "made-up fields": lambda n: {"messages": [MESSAGE], **{f"field {i}": 1 for i in range(min(n, MAX_FIELDS - 1))}},
    "options": lambda n: {"messages": [MESSAGE], "options": {f"field {i}": 1 for i in range(n)}},
    "options in options": lambda n: {"messages": [MESSAGE], "options": nested(n)},
    "reasoning": lambda n: {"messages": [MESSAGE], "reasoning": {f"field {i}": 1 for i in range(n)}},
    "variables": lambda n: {
        "messages": [MESSAGE], "think": True, "chat_template_kwargs": {f"field {i}": 1 for i in range(n)}
    },
    "a prefix": lambda n: {"messages": [*[MESSAGE] * (n // 4), {"role": "assistant", "content": "a", "prefix": True}]},
    "response formats": lambda n: {
        "messages": [MESSAGE], "response_format": {"type": "json", "value": {f"field {i}": 1 for i in range(n)}}
    },
}  # fmt: skip
NAMES: dict[str, Callable[[int], str]] = {
    "letters": lambda n: "a" * n,
    "no letters": lambda n: "_" * n,
    "a known name": lambda n: "temperature" * (n // 11),
    "unicode": lambda n: "\u00fc\U0001f600" * (n // 2),
}
PATHS: dict[str, Callable[[int], str]] = {
    "slashes": lambda n: "/" * n,
    "parts": lambda n: "/v1" * (n // 3),
    "one part": lambda n: "/" + "a" * n,
    "a known beginning": lambda n: "/v1/files/" + "a/" * (n // 2),
}
PATTERNS: dict[str, Callable[[int], str]] = {
    "spaces": lambda n: " " * n,
    "open groups": lambda n: "(?:" * (n // 3),
    "question marks": lambda n: "(?" * (n // 2) + "x",
    "open classes": lambda n: "[ " * (n // 2) + "x",
    "classes": lambda n: "[ \n]" * (n // 4) + "x",
    "repeats": lambda n: " {1,2}" * (n // 6) + "x",
    "open repeats": lambda n: " {" * (n // 2),
    "digits": lambda n: " {" + "1" * n,
    "escapes": lambda n: r"\n\x20" * (n // 6) + "\\",
}


def nested(n: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(min(n, 200)):
        value = {"options": value}
    return value


def read(body: dict[str, Any]) -> object:
    """Read a body, and name what is wrong in it."""
    try:
        return parse_body(json.dumps(body).encode(), ChatBody, 2**20, POLICY)
    except ValidationError as error:
        raise invalid_body(error.errors()) from None


def refuse(name: str) -> object:
    raise invalid_body([{"loc": ("body", name), "type": "extra_forbidden", "msg": "", "input": 1}])


def middle_tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer(str(DEMO / "target")).tokenizer
    tokenizer.add_tokens([AddedToken(token, special=True) for token in FORMATS[0].tokens])
    return Tokenizer(tokenizer)


TOKENIZER = middle_tokenizer()

READERS = (
    Reader("bodies.parse_body, fields", read, BODIES, MAX_OBJECTS),
    Reader(
        "bodies.parse_body, fields on the loop",
        read,
        {name: lambda n, make=make: make(n // 32) for name, make in BODIES.items()},
        LARGE_REQUEST_BYTES,
        on_loop=True,
    ),
    Reader("other_servers.translated", lambda body: translated(body, KNOWN), BODIES, MAX_OBJECTS),
    Reader("other_servers.near_names", lambda name: near_names(name, KNOWN), NAMES, 2**20, on_loop=True),
    Reader("requests.invalid_body, an unknown field", refuse, NAMES, 2**20, on_loop=True),
    Reader(
        "errors.instead_of",
        lambda path: instead_of(path, ["/v1/completions"]),
        PATHS,
        LimitsConfig().max_header_bytes,
        on_loop=True,
    ),
    Reader("validation.is_whitespace_pattern", is_whitespace_pattern, PATTERNS, MAX_WHITESPACE_PATTERN, on_loop=True),
    Reader(
        "requests.CompletionBody, response_format",
        lambda value: CompletionBody.model_validate({"prompt": "a", "response_format": {"type": "regex", "value": value}}),
        NAMES,
        2**20,
    ),
    Reader(
        "fill_in_middle.middle_prompt",
        lambda ids: middle_prompt(middle_format(TOKENIZER, "demo"), TOKENIZER, ids, ids),
        {"ids": lambda n: (5,) * n, "special": lambda n: (0,) * n},
        2**16,
        on_loop=True,
    ),
)


@pytest.mark.parametrize(("reader", "shape"), pairs(READERS), ids=label)
def test_a_field_grows_no_faster_than_n_log_n(reader: Reader, shape: str) -> None:
    check_growth(reader, shape)
