"""Log-probabilities in OpenAI's two formats, and token names that lose no byte."""

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models

from eyas.api.request import TokenLogprob
from eyas.services.router.http.writers.json_blocks import json_blocks
from eyas.services.router.http.writers.logprobs import chat_logprobs, completion_logprobs, text_offsets
from eyas.text.tokenizer import Tokenizer
from tests.support.services.http_router import ALL, CHAT, REST_TEXT, TOKENIZER, served
from tests.support.services.scripted_verifier import PROMPT, REST, TEXT, TOKENS

BYTES = Tokenizer(HuggingFaceTokenizer(models.WordLevel({"<0xE2>": 0, "<0x82>": 1, "\u2581a": 2, "b": 3}, unk_token="b")))


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(text: str) -> None:
    ids = TOKENIZER.encode_rendered(text)
    assume(TOKENIZER.special.isdisjoint(ids))
    assert b"".join(TOKENIZER.token_bytes(token) for token in ids).decode() == text == TOKENIZER.decode(ids)
    assert sum(TOKENIZER.num_characters(token) for token in ids) == len(text)


def test_byte_tokens_and_sentencepiece_spaces_are_decoded() -> None:
    assert [BYTES.token_bytes(token) for token in range(4)] == [b"\xe2", b"\x82", b" a", b"b"]
    assert [TOKENIZER.token_bytes(token) for token in (0, 1)] == [b"<|bos|>", b"<|eos|>"]


def test_partial_characters_and_zero_probabilities_are_encoded() -> None:
    logprobs = [TokenLogprob(0, float("-inf"), (1, 3), (-0.5, -1.0))]
    assert json.loads(b"".join(json_blocks(completion_logprobs(BYTES, logprobs, text_offsets(BYTES, logprobs, 4))))) == {
        "tokens": ["bytes:\\xe2"],
        "token_logprobs": [-9999.0],
        "top_logprobs": [{"bytes:\\x82": -0.5, "b": -1.0, "bytes:\\xe2": -9999.0}],
        "text_offset": [4],
    }
    assert chat_logprobs(BYTES, logprobs)["content"][0]["bytes"] == [0xE2]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_reports_logprobs_of_prompt_and_tokens(url: str, stream: bool) -> None:
    async with served(url) as client:
        answer: Any = await client.completions.create(**ALL, logprobs=2, echo=True, stream=stream)
        choices = [event.choices[0] async for event in answer] if stream else [answer.choices[0]]
    text = "".join(choice.text for choice in choices)
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    offsets = [at for choice in choices for at in choice.logprobs.text_offset]
    values = [value for choice in choices for value in choice.logprobs.token_logprobs]
    tops = [top for choice in choices for top in choice.logprobs.top_logprobs]
    assert text == TEXT
    assert "".join(tokens[1:]) == TEXT
    assert (values[0], tops[0], tokens[0]) == (None, None, "<|bos|>")
    assert values[1:] == [-0.5] * (len(TOKENS) - 1)
    assert all(text[at:].startswith(token) for at, token in zip(offsets[1:], tokens[1:], strict=True))
    assert all(len(top) == 2 and top[token] == -0.5 for top, token in zip(tops[1:], tokens[1:], strict=True))


async def test_an_echo_of_no_tokens_only_scores_the_prompt(url: str) -> None:
    async with served(url) as client:
        answer = await client.completions.create(
            **ALL | {"prompt": list(TOKENS[:6]), "max_tokens": 0}, logprobs=0, echo=True
        )
    (choice,) = answer.choices
    assert choice.text == TOKENIZER.decode(TOKENS[:6])
    assert choice.logprobs.token_logprobs == [None] + [-0.5] * 5
    assert (choice.finish_reason, answer.usage.prompt_tokens, answer.usage.completion_tokens) == ("length", 6, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [None, 2])
async def test_a_chat_reports_logprobs_of_each_token(url: str, stream: bool, top: int | None) -> None:
    async with served(url) as client:
        more: dict[str, Any] = {} if top is None else {"top_logprobs": top}
        answer: Any = await client.chat.completions.create(**CHAT, **more, logprobs=True, stream=stream)
        found = [event.choices[0] async for event in answer] if stream else [answer.choices[0]]
    entries = [entry for choice in found for entry in choice.logprobs.content]
    assert "".join(entry.token for entry in entries) == REST_TEXT
    assert bytes(byte for entry in entries for byte in entry.bytes) == REST_TEXT.encode()
    assert {entry.logprob for entry in entries} == {-0.5}
    assert all([one.token for one in entry.top_logprobs][:1] == [entry.token] for entry in entries)
    assert len(entries) == len(REST)


async def test_prompt_logprobs_have_a_field_once_for_each_prompt(url: str) -> None:
    async with served(url) as client:
        request = ALL | {"n": 2, "temperature": 1}
        whole = await client.completions.create(**request, extra_body={"prompt_logprobs": 1})
        chat = await client.chat.completions.create(**CHAT, extra_body={"prompt_logprobs": 0})
        ((first, second), chat) = whole.choices, chat.choices[0]
    for choice in (first, chat):
        assert choice.prompt_logprobs[0] is None
        tokens = [entry[str(token)] for entry, token in zip(choice.prompt_logprobs[1:], PROMPT[1:], strict=True)]
        assert tokens == [{"logprob": -0.5, "decoded_token": TOKENIZER.decode([token])} for token in PROMPT[1:]]
    assert not hasattr(second, "prompt_logprobs")
    assert first.logprobs is None


def test_other_decoders_round_trip_their_text() -> None:
    words = HuggingFaceTokenizer(models.WordLevel({"##ing": 0, "go": 1}, unk_token="go"))
    words.decoder = decoders.WordPiece()
    assert [Tokenizer(words).token_bytes(token) for token in (0, 1)] == [Tokenizer(words).decode([0]).encode(), b"go"]
