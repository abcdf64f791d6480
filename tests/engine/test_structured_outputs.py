"""Output that must match a grammar: with any drafter, the tokens are those of plain constrained decoding."""

import json
import random
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from eyas.api.request import Chunk, Request, SamplingParams, StructuredOutputs
from eyas.config import TreeConfig
from eyas.drafters.base import Drafter
from eyas.engine import grammar_manager
from eyas.engine.build import assemble_engine
from eyas.engine.engine import Engine
from eyas.engine.grammar_manager import FollowedOutput, GrammarManager
from eyas.engine.sequence import DraftReply
from eyas.errors import InvalidRequest
from eyas.grammar import compiler as grammar
from eyas.grammar import trial as grammar_trial
from eyas.grammar.compiler import OutputMatchers
from eyas.protocol.tree import DraftProbs, DraftTree, SampledProposal
from eyas.text.tokenizer import load_tokenizer
from tests.support import reference
from tests.support.bad_drafters import RandomDrafter
from tests.support.corpora import write_datastore
from tests.support.methods import KINDS_OF_DRAFTS, Case
from tests.support.runs import moved, run
from tests.support.tiers import nightly, tiered
from tests.support.tiny import fixed_config, shared_target, write_spelling_tokenizer, write_target

TREE = TreeConfig(num_draft_tokens=12, num_steps=4, top_k=4)
RECORD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "bc": {"type": "array", "items": {"enum": ["d", "ab", None]}, "maxItems": 3}},
    "required": ["a", "bc"],
    "additionalProperties": False,
}
TREE_SCHEMA = {
    "$ref": "#/$defs/n",
    "$defs": {
        "n": {
            "type": "object",
            "properties": {"v": {"type": "boolean"}, "c": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 1}},
            "required": ["v", "c"],
            "additionalProperties": False,
        }
    },
}
CONSTRAINTS: Mapping[str, StructuredOutputs | None] = {
    "free": None,
    "record": StructuredOutputs(json=RECORD, whitespace_pattern=""),
    "tree": StructuredOutputs(json=TREE_SCHEMA),
    "object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex="[a-f]{2,5}-[0-9]{3}(,|:)true"),
    "choice": StructuredOutputs(choice=("abc", "abd", "abd-1", "k")),
    "ebnf": StructuredOutputs(grammar='root ::= "{" pair ("," pair)* "}"\npair ::= [a-c]{1,3} ":" [0-9]+'),
    "tag": StructuredOutputs(
        structural_tag={
            "type": "structural_tag",
            "format": {"type": "tag", "begin": "[", "content": {"type": "json_schema", "json_schema": RECORD}, "end": "]"},
        }
    ),
}
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
# Kinds of drafts; nightly also the methods that draft as one of these does.
DAILY = ("eagle3-ahead", "dspark", "medusa", "sps", "prompt_lookup", "lookahead")
METHODS = (*tiered(KINDS_OF_DRAFTS, DAILY), "random")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny target with a tokenizer that can write JSON."""
    folder = write_target(tmp_path_factory.mktemp("spelling"))
    write_spelling_tokenizer(folder)
    return str(folder)


def make_engine(target: str, drafter: Drafter | None = None, case: Case | None = None, **limits: Any) -> Engine:
    fuser = case.fuser() if case else None
    config = fixed_config(**{"max_kv_tokens": 2048, "max_prefill_tokens": 64, **limits})
    layers = fuser.aux_hidden_state_layers if fuser else ()
    return assemble_engine(shared_target(target, layers), fuser, config, TREE, drafter)


def case_engine(name: str, target: str, head: str, **limits: Any) -> Engine:
    if name == "random":
        return make_engine(target, RandomDrafter(48), **limits)
    store, drafted = Path(f"{target}-outputs"), f"{target}-drafted"
    if name == "rest" and not store.exists():
        write_target(Path(drafted))  # the datastore brings a tokenizer of its own
        write_datastore(Path(drafted), [list(one) for one in plain_outputs(target, 0.0).values()], store)
    case = Case(name, drafted if name == "rest" else target, head, store)
    return make_engine(target, case.drafter(TREE), case, **limits)


@lru_cache
def shared_engine(name: str, target: str, head: str = "") -> Engine:
    """An engine for requests of several tests: each starts processes that try new grammars."""
    return make_engine(target) if name == "none" else case_engine(name, target, head)


def requests_at(temperature: float, **changes: Any) -> list[Request]:
    sampling = replace(SamplingParams(max_tokens=20, temperature=temperature), **changes)
    return [
        Request(name, (5 + i, 9, 17, 30 + i), replace(sampling, seed=70 + i, structured_outputs=constraint))
        for i, (name, constraint) in enumerate(CONSTRAINTS.items())
    ]


def tokens_of(chunks: Mapping[str, list[Chunk]]) -> dict[str, tuple[int, ...]]:
    assert not [chunk.message for own in chunks.values() for chunk in own if chunk.message]
    return {name: tuple(token for chunk in own for token in chunk.token_ids) for name, own in chunks.items()}


@lru_cache
def plain_outputs(target: str, temperature: float, max_tokens: int = 20) -> dict[str, tuple[int, ...]]:
    return tokens_of(run(shared_engine("none", target), requests_at(temperature, max_tokens=max_tokens)))


def text_of(target: str, tokens: tuple[int, ...]) -> str:
    return load_tokenizer(target).decode(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_equals_plain_constrained_decoding(name: str, target: str, tiny_head: str) -> None:
    """Greedy and sampled requests in turn, more than run at once."""
    kinds = list(TEMPERATURES.values())
    requests = [requests_at(kinds[i % 2])[i] for i in range(len(CONSTRAINTS))]
    chunks = run(case_engine(name, target, tiny_head, max_num_seqs=6), requests)
    expected = {request.id: plain_outputs(target, request.sampling.temperature)[request.id] for request in requests}
    assert tokens_of(chunks) == expected
    for temperature in kinds:
        own = [chunk for r in requests if r.sampling.temperature == temperature for chunk in chunks[r.id]]
        assert any(chunk.verify_step and chunk.verify_step.drafted for chunk in own), temperature


def test_a_step_in_parts_follows_each_grammar_once(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory for all sequences at once. Two threads on one grammar would spoil its state."""
    engine, running, twice, masks = make_engine(target, RandomDrafter(48)), set[int](), list[int](), FollowedOutput.masks
    forward = engine.runner.forward

    def forward_one(segments: Any) -> Any:
        if len(segments) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(segments)

    def slow_masks(output: FollowedOutput, *args: Any) -> Any:
        twice.extend({id(output)} & running)
        running.add(id(output))
        time.sleep(0.01)
        try:
            return masks(output, *args)
        finally:
            running.discard(id(output))

    monkeypatch.setattr(engine.runner, "forward", forward_one)
    monkeypatch.setattr(FollowedOutput, "masks", slow_masks)
    assert tokens_of(run(engine, requests_at(0.0))) == plain_outputs(target, 0.0)
    assert not twice


