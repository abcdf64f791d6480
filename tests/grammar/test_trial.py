"""Grammars that end the process which compiles them, and what is left of them for an engine."""

import gc
import json
import signal
import subprocess
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path

import pytest

from eyas.api.request import StructuredOutputs
from eyas.api.validation import MAX_SCHEMA_LENGTH
from eyas.errors import EyasError, InvalidRequest, Unavailable
from eyas.grammar import trial as grammar_trial
from eyas.grammar.compiler import GrammarCompiler
from tests.support.tiers import tiered
from tests.support.tiny import DEMO

FIRST = StructuredOutputs(regex="the first that a compiler of these tests tries")
KillTrial = Callable[[signal.Signals], tuple[GrammarCompiler, BaseException | None]]


def new_compiler() -> GrammarCompiler:
    return GrammarCompiler(str(DEMO / "target"), 4096, frozenset({1}))


def references(make: Callable[[dict[str, str]], object]) -> Callable[[int], StructuredOutputs]:
    """Definitions that each refer to the next one."""

    def chain(length: int) -> StructuredOutputs:
        links = {str(i): make({"$ref": f"#/{i + 1}"}) for i in range(length)}
        return StructuredOutputs(json=json.dumps({"$ref": "#/0", **links, str(length): {}}, separators=(",", ":")))

    return chain


def rules(form: str, *, is_tag: bool = False) -> Callable[[int], StructuredOutputs]:
    """Rules that each name the next one. form: one of them, from `{0}` to `{1}`."""

    def chain(length: int) -> StructuredOutputs:
        first = "root ::= r0\n" if "::=" in form else f"start: {form[0]}0\n"
        links = [form.format(i, i + 1) for i in range(length)]
        text = "\n".join([first, *links, form.split("{0}", 1)[0] + f'{length} {"::=" if "::=" in form else ":"} "a"'])
        if is_tag:
            return StructuredOutputs(
                structural_tag={"type": "structural_tag", "format": {"type": "grammar", "grammar": text}}
            )
        return StructuredOutputs(grammar=text)

    return chain


def deep_items(levels: int) -> Callable[[dict[str, str]], object]:
    def items(value: object) -> object:
        for _ in range(levels):
            value = {"items": value}
        return value

    return items


CHAINS: dict[str, Callable[[int], StructuredOutputs]] = {
    "references in items": references(deep_items(1)),
    "references in deep items": references(deep_items(60)),
    "references alone": references(lambda reference: reference),
    "references in anyOf": references(lambda reference: {"anyOf": [reference, {"type": "null"}]}),
    "references in properties": references(lambda reference: {"properties": {"a": reference}}),
    "rules": rules("r{0}: r{1}"),
    "terminals": rules("T{0}: T{1}"),
    "terminals that take others away": rules("T{0}: /a*/ & ~T{1}"),
    "rules in a structural tag": rules("r{0}: r{1}", is_tag=True),
}


def longest(chain: Callable[[int], StructuredOutputs]) -> StructuredOutputs:
    """One of the longest chains that a request may bring."""
    made = chain(500)
    length = max(len(made.json), len(made.grammar), len(made.structural_tag))
    return chain(int(0.95 * 500 * MAX_SCHEMA_LENGTH / length))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return new_compiler()


@pytest.mark.slow
@pytest.mark.parametrize("kind", tiered(CHAINS, CHAINS.keys() - {"references in items"}))
def test_the_longest_chain_leaves_the_process_alive(kind: str, compiler: GrammarCompiler) -> None:
    """It compiles, or is refused: a default stack of 8 MiB overflows with a tenth of each."""
    error = compiler.submit(longest(CHAINS[kind])).exception()
    assert error is None or (isinstance(error, InvalidRequest) and error.param == "structured_outputs")
    assert compiler.submit(StructuredOutputs(regex=f"after {kind}")).result()


SLOW = StructuredOutputs(grammar="start: T0\n" + "".join(f"T{i}: T{i + 1}*\n" for i in range(9000)) + 'T9000: "a"\n')


@pytest.mark.slow
def test_a_trial_ends_at_its_limit_of_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.grammar.compiler.COMPILE_SECONDS", 0.3)
    compiler = new_compiler()
    refused = compiler.submit(SLOW)
    with pytest.raises(InvalidRequest, match=r"takes more than 0\.3 s to compile; simplify it") as caught:
        refused.result()
    assert caught.value.param == "structured_outputs"
    again = compiler.submit(SLOW)
    assert not again.done(), "a busy machine may have been the cause, so it is tried again"
    assert again.exception()


