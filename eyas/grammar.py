"""Compiles what the output of a request must match, and follows it token by token, with llguidance.

llguidance bounds the time and memory of a grammar by counted steps, and what the counts miss has a limit of processor time:
a hostile schema or expression is refused, or ends its own request (decision 0031). This module knows no tensors.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from eyas.bounded_calls import BoundedCalls, Call
from eyas.errors import CheckpointError, InvalidRequest, Overloaded
from eyas.request import StructuredOutputs
from eyas.structural_tag import grammar_to_lark, structural_tag_to_lark
from eyas.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# One bit per token id, the lowest id in the lowest bit of the first byte: uint8 [ceil(V / 8)].
TokenBits: TypeAlias = npt.NDArray[np.uint8]

# Compiled grammars that are kept, and their summed length as text: 128 KiB of schema compile to a few MiB. A lexer grows by
# the states that outputs reach; 20,000 of them take 10 to 22 MiB.
MAX_CACHED = 64
MAX_CACHED_LENGTH = 2**23
# Grammars that may wait to be compiled. A tenant without its share of them may add some all the same.
MAX_COMPILING = 64
# Processor time that a grammar may take to compile, and late grammars of one tenant that may still hold a thread.
COMPILE_SECONDS, MAX_LATE = 5.0, 2
# Limits of llguidance: work to build a lexer, and to compute one mask, about 15 ms each on one core; and a lexer's states.
INITIAL_FUEL, STEP_FUEL, LEXER_STATES = 1_000_000, 200_000, 20_000
# Parser items for one mask, and behind one token. To add a row of n items takes up to n cubed steps: 50 ms for 500 of them.
STEP_ITEMS, ROW_ITEMS = 10_000, 500


def bits_of(ids: Sequence[int], vocab_size: int) -> TokenBits:
    """The set of token ids as bits."""
    flags = np.zeros(vocab_size, dtype=np.bool_)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little")


class Matcher:
    """Follows one output through a grammar. Not safe for use from several threads at once.

    End-of-sequence tokens are no part of a grammar: `mask` leaves them out, and they must not be consumed.
    """

    def __init__(self, matcher: LLMatcher, not_eos: TokenBits, on_error: Callable[[], None]) -> None:
        """not_eos: all tokens but the model's end-of-sequence tokens. on_error: called before an error is raised."""
        self._matcher = matcher
        self._not_eos = not_eos
        self._on_error = on_error

    @property
    def is_accepting(self) -> bool:
        """Whether the output so far is whole."""
        return self._matcher.is_accepting()

    def consume(self, tokens: Sequence[int]) -> int:
        """Advance by the tokens that may follow, up to the first one that may not; returns their number.

        Raises InvalidRequest if that takes too much work. Then the matcher cannot be used any more.
        """
        num_tokens = self._matcher.try_consume_tokens(list(tokens))
        if num_tokens < len(tokens):
            self._check()
        return num_tokens

    def fork(self) -> Matcher:
        """A matcher at the same place, which goes its own way.

        Going back instead, with llguidance 1.9, may leave the mask of a path that was followed before.
        """
        return Matcher(self._matcher.deep_copy(), self._not_eos, self._on_error)

    def behind(self, token: int) -> Matcher | None:
        """A matcher behind one more token, None if it may not follow. Raises as `consume`."""
        found = self.fork()
        return found if found.consume([token]) else None

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
            self._on_error()
            raise InvalidRequest(
                f"structured_outputs takes too much work to follow ({_first_line(self._matcher.get_error())}); simplify it",
                "structured_outputs",
            )


class Grammar:
    """A compiled grammar, which any number of outputs follow. They share the states of its lexer.

    is_spent: an output failed, maybe because the lexer has all the states that it may have. Other outputs would fail too.
    """

    def __init__(self, matcher: LLMatcher, not_eos: TokenBits) -> None:
        self._matcher = matcher
        self._not_eos = not_eos
        self.is_spent = False

    def matcher(self) -> Matcher:
        """A matcher before the first token."""
        return Matcher(self._matcher.deep_copy(), self._not_eos, self._spend)

    def _spend(self) -> None:
        self.is_spent = True


