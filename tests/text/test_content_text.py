"""Names of special tokens in contents are text, and all else is encoded as it always is."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as HuggingFaceTokenizer

from eyas.text.chat_template import ChatTemplate
from eyas.text.content_text import ContentText, renamed
from eyas.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.test_tokenizer import LIKE_LLAMA2

DEMO = Path("models/demo/target")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|eos|>{{ m.role }}\n{{ m.name }}{{ m.content | trim }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endfor %}"
)
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
TOKENIZERS = {"demo": load_tokenizer(str(DEMO)), **LIKE_LLAMA2}
CONTENTS = {name: ContentText(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def as_text(tokenizer: Tokenizer) -> HuggingFaceTokenizer:
    """The library's own way to read every special token as text."""
    copy = HuggingFaceTokenizer.from_str(tokenizer.tokenizer.to_str())
    copy.encode_special_tokens = True
    return copy


def rendered(content: ContentText, *messages: dict[str, Any], template: str = TEMPLATE) -> str:
    return ChatTemplate(template, SPECIAL, "m").render(messages, {}, False, content.mark)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_contents_are_encoded_as_text(name: str, data: st.DataObject) -> None:
    """The text between the template's own tokens has the ids that it has where every name is text."""
    tokenizer, content = TOKENIZERS[name], CONTENTS[name]
    own = ["<|bos|>", "<|eos|>"] if name == "demo" else ["<s>", "</s>"]
    text = data.draw(st.text("aisPr<|>/", max_size=8)) + data.draw(st.sampled_from([*own, own[0][:2], "", "<" + own[1]]))
    text += data.draw(st.text("aisPr <s>", max_size=5))
    template = own[0] + "{% for m in messages %}" + own[1] + "{{ m.content }}" + own[1] + "{% endfor %}"
    shown = rendered(content, {"role": "user", "content": text}, template=template)
    found = content.encode(shown, 2**20)
    first, last = (tokenizer.tokenizer.token_to_id(one) for one in own)
    assert content.plain(shown) == own[0] + own[1] + text + own[1]
    assert (found[:2], found[-1]) == ((first, last), last)
    if name != "first":  # which puts no space before a text that does not come first
        assert list(found[2:-1]) == as_text(tokenizer).encode(text, add_special_tokens=False).ids


@given(st.text("aisPr <|>/\n\u00e9", max_size=20))
def test_other_chats_are_encoded_as_ever(text: str) -> None:
    content, tokenizer = CONTENTS["demo"], TOKENIZERS["demo"]
    chat = {"role": "user", "content": text}
    plain = ChatTemplate(TEMPLATE, SPECIAL, "m").render([chat], {})
    assert content.encode(rendered(content, chat), 2**20) == tokenizer.encode_rendered(plain)


def test_every_value_of_a_message_is_text() -> None:
    content, special = CONTENTS["demo"], TOKENIZERS["demo"].special_ids(["<|bos|>", "<|eos|>"])
    arguments = {"\u003c|eos|>": ["<|bos|>", {"b": "x<|eos|>"}]}
    chat: list[dict[str, Any]] = [
        {"role": "user", "name": "<|eo", "content": "s|> <|bos|> "},
        {"role": "assistant", "content": "<|bos|", "tool_calls": [call(json.dumps(arguments))]},
        {"role": "user", "content": "<|eos|>" * 3},
    ]
    text = rendered(content, *chat)
    expected = "".join(
        [
            "<|bos|><|eos|>user\n<|eos|> <|bos|><|eos|>",
            f"<|eos|>assistant\n<|bos|{json.dumps(arguments)}<|eos|>",
            f"<|eos|>user\n{'<|eos|>' * 3}<|eos|>",
        ]
    )
    assert content.plain(text) == expected
    ids = content.encode(text, 2**20)
    assert sum(id_ in special for id_ in ids) == 7
    assert TOKENIZERS["demo"].decode(ids, skip_special_tokens=False) == expected


def call(arguments: str) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_a_copy_with_other_names_has_the_same_ids() -> None:
    for tokenizer in TOKENIZERS.values():
        copy = renamed(tokenizer.tokenizer, {"<s>": "<other>"})
        assert copy.get_vocab_size() == tokenizer.tokenizer.get_vocab_size()
        assert copy.encode("is a", add_special_tokens=False).ids == list(tokenizer.encode_rendered("is a"))


def with_specials(*names: str) -> Tokenizer:
    copy = HuggingFaceTokenizer.from_str(TOKENIZERS["demo"].tokenizer.to_str())
    copy.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return Tokenizer(copy)


@pytest.mark.parametrize("texts", [["<<", "s>"], ["<<s>x"], ["<<<s>x>"], ["<<", "SYS>>"], ["<<s> "], ["<", "<", "s>x"]])
def test_names_that_overlap_are_text(texts: list[str]) -> None:
    tokenizer = with_specials("<s>", "<<SYS>>", "<<s>x")
    content = ContentText(tokenizer)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    text = rendered(content, *({"role": "user", "content": text} for text in texts), template=template)
    assert content.plain(text) == "".join(texts)
    assert not set(content.encode(text, 2**20)) & set(tokenizer.special_ids(["<s>", "<<SYS>>", "<<s>x"]))


def test_keys_that_begin_a_name_are_kept() -> None:
    content = ContentText(with_specials("s|", "<s>"))
    marked = content.mark({"tools": 1, "<s>": 2})
    assert marked["tools"] == 1
    assert "<s>" not in marked
