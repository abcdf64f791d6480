"""`suffix` of /v1/completions makes the prompt that the model was trained to fill in the middle of."""

from dataclasses import replace
from typing import Any

import pytest
from httpx import AsyncClient
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from eyas.services.router.http.fill_in_middle import FORMATS, MiddleFormat
from eyas.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.services.http_router import ALL, DEMO, Script, http_router, worker
from tests.support.services.scripted_verifier import MODEL, TOKENS

BEFORE, AFTER = "def f(x):\n    return ", "\n\nprint(f(1))\n"


def tokenizer_with(tokens: tuple[str, ...], has_bos: bool = True) -> Tokenizer:
    """The demo's tokenizer, with further special tokens."""
    tokenizer = load_tokenizer(DEMO).tokenizer
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    bos = tokenizer.token_to_id("<|bos|>")
    if has_bos:
        tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", bos)])
    return Tokenizer(tokenizer, bos if has_bos else None)


async def answer(url: str, tokenizer: Tokenizer, script: Script, **fields: Any) -> Any:
    async with (
        worker(url, script, model=replace(MODEL, vocab_size=tokenizer.tokenizer.get_vocab_size())),
        http_router(url, tokenizer=tokenizer) as base,
        AsyncClient(base_url=base, timeout=30) as client,
    ):
        return await client.post("/v1/completions", json=ALL | {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 1} | fields)


def expected(format_: MiddleFormat) -> str:
    before, after = format_.prefix + BEFORE, format_.suffix + AFTER
    return f"<|bos|>{after + before if format_.is_suffix_first else before + after}{format_.middle}"


@pytest.mark.parametrize("format_", FORMATS, ids=lambda format_: format_.families)
async def test_the_output_stands_between_two_texts(url: str, format_: MiddleFormat) -> None:
    tokenizer, script = tokenizer_with(format_.tokens), Script(TOKENS)
    response = await answer(url, tokenizer, script)
    assert response.status_code == 200, response.text
    (call,) = script.calls
    assert tokenizer.decode(call.request.prompt_ids, skip_special_tokens=False) == expected(format_)
    ends = {tokenizer.tokenizer.token_to_id(token) for token in format_.tokens}
    assert ends <= set(call.request.sampling.stop_token_ids)


async def test_a_prompt_of_token_ids_has_a_suffix_too(url: str) -> None:
    format_ = FORMATS[0]
    tokenizer, script = tokenizer_with(format_.tokens), Script(TOKENS)
    ids = list(tokenizer.encode(BEFORE))
    response = await answer(url, tokenizer, script, prompt=[ids, BEFORE])
    assert response.status_code == 200, response.text
    texts = {tokenizer.decode(call.request.prompt_ids, skip_special_tokens=False) for call in script.calls}
    assert texts == {expected(format_)}


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ((), "has no tokens to fill in the middle, such as <|fim_prefix|> <|fim_suffix|> <|fim_middle|> (Qwen coder"),
        (("<fim_prefix>", "<fim_middle>"), "it lacks <fim_suffix> (of StarCoder, Granite code); leave suffix out"),
    ],
)
async def test_missing_tokens_are_named(url: str, tokens: tuple[str, ...], reason: str) -> None:
    response = await answer(url, tokenizer_with(tokens), Script(TOKENS))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "suffix")
    assert reason in error["message"]


async def test_an_empty_suffix_asks_for_nothing_and_echo_for_too_much(url: str) -> None:
    tokenizer, script = tokenizer_with(()), Script(TOKENS)
    assert (await answer(url, tokenizer, script, suffix="")).status_code == 200
    response = await answer(url, tokenizer, script, echo=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "suffix")