class GrammarCompiler:
    """Compiles grammars for one model, in threads of its own, and keeps the latest ones. Safe for use from any thread.

    Tenants take turns, and none has all threads: what one of them asks for delays no other.
    """

    def __init__(self, model: str, vocab_size: int, eos_ids: frozenset[int]) -> None:
        """model: folder or hub id whose tokenizer is loaded when the first grammar comes. vocab_size: of its logits."""
        self._model = model
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._not_eos = ~bits_of(self._eos_ids, vocab_size) & bits_of(range(vocab_size), vocab_size)
        self._num_threads = min(4, max(2, os.cpu_count() or 1))
        self._calls = BoundedCalls(self._num_threads, "grammar-compiler")
        self._waiters = ThreadPoolExecutor(self._num_threads, thread_name_prefix="grammar-deadline")
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._tokenizers: tuple[Tokenizer, LLTokenizer] | None = None
        self._futures: OrderedDict[StructuredOutputs, Future[Grammar]] = OrderedDict()
        self._cached_length = 0
        self._queues: OrderedDict[str, deque[StructuredOutputs]] = OrderedDict()  # of the tenants, the next one first
        self._num_running, self._num_late = Counter[str](), Counter[str]()  # by tenant

    def submit(self, structured: StructuredOutputs, tenant: str = "") -> Future[Grammar]:
        """The grammar as soon as it is compiled; equal ones are compiled once. Its constraint must have been checked.

        The future raises InvalidRequest for what cannot be compiled, and if llguidance is not installed.
        Raises Overloaded while too many grammars wait, and the tenant has its share of them.
        """
        with self._lock:
            future = self._futures.get(structured)
            if future and future.done() and not future.exception() and future.result().is_spent:
                del self._futures[structured]
                self._cached_length -= _length(structured)
                future = None
            if future is None:
                self._check_share(tenant)
                future = self._futures[structured] = Future()
                self._cached_length += _length(structured)
            else:
                self._futures.move_to_end(structured)
                if future.running() or future.done() or structured in self._queues.get(tenant, ()):
                    return future
            self._queues.setdefault(tenant, deque()).append(structured)  # maybe in another tenant's queue too
        self._waiters.submit(self._compile_next)
        return future

    def compile(self, structured: StructuredOutputs) -> Grammar:
        """The same, waiting for it."""
        return self.submit(structured).result()

    def _check_share(self, tenant: str) -> None:
        num_waiting, tenants = sum(map(len, self._queues.values())), self._queues.keys() | {tenant}
        if num_waiting >= MAX_COMPILING and len(self._queues.get(tenant, ())) >= MAX_COMPILING // len(tenants):
            raise Overloaded(f"{num_waiting} grammars wait to be compiled already; try again in 1 s", 1.0)

    def _compile_next(self) -> None:
        """Compile the first grammar of the tenant whose turn it is, unless those that wait have all they may have."""
        with self._lock:
            found = self._next()
        if found is None:
            return
        tenant, structured = found
        future = self._futures[structured]
        call, is_late = self._calls.submit(self._compile, structured), False
        try:
            future.set_result(self._calls.result(call, COMPILE_SECONDS))
        except TimeoutError:
            is_late = True
            reason = f"structured_outputs takes more than {COMPILE_SECONDS:g} s to compile; simplify it"
            future.set_exception(InvalidRequest(reason, "structured_outputs"))
        except Exception as error:
            future.set_exception(error)
        self._finish(structured, future, is_late)
        with self._lock:
            self._num_running[tenant] -= 1
            self._num_late[tenant] += is_late
        if is_late:
            call.add_done_callback(partial(self._late_ended, tenant))
        self._waiters.submit(self._compile_next)  # this tenant may have been the only one that waits

    def _next(self) -> tuple[str, StructuredOutputs] | None:
        """Take the next grammar from the queues."""
        for tenant, queue in list(self._queues.items()):
            if self._num_running[tenant] >= self._num_threads - 1 or self._num_late[tenant] >= MAX_LATE:
                continue
            structured = queue.popleft()
            self._queues.move_to_end(tenant)
            if not queue:
                del self._queues[tenant]
            future = self._futures.get(structured)
            if future is None or future.running() or future.done():
                return self._next()  # it was in the queue of another tenant too
            future.set_running_or_notify_cancel()
            self._num_running[tenant] += 1
            return tenant, structured
        return None

    def _late_ended(self, tenant: str, call: Call[Grammar]) -> None:
        with self._lock:
            self._num_late[tenant] -= 1
        self._waiters.submit(self._compile_next)

    def _finish(self, structured: StructuredOutputs, future: Future[Grammar], is_late: bool) -> None:
        """Forget what failed, unless that took long, and the oldest ones beyond the limits."""
        with self._lock:
            if future.exception() is not None and not is_late and self._futures.pop(structured, None) is not None:
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
        first = grammar.matcher()  # may take seconds to fail, which no step of the engine must wait for
        for byte in np.flatnonzero(first.mask())[:1].tolist():
            bits = int(first.mask()[byte])
            first.consume([8 * byte + (bits & -bits).bit_length() - 1])
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

    (name,) = structured.constraints
    if name in ("json", "json_object"):
        schema = structured.json or '{"type": "object"}'
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": structured.any_whitespace})
    if name == "regex":
        return LLMatcher.grammar_from_regex(structured.regex)
    if name == "choice":
        texts = " | ".join(map(json.dumps, structured.choice))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")  # one item of the parser for all of them
    if name == "structural_tag":
        lark = structural_tag_to_lark(structured.structural_tag, structured.any_whitespace, tokenizer.tokenizer.token_to_id)
        return LLMatcher.grammar_from_lark(lark)
    return LLMatcher.grammar_from_lark(grammar_to_lark(structured.grammar))


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=INITIAL_FUEL,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=STEP_ITEMS,
        max_items_in_row=ROW_ITEMS,
        max_lexer_states=LEXER_STATES,
        verbose_errors=False,
    )


def _length(structured: StructuredOutputs) -> int:
    texts = (structured.json, structured.regex, structured.grammar, structured.structural_tag, *structured.choice)
    return sum(map(len, texts))


def _first_line(message: str) -> str:
    return next(iter(message.strip().splitlines()), "")[:200]
