"""Compiles what the output of a request must match, and follows it token by token, with llguidance.

llguidance bounds the time and memory of a grammar by counted steps, and what the counts miss has a limit of processor time:
a hostile schema or expression is refused, or ends its own request (decision 0031). This module knows no tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from eyas.api.request import StructuredOutputs
from eyas.config.engine import EngineConfig
from eyas.errors import CheckpointError, InvalidRequest, Overloaded, Unavailable, first_line, install_command
from eyas.grammar.timed_calls import BoundedCalls, Call
from eyas.grammar.trial import COMPILE_STACK, CostlyGrammar, GrammarTrials, compile_error, parser_limits
from eyas.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# One bit per token id, the lowest id in the lowest bit of the first byte: uint8 [ceil(V / 8)].
TokenBits: TypeAlias = npt.NDArray[np.uint8]
ResultT = TypeVar("ResultT")

# Grammars that are kept, and their summed length as text.
MAX_CACHED = 64
MAX_CACHED_LENGTH = 2**23
# Constraints that are remembered because a process died of them, and not tried again.
MAX_REFUSED = 1024
# Grammars that may wait to be compiled. A tenant without its share of them may add some all the same.
MAX_COMPILING = 64
# Outputs that may wait to be followed, with the same rule.
MAX_FOLLOWING = 1024
# Processor time that a grammar may take to compile, and to follow the output that a request brings along. Late ones of one
# tenant that may still hold a thread.
COMPILE_SECONDS, FOLLOW_SECONDS, MAX_LATE = 5.0, 2.0, 2
# Tokens of an output that are followed at a time, between two looks at the clock.
_FOLLOWED_AT_ONCE = 8
# What llguidance calls a place where no token fits and the output may not end.
_DEAD_END = "NoExtensionBias"


def bits_of(ids: Sequence[int], vocab_size: int) -> TokenBits:
    """Return the set of token ids as bits."""
    flags = np.zeros(vocab_size, dtype=np.bool_)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little")


class Matcher:
    """Matcher that follows one output through a grammar. Not safe for use from several threads at once.

    End-of-sequence tokens are no part of a grammar: `mask` leaves them out, and they must not be consumed.

    Args:
        not_eos: all tokens but the model's end-of-sequence tokens.
    """

    def __init__(self, matcher: LLMatcher, not_eos: TokenBits) -> None:
        self._matcher = matcher
        self._not_eos = not_eos

    @property
    def is_accepting(self) -> bool:
        """Return whether the output so far is whole."""
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
        """Return a matcher at the same place, which goes its own way. Both share one lexer, its states and its lock.

        Going back instead, with llguidance 1.9, may leave the mask of a path that was followed before.
        """
        return Matcher(self._matcher.deep_copy(), self._not_eos)

    def behind(self, token: int) -> Matcher | None:
        """Return a matcher behind one more token, None if it may not follow. Raises as `consume`."""
        found = self.fork()
        return found if found.consume([token]) else None

    def mask(self) -> TokenBits:
        """Return the tokens that may follow, end-of-sequence tokens excluded. Raises InvalidRequest if that takes too much
        work.

        Where no token of the model fits, none may follow, and the matcher cannot be used any more.
        """
        data = self._matcher.compute_bitmask()
        if self._matcher.is_error() and self._matcher.get_error().startswith(_DEAD_END):
            return np.zeros_like(self._not_eos)
        self._check()
        return np.frombuffer(data, dtype=np.uint8)[: len(self._not_eos)] & self._not_eos

    def forced(self) -> list[int]:
        """Return the tokens that spell the text that must follow, in the tokenizer's own spelling; empty if there is a
        choice.
        """
        return self._matcher.compute_ff_tokens()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(
                f"structured_outputs takes too much work to follow ({first_line(self._matcher.get_error())}); simplify it",
                "structured_outputs",
            )


class Grammar:
    """A compiled grammar, which any number of outputs follow. Safe for use from any thread.

    Every output has a lexer of its own, as in vLLM and SGLang: copies of a matcher share the states of one lexer, and a lock
    that llguidance holds for a whole mask, so that one output could end or stall another one.
    """

    def __init__(self, compile_matcher: Callable[[], Matcher]) -> None:
        """Compile it. Raises InvalidRequest."""
        self._compile_matcher = compile_matcher
        self._unused = [compile_matcher()]
        first = self._unused[0].fork()  # may take seconds to fail, which no step of the engine must wait for
        for byte in np.flatnonzero(first.mask())[:1].tolist():
            bits = int(first.mask()[byte])
            first.consume([8 * byte + (bits & -bits).bit_length() - 1])

    def matcher(self) -> Matcher:
        """Return a matcher before the first token, with a lexer that no other one has."""
        try:
            return self._unused.pop()
        except IndexError:
            return self._compile_matcher()

    def followed(self, output: Sequence[int]) -> Matcher:
        """Return a matcher behind the output that a request brings along. Raises InvalidRequest if it does not match."""
        matcher, late_at = self.matcher(), time.thread_time() + FOLLOW_SECONDS
        for start in range(0, len(output), _FOLLOWED_AT_ONCE):
            tokens = output[start : start + _FOLLOWED_AT_ONCE]
            if matcher.consume(tokens) < len(tokens):
                reason = "structured_outputs does not match the tokens that the request brought along as its output"
                raise InvalidRequest(reason, "structured_outputs")
            if time.thread_time() > late_at:
                reason = f"structured_outputs takes too much work to follow (more than {FOLLOW_SECONDS:g} s); simplify it"
                raise InvalidRequest(reason, "structured_outputs")
        return matcher


@dataclass(frozen=True)
class OutputMatchers:
    """Matchers that follow one output.

    Attributes:
        committed: behind its committed tokens.
        drafted: the same place, for draft trees; None without them. It has a lexer of its own, so that drafts use up
            nothing that the output needs.
    """

    committed: Matcher
    drafted: Matcher | None = None


@dataclass(eq=False)
class _Job(Generic[ResultT]):
    """Work that waits for the turn of its tenant.

    Attributes:
        seconds: processor time that it may take.
        is_new: of a new grammar.
    """

    function: Callable[[], ResultT]
    seconds: float
    is_new: bool = False
    future: Future[ResultT] = field(default_factory=Future)


class GrammarCompiler:
    """Compiler of grammars for one model, with threads of its own, which keeps the latest ones. Safe for use from any
    thread.

    Tenants take turns, and none has all threads: what one of them asks for delays no other.

    Args:
        model: folder or hub id of the tokenizer.
        vocab_size: of its logits.
        whitespace_pattern: of constraints that name none, as in StructuredOutputs.
    """

    def __init__(
        self,
        model: str,
        vocab_size: int,
        eos_ids: frozenset[int],
        whitespace_pattern: str = EngineConfig.json_whitespace_pattern,
    ) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._whitespace_pattern = whitespace_pattern
        self._not_eos = ~bits_of(self._eos_ids, vocab_size) & bits_of(range(vocab_size), vocab_size)
        self._num_threads = min(4, max(2, os.cpu_count() or 1))
        self._calls = BoundedCalls(self._num_threads, "grammar-compiler", COMPILE_STACK)
        self._waiters = ThreadPoolExecutor(self._num_threads, thread_name_prefix="grammar-deadline")
        self._lock = threading.Lock()
        self._vocabulary: Future[tuple[GrammarTrials, LLTokenizer]] | None = None
        self._grammars: OrderedDict[StructuredOutputs, _Job[Grammar]] = OrderedDict()
        self._cached_length = 0
        self.refused: OrderedDict[bytes, str] = OrderedDict()  # why, by the digest of the constraint
        self._queues: OrderedDict[str, deque[_Job[Any]]] = OrderedDict()  # of the tenants, the next one first
        self.num_running, self.num_late, self._num_following = Counter[str](), Counter[str](), Counter[str]()  # by tenant

    def load(self) -> Future[tuple[GrammarTrials, LLTokenizer]]:
        """Begin to load the model's tokenizer, unless it is loaded or being loaded: 262,144 tokens take seconds.

        Grammars wait for it, and their limits of time do not count it. The future raises InvalidRequest if the model or the
        installation has no structured outputs; then the next call tries again. Raises Unavailable at the process's end.
        """
        with self._lock:
            if self._vocabulary is not None and not (self._vocabulary.done() and self._vocabulary.exception()):
                return self._vocabulary
            loading = self._vocabulary = Future()
        try:
            self._waiters.submit(self._load, loading)
        except RuntimeError as error:
            loading.set_exception(_ending())
            raise _ending() from error
        return loading

    def submit(self, structured: StructuredOutputs, tenant: str = "") -> Future[Grammar]:
        """Return the grammar as soon as it is compiled; equal ones are compiled once. Its constraint must have been checked.

        The future raises InvalidRequest for what cannot be compiled, and if llguidance is not installed.
        Raises Overloaded while too much waits, and the tenant has its share of it.
        """
        if structured.whitespace_pattern is None:
            structured = replace(structured, whitespace_pattern=self._whitespace_pattern)
        self.load()
        with self._lock:
            job = self._grammars.get(structured)
            if job is None and (reason := self.refused.get(_digest(structured))) is not None:
                self.refused.move_to_end(_digest(structured))
                refused = Future[Grammar]()
                refused.set_exception(CostlyGrammar(reason, "structured_outputs"))
                return refused
            if job is None:
                waiting = {other: sum(job.is_new for job in queue) for other, queue in self._queues.items()}
                _check_share(waiting, tenant, MAX_COMPILING, "grammars wait to be compiled")
                job = self._grammars[structured] = _Job(partial(self._compile, structured), COMPILE_SECONDS, is_new=True)
                job.future.add_done_callback(partial(self._keep, structured))
                self._cached_length += _length(structured)
            else:
                self._grammars.move_to_end(structured)
                if job.future.running() or job.future.done() or job in self._queues.get(tenant, ()):
                    return job.future
        self._enqueue(job, tenant)  # maybe in another tenant's queue too
        return job.future

    def matchers(
        self, structured: StructuredOutputs, output: Sequence[int], has_drafts: bool, tenant: str = ""
    ) -> Future[OutputMatchers]:
        """Return what follows one request, behind the output that it brings along. Raises as `submit`."""
        with self._lock:
            _check_share(self._num_following, tenant, MAX_FOLLOWING, "outputs wait to be followed")
        grammar = self.submit(structured, tenant)
        with self._lock:
            self._num_following[tenant] += 1
        job = _Job(lambda: _matchers(grammar.result(), output, has_drafts), COMPILE_SECONDS + 2 * FOLLOW_SECONDS)

        def follow(_: Future[Grammar]) -> None:
            self._enqueue(job, tenant)  # it raises what the grammar raises

        grammar.add_done_callback(follow)
        return job.future

    def _enqueue(self, job: _Job[Any], tenant: str) -> None:
        with self._lock:
            self._queues.setdefault(tenant, deque()).append(job)
        self._run_next_soon()

    def _run_next_soon(self) -> None:
        try:
            self._waiters.submit(self._run_next)
        except RuntimeError:  # the interpreter exits: nothing is compiled any more
            with self._lock:
                jobs = [job for queue in self._queues.values() for job in queue]
                self._queues.clear()
            for job in jobs:
                if not job.future.done() and job.future.set_running_or_notify_cancel():
                    job.future.set_exception(_ending())

    def _run_next(self) -> None:
        """Run the first job of the tenant whose turn it is, unless those that wait have all they may have."""
        with self._lock:
            found = self._next()
        if found is None:
            return
        tenant, job = found
        call, is_late = self._calls.submit(job.function), False
        try:
            job.future.set_result(self._calls.result(call, job.seconds))
        except TimeoutError:
            is_late = True
            reason = f"structured_outputs takes more than {job.seconds:g} s to compile; simplify it"
            job.future.set_exception(InvalidRequest(reason, "structured_outputs"))
        except Exception as error:
            job.future.set_exception(error)
        with self._lock:
            self.num_running[tenant] -= 1
            self.num_running += Counter()  # only tenants with some are kept
            if is_late:
                self.num_late[tenant] += 1
        if is_late:
            call.add_done_callback(partial(self._late_ended, tenant))
        self._run_next_soon()  # this tenant may have been the only one that waits

    def _next(self) -> tuple[str, _Job[Any]] | None:
        """Take the next job from the queues."""
        while (tenant := next(filter(self._may_run, self._queues), None)) is not None:
            job = self._queues[tenant].popleft()
            self._queues.move_to_end(tenant)
            if not self._queues[tenant]:
                del self._queues[tenant]
            if not job.is_new:
                self._num_following[tenant] -= 1
                self._num_following += Counter()
            # else it was in the queue of another tenant too, or is not wanted any more
            if not job.future.running() and not job.future.done() and job.future.set_running_or_notify_cancel():
                self.num_running[tenant] += 1
                return tenant, job
        return None

    def _may_run(self, tenant: str) -> bool:
        is_loaded = self._vocabulary is not None and self._vocabulary.done()
        has_thread = self.num_running[tenant] < self._num_threads - 1 and self.num_late[tenant] < MAX_LATE
        return is_loaded and has_thread

    def _late_ended(self, tenant: str, call: Call[object]) -> None:
        with self._lock:
            self.num_late[tenant] -= 1
            self.num_late += Counter()
        self._run_next_soon()

    def _keep(self, structured: StructuredOutputs, future: Future[Grammar]) -> None:
        """Forget what failed, but not what a process died of, and the oldest ones beyond the limits."""
        error = future.exception()
        with self._lock:
            if error is not None and self._grammars.pop(structured, None) is not None:
                self._cached_length -= _length(structured)
            if isinstance(error, CostlyGrammar):
                self.refused[_digest(structured)] = str(error)
                if len(self.refused) > MAX_REFUSED:
                    self.refused.popitem(last=False)
            while len(self._grammars) > MAX_CACHED or self._cached_length > MAX_CACHED_LENGTH:
                oldest = next((key for key, job in self._grammars.items() if job.future.done()), None)
                if oldest is None:
                    return
                del self._grammars[oldest]
                self._cached_length -= _length(oldest)

    def _compile(self, structured: StructuredOutputs) -> Grammar:
        assert self._vocabulary is not None  # `_may_run` waits for it
        trials, vocabulary = self._vocabulary.result()
        text = trials.translate(structured, COMPILE_SECONDS)
        from llguidance import LLMatcher

        def compile_matcher() -> Matcher:
            matcher = LLMatcher(vocabulary, text, log_level=0, limits=parser_limits())
            if matcher.is_error():
                raise InvalidRequest(compile_error(matcher.get_error()), "structured_outputs")
            return Matcher(matcher, self._not_eos)

        return Grammar(compile_matcher)

    def _load(self, loading: Future[tuple[GrammarTrials, LLTokenizer]]) -> None:
        """Load the tokenizer, then run what waits for it."""
        try:
            loading.set_result(self._loaded())
        except Exception as error:
            loading.set_exception(error)
        with self._lock:
            num_waiting = sum(map(len, self._queues.values()))
        for _ in range(num_waiting):
            self._run_next_soon()

    def _loaded(self) -> tuple[GrammarTrials, LLTokenizer]:
        """Return the model's vocabulary, for trials and for matchers. Raises InvalidRequest."""
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            reason = f"structured_outputs needs llguidance, which is missing here; run: {install_command('structured')}"
            raise InvalidRequest(reason, "structured_outputs") from error
        if not self._eos_ids:
            raise InvalidRequest("the model has no end-of-sequence token, which structured_outputs needs")
        try:
            tokenizer = load_tokenizer(self._model).tokenizer
            size = max(self._vocab_size, tokenizer.get_vocab_size())
            special = {id_: str(one) for id_, one in tokenizer.get_added_tokens_decoder().items() if one.special}
            trials = GrammarTrials(tokenizer.token_to_id, special, size, self._eos_ids)
            return trials, LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=self._eos_ids)
        except (CheckpointError, ValueError, RuntimeError) as error:
            reason = f"structured_outputs is not supported with this model's tokenizer: {first_line(str(error))}"
            raise InvalidRequest(reason, "structured_outputs") from error


def _ending() -> Unavailable:
    return Unavailable("the process ends, so no grammar is compiled any more")


def _check_share(waiting: Mapping[str, int], tenant: str, most: int, what: str) -> None:
    """Raises Overloaded if `most` wait and the tenant has its share of them. waiting: by tenant."""
    num_waiting, num_tenants = sum(waiting.values()), len(waiting.keys() | {tenant})
    if num_waiting >= most and waiting.get(tenant, 0) >= most // num_tenants:
        raise Overloaded(f"{num_waiting} {what} already; try again in 1 s", 1.0)


def _matchers(grammar: Grammar, output: Sequence[int], has_drafts: bool) -> OutputMatchers:
    """Return both matchers behind the output; a first mask that takes long is not left to a step of the engine."""
    committed = grammar.followed(output)
    committed.mask()
    return OutputMatchers(committed, grammar.followed(output) if has_drafts else None)


def _digest(structured: StructuredOutputs) -> bytes:
    return hashlib.sha256(json.dumps(vars(structured)).encode()).digest()


def _length(structured: StructuredOutputs) -> int:
    texts = (structured.json, structured.regex, structured.grammar, structured.structural_tag, *structured.choice)
    return sum(map(len, texts))
