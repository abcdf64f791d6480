"""Texts on their way from a client's body to tokens, and from tokens to text."""

import json
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from eyas.config import LimitsConfig
from eyas.errors import InvalidRequest
from eyas.services.router.http.bodies.base import MAX_OBJECTS, parse_body
from eyas.services.router.http.bodies.body_errors import invalid_body
from eyas.services.router.http.bodies.openai import ChatBody, CompletionBody
from eyas.text.chat_template import ChatTemplate
from eyas.text.content_text import ContentText
from eyas.text.tokenizer import TextStream, load_tokenizer
from tests.growth.growth import Reader, check_growth, label, pairs

LIMITS = LimitsConfig()
TOKENIZER = load_tokenizer("models/demo/target")
A = TOKENIZER.encode_rendered("a")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}{% for c in m.tool_calls %}"
    "{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
)
NAMES = "{% for m in messages %}{{ m.name }}{{ m.content }}{% if m.content.endswith('</think>') %}!{% endif %}{% endfor %}"
TEXTS: dict[str, Any] = {
    "letters": lambda n: "a" * n,
    "space": lambda n: " " * n,
    "lines": lambda n: " \n" * (n // 2),
    "accents": lambda n: "a" + "\u0301\u0316" * (n // 4),
    "emoji": lambda n: "\U0001f985" * (n // 4),
    "special": lambda n: "<|bos|>" * (n // 7),
    "words": lambda n: "the a " * (n // 6),
    "brackets": lambda n: "<[{" * (n // 3),
}


def ends_again(n: int) -> list[dict[str, Any]]:
    """A last message that almost occurs in the one before, at every place."""
    return [{"role": "user", "content": "a" * (n // 2)}, {"role": "user", "content": "a\n" + "a" * (n // 4)}]


def many(n: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "x"}] * n


def calling(n: int) -> list[dict[str, Any]]:
    calls = [{"id": f"{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in range(n)]
    results = [{"role": "tool", "tool_call_id": f"{i}", "content": "r"} for i in range(n)]
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def instructions(n: int) -> list[dict[str, Any]]:
    return [*[{"role": "system", "content": "x"}] * n, {"role": "user", "content": "x"}]


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "x", **fields}).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()


def parts(n: int, part: dict[str, Any]) -> bytes:
    return chat(messages=[{"role": "user", "content": [part] * n}])


def render(template: ChatTemplate, continues_last: bool, messages: list[dict[str, Any]]) -> str:
    return template.render(messages, {}, continues_last)


def read(model: type[BaseModel], data: bytes) -> object:
    """Read a body as the router does."""
    try:
        return parse_body(data, model, LIMITS.max_request_values)
    except ValidationError as error:
        raise invalid_body(error.errors()) from None


MESSAGES = {"many": many, "calls": calling, "instructions": instructions}
STOPS = ["a" * size + "b" + "a" * (1023 - size) for size in range(0, 1024, 8)]


def push_all(stops: list[str], num_tokens: int) -> None:
    """Push one letter at a time, which every stop string may begin with."""
    stream, letter = TextStream(TOKENIZER, stops), TOKENIZER.encode_rendered("a")
    for _ in range(num_tokens):
        stream.push(letter)


def stream_of(n: int) -> TextStream:
    return TextStream(TOKENIZER, ["a" * (n - 1) + "b"] * 128)


CONTENTS = ContentText(TOKENIZER)
NAMED: dict[str, Any] = {
    **{name: TEXTS[name] for name in ("letters", "space", "special", "brackets")},
    "beginnings": lambda n: "<|bo" * (n // 4),
}


READERS = (
    Reader("ContentText.mark", CONTENTS.mark, NAMED | {"list": lambda n: ["<|bos|>"] * (n // 8)}, 2**18),
    Reader("ContentText.encode", lambda text: CONTENTS.encode(text, 2**30), NAMED, 2**17),
    Reader("TextStream.push", partial(push_all, STOPS), {"a": lambda n: n}, 2**11),
    Reader("TextStream.push, one token", lambda stream: stream.push(A), {"long stop": stream_of}, 1024, on_loop=True),
    Reader("Tokenizer.specials_in", TOKENIZER.specials_in, {"long": lambda n: ["<|bos|>a" * 128] * (n // 1024)}, 2**17),
    Reader("Tokenizer.decode", TOKENIZER.decode, {"byte": lambda n: [130] * n, "special": lambda n: [0] * n}, 2**18),
    Reader("Tokenizer.left_context", TOKENIZER.left_context, {"special": lambda n: [0] * n}, 2**18, on_loop=True),
    Reader("Tokenizer.encode", TOKENIZER.encode, TEXTS, 2**17),
    Reader("Tokenizer.encode_within", partial(TOKENIZER.encode_within, max_tokens=2048), TEXTS, LIMITS.max_request_bytes),
    Reader("Tokenizer.bad_token_ids", TOKENIZER.bad_token_ids, {"long": lambda n: ["a b" * 341] * (n // 1024)}, 2**18),
    *(
        Reader(
            f"ChatTemplate.render, {name}",
            partial(render, ChatTemplate(source, {}, "m"), True),
            {"again": ends_again},
            2**22,
        )
        for name, source in (("ChatML", CHATML), ("names", NAMES))
    ),
    *(
        Reader(f"ChatTemplate.render, {name}", partial(render, ChatTemplate(source, {}, "m"), False), MESSAGES, 2**12)
        for name, source in (("ChatML", CHATML), ("names", NAMES), ("one call", f"{CHATML}{{# {'x'} #}}"))
    ),
    Reader(
        "parse_body, small",
        partial(read, CompletionBody),
        {
            "text": lambda n: completion(prompt="a" * n),
            "escapes": lambda n: completion(prompt='"\n' * (n // 5)),
            "tokens": lambda n: completion(prompt=[1] * (n // 4)),
            "prompts": lambda n: completion(prompt=["a"] * (n // 6)),
            "bias": lambda n: completion(logit_bias={str(i): 1 for i in range(n // 12)}),
            "stop": lambda n: completion(stop=["a" * 100] * (n // 105)),
            "bad words": lambda n: completion(bad_words=["a"] * (n // 6)),
            "fields": lambda n: completion(**{f"f{i}": 1 for i in range(n // 10)}),
            "one field": lambda n: completion(**{"f" * n: 1}),
            "brackets": lambda n: b"[" * n,
        },
        16 * 2**10,
        on_loop=True,
    ),
    Reader(
        "parse_body, large",
        partial(read, ChatBody),
        {
            "text": lambda n: chat(messages=[{"role": "user", "content": "a" * n}]),
            "brackets": lambda n: b"[" * n,
            "backslashes": lambda n: b'{"x": "' + b"\\" * n,
            "digits": lambda n: b"1" * n,
            "image": lambda n: parts(1, {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * n}}),
        },
        LIMITS.max_request_bytes,
    ),
    Reader(
        "parse_body, many values",
        partial(read, ChatBody),
        {
            "parts": lambda n: parts(n, {"type": "text", "text": "x"}),
            "images": lambda n: parts(n, {"type": "image_url", "image_url": {"url": "data:,"}}),
            "messages": lambda n: chat(messages=many(n)),
            "nested": lambda n: ('{"messages": ' + "[" * n + "]" * n + "}").encode(),
        },
        MAX_OBJECTS // 4,
    ),
)


@pytest.mark.parametrize(("reader", "shape"), pairs(READERS), ids=label)
def test_a_text_grows_no_faster_than_n_log_n(reader: Reader, shape: str) -> None:
    check_growth(reader, shape)


def test_a_text_that_cannot_fit_is_refused_after_its_beginning() -> None:
    with pytest.raises(InvalidRequest, match=r"at least 8\d\d\d tokens"):
        TOKENIZER.encode_within(" \n" * 2**16, 2048)
