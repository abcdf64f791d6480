"""Tries new grammars in child processes, which may die of them, before the process of an engine compiles them.

A grammar of a stranger can overflow a stack or take all memory, which ends a process whatever language guards it. Decision
0031 has the bounds, and why a grammar that leaves a child alive leaves its parent alive too.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from eyas.api.request import StructuredOutputs
from eyas.errors import InvalidRequest, Unavailable, first_line
from eyas.grammar.structural_tags import grammar_to_lark, json_options, structural_tag_to_lark
from eyas.text.schema_keywords import known_schema

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

# Bytes of the stacks that grammars are tried on and compiled on; only what is used takes memory. The chains that fit into
# a constraint take up to 64 MiB, and what passes the trial has a quarter more behind it.
TRIAL_STACK, COMPILE_STACK = 2**28, 2**28 + 2**26
# Address space of a child. It needs some 400 MiB with its stack, and the largest schema 100 MiB more.
TRIAL_MEMORY = 2**30
# Wall time after which a child is given up. Its limit is one of processor time, so that only a busy machine is the cause.
WALL_SECONDS = 120.0
# Signals that end a process for what it does itself.
_FAULTS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP}
# Limits of llguidance: work to build a lexer, and to compute one mask, about 15 ms each on one core; and a lexer's states:
# 20,000 of them take 10 to 22 MiB.
INITIAL_FUEL, STEP_FUEL, LEXER_STATES = 1_000_000, 200_000, 20_000
# Parser items for one mask, and behind one token. To add a row of n items takes up to n cubed steps: 50 ms for 500 of them.
STEP_ITEMS, ROW_ITEMS = 10_000, 500
_NAMED_TOKEN = re.compile(r'"token"\s*:\s*("(?:[^"\\]|\\.)*")')

_log = logging.getLogger(__name__)


class CostlyGrammar(InvalidRequest):
    """A grammar that a process died of, for stack or memory. It is not tried again."""


@dataclass(frozen=True)
class TrialProcess:
    """A process that tries grammars, and the connection to it."""

    process: subprocess.Popen[bytes]
    connection: Connection[bytes, bytes]


class GrammarTrials:
    """Processes that translate grammars, and compile them once. Safe for use from any thread.

    They know a vocabulary of single bytes, so that one starts in .2 s and takes 45 to 70 MiB whatever the model.

    Args:
        token_id: finds a token of the model by its text.
        special_tokens: the special ones.
        size: number of all.
    """

    def __init__(
        self,
        token_id: Callable[[str], int | None],
        special_tokens: Mapping[int, str],
        size: int,
        eos_ids: Sequence[int],
    ) -> None:
        self._token_id = token_id
        special = {token: text for token, text in special_tokens.items() if token < size}
        self._setup = json.dumps({"size": size, "eos": list(eos_ids), "special": special}).encode()
        self.idle = deque[TrialProcess]()
        weakref.finalize(self, _close, self.idle)

    def translate(self, structured: StructuredOutputs, seconds: float) -> str:
        """Return a constraint in llguidance's form, after a child has compiled it and taken a first token.

        Raises InvalidRequest for what cannot be compiled or needs more than `seconds` of processor time, CostlyGrammar if
        the child dies of it, and Unavailable if no child starts or it is lost otherwise.
        """
        names = set(_NAMED_TOKEN.findall(structured.structural_tag))
        try:
            tokens = {text: self._token_id(text) for text in map(json.loads, names)}
        except ValueError as error:  # half a surrogate pair, or no text of JSON
            reason = f"structured_outputs names a token that cannot be read: {first_line(str(error))}"
            raise InvalidRequest(reason, "structured_outputs") from error
        asked = {"structured": vars(structured), "tokens": tokens, "seconds": seconds}
        child = self.take_child()
        try:
            child.connection.send_bytes(json.dumps(asked).encode())
            if not child.connection.poll(WALL_SECONDS):
                raise EOFError
            answer: dict[str, str] = json.loads(child.connection.recv_bytes())
        except (OSError, EOFError):
            raise error_of(child, seconds) from None
        self.idle.append(child)
        if "error" in answer:
            raise InvalidRequest(answer["error"], "structured_outputs")
        return answer["text"]

    def take_child(self) -> TrialProcess:
        """Return a child that does nothing, a new one if there is none."""
        while self.idle:
            try:
                child = self.idle.pop()
            except IndexError:
                break
            if child.process.poll() is None:
                return child
            child.connection.close()
        try:
            child = start_child()
        except OSError as error:
            raise Unavailable(f"cannot start a process that tries new grammars: {error}") from error
        try:
            child.connection.send_bytes(self._setup)
            if not child.connection.poll(WALL_SECONDS):
                raise EOFError
            child.connection.recv_bytes()
        except (OSError, EOFError):
            _close([child])
            reason = f"the process that tries new grammars does not start (exit code {child.process.returncode})"
            raise Unavailable(f"{reason}: raise the limits of memory and processes (`ulimit -v`, `ulimit -u`)") from None
        return child


def start_child() -> TrialProcess:
    """Start a child. Raises OSError."""
    ours, theirs = Pipe()
    with theirs:
        command = f"from eyas.grammar.trial import serve; serve({theirs.fileno()})"
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        except OSError:
            ours.close()
            raise
    return TrialProcess(process, ours)


def error_of(child: TrialProcess, seconds: float) -> InvalidRequest | Unavailable:
    """Return the error for a child that gave no answer, and see it dead."""
    child.connection.close()
    is_hung = False
    try:
        code = child.process.wait(1.0)
    except subprocess.TimeoutExpired:
        is_hung = True
        child.process.kill()
        code = child.process.wait()
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    if -code == signal.SIGPROF:
        return InvalidRequest(
            f"structured_outputs takes more than {seconds:g} s to compile; simplify it", "structured_outputs"
        )
    _log.warning("The trial of a new grammar ended: %s.", name)
    if is_hung:
        return Unavailable(f"no answer for {WALL_SECONDS:g} s from the process that tries new grammars; try again")
    if code >= 0 or -code in _FAULTS:  # of its own accord: all memory is taken, or llguidance panics
        reason = f"structured_outputs takes too much stack or memory to compile ({name})"
        return CostlyGrammar(f"{reason}; shorten its chains of references or rules", "structured_outputs")
    return Unavailable(f"the process that tries new grammars was ended ({name}); send the request again")


def _close(children: Sequence[TrialProcess] | deque[TrialProcess]) -> None:
    """End children: they do so on their own when the connection closes."""
    for child in children:
        child.connection.close()
    for child in children:
        try:
            child.process.wait(1.0)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


# What runs in a child


def serve(file: int) -> None:
    """Try the grammars that come over a connection until its other end closes. file: its descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group; the parent decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (TRIAL_MEMORY if most < 0 else min(most, TRIAL_MEMORY), most))
    threading.stack_size(TRIAL_STACK)
    thread = threading.Thread(target=_serve, args=(Connection(file),))
    thread.start()
    thread.join()


