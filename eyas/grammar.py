"""Compiles what the output of a request must match, and follows it token by token, with llguidance.

llguidance bounds the time and memory of a grammar by counted steps: a hostile schema or expression is refused, or ends its
own request, and costs others nothing (decision 0031). This module knows text and token ids, no tensors.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from eyas.errors import CheckpointError, InvalidRequest, Overloaded
from eyas.request import StructuredOutputs
from eyas.structural_tag import structural_tag_to_lark
from eyas.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# One bit per token id, the lowest id in the lowest bit of the first byte: uint8 [ceil(V / 8)].
TokenBits: TypeAlias = npt.NDArray[np.uint8]

# Compiled grammars that are kept, and their summed length as text: 128 KiB of schema compile to a few MiB.
MAX_CACHED = 256
MAX_CACHED_LENGTH = 2**23
# Grammars that may wait to be compiled.
MAX_COMPILING = 64
# Limits of llguidance: work to build a lexer, and to compute one mask, about 15 ms each on one core; and a lexer's states.
INITIAL_FUEL, STEP_FUEL, STEP_ITEMS, LEXER_STATES = 1_000_000, 200_000, 10_000, 20_000


def bits_of(ids: Sequence[int], vocab_size: int) -> TokenBits:
    """The set of token ids as bits."""
    flags = np.zeros(vocab_size, dtype=np.bool_)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little")


class Matcher:
    """Follows one output through a grammar. Not safe for use from several threads at once.

    End-of-sequence tokens are no part of a grammar: `mask` leaves them out, and they must not be consumed.
    """

    def __init__(self, matcher: LLMatcher, not_eos: TokenBits) -> None:
        """not_eos: all tokens but the model's end-of-sequence tokens."""
        self._matcher = matcher
        self._not_eos = not_eos

    @property
    def is_accepting(self) -> bool:
        """Whether the output so far is whole."""
        return self._matcher.is_accepting()

    def consume(self, tokens: Sequence[int]) -> int:
        """Advance by the tokens that may follow, up to the first one that may not; returns their number."""
        return self._matcher.try_consume_tokens(list(tokens))

    def rollback(self, num_tokens: int) -> None:
        """Go back by tokens that were consumed."""
        if num_tokens and not self._matcher.rollback(num_tokens):
            self._check()

    def mask(self) -> TokenBits:
        """The tokens that may follow, end-of-sequence tokens excluded. Raises InvalidRequest if that takes too much work."""
        data = self._matcher.compute_bitmask()
        self._check()
        return np.frombuffer(data, dtype=np.uint8)[: len(self._not_eos)] & self._not_eos

    def forced(self) -> list[int]:
        """Tokens that spell the text that must follow, in the tokenizer's own spelling; empty if there is a choice."""
        return self._matcher.compute_ff_tokens()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(
                f"structured_outputs takes too much work to follow ({_first_line(self._matcher.get_error())}); simplify it",
                "structured_outputs",
            )


class Grammar:
    """A compiled grammar, which any number of outputs follow."""

    def __init__(self, matcher: LLMatcher, not_eos: TokenBits) -> None:
        self._matcher = matcher
        self._not_eos = not_eos

    def matcher(self) -> Matcher:
        """A matcher before the first token."""
        return Matcher(self._matcher.deep_copy(), self._not_eos)


