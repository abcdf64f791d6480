"""Names of special tokens in what clients write: encoded as ordinary text, apart from those of a chat template."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as HuggingFaceTokenizer

from eyas.errors import ConfigError
from eyas.text.tokenizer import Tokenizer

# Of messages and tools: values that templates compare, and never show as text.
_KEPT_KEYS = ("role", "type")


class ContentText:
    """Encoder of chats by which only the special tokens of their template are tokens. Safe for use from several threads.

    `mark` puts a mark into each name of a special token in contents, before the template renders them. `encode` takes a
    copy of the tokenizer whose special tokens have other names, and writes those where the rendered text has names without
    a mark. So all other text is encoded as one, and the names in contents are text like any other.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError for a tokenizer whose special tokens cannot be renamed."""
        added = tokenizer.tokenizer.get_added_tokens_decoder()
        nonce = secrets.token_hex(8)
        self._mark = secrets.token_hex(8)
        self._renamed = {token.content: f"<{nonce}-{id_}>" for id_, token in added.items() if token.special}
        self._beginnings = {name[:length] for name in self._renamed for length in range(1, len(name))}
        self._longest = max(map(len, self._renamed), default=0)
        self._finder = _finder(self._renamed)
        self._tokenizer = Tokenizer(renamed(tokenizer.tokenizer, self._renamed), tokenizer.bos)
        for id_, token in added.items():
            if token.special and self._tokenizer.tokenizer.token_to_id(self._renamed[token.content]) != id_:
                reason = f"special_tokens_in_content: text is not possible here: the tokenizer has {token.content!r} twice"
                raise ConfigError(f"{reason}; leave the setting out")

    def mark(self, value: Any) -> Any:
        """Return a value of JSON with a mark in each name of a special token, also in one that its end begins.

        Keys get no mark at their end: templates look for them.
        """
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {self._marked(key, False): item if key in _KEPT_KEYS else self.mark(item) for key, item in value.items()}
        return [self.mark(item) for item in value] if isinstance(value, list | tuple) else value

    def plain(self, rendered: str) -> str:
        """Return a rendered text without marks."""
        return rendered.replace(self._mark, "")

    def encode(self, rendered: str, max_tokens: int, is_rendered: bool = True) -> tuple[int, ...]:
        """Return the token ids of a rendered text with marks. Has arguments and errors of `Tokenizer.encode_within`."""
        parts, at = [], 0
        for start, end in self._spans(rendered):
            parts += [rendered[at:start], self._renamed[rendered[start:end]]]
            at = end
        return self._tokenizer.encode_within(self.plain("".join([*parts, rendered[at:]])), max_tokens, is_rendered)

    def _marked(self, text: str, may_go_on: bool = True) -> str:
        """Return a text with marks. may_go_on: whether its end may begin a name."""
        # A mark may uncover a name that overlaps: at most as often as the longest name has characters.
        while spans := self._spans(text):
            text = self._with_marks(text, [start + 1 for start, _ in spans])
        if not may_go_on:
            return text
        end = len(text.rstrip())
        lengths = range(min(self._longest - 1, end), 0, -1)
        tails = [length for length in lengths if text[end - length : end] in self._beginnings]
        return self._with_marks(text, [end - length + 1 for length in tails])

    def _with_marks(self, text: str, places: Sequence[int]) -> str:
        parts, at = [], 0
        for place in places:
            parts.append(text[at:place])
            at = place
        return self._mark.join([*parts, text[at:]])

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Return where a text has names of special tokens."""
        if not text or not self._renamed:
            return []
        (found,) = self._finder.encode_batch([text], add_special_tokens=False)
        return [span for span, id_ in zip(found.offsets, found.ids, strict=True) if id_]


def _finder(names: Mapping[str, str]) -> HuggingFaceTokenizer:
    """Return a tokenizer that finds names in linear time, as the model's own does; all other text is its token 0."""
    finder = HuggingFaceTokenizer(models.WordLevel({"": 0}, unk_token=""))
    finder.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return finder


def renamed(tokenizer: HuggingFaceTokenizer, names: Mapping[str, str]) -> HuggingFaceTokenizer:
    """Return a copy of a tokenizer in which tokens have other names, and their ids."""
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = content["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(name, name): id_ for name, id_ in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(name, name), score] for name, score in vocabulary]
    if (unknown := model.get("unk_token")) is not None:
        model["unk_token"] = names.get(unknown, unknown)
    return HuggingFaceTokenizer.from_str(json.dumps(content))