def _serve(connection: Connection[bytes, bytes]) -> None:
    vocabulary = _byte_vocabulary(**json.loads(connection.recv_bytes()))
    try:
        connection.send_bytes(b"ready")
        while True:
            asked = json.loads(connection.recv_bytes())
            signal.setitimer(signal.ITIMER_PROF, asked["seconds"])  # its signal has no handler: it ends the process
            answer = _tried(StructuredOutputs(**asked["structured"]), asked["tokens"], vocabulary)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(json.dumps(answer).encode())
    except (EOFError, OSError):
        return


def _tried(structured: StructuredOutputs, tokens: Mapping[str, int], vocabulary: LLTokenizer) -> dict[str, str]:
    """Return the translation of a grammar that compiles, or the error."""
    from llguidance import LLMatcher

    try:
        text = _grammar_text(structured, tokens)
    except InvalidRequest as error:
        return {"error": str(error)}
    except Exception as error:  # a schema with half a surrogate pair, a number that is none, too deep a recursion
        return {"error": f"structured_outputs cannot be read: {first_line(str(error) or type(error).__name__)}"}
    matcher = LLMatcher(vocabulary, text, log_level=0, limits=parser_limits())
    if matcher.is_error():
        return {"error": compile_error(matcher.get_error())}
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    if allowed and not matcher.is_error():
        matcher.try_consume_tokens([(allowed & -allowed).bit_length() - 1])
    return {"text": text}


class _Bytes:
    """Single bytes as tokens, behind the special tokens of a model, in the form that llguidance's TokenizerWrapper takes.

    Args:
        size: tokens of the model, which may be named by their numbers.
        special: texts by number.
    """

    bos_token_id = None

    def __init__(self, size: int, eos: Sequence[int], special: Mapping[str, str]) -> None:
        self._size = size
        self.eos_token_id = eos[0]
        self.special_token_ids = sorted(map(int, special))
        self.tokens = [b""] * size + [bytes([byte]) for byte in range(256)]
        for token, text in special.items():
            self.tokens[int(token)] = text.encode()

    def __call__(self, text: bytes) -> list[int]:
        return [self._size + byte for byte in text]


def _byte_vocabulary(size: int, eos: Sequence[int], special: Mapping[str, str]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes(size, eos, special)), eos_token=list(eos))


def _grammar_text(structured: StructuredOutputs, tokens: Mapping[str, int]) -> str:
    """Return the grammar in llguidance's form. tokens: by their texts. Raises InvalidRequest."""
    from llguidance import LLMatcher

    (name,) = structured.constraints
    if name in ("json", "json_object"):
        schema = json.dumps(known_schema(json.loads(structured.json or '{"type": "object"}')))
        options: Any = json_options(structured.whitespace_pattern or "")
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    if name == "regex":
        return LLMatcher.grammar_from_regex(structured.regex)
    if name == "choice":
        texts = " | ".join(map(json.dumps, structured.choice))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")  # one item of the parser for all of them
    if name == "structural_tag":
        lark = structural_tag_to_lark(structured.structural_tag, structured.whitespace_pattern or "", tokens.get)
        return LLMatcher.grammar_from_lark(lark)
    return LLMatcher.grammar_from_lark(grammar_to_lark(structured.grammar))


def parser_limits() -> LLParserLimits:
    """Return the limits of work for one grammar."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=INITIAL_FUEL,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=STEP_ITEMS,
        max_items_in_row=ROW_ITEMS,
        max_lexer_states=LEXER_STATES,
        verbose_errors=False,
    )


def compile_error(message: str) -> str:
    """Return the first line of llguidance's message, and what is wrong with a regular expression, which stands below it."""
    below: list[str] = message.strip().splitlines()[1:]
    detail = next((line.removeprefix("error: ") for line in below if line.startswith("error: ")), "")
    return f"structured_outputs cannot be compiled: {first_line(message)} {detail[:200]}".rstrip()