class GrammarCompiler:
    """Compiles grammars for one model, in threads of its own, and keeps the latest ones. Safe for use from any thread."""

    def __init__(self, model: str, vocab_size: int, eos_ids: frozenset[int]) -> None:
        """model: folder or hub id whose tokenizer is loaded when the first grammar comes. vocab_size: of its logits."""
        self._model = model
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._not_eos = ~bits_of(self._eos_ids, vocab_size) & bits_of(range(vocab_size), vocab_size)
        self._threads = ThreadPoolExecutor(min(2, os.cpu_count() or 1), thread_name_prefix="grammar-compiler")
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._tokenizers: tuple[Tokenizer, LLTokenizer] | None = None
        self._futures: OrderedDict[StructuredOutputs, Future[Grammar]] = OrderedDict()
        self._cached_length = 0
        self._num_compiling = 0

    def submit(self, structured: StructuredOutputs) -> Future[Grammar]:
        """The grammar as soon as it is compiled; equal ones are compiled once. Its constraint must have been checked.

        The future raises InvalidRequest for what cannot be compiled, and if llguidance is not installed.
        Raises Overloaded while too many grammars wait.
        """
        with self._lock:
            if future := self._futures.get(structured):
                self._futures.move_to_end(structured)
                return future
            if self._num_compiling >= MAX_COMPILING:
                raise Overloaded(f"{self._num_compiling} grammars wait to be compiled already; try again in 1 s", 1.0)
            self._num_compiling += 1
            future = self._futures[structured] = self._threads.submit(self._compile, structured)
            self._cached_length += _length(structured)
        future.add_done_callback(lambda done: self._finish(structured, done))
        return future

    def compile(self, structured: StructuredOutputs) -> Grammar:
        """The same, waiting for it."""
        return self.submit(structured).result()

    def _finish(self, structured: StructuredOutputs, future: Future[Grammar]) -> None:
        """Forget what failed, and the oldest ones beyond the limits."""
        with self._lock:
            self._num_compiling -= 1
            if future.exception() is not None and self._futures.pop(structured, None) is not None:
                self._cached_length -= _length(structured)
            while len(self._futures) > MAX_CACHED or self._cached_length > MAX_CACHED_LENGTH:
                oldest = next((key for key, other in self._futures.items() if other.done()), None)
                if oldest is None:
                    return
                del self._futures[oldest]
                self._cached_length -= _length(oldest)

    def _compile(self, structured: StructuredOutputs) -> Grammar:
        tokenizer, vocabulary = self._load()
        from llguidance import LLMatcher

        text = _grammar_text(structured, tokenizer)
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=_limits())
        if matcher.is_error():
            reason = f"structured_outputs cannot be compiled: {_first_line(matcher.get_error())}"
            raise InvalidRequest(reason, "structured_outputs")
        grammar = Grammar(matcher, self._not_eos)
        grammar.matcher().mask()  # may take seconds to fail, which no step of the engine must wait for
        return grammar

    def _load(self) -> tuple[Tokenizer, LLTokenizer]:
        with self._loading:
            if self._tokenizers is None:
                try:
                    from llguidance import LLTokenizer
                except ImportError as error:
                    reason = "structured_outputs needs llguidance, which is missing here; pip install 'eyas[structured]'"
                    raise InvalidRequest(reason, "structured_outputs") from error
                if not self._eos_ids:
                    raise InvalidRequest("the model has no end-of-sequence token, which structured_outputs needs")
                try:
                    tokenizer = load_tokenizer(self._model)
                    text = tokenizer.tokenizer.to_str()
                    size = max(self._vocab_size, tokenizer.tokenizer.get_vocab_size())
                    self._tokenizers = tokenizer, LLTokenizer(text, n_vocab=size, eos_token=self._eos_ids)
                except (CheckpointError, ValueError, RuntimeError) as error:
                    reason = f"structured_outputs is not supported with this model's tokenizer: {_first_line(str(error))}"
                    raise InvalidRequest(reason, "structured_outputs") from error
            return self._tokenizers


def _grammar_text(structured: StructuredOutputs, tokenizer: Tokenizer) -> str:
    """The grammar in llguidance's form. Raises InvalidRequest."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    (name,) = structured.constraints
    if name in ("json", "json_object"):
        schema = structured.json or '{"type": "object"}'
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": structured.any_whitespace})
    if name == "regex":
        return LLMatcher.grammar_from_regex(structured.regex)
    if name == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, structured.choice)))
    if name == "structural_tag":
        lark = structural_tag_to_lark(structured.structural_tag, structured.any_whitespace, tokenizer.tokenizer.token_to_id)
        return LLMatcher.grammar_from_lark(lark)
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(structured.grammar))
    except Exception as error:  # a parser of its own, with errors of its own; RecursionError too
        raise InvalidRequest(f"grammar cannot be read: {_first_line(str(error))}", "structured_outputs") from error


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=INITIAL_FUEL,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=STEP_ITEMS,
        max_lexer_states=LEXER_STATES,
        verbose_errors=False,
    )


def _length(structured: StructuredOutputs) -> int:
    texts = (structured.json, structured.regex, structured.grammar, structured.structural_tag, *structured.choice)
    return sum(map(len, texts))


def _first_line(message: str) -> str:
    return next(iter(message.strip().splitlines()), "")[:200]