@pytest.mark.parametrize("temperature", [0.0, nightly(0.7), 1.0, nightly(1.6)])
def test_whole_outputs_match_their_constraints(temperature: float, target: str) -> None:
    found = {name: text_of(target, tokens) for name, tokens in plain_outputs(target, temperature).items()}
    ended = {name for name, tokens in plain_outputs(target, temperature).items() if tokens[-1] == 1} - {"free"}
    assert {"regex", "choice"} <= ended
    for name in ended & {"record", "tree", "object"}:
        schema = {"record": RECORD, "tree": TREE_SCHEMA, "object": {"type": "object"}}[name]
        jsonschema.validate(json.loads(found[name]), schema)
    assert re.fullmatch("[a-f]{2,5}-[0-9]{3}(,|:)true", found["regex"])
    assert found["choice"] in ("abc", "abd", "abd-1", "k")
    if "tag" in ended:
        jsonschema.validate(json.loads(found["tag"])[0], RECORD)


def test_plain_constrained_decoding_masks_nothing_else(target: str) -> None:
    """Beside a loop that allows a token if its text continues a choice; no text is forced that has several spellings."""
    choices, tokenizer = ("abc", "abd", "abd-1", "k"), load_tokenizer(target)
    pieces = [tokenizer.decode([token]) for token in range(48)]

    def allowed(output: list[int]) -> list[int]:
        text = tokenizer.decode(output)
        fits = [token for token in range(3, 48) if any(choice.startswith(text + pieces[token]) for choice in choices)]
        return [*fits, 1] if text in choices else fits

    for temperature in (0.0, 1.0, 2.0):
        (request,) = [request for request in requests_at(temperature) if request.id == "choice"]
        expected = reference.generate(target, list(request.prompt_ids), request.sampling, allowed=allowed)
        assert list(plain_outputs(target, temperature)["choice"]) == expected