@pytest.fixture
def tried_first(monkeypatch: pytest.MonkeyPatch) -> Callable[[GrammarCompiler], subprocess.Popen[bytes]]:
    """Lets a compiler try its first grammar; returns the process that did. Those of other tests may still be at work."""
    translate, users = grammar_trial.GrammarTrials.translate, list[grammar_trial.GrammarTrials]()

    def recorded(self: grammar_trial.GrammarTrials, structured: StructuredOutputs, seconds: float) -> str:
        if structured.regex == FIRST.regex:
            users.append(self)
        return translate(self, structured, seconds)

    def tried(compiler: GrammarCompiler) -> subprocess.Popen[bytes]:
        compiler.submit(FIRST).result()
        return users.pop().idle[-1].process

    monkeypatch.setattr(grammar_trial.GrammarTrials, "translate", recorded)
    return tried


def processor_time(process: subprocess.Popen[bytes]) -> int:
    """Return the processor time of a process so far, in clock ticks."""
    return int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11])


@pytest.fixture
def kill_trial(
    tried_first: Callable[[GrammarCompiler], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> KillTrial:
    """Returns the compiler and the error of a grammar whose trial gets a signal."""
    monkeypatch.setattr("eyas.grammar.compiler.COMPILE_SECONDS", 600.0)  # the signal comes first, however late

    def kill(number: signal.Signals) -> tuple[GrammarCompiler, BaseException | None]:
        compiler = new_compiler()
        child = tried_first(compiler)
        before = processor_time(child)
        future = compiler.submit(SLOW)
        while processor_time(child) == before:
            time.sleep(0.001)
        child.send_signal(number)
        return compiler, future.exception()

    return kill


def test_a_grammar_that_its_trial_dies_of_is_refused(kill_trial: KillTrial) -> None:
    compiler, error = kill_trial(signal.SIGSEGV)
    assert isinstance(error, InvalidRequest)
    assert "too much stack or memory to compile (SIGSEGV)" in str(error)
    again = compiler.submit(SLOW)
    assert again.done(), "it is not tried again"
    assert str(again.exception()) == str(error)
    assert compiler.submit(StructuredOutputs(regex="second")).result()


def test_a_grammar_is_not_blamed_for_a_trial_that_is_killed(kill_trial: KillTrial) -> None:
    compiler, error = kill_trial(signal.SIGKILL)
    assert isinstance(error, Unavailable)
    assert "send the request again" in str(error)
    assert compiler.submit(StructuredOutputs(regex="second")).result()


@pytest.mark.parametrize("name", ['"\\ud800"', r'"\q"'])
def test_a_token_that_is_no_text_is_refused(name: str, compiler: GrammarCompiler) -> None:
    text = f'{{"type": "structural_tag", "format": {{"type": "token", "token": {name}}}}}'
    with pytest.raises(InvalidRequest, match="a token that cannot be read") as caught:
        compiler.submit(StructuredOutputs(structural_tag=text)).result()
    assert caught.value.param == "structured_outputs"


def test_a_trial_that_cannot_start_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(Unavailable, match="cannot start a process that tries new grammars: "):
        new_compiler().submit(StructuredOutputs(regex="first")).result()


def test_a_trial_that_does_not_start_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = subprocess.Popen(["sleep", "60"])
    ours, theirs = Pipe()
    monkeypatch.setattr(grammar_trial, "WALL_SECONDS", 0.1)
    monkeypatch.setattr(grammar_trial, "start_child", lambda: grammar_trial.TrialProcess(asleep, ours))
    with theirs, pytest.raises(Unavailable, match="does not start"):
        new_compiler().submit(StructuredOutputs(regex="first")).result()
    assert asleep.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("command", "kind"), [("true", grammar_trial.CostlyGrammar), ("sleep 60", Unavailable)])
def test_a_grammar_is_blamed_for_a_trial_that_ends(command: str, kind: type[EyasError]) -> None:
    """One that uses no processor time waits for a busy machine, and not for its grammar."""
    ours, theirs = Pipe()
    with theirs:
        error = grammar_trial.error_of(grammar_trial.TrialProcess(subprocess.Popen(command.split()), ours), 1.0)
    assert type(error) is kind


def test_a_trial_ends_with_its_compiler(tried_first: Callable[[GrammarCompiler], subprocess.Popen[bytes]]) -> None:
    compiler = new_compiler()
    child = tried_first(compiler)
    assert child.poll() is None
    del compiler
    gc.collect()
    assert child.poll() is not None
