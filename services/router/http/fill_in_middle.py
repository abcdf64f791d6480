"""Prompts for models that fill in the middle: a text before the output and a text after it, between tokens of the tokenizer.

To add a family of models, add its tokens to `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from eyas.errors import InvalidRequest
from eyas.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class MiddleFormat:
    """The tokens of one family of models.

    Attributes:
        middle: empty where the output follows the text before it.
        is_suffix_first: the text after the output comes first.
        ends: further tokens that end an output.
    """

    families: str
    prefix: str
    suffix: str
    middle: str = ""
    is_suffix_first: bool = False
    ends: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens that a prompt needs."""
        return tuple(filter(None, (self.prefix, self.suffix, self.middle)))


_BAR = "\uff5c"  # DeepSeek's
_QWEN_ENDS = ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>")
FORMATS = (
    MiddleFormat(
        "Qwen coder, CodeGemma, Granite 4", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ends=_QWEN_ENDS
    ),
    MiddleFormat(
        "StarCoder, Granite code", "<fim_prefix>", "<fim_suffix>", "<fim_middle>",
        ends=("<|endoftext|>", "<fim_pad>", "<file_sep>", "<filename>", "<repo_name>", "<reponame>"),
    ),
    MiddleFormat("SantaCoder", "<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<|endoftext|>", "<fim-pad>")),
    MiddleFormat("CodeLlama", "▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    MiddleFormat(
        "DeepSeek coder", f"<{_BAR}fim▁begin{_BAR}>", f"<{_BAR}fim▁hole{_BAR}>", f"<{_BAR}fim▁end{_BAR}>",
        ends=(f"<{_BAR}end▁of▁sentence{_BAR}>", "<|EOT|>"),
    ),
    MiddleFormat("Codestral", "[PREFIX]", "[SUFFIX]", is_suffix_first=True, ends=("[MIDDLE]",)),
    MiddleFormat(
        "Seed coder", "<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", is_suffix_first=True,
    ),
    MiddleFormat(
        "CodeGeeX", "<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ends=("<|endoftext|>", "<|user|>")
    ),
)  # fmt: skip


def middle_format(tokenizer: Tokenizer, model: str) -> MiddleFormat:
    """Return the format whose tokens the tokenizer has. Raises InvalidRequest that names the missing ones."""
    vocabulary = tokenizer.tokenizer
    missing = {format_: [token for token in format_.tokens if vocabulary.token_to_id(token) is None] for format_ in FORMATS}
    if found := next((format_ for format_, tokens in missing.items() if not tokens), None):
        return found
    nearest = min(FORMATS, key=lambda format_: len(missing[format_]) - len(format_.tokens))
    reason = f"the tokenizer of {model!r} has no tokens to fill in the middle"
    if len(missing[nearest]) < len(nearest.tokens):
        lacks = " and ".join(missing[nearest])
        raise InvalidRequest(f"{reason}: it lacks {lacks} (of {nearest.families}); leave suffix out", "suffix")
    known = "; ".join(f"{' '.join(format_.tokens)} ({format_.families})" for format_ in FORMATS)
    raise InvalidRequest(f"{reason}, such as {known}; serve a model that has some, or leave suffix out", "suffix")


def middle_prompt(
    format_: MiddleFormat, tokenizer: Tokenizer, prefix: Sequence[int], suffix: Sequence[int]
) -> tuple[int, ...]:
    """Return the prompt for the output between two texts, as token ids.

    prefix: may begin with the special tokens that begin every prompt.
    """
    leading = tuple(takewhile(tokenizer.special.__contains__, tokenizer.encode("a")))
    if tuple(prefix[: len(leading)]) == leading:
        prefix = prefix[len(leading) :]
    marks = [token for text in format_.tokens if (token := tokenizer.tokenizer.token_to_id(text)) is not None]
    before, after = (marks[0], *prefix), (marks[1], *suffix)
    texts = (*after, *before) if format_.is_suffix_first else (*before, *after)
    return (*leading, *texts, *marks[2:])


def end_tokens(format_: MiddleFormat, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end an output, as far as the tokenizer has them."""
    found = (tokenizer.tokenizer.token_to_id(token) for token in (*format_.ends, *format_.tokens))
    return tuple(dict.fromkeys(token for token in found if token is not None))
