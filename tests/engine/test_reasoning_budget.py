"""Reasoning with a budget of tokens, in outputs that must match a grammar: drafts change no token."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import pytest

from eyas.api.request import ReasoningBudget, Request, SamplingParams, StructuredOutputs
from eyas.text.tokenizer import load_tokenizer
from tests.engine.test_structured_outputs import RECORD, make_engine, shared_engine, target, text_of, tokens_of
from tests.support.bad_drafters import KnowingDrafter
from tests.support.runs import moved, run
from tests.support.tiers import nightly

__all__ = ["target"]  # a fixture

MAX_TOKENS = 24
BUDGETS, TEMPERATURES = (0, 3, 8), (0.0, 0.8)
ANYTHING = {"type": "regex", "pattern": r"(.|\n)*"}
ANSWER = {"type": "json_schema", "json_schema": RECORD}
TOKEN_MARK = [ANYTHING, {"type": "token", "token": "<pad>"}, ANSWER]
TEXT_MARK = [{"type": "any_text"}, {"type": "const_string", "value": "zk:"}, ANSWER]
PAIRS = re.compile(r"((?:[a-f]-)*)kq\.([a-f]{4,9})")


def sequence(elements: list[dict[str, object]]) -> StructuredOutputs:
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    return StructuredOutputs(structural_tag=tag, whitespace_pattern="")


# Grammars, and what ends and begins their reasoning. That of the last two has no place for an end.
GRAMMARS: Mapping[str, tuple[StructuredOutputs, str, str]] = {
    "a special token": (sequence(TOKEN_MARK), "<pad>", "<bos>"),
    "a text of three tokens": (sequence(TEXT_MARK), "zk:", "xv"),
    "an end at some places only": (StructuredOutputs(regex=PAIRS.pattern), "kq.", "<bos>"),
    "an answer that begins reasoning": (StructuredOutputs(json=RECORD, whitespace_pattern=""), "<pad>", '"'),
    "no reasoning": (StructuredOutputs(regex="[a-f]{2,20}-[0-9]{3}"), "zk", "<bos>"),
}


def requests(target: str, temperature: float) -> Iterator[Request]:
    """Each grammar with each budget."""
    ids = load_tokenizer(target).tokenizer
    for number, (name, (grammar, end, start)) in enumerate(GRAMMARS.items()):
        marks = [tuple(ids.encode(mark, add_special_tokens=False).ids) for mark in (end, start)]
        for budget in BUDGETS:
            sampling = SamplingParams(
                max_tokens=MAX_TOKENS,
                temperature=temperature,
                seed=31 * number + budget,
                structured_outputs=grammar,
                reasoning_budget=ReasoningBudget(budget, *marks, is_open=start != '"'),
            )
            yield Request(f"{name}, {budget}", (5 + number, 9, 17, 30 + budget), sampling)


@lru_cache
def plain(target: str, temperature: float) -> dict[str, tuple[int, ...]]:
    return tokens_of(run(shared_engine("none", target), list(requests(target, temperature))))


@pytest.mark.parametrize(
    ("name", "temperature"), [("prompt_lookup", 0.8), nightly("eagle3", 0.0), nightly("random", 0.8), ("knowing", 0.0)]
)
def test_drafts_change_no_budget_within_a_grammar(name: str, temperature: float, target: str, tiny_head: str) -> None:
    expected, asked = plain(target, temperature), list(requests(target, temperature))
    if name == "knowing":
        outcomes = {request.id: [*request.prompt_ids, *expected[request.id]] for request in asked}
        engine = make_engine(target, KnowingDrafter(outcomes, 48))
    else:
        engine = shared_engine(name, target, tiny_head)
    chunks = run(engine, asked)
    assert tokens_of(chunks) == expected
    assert any(len(chunk.token_ids) > 1 for own in chunks.values() for chunk in own), "drafts were accepted"


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_reasoning_ends_where_the_grammar_lets_it(temperature: float, target: str) -> None:
    outputs = plain(target, temperature)
    for budget in BUDGETS:
        assert outputs[f"a special token, {budget}"].index(2) <= budget
        assert text_of(target, outputs[f"a text of three tokens, {budget}"]).index("zk:") <= 3 * budget
        pairs = PAIRS.fullmatch(text_of(target, outputs[f"an end at some places only, {budget}"]))
        assert pairs
        assert len(pairs[1]) <= budget + budget % 2, "the second half of a pair comes before the end"
    alone = [replace(one, sampling=replace(one.sampling, reasoning_budget=None)) for one in requests(target, temperature)]
    without = tokens_of(run(shared_engine("none", target), [one for one in alone if one.id.startswith(tuple(GRAMMARS)[3:])]))
    assert without == {name: outputs[name] for name in without}


@pytest.mark.parametrize(
    ("num_emitted", "name"), [nightly(1, "eagle3"), (4, "prompt_lookup"), nightly(9, "random"), (11, "eagle3")]
)
def test_a_budget_counts_what_another_verifier_wrote(num_emitted: int, name: str, target: str, tiny_head: str) -> None:
    whole = plain(target, 0.8)
    long = [request for request in requests(target, 0.8) if len(whole[request.id]) > num_emitted]
    left = [moved(request, whole[request.id][:num_emitted]) for request in long]
    found = tokens_of(run(shared_engine(name, target, tiny_head), left))
    assert found == {one.id: whole[one.id][num_emitted:] for one in left}
