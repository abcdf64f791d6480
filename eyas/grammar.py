"""Compiles what the output of a request must match, and follows it token by token, with llguidance.

llguidance bounds the time and memory of a grammar by counted steps: a hostile schema or expression is refused, or ends its
own request, and costs others nothing (decision 0031). This module knows text and token ids, no tensors.

xgrammar's structural tags, which vLLM and SGLang take too, become grammars in Lark's syntax, which is llguidance's. A
structural tag describes text whose parts may follow a schema, such as calls of tools between words. Source of the
format: xgrammar's documentation, "Structural Tag".
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from eyas.errors import CheckpointError, InvalidRequest, Overloaded
from eyas.request import StructuredOutputs
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

        try:
            text = _grammar_text(structured, tokenizer)
        except ValueError as error:  # of a schema with half a surrogate pair, for example
            reason = f"structured_outputs cannot be read: {_first_line(str(error))}"
            raise InvalidRequest(reason, "structured_outputs") from error
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


# Fields of each format besides `type`: required ones, and those that may be left out.
_FIELDS: Mapping[str, tuple[set[str], set[str]]] = {
    "const_string": ({"value"}, set()),
    "json_schema": ({"json_schema"}, {"style"}),
    "any_text": (set(), {"excludes"}),
    "regex": ({"pattern"}, set()),
    "token": ({"token"}, set()),
    "sequence": ({"elements"}, set()),
    "or": ({"elements"}, set()),
    "optional": ({"content"}, set()),
    "plus": ({"content"}, set()),
    "star": ({"content"}, set()),
    "repeat": ({"content", "min", "max"}, set()),
    "tag": ({"begin", "content", "end"}, set()),
    "triggered_tags": ({"triggers", "tags"}, {"at_least_one", "stop_after_first", "excludes"}),
    "tags_with_separator": ({"tags", "separator"}, {"at_least_one", "stop_after_first"}),
}
_REPEATS = {"optional": "?", "plus": "+", "star": "*"}
_TEXT = r"/(.|\n)*/"


def structural_tag_to_lark(text: str, any_whitespace: bool, token_id: Callable[[str], int | None]) -> str:
    """The grammar of a structural tag. token_id: finds a special token of the model by its text.

    Raises InvalidRequest for a format that is unknown or malformed.
    """
    tag = json.loads(text)
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag" or not isinstance(tag.get("format"), dict):
        raise _invalid('it must be an object of the form {"type": "structural_tag", "format": {...}}')
    writer = _LarkWriter(any_whitespace, token_id)
    start = writer.expression(tag["format"])
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules])


class _LarkWriter:
    """Writes rules; `expression` returns what stands for a format in another rule."""

    def __init__(self, any_whitespace: bool, token_id: Callable[[str], int | None]) -> None:
        self.rules: list[str] = []
        self._any_whitespace = any_whitespace
        self._token_id = token_id

    def expression(self, format_: Any) -> str:
        kind = self._checked(format_)
        match kind:
            case "const_string":
                return _literal(format_["value"])
            case "json_schema":
                return self._json(format_)
            case "any_text":
                return self._rule(self._text_without(_TEXT, format_.get("excludes", [])))
            case "regex":
                return self._rule(_pattern(_string(format_["pattern"], "pattern")))
            case "token":
                return self._token(format_["token"])
            case "sequence":
                return self._sequence(_list(format_["elements"], "elements"))
            case "or":
                return f"({' | '.join(map(self.expression, _list(format_['elements'], 'elements')))})"
            case "optional" | "plus" | "star":
                return f"({self.expression(format_['content'])}){_REPEATS[kind]}"
            case "repeat":
                return self._repeat(format_)
            case "tag":
                return self._tag(format_)
            case "triggered_tags":
                return self._triggered(format_)
            case _:
                return self._separated(format_)

    def _checked(self, format_: Any) -> str:
        """The type of a format whose fields are known. Raises InvalidRequest."""
        kind = format_.get("type") if isinstance(format_, dict) else None
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise _invalid(f"a format is {str(format_)[:80]}; its type must be one of {', '.join(_FIELDS)}")
        required, optional = _FIELDS[kind]
        given = format_.keys() - {"type"}
        if missing := required - given:
            raise _invalid(f"a format of the type {kind!r} has no {sorted(missing)[0]}")
        if unknown := given - required - optional:
            raise _invalid(f"{sorted(unknown)[0]!r} of a format of the type {kind!r} is not supported; leave it out")
        return kind

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _text_without(self, body: str, excludes: Any) -> str:
        """`body` without any of the texts `excludes` in it."""
        if not excludes:
            return body
        banned = "|".join(re.escape(_string(one, "excludes")) for one in _list(excludes, "excludes"))
        name = f"T{len(self.rules)}"  # only terminals, whose names are upper-case, can be intersected
        self.rules.append(f"{name}: ({body}) & ~" + _pattern(rf"(.|\n)*({banned})(.|\n)*"))
        return name

    def _json(self, format_: Mapping[str, Any]) -> str:
        schema = format_["json_schema"]
        if format_.get("style", "json") != "json":
            raise _invalid(f"style {format_['style']!r} of a json_schema is not supported; use 'json'")
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if not isinstance(schema, dict):
            raise _invalid("json_schema must be an object")
        if not self._any_whitespace:
            schema = {**schema, "x-guidance": {"whitespace_flexible": False}}
        return self._rule(f"%json {json.dumps(schema)}")

    def _token(self, token: Any) -> str:
        number = token if isinstance(token, int) else self._token_id(_string(token, "token"))
        if number is None or isinstance(token, bool):
            raise _invalid(f"token {token!r} is not in the model's vocabulary")
        return f"<[{number}]>"

    def _edge(self, edge: Any) -> str:
        """A begin, an end, or one of several ends."""
        if isinstance(edge, dict):
            return self.expression(edge)
        if isinstance(edge, list):
            return f"({' | '.join(_literal(one) for one in _list(edge, 'end'))})"
        return _literal(edge)

    def _repeat(self, format_: Mapping[str, Any]) -> str:
        least, most = format_["min"], format_["max"]
        if not (isinstance(least, int) and isinstance(most, int) and least >= 0 and (most == -1 or least <= most)):
            raise _invalid(f"a repeat has min {least!r} and max {most!r}; give 0 <= min <= max, or max -1")
        return f"({self.expression(format_['content'])}){{{least},{'' if most < 0 else most}}}"

    def _sequence(self, elements: Sequence[Any]) -> str:
        parts, index = [], 0
        while index < len(elements):
            following = elements[index + 1] if index + 1 < len(elements) else None
            if following is not None and self._checked(elements[index]) == "any_text":
                if self._checked(following) != "const_string":
                    raise _invalid("an any_text in the middle of a sequence must be followed by a const_string")
                parts.append(self._text_until(elements[index], _literal(following["value"])))
                index += 2
            else:
                parts.append(self.expression(elements[index]))
                index += 1
        return f"({' '.join(parts)})"

    def _text_until(self, text: Mapping[str, Any], end: str) -> str:
        """Free text up to the first `end`, that one included."""
        return self._rule(self._text_without(f"{_TEXT} {end}", text.get("excludes", [])), "[lazy]")

    def _tag(self, tag: Mapping[str, Any]) -> str:
        return f"{self._edge(tag['begin'])} {self._after_begin(tag)}"

    def _after_begin(self, tag: Mapping[str, Any]) -> str:
        """The content and the end of a tag."""
        if self._checked(tag["content"]) == "any_text" and not isinstance(tag["end"], dict):
            if not _ends(tag["end"]):
                return self.expression(tag["content"])
            return self._text_until(tag["content"], self._edge(tag["end"]))
        return f"{self.expression(tag['content'])} {self._edge(tag['end'])}"

    def _triggered(self, format_: Mapping[str, Any]) -> str:
        triggers, excludes = _list(format_["triggers"], "triggers"), format_.get("excludes", [])
        firsts, alternatives = [], []
        for tag in _list(format_["tags"], "tags"):
            if self._checked(tag) != "tag":
                raise _invalid("tags must hold formats of the type 'tag'")
            begin = _string(tag["begin"], "begin")
            found = [one for one in triggers if _string(one, "trigger") and begin.startswith(one)]
            if len(found) != 1:
                raise _invalid(f"{len(found)} triggers begin the tag {begin[:80]!r}; exactly one must")
            until = self._rule(self._text_without(f"{_TEXT} {_literal(found[0])}", excludes), "[lazy]")
            rest = self._rule(self._after_begin(tag))  # written once: nested tags would double with every level
            firsts.append(f"{_literal(begin)} {rest}")
            alternatives.append(f"{until} {_literal(begin[len(found[0]) :])} {rest}")
        triggered = self._rule(" | ".join(alternatives))
        tail = self._rule(self._text_without(_TEXT, excludes))
        if format_.get("at_least_one", False):
            first = f"({' | '.join(firsts)})"
            return first if format_.get("stop_after_first", False) else f"{first} {triggered}* {tail}"
        return f"({triggered} | {tail})" if format_.get("stop_after_first", False) else f"{triggered}* {tail}"

    def _separated(self, format_: Mapping[str, Any]) -> str:
        tag = self._rule(" | ".join(map(self.expression, _list(format_["tags"], "tags"))))
        separator = _literal(_string(format_["separator"], "separator"))
        several = tag if format_.get("stop_after_first", False) else f"{tag} ({separator} {tag})*"
        return several if format_.get("at_least_one", False) else f"({several})?"


def _invalid(reason: str) -> InvalidRequest:
    return InvalidRequest(f"structural_tag: {reason}", "structured_outputs")


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _invalid(f"{name} is {value!r}; it must be text")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _invalid(f"{name} must be a list that is not empty")
    return value


def _ends(end: Any) -> bool:
    """Whether the ends of a tag have any text."""
    return all(end) if isinstance(end, list) else bool(end)


def _literal(value: Any) -> str:
    return json.dumps(_string(value, "a text"))


def _pattern(pattern: str) -> str:
    """A regular expression as Lark writes it."""
    return "/" + re.sub(r"(?<!\\)/", r"\\/", pattern) + "/"