@pytest.mark.parametrize("name", ["eagle3", nightly("none")])
def test_preempted_requests_go_on_with_the_same_tokens(name: str, target: str, tiny_head: str) -> None:
    limits = {"max_kv_tokens": 50}
    engine = case_engine(name, target, tiny_head, **limits) if name != "none" else make_engine(target, **limits)
    assert tokens_of(run(engine, requests_at(1.0, max_tokens=30))) == plain_outputs(target, 1.0, 30)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("num_emitted", [nightly(1), 3, nightly(7)])
def test_a_request_moves_to_another_engine_at_any_token(num_emitted: int, target: str, tiny_head: str) -> None:
    outputs = {name: tokens for name, tokens in plain_outputs(target, 1.0).items() if len(tokens) > num_emitted}
    assert {"regex", "tree"} <= outputs.keys()
    left = [moved(one, outputs[one.id][:num_emitted]) for one in requests_at(1.0) if one.id in outputs]
    found = tokens_of(run(shared_engine("eagle3", target, tiny_head), left))
    assert found == {name: tokens[num_emitted:] for name, tokens in outputs.items()}


def test_output_that_another_grammar_wrote_is_refused(target: str) -> None:
    engine = make_engine(target)
    sampling = SamplingParams(seed=1, structured_outputs=StructuredOutputs(regex="[0-9]+"))
    with pytest.raises(InvalidRequest, match="does not match the tokens"):
        engine.submit(Request("r", (5, 9, 20), sampling, num_emitted=2))
    assert not engine.has_work


STEERED = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {20: 5.0}},
    "bad words": {"bad_token_ids": ((25,), (3, 5))},
    "ignored end": {"ignore_eos": True},
    "minimum": {"min_tokens": 9},
    "stops": {"stop_token_ids": (7, 20)},
    "filters": {"top_k": 6, "top_p": 0.9, "min_p": 0.05},
}


@pytest.mark.parametrize("kind", tiered(STEERED, ("penalties", "bad words", "minimum")))
def test_other_parameters_hold_within_a_grammar(kind: str, target: str, tiny_head: str) -> None:
    requests = requests_at(1.0, **STEERED[kind])
    plain = run(shared_engine("none", target), requests)
    speculative = run(shared_engine("eagle3", target, tiny_head), requests)
    ends = {name: (own[-1].finish_reason, own[-1].message) for name, own in plain.items()}
    assert ends == {name: (own[-1].finish_reason, own[-1].message) for name, own in speculative.items()}
    failed = {name for name, (reason, _) in ends.items() if reason == "error"}
    assert not failed or kind == "bad words", ends
    names = CONSTRAINTS.keys() - failed
    outputs = tokens_of({name: plain[name] for name in names})
    assert outputs == tokens_of({name: speculative[name] for name in names})
    if kind in ("ignored end", "minimum"):
        assert text_of(target, outputs["choice"]) in CONSTRAINTS["choice"].choice, "the grammar's end wins"
        assert outputs["choice"][-1] == 1


