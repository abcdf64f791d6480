"""Grammars are compiled once, in bounded time, and followed token by token."""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.api.request import StructuredOutputs
from eyas.errors import CheckpointError, InvalidRequest, Overloaded
from eyas.grammar import compiler as grammar
from eyas.grammar.compiler import MAX_CACHED, MAX_COMPILING, GrammarCompiler, Matcher
from eyas.grammar.timed_calls import BoundedCalls
from eyas.grammar.trial import CostlyGrammar
from eyas.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.tiers import tiered
from tests.support.tiny import DEMO

TARGET = str(DEMO / "target")
CALL = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TAGS: list[dict[str, Any]] = [
    {"type": "tag", "begin": f"<call={name}>", "content": {"type": "json_schema", "json_schema": CALL}, "end": "</call>"}
    for name in ("f", "g")
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TARGET, 4096, frozenset({1}))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TARGET)


def accepts(matcher: Matcher, tokenizer: Tokenizer, text: str) -> bool:
    ids = tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.consume(ids) == len(ids) and matcher.is_accepting


def tag(format_: dict[str, Any]) -> StructuredOutputs:
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": format_})


TEXT, SLASH = {"type": "any_text"}, {"type": "const_string", "value": "/"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<call="], "tags": TAGS}
ACCEPTED: list[tuple[StructuredOutputs, list[str], list[str]]] = [
    (StructuredOutputs(json=CALL), ['{"x": 1}', '{\n "x":-7 }'], ['{"x": "1"}', "{}", '{"x": 1, "y": 2}']),
    (StructuredOutputs(json=CALL, whitespace_pattern=""), ['{"x":1}'], ['{"x": 1}']),
    (StructuredOutputs(json_object=True), ['{"a": [1, {"b": null}]}', "{}"], ["[1]", "1"]),
    (StructuredOutputs(regex="^[a-c]+(/|x)$"), ["abc/", "cx"], ["abc", "d/"]),
    (StructuredOutputs(choice=("yes", 'n"o\n')), ["yes", 'n"o\n'], ["no", "yesyes"]),
    (StructuredOutputs(grammar='root ::= "a" b{2,3}\nb ::= [0-9] | "x"'), ["a1x", "axxx"], ["a1", "b11"]),
    (StructuredOutputs(grammar=r'root ::= "\x41\u0042" [\u0430-\u044f\x22]'), ["ABж", 'AB"'], ["ABz", "x41"]),
    (StructuredOutputs(grammar=r'root ::= "\\u0041\U0001F600" [\u005d\u000a]'), ["\\u0041😀]", "\\u0041😀\n"], ["A😀]"]),
    (tag(TAGS[0]), ['<call=f>{"x": 1}</call>'], ["", '<call=g>{"x": 1}</call>', "<call=f>{}</call>"]),
    (tag({"type": "or", "elements": TAGS}), ['<call=g>{"x": 1}</call>'], ["<call=h>"]),
    (tag(TRIGGERED), ["", "a <cal", 'a<call=f>{"x": 1}</call>b<call=g>{"x": 2}</call>'], ["<call=h>x", "<call=f>x</call>"]),
    (tag(TRIGGERED | {"at_least_one": True}), ['<call=f>{"x": 1}</call> and'], ["", 'a<call=f>{"x": 1}</call>']),
    (tag(TRIGGERED | {"stop_after_first": True}), ['a<call=f>{"x": 1}</call>', "a"], ['<call=f>{"x": 1}</call>b']),
    (
        tag({"type": "tags_with_separator", "tags": TAGS, "separator": ", "}),
        ["", '<call=f>{"x": 1}</call>, <call=g>{"x": 1}</call>'],
        ['<call=f>{"x": 1}</call><call=g>{"x": 1}</call>'],
    ),
    (
        tag({"type": "sequence", "elements": [TEXT, SLASH, {"type": "regex", "pattern": "a/?"}]}),
        ["so /a", "/a/"],
        ["so a"],
    ),
    (tag({"type": "tag", "begin": "<t>", "content": TEXT, "end": ["</t>", "."]}), ["<t>a b</t>", "<t>."], ["<t>a", "<t>.x"]),
    (tag({"type": "any_text", "excludes": ["no", "/"]}), ["yes, n o"], ["say no", "a/b"]),
    (tag({"type": "repeat", "min": 1, "max": 2, "content": TAGS[0]}), ['<call=f>{"x": 1}</call>' * 2], [""]),
    (tag({"type": "star", "content": {"type": "const_string", "value": "ab"}}), ["", "abab"], ["aba"]),
]  # fmt: skip


@pytest.mark.parametrize(("structured", "good", "bad"), ACCEPTED)
def test_a_constraint_accepts_what_it_should(
    structured: StructuredOutputs, good: list[str], bad: list[str], compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiler.submit(structured).result()
    for text in good:
        assert accepts(grammar.matcher(), tokenizer, text), text
    for text in bad:
        assert not accepts(grammar.matcher(), tokenizer, text), text


REFUSED: list[tuple[StructuredOutputs, str]] = [
    (StructuredOutputs(json={"type": "nonsense"}), "cannot be compiled"),
    (StructuredOutputs(json={"not": {"type": "string"}}), "not"),
    (StructuredOutputs(json={"const": "\ud800"}), "structured_outputs cannot be read"),
    (StructuredOutputs(json={"$ref": "http://127.0.0.1/schema"}), "not present in a registry"),
    (StructuredOutputs(regex="(a"), "cannot be compiled: .* regex parse error: unclosed group$"),
    (
        StructuredOutputs(json={"type": "string", "pattern": "a(?=b)"}),
        "cannot be compiled: .* look-around.* is not supported$",
    ),
    (StructuredOutputs(grammar="root ::= other"), "grammar cannot be read: Rule 'other' not found"),
    (StructuredOutputs(grammar=r'root ::= "\uD83D"'), r"grammar cannot be read: \\uD83D names no character"),
    (StructuredOutputs(grammar=r'root ::= "\U00110000"'), r"grammar cannot be read: \\U00110000 names no character"),
    (StructuredOutputs(grammar="root = ["), "cannot be"),
    (StructuredOutputs(structural_tag={}), "must be an object of the form"),
    (tag({"type": "xml"}), "its type must be one of const_string"),
    (tag({"type": "const_string"}), "has no value"),
    (tag({"type": "any_text", "max_tokens": 5}), "'max_tokens' of a format of the type 'any_text' is not supported"),
    (tag({"type": "json_schema", "json_schema": {}, "style": "minimax_xml"}), "style 'minimax_xml'"),
    (tag({"type": "sequence", "elements": [TEXT, TEXT]}), "followed by a const_string"),
    (tag(TRIGGERED | {"triggers": ["x"]}), "0 triggers begin the tag"),
    (tag({"type": "token", "token": "<|none|>"}), "not in the model's vocabulary"),
    (tag({"type": "repeat", "min": 3, "max": 2, "content": TEXT}), "min 3 and max 2"),
]


@pytest.mark.parametrize(("structured", "reason"), REFUSED)
def test_a_constraint_that_does_not_compile_is_refused(
    structured: StructuredOutputs, reason: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        compiler.submit(structured).result()
    assert caught.value.param == "structured_outputs"


def chain(number: int, rule: str) -> str:
    """Rules that each name the next one twice."""
    rules = [f"r{i} ::= {rule.format(i + 1)}" for i in range(number)]
    return "\n".join(["root ::= r0", *rules, f'r{number} ::= "a"'])


def nested_tags(depth: int) -> StructuredOutputs:
    """Tags inside of one another; each level needs at least one."""
    format_: dict[str, Any] = {"type": "any_text"}
    for _ in range(depth):
        inner = {"type": "tag", "begin": "<a>", "content": format_, "end": "</a>"}
        format_ = {"type": "triggered_tags", "triggers": ["<a"], "tags": [inner], "at_least_one": True}
    return tag(format_)


HOSTILE = {
    "nested repeats": StructuredOutputs(regex="((((a{0,50}){0,50}){0,50}){0,50}){0,50}"),
    "long repeats": StructuredOutputs(regex="(a|b){0,1000000}"),
    "ambiguous": StructuredOutputs(regex="(" + "(a|aa)+" * 100 + ")"),
    "exponential": StructuredOutputs(regex="(.*a.{200})"),
    "unicode": StructuredOutputs(regex=r"(\w|\d|[^\x00-\x7f]){1,2000}"),
    "endless reference": StructuredOutputs(json={"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "long text": StructuredOutputs(json={"type": "string", "minLength": 1000000, "maxLength": 1000000000}),
    "alternatives": StructuredOutputs(json={
        "allOf": [{"anyOf": [{"properties": {f"{name}{i}": {"type": "string"}}} for name in "pq"]} for i in range(24)]
    }),
    "wide": StructuredOutputs(json={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}),
    "enumeration": StructuredOutputs(json={"enum": [f"value-{i * 7919 % 10007}" for i in range(5500)]}),
    "ambiguous rules": StructuredOutputs(grammar='root ::= s\ns ::= s s s | s s | "a" | "b" | ""'),
    "doubling": StructuredOutputs(grammar=chain(40, "r{0} r{0}")),
    "empty rules": StructuredOutputs(grammar=chain(30, 'r{0} r{0} | ""')),
    "optional texts": StructuredOutputs(grammar="root ::= " + '"a"? ' * 6000),
    "nested tags": nested_tags(20),
    "deep": StructuredOutputs(grammar="root ::= " + "(" * 20000 + '"a"' + ")" * 20000),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", tiered(HOSTILE, HOSTILE.keys() - {"wide"}))
def test_a_hostile_constraint_takes_bounded_time(kind: str, compiler: GrammarCompiler) -> None:
    """It is refused, or its masks are: seconds of work become milliseconds. CPU time, because the machine is shared."""
    started, slowest = time.process_time(), 0.0
    try:
        matcher = compiler.submit(HOSTILE[kind]).result().matcher()
        for _ in range(120):
            before = time.thread_time()
            try:
                allowed = matcher.mask()
            finally:
                slowest = max(slowest, time.thread_time() - before)
            ids = [8 * int(byte) + bit for byte in allowed.nonzero()[0][:1] for bit in range(8) if allowed[byte] >> bit & 1]
            if not ids or not matcher.consume(ids[:1]):
                break
    except InvalidRequest:
        pass
    assert time.process_time() - started < 8
    assert slowest < 0.3


def test_equal_constraints_are_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.submit(StructuredOutputs(regex="once+"))
    assert compiler.submit(StructuredOutputs(regex="once+")) is first
    assert compiler.submit(StructuredOutputs(regex="twice+")) is not first


def wide(number: int) -> StructuredOutputs:
    """The first mask takes work that grows with the cube of `number`: seconds for 500."""
    rules = [f't{i} ::= "a" | "a" "b"' for i in range(number)]
    start = " | ".join(f"t{i} root" for i in range(number))
    return StructuredOutputs(grammar="\n".join([f'root ::= {start} | ""', *rules]))


@contextmanager
def loading(compiler: GrammarCompiler) -> Iterator[None]:
    """Lets the compiler load its tokenizer until the end of the block."""
    vocabulary = compiler.load().result()
    later = compiler._vocabulary = Future()
    yield
    later.set_result(vocabulary)
    for queue in list(compiler._queues.values()):
        for _ in list(queue):
            compiler._run_next_soon()


def test_a_tenant_with_many_grammars_delays_no_other() -> None:
    compiler, done = GrammarCompiler(TARGET, 4096, frozenset({1})), list[str]()
    trials, _ = compiler.load().result()
    trials.idle.extend([trials.take_child() for _ in range(2)])  # one takes as long to start as many grammars to compile
    futures = []

    def fill() -> None:
        for number in range(2 * MAX_COMPILING):
            futures.append(compiler.submit(StructuredOutputs(regex=f"greedy{number}"), "greedy"))

    with loading(compiler):  # nothing is compiled before all have been submitted
        with pytest.raises(Overloaded, match="grammars wait to be compiled already"):
            fill()
        for number in range(3):
            futures.append(compiler.submit(StructuredOutputs(regex=f"modest{number}"), "modest"))
            futures[-1].add_done_callback(lambda _: done.append("modest"))
        futures[-4].add_done_callback(lambda _: done.append("greedy"))
    for future in futures:
        future.result()
    assert len(futures) >= MAX_COMPILING + 3
    assert done == ["modest"] * 3 + ["greedy"]


def test_outputs_wait_up_to_a_limit_and_may_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, known = GrammarCompiler(TARGET, 4096, frozenset({1})), StructuredOutputs(regex="first")
    compiler.submit(known).result()
    monkeypatch.setattr(grammar, "MAX_FOLLOWING", sys.getrecursionlimit())
    with loading(compiler):
        outputs = [compiler.matchers(known, (), has_drafts=False) for _ in range(grammar.MAX_FOLLOWING)]
        with pytest.raises(Overloaded, match="outputs wait to be followed already"):
            compiler.matchers(known, (), has_drafts=False)
        assert all(output.cancel() for output in outputs[:-1])
    assert outputs[-1].result(timeout=30).committed.mask().any()
    assert compiler.matchers(known, (), has_drafts=False).result(timeout=30)


def test_a_late_grammar_is_refused_and_takes_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(TARGET, 4096, frozenset({1}))
    compiler.submit(StructuredOutputs(regex="first")).result()
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 0.1)
    slow = [compiler.submit(wide(220 + number)) for number in range(3)]
    other = compiler.submit(StructuredOutputs(regex="other"), "other")
    for future in slow:
        with pytest.raises(InvalidRequest, match=r"takes more than 0\.1 s to compile"):
            future.result()
    assert other.result().matcher().mask().any()
    assert not compiler.submit(wide(220)).done(), "a busy machine may have been the cause, so it is tried again"


def test_the_oldest_grammars_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_CACHED", 4)
    compiler = GrammarCompiler(TARGET, 4096, frozenset({1}))
    first = compiler.submit(StructuredOutputs(regex="first"))
    for number in range(5):
        compiler.submit(StructuredOutputs(regex=f"a{number}")).result()
    assert compiler.submit(StructuredOutputs(regex="first")) is not first


def test_costly_grammars_and_good_ones_evict_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, costly = GrammarCompiler(TARGET, 4096, frozenset({1})), StructuredOutputs(regex="costly")
    first = compiler.submit(StructuredOutputs(regex="first"), "tenant")
    first.result()
    monkeypatch.setattr(grammar, "MAX_REFUSED", 2)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_compile", refuse)
        for number in range(MAX_CACHED):
            with pytest.raises(CostlyGrammar):
                compiler.submit(StructuredOutputs(regex=f"costly{number}")).result()
        compiler.submit(costly).exception()
    assert compiler.submit(StructuredOutputs(regex="first")) is first
    assert compiler.submit(costly).done()
    assert len(compiler.refused) == 2


def refuse(_: StructuredOutputs) -> None:
    raise CostlyGrammar("too costly", "structured_outputs")


def test_tenants_without_grammars_are_forgotten(compiler: GrammarCompiler) -> None:
    for number in range(3):
        compiler.submit(StructuredOutputs(regex=f"of a tenant {number}"), f"tenant {number}").result()
    deadline = time.monotonic() + 10
    while compiler.num_running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not compiler.num_running
    assert not compiler.num_late


def test_threads_for_calls_start_at_once() -> None:
    before = threading.active_count()
    calls = BoundedCalls(3, "sized", 2**20)
    assert threading.active_count() == before + 3
    assert threading.stack_size() == 0
    assert calls.submit(int, "7").result() == 7


def test_an_output_that_fills_its_lexer_ends_no_other(compiler: GrammarCompiler) -> None:
    """Copies of one matcher share the states of its lexer, so that all of them would fail with the first one."""
    rng, found = random.Random(0), compiler.submit(StructuredOutputs(regex="(?s:.*[a-m].{60}.*[n-z].{90}q)")).result()

    def follow(matcher: Matcher, num_tokens: int) -> None:
        for _ in range(num_tokens):
            (allowed,) = np.unpackbits(matcher.mask(), bitorder="little").nonzero()
            matcher.consume([rng.choice(allowed.tolist())])

    other = found.matcher()
    follow(other, 3)
    with pytest.raises(InvalidRequest, match="too many states"):
        follow(found.matcher(), 100)
    follow(other, 3)
    follow(found.matcher(), 3)


EXIT = """
from eyas.grammar import compiler as grammar
from eyas.grammar.timed_calls import BoundedCalls
from eyas.errors import InvalidRequest
from eyas.api.request import StructuredOutputs

compiler = grammar.GrammarCompiler({target!r}, 4096, frozenset({{1}}))
compiler.submit(StructuredOutputs(regex="first")).result()
grammar.COMPILE_SECONDS = 0.02
try:
    compiler.submit(StructuredOutputs(grammar={slow!r})).result()
except InvalidRequest as error:
    print(error)
"""


def test_an_exit_while_a_grammar_compiles_is_silent() -> None:
    script = EXIT.format(target=TARGET, slow=wide(200).grammar)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "takes more than 0.02 s" in ended.stdout
    assert ended.stderr == ""


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    compiler = GrammarCompiler(str(tmp_path), 48, frozenset({1}))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"not supported with this model's tokenizer: no tokenizer\.json"):
            compiler.submit(StructuredOutputs(regex="a")).result()


def test_loading_a_tokenizer_counts_for_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of loading is far above the limit, as with 262,144 tokens; the trial of so small a grammar is far below."""
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 0.5)
    load_tokenizer = grammar.load_tokenizer

    def load_for_long(model: str) -> Tokenizer:
        started = time.thread_time()
        while time.thread_time() < started + 0.8:
            pass
        return load_tokenizer(model)

    monkeypatch.setattr(grammar, "load_tokenizer", load_for_long)
    compiler = GrammarCompiler(TARGET, 4096, frozenset({1}))
    futures = [compiler.submit(StructuredOutputs(json=CALL), f"tenant {number}") for number in range(3)]
    assert all(future.result().matcher().mask().any() for future in futures)


def test_a_tokenizer_is_loaded_once_and_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    load_tokenizer, models = grammar.load_tokenizer, list[str]()

    def load(model: str) -> Tokenizer:
        models.append(model)
        if len(models) == 1:
            raise CheckpointError("not there yet")
        return load_tokenizer(model)

    monkeypatch.setattr(grammar, "load_tokenizer", load)
    compiler = GrammarCompiler(TARGET, 4096, frozenset({1}))
    with pytest.raises(InvalidRequest, match="not there yet"):
        compiler.submit(StructuredOutputs(regex="a")).result()
    for number in range(3):
        compiler.submit(StructuredOutputs(regex=f"a{number}")).result()
    assert len(models) == 2


SPACED = [
    ('{"x":1}', True, True),
    ('{"x": 1}', True, False),
    ('{\n  "x": 1\n}', True, False),
    ('{\r\n\t"x": 1\r\n}', True, False),
    ('{"x":  1}', False, False),
    ('{\n\n"x": 1}', False, False),
    ("{\n" + " " * 22 + '"x": 1}', False, False),
]


@pytest.mark.parametrize(("text", "is_bounded", "is_compact"), SPACED)
@pytest.mark.parametrize("kind", ["json", "structural_tag"])
def test_whitespace_of_json_is_bounded_unless_asked(
    kind: str, text: str, is_bounded: bool, is_compact: bool, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": CALL}}
    given = {kind: json.dumps(CALL if kind == "json" else tag)}

    def fits(pattern: str | None) -> bool:
        found = compiler.submit(StructuredOutputs(**given, whitespace_pattern=pattern)).result()
        return follows(found.matcher(), text, tokenizer)

    assert fits(None) == is_bounded
    assert fits("") == is_compact
    assert fits(r"\s*")


def test_a_compiler_has_a_whitespace_of_its_own(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(TARGET, 4096, frozenset({1}), whitespace_pattern="")
    assert follows(compiler.submit(StructuredOutputs(json=CALL)).result().matcher(), '{"x":1}', tokenizer)
    assert not follows(compiler.submit(StructuredOutputs(json_object=True)).result().matcher(), '{ "x":1}', tokenizer)


def test_a_schema_cannot_bring_whitespace_along(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    schema = json.dumps({**CALL, "x-guidance": {"whitespace_pattern": "x*", "whitespace_flexible": True}})
    found = compiler.submit(StructuredOutputs(json=schema, whitespace_pattern="")).result()
    assert not follows(found.matcher(), '{x"x":1}', tokenizer)


def follows(matcher: Matcher, text: str, tokenizer: Tokenizer) -> bool:
    """Return whether a text of single characters is whole in a grammar."""
    pieces = [tokenizer.encode_rendered(character) for character in text]
    return all(matcher.consume(piece) == len(piece) for piece in pieces) and matcher.is_accepting


def test_forks_go_their_own_ways(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.submit(StructuredOutputs(json=CALL)).result()
    ids = tokenizer.tokenizer.encode('{"x": 12}', add_special_tokens=False).ids
    matchers, masks = [grammar.matcher()], []
    for token in ids:
        masks.append(matchers[-1].mask())
        assert masks[-1][token >> 3] >> (token & 7) & 1
        behind = matchers[-1].behind(token)
        assert behind
        matchers.append(behind)
    assert matchers[-1].is_accepting
    assert not matchers[-1].mask().any(), "only the end may follow, which is no part of the grammar"
    for token, mask, matcher in zip(reversed(ids), reversed(masks), reversed(matchers[:-1]), strict=True):
        assert (matcher.mask() == mask).all(), token
        assert matcher.behind(ids[0]) is None or token == ids[0]
    assert json.loads(tokenizer.decode(ids)) == {"x": 12}


def test_forks_leave_the_masks_of_a_path_as_they_are(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Masks behind paths beside the one that is taken; going back over these paths made llguidance 1.9 mix them up."""
    item = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema = {"type": "object", "properties": {"x": {"type": "array", "items": item}}, "required": ["x"]}
    grammar = compiler.submit(StructuredOutputs(json=schema)).result()
    encode = tokenizer.tokenizer.encode
    begin = encode('{"x": [{"a": 1', add_special_tokens=False).ids
    matcher = grammar.matcher()
    assert matcher.consume(begin) == len(begin)
    beside = [encode(text, add_special_tokens=False).ids for text in (",", ", ", "}", "} ", ",\n", "2", "2 ", ', "')]
    for path in beside:
        fork = matcher.fork()
        if fork.consume(path) == len(path):
            fork.mask()
    for path in beside:
        fork, fresh = matcher.fork(), grammar.matcher()
        fresh.consume(begin)
        assert fork.consume(path) == fresh.consume(path)
        assert (fork.mask() == fresh.mask()).all(), path