def test_nothing_left_to_draw_ends_the_request_with_a_reason(target: str) -> None:
    tokenizer = load_tokenizer(target).tokenizer
    banned = tuple((tokenizer.token_to_id(text),) for text in ("a", "ab", "k"))
    for temperature in (0.0, 1.0):
        chunks = run(shared_engine("none", target), requests_at(temperature, bad_token_ids=banned))
        (last,) = chunks["choice"]
        assert (last.finish_reason, last.token_ids, last.is_invalid) == ("error", (), True)
        assert "leaves no token to draw" in last.message
        assert chunks["ebnf"][-1].finish_reason != "error", "others go on"


def test_log_probabilities_are_those_of_the_masked_logits(target: str, tiny_head: str) -> None:
    requests = requests_at(1.0, logprobs=5, prompt_logprobs=1)
    plain, speculative = (
        run(shared_engine("none", target), requests),
        run(shared_engine("eagle3", target, tiny_head), requests),
    )
    for name in CONSTRAINTS:
        one, other = ([entry for chunk in chunks[name] for entry in chunk.logprobs] for chunks in (plain, speculative))
        assert [(entry.token, entry.top_ids) for entry in one] == [(entry.token, entry.top_ids) for entry in other]
        assert [entry.logprob for entry in one] == pytest.approx([entry.logprob for entry in other], abs=1e-4)
    first = next(chunk.logprobs[0] for chunk in plain["choice"] if chunk.logprobs)
    texts = {load_tokenizer(target).decode([token]) for token in first.top_ids}
    assert texts == {"a", "ab", "k"}, "tokens without probability are not reported"
    assert sum(2.718281828459045**logprob for logprob in first.top_logprobs) == pytest.approx(1, abs=1e-4)


def test_forced_text_is_drafted(target: str) -> None:
    """A drafter without any tree at all; what the grammar forces is drafted all the same, and accepted."""
    forced = StructuredOutputs(regex="([a-c]dddddddd){3}")
    request = Request("r", (5, 6), SamplingParams(max_tokens=60, temperature=1.0, seed=3, structured_outputs=forced))
    plain = run(shared_engine("none", target), [request])
    chunks = run(make_engine(target, RandomDrafter(48)), [request])
    assert tokens_of(chunks) == tokens_of(plain)
    assert len(chunks["r"]) < len(plain["r"]) / 3


@pytest.mark.parametrize("name", [nightly("eagle3"), "sps", nightly("medusa")])
def test_sampled_trees_stay_within_the_grammar(name: str, target: str, tiny_head: str) -> None:
    engine = case_engine(name, target, tiny_head, acceptance="rejection")
    requests = [request for request in requests_at(1.0) if request.id in ("choice", "regex", "record", "tree")]
    outputs = tokens_of(run(engine, requests))
    assert text_of(target, outputs["choice"]) in ("abc", "abd", "abd-1", "k")
    assert re.fullmatch("[a-f]{2,5}-[0-9]{3}(,|:)true", text_of(target, outputs["regex"]))
    assert outputs == tokens_of(run(engine, requests))


def ambiguous(number: int) -> StructuredOutputs:
    """Each mask behind "k" takes work that grows with the cube of `number`: 0.05 s for 240."""
    rules = [f't{i} ::= [a-d] | [a-d] "b"' for i in range(number)]
    start = " | ".join(f"t{i} s" for i in range(number))
    return StructuredOutputs(grammar="\n".join(['root ::= "k" s', f's ::= {start} | "a"', *rules]))


def matchers_of(engine: Engine, structured: StructuredOutputs) -> OutputMatchers:
    """Before the first token, with drafts if the engine drafts."""
    return engine.follow(Request("r", (5,), SamplingParams(structured_outputs=structured))).result()


def hostile_request(number: int) -> Request:
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=5, structured_outputs=ambiguous(number))
    return Request("hostile", (5, 9, 17), sampling)


@pytest.mark.parametrize("name", [nightly("none"), "random"])
def test_a_late_mask_ends_its_own_request_only(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_manager, "STEP_SECONDS", 0.02)
    engine = make_engine(target, RandomDrafter(48) if name == "random" else None)
    chunks = run(engine, [hostile_request(240), *requests_at(1.0)])
    last = chunks.pop("hostile")[-1]
    assert last.finish_reason == "error"
    assert "takes too much work to follow (more than" in last.message
    assert tokens_of(chunks) == plain_outputs(target, 1.0)


def test_late_masks_for_drafts_end_drafts_only(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, request = GrammarManager(frozenset({1}), 48), hostile_request(240)
    manager.add(request, matchers_of(make_engine(target, RandomDrafter(48)), ambiguous(240)))
    first = load_tokenizer(target).tokenizer.token_to_id("k")
    with monkeypatch.context() as patch:
        patch.setattr(grammar_manager, "STEP_SECONDS", 0.005)
        assert not manager.path_masks({request.id: [(first,)]})()
    output = manager.outputs[request.id]
    assert output.drafted is None
    assert not output.failed
    assert manager.root_masks({request.id: request.prompt_ids})


def test_drafts_do_not_change_where_a_grammar_costs_too_much(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the parser grows too large, in a drafted token before it does in an output."""
    monkeypatch.setattr(grammar_trial, "ROW_ITEMS", 150)
    drafters = (None, RandomDrafter(48))
    chunks = [run(make_engine(target, drafter), [hostile_request(40)])["hostile"] for drafter in drafters]
    plain, speculative = ([token for chunk in own for token in chunk.token_ids] for own in chunks)
    assert plain == speculative
    assert chunks[0][-1].message == chunks[1][-1].message
    assert "too much work" in chunks[0][-1].message


def test_drafts_use_up_no_lexer_states_of_the_output(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lexer of the drafts is full soon; that of the output is not, and the output goes on without drafts."""
    monkeypatch.setattr(grammar_trial, "LEXER_STATES", 300)
    structured = StructuredOutputs(regex="(?s:.*[a-m].{9}.*[n-z].{9}q)")
    request = Request("r", (5, 9, 17), SamplingParams(max_tokens=40, seed=5, structured_outputs=structured))
    plain, speculative = (run(make_engine(target, drafter), [request]) for drafter in (None, RandomDrafter(48)))
    assert tokens_of(speculative) == tokens_of(plain)
    sizes = [chunk.verify_step.drafted for chunk in speculative["r"] if chunk.verify_step]
    assert any(sizes)
    assert not any(sizes[-8:])


def test_a_dead_end_in_a_draft_ends_no_drafts(target: str) -> None:
    """The root allows "z", behind which no token of the model fits; the output takes another way."""
    token = {text: load_tokenizer(target).tokenizer.token_to_id(text) for text in "zk"}
    structured = StructuredOutputs(regex="z\u00e9|k{9}")
    request, engine = (
        Request("r", (5,), SamplingParams(seed=1, structured_outputs=structured)),
        make_engine(target, RandomDrafter(48)),
    )
    engine.grammars.add(request, matchers_of(engine, structured))
    output = engine.grammars.outputs["r"]
    tree = DraftTree.of((5, token["z"], token["k"], token["k"]), (0, 0, 0, 2), (0.0, -1.0, -2.0, -3.0))
    masks = output.masks(request.prompt_ids, tree, 1.0)
    assert masks.unvisited == {1}
    assert [mask is not None and mask.allows(token["k"]) for mask in masks.nodes] == [True, False, True, True]
    assert masks.nodes[0] is not None
    assert masks.nodes[0].allows(token["z"]), "plain decoding may draw it"
    assert output.drafted is not None
    output.follow((5, token["z"]))
    with pytest.raises(InvalidRequest, match="no token of the model continues"):
        output.root_mask((5, token["z"]))


def test_trees_are_pruned_beside_the_engines_thread(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, all_threads, own_thread = make_engine(target, RandomDrafter(48)), list[float](), list[float]()
    prune = engine.grammars.prune

    def timed(*args: Any) -> list[DraftReply]:
        started, own = time.process_time(), time.thread_time()
        replies = prune(*args)
        all_threads.append(time.process_time() - started)
        own_thread.append(time.thread_time() - own)
        return replies

    monkeypatch.setattr(engine.grammars, "prune", timed)
    for name in "abcd":
        engine.submit(replace(hostile_request(100), id=name))
    for _ in range(5):
        engine.step()
    assert sum(all_threads) > 0.005
    assert sum(own_thread) < sum(all_threads) / 4


def test_the_trees_of_a_step_share_its_time() -> None:
    manager = GrammarManager(frozenset({1}), 48)
    few, many = manager._tree_seconds(1), manager._tree_seconds(64)
    assert 0 < many < few
    assert 64 * many <= grammar_manager.TREES_SECONDS * manager._num_threads * 1.001


def test_the_engines_thread_follows_no_output_of_a_request(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokens = make_engine(target), plain_outputs(target, 1.0)["regex"]
    left = moved(next(request for request in requests_at(1.0) if request.id == "regex"), tokens[:3])
    matchers = engine.follow(left).result()
    with monkeypatch.context() as patch:
        patch.delattr(grammar.Matcher, "consume")
        engine.submit(left, matchers)
    assert engine.has_work


@pytest.mark.parametrize("kind", TEMPERATURES)
def test_outputs_are_the_same_if_time_runs_out_anywhere(
    kind: str, target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, seen = random.Random(3), list[bool]()

    def is_late(output: FollowedOutput) -> bool:
        seen.append(rng.random() < 0.2)
        return seen[-1]

    monkeypatch.setattr(FollowedOutput, "_is_late", property(is_late))
    chunks = run(case_engine("eagle3", target, tiny_head), requests_at(TEMPERATURES[kind]))
    assert tokens_of(chunks) == plain_outputs(target, TEMPERATURES[kind])
    assert any(seen)
    assert [chunk for own in chunks.values() for chunk in own if len(chunk.token_ids) > 1], "drafts were accepted"


@pytest.mark.parametrize("max_nodes", [1, 2, 4, 12])
def test_a_sampled_tree_is_cut_between_families(max_nodes: int, target: str) -> None:
    engine = make_engine(target, RandomDrafter(48))
    request = next(request for request in requests_at(1.0) if request.id == "regex")
    engine.grammars.add(request, matchers_of(engine, ambiguous(1)))
    output = engine.grammars.outputs[request.id]
    token = {text: load_tokenizer(target).tokenizer.token_to_id(text) for text in "kabz"}
    tokens = (request.prompt_ids[-1], *(token[text] for text in "kzazb"))
    probs = DraftProbs(tuple(sorted(token.values())), (0.25,) * 4)
    tree = DraftTree.of(tokens, (0, 0, 0, 1, 1, 3), (0.0, -1.0, -1.0, -2.0, -2.0, -3.0))
    tree = tree.with_sampled(SampledProposal({0: probs, 1: probs, 3: probs}))
    pruned = output.pruned(request.prompt_ids, tree, max_nodes, 8, 1.0)
    assert len(pruned) == {1: 1, 2: 1, 4: 3, 12: 6}[max_nodes]
    assert pruned.sampled is None or pruned.sampled.draft_probs.keys() == pruned.families.keys()
