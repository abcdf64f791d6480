"""Penalties, bias and bans: every node has the history of its own path, so drafts change no token."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from eyas.api.request import ReasoningBudget, Request, SamplingParams
from eyas.drafters.base import Drafter
from eyas.engine.build import assemble_engine
from eyas.engine.engine import Engine
from eyas.engine.sequence import QueueKey, ScheduledSequence, Sequence
from eyas.errors import InvalidRequest
from eyas.models.heads.eagle import load_fuser
from eyas.protocol.tree import DraftTree
from eyas.sampling.logit_rules import LogitRules
from tests.engine.test_equality import TREE, make_drafter, make_engine, prompts
from tests.support import reference
from tests.support.bad_drafters import KnowingDrafter
from tests.support.runs import assert_plain, moved, outputs_of, run, stats_of, tokens_of
from tests.support.strategies import trees
from tests.support.tiers import nightly
from tests.support.tiny import fixed_config, shared_target

PLAIN = SamplingParams(max_tokens=24, temperature=0.9, ignore_eos=True)
NO_SLOTS = np.zeros(0, np.int64)
WORDS = (*itertools.product(range(3, 48, 2), range(4, 48, 3)), (5, 6, 7), (8,), (9, 10, 11, 12))
STEERED = {
    "bias": replace(PLAIN, temperature=0, logit_bias=((5, 3.0), (11, -100.0), (17, 1.5))),
    "repetition": replace(PLAIN, temperature=0, repetition_penalty=1.5),
    "output": replace(PLAIN, temperature=0, presence_penalty=0.5, frequency_penalty=0.75),
    "reward": replace(PLAIN, frequency_penalty=-1.0, presence_penalty=-2.0, repetition_penalty=0.7),
    "bad words": replace(PLAIN, temperature=0, bad_token_ids=WORDS),
    "min tokens": replace(PLAIN, ignore_eos=False, min_tokens=9, stop_token_ids=tuple(range(3, 40))),
    "no reasoning": replace(PLAIN, reasoning_budget=ReasoningBudget(0, (9, 8, 9, 7), (4,), is_open=True)),
    "short reasoning": replace(PLAIN, temperature=0, reasoning_budget=ReasoningBudget(5, (9,), (4,), is_open=True)),
    "begun reasoning": replace(
        PLAIN, temperature=1e6, logit_bias=((4, 10.0), (5, 10.0)), reasoning_budget=ReasoningBudget(2, (9, 5), (4, 5))
    ),
    "hot": replace(PLAIN, ignore_eos=False, min_tokens=20, temperature=1e6),
    "min p": replace(PLAIN, temperature=1.3, min_p=0.2),
    "all": replace(
        PLAIN, temperature=1.2, top_k=20, top_p=0.95, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.3,
        frequency_penalty=0.2, logit_bias=((7, 2.0), (30, -5.0)), bad_token_ids=WORDS[::3], min_tokens=12,
        stop_token_ids=(4, 5, 6, 7, 8), ignore_eos=False,
    ),
}  # fmt: skip


def steered_requests() -> list[Request]:
    """Each parameter, among requests without any."""
    kinds = [*STEERED.values(), PLAIN, replace(PLAIN, temperature=0)]
    return [
        Request(f"r{i}", tuple(prompt), replace(params, seed=50 + i, max_tokens=24 - i % 3))
        for i, (prompt, params) in enumerate(zip(prompts(len(kinds), seed=4), kinds, strict=True))
    ]


def expected_of(target: str, request: Request) -> list[int]:
    return reference.generate(target, list(request.prompt_ids), request.sampling)


def engine_with(drafter: Drafter | None, target: str, head: str) -> Engine:
    fuser = load_fuser(head, target)
    return assemble_engine(
        shared_target(target, fuser.aux_hidden_state_layers),
        fuser,
        fixed_config(max_kv_tokens=2048, max_prefill_tokens=16),
        TREE,
        drafter,
    )


@pytest.mark.parametrize("name", ["none", "random", "eagle3", nightly("dying"), "knowing"])
def test_steered_requests_beside_others_equal_the_plain_loop(name: str, tiny_target: str, tiny_head: str) -> None:
    requests = steered_requests()
    expected = {request.id: expected_of(tiny_target, request) for request in requests}
    outcomes = {request.id: [*request.prompt_ids, *expected[request.id]] for request in requests}
    drafter = KnowingDrafter(outcomes, 48) if name == "knowing" else make_drafter(name, tiny_target, tiny_head)
    engine = engine_with(drafter, tiny_target, tiny_head)
    chunks = run(engine, requests[:4], {3: requests[4:8], 9: requests[8:]})
    assert outputs_of(chunks) == expected
    again = [replace(request, sampling=replace(STEERED["reward"], seed=1, max_tokens=6)) for request in requests[:4]]
    assert_plain(tiny_target, again, run(engine, again))  # under other rules: what requests asked is forgotten with them
    if name == "knowing":
        assert stats_of(chunks).acceptance_length > 3, "deep nodes were accepted"


@given(
    tree=st.none() | trees(max_nodes=12, vocab_size=6),
    before=st.lists(st.integers(0, 5), min_size=1, max_size=9),
    num_prompt=st.integers(1, 9),
    kind=st.builds(
        SamplingParams,
        logit_bias=st.dictionaries(st.integers(0, 5), st.sampled_from([-3.0, 0.5, 4.0]), max_size=3),
        repetition_penalty=st.sampled_from([1.0, 0.5, 1.25]),
        presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.25, -2.0]),
        bad_token_ids=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=6),
        min_tokens=st.integers(0, 6),
        stop_token_ids=st.lists(st.integers(0, 5), max_size=2),
    ),
)
def test_every_row_of_a_tree_is_steered_by_its_own_history(
    tree: DraftTree | None, before: list[int], num_prompt: int, kind: SamplingParams
) -> None:
    prompt = before[:num_prompt]
    tree = DraftTree.of((before[-1], *tree.tokens[1:]), tree.parents, tree.log_probs) if tree else None
    sequence = Sequence(Request("a", tuple(prompt), kind), QueueKey(0.0, 0), list(before), NO_SLOTS)
    work = ScheduledSequence(sequence, np.arange(len(tree) if tree else 1), len(before) - 1, tree)
    other = ScheduledSequence(under(sequence, "b", SamplingParams(temperature=0)), work.slots, work.first, tree)
    logits = 3 * torch.randn(3 * work.logit_rows.num_drawn, 6, generator=torch.Generator().manual_seed(len(before)))
    steered = LogitRules(frozenset({1})).applied(logits, [other.logit_rows, work.logit_rows, other.logit_rows])
    size = work.logit_rows.num_drawn
    assert torch.equal(steered[:size], logits[:size])
    assert torch.equal(steered[2 * size :], logits[2 * size :])
    for node in range(size):
        path = [tree.tokens[n] for n in tree.path(node)[1:]] if tree else []
        expected = reference.steered(logits[size + node], before + path, len(prompt), kind)
        assert torch.allclose(steered[size + node], expected, rtol=1e-5, atol=1e-5)


@given(
    before=st.lists(st.integers(0, 5), min_size=1, max_size=9),
    num_prompt=st.integers(1, 9),
    kind=st.builds(
        SamplingParams,
        logit_bias=st.dictionaries(st.integers(0, 5), st.sampled_from([-3.0, 0.5, 4.0]), max_size=3),
        bad_token_ids=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=6),
        min_tokens=st.integers(0, 6),
        stop_token_ids=st.lists(st.integers(0, 5), max_size=2),
    ),
    more=st.lists(st.integers(0, 5), max_size=3),
)
def test_a_drafter_knows_what_the_next_logits_will_get(
    before: list[int], num_prompt: int, kind: SamplingParams, more: list[int]
) -> None:
    prompt = tuple(before[:num_prompt])
    biases = LogitRules(frozenset({1})).known_biases(Request("a", prompt, kind), before)
    for level in range(len(more) + 1):
        known = torch.zeros(6)
        for bias in biases:
            known[bias.token] += bias.bias if bias.num_levels > level else 0.0
        true = reference.steered(torch.zeros(6), before + more[:level], len(prompt), kind)
        assert torch.equal(known, true) if level == 0 else torch.isinf(true[torch.isinf(known)]).all()


def under(sequence: Sequence, name: str, sampling: SamplingParams) -> Sequence:
    """The same tokens, requested in another form."""
    return Sequence(Request(name, sequence.request.prompt_ids, sampling), sequence.key, sequence.tokens, NO_SLOTS)


def test_default_requests_keep_their_logits() -> None:
    sequence = Sequence(Request("a", (1, 2), PLAIN), QueueKey(0.0, 0), [1, 2], NO_SLOTS)
    logits = torch.zeros(1, 8)
    assert LogitRules(frozenset()).applied(logits, [ScheduledSequence(sequence, np.arange(2), 0).logit_rows]) is logits


@pytest.mark.parametrize("kind", ["reward", "output", "bad words", "min tokens", "all"])
def test_a_request_continues_exactly_on_another_engine(kind: str, tiny_target: str, tiny_head: str) -> None:
    request = Request("whole", tuple(prompts(1, seed=9)[0]), replace(STEERED[kind], seed=77))
    whole = expected_of(tiny_target, request)
    done = len(whole) // 2
    engine = make_engine(make_drafter("eagle3", tiny_target, tiny_head), tiny_target, tiny_head)
    assert tokens_of(run(engine, [moved(request, whole[:done])])["whole"]) == whole[done:]


def test_biases_bans_and_penalties_do_what_they_say(tiny_target: str, tiny_head: str) -> None:
    engine = engine_with(make_drafter("eagle3", tiny_target, tiny_head), tiny_target, tiny_head)
    greedy = SamplingParams(max_tokens=24, temperature=0, seed=0, ignore_eos=True)
    plain = reference.generate(tiny_target, [5, 6, 7], greedy)
    pair = (plain[0], plain[1])
    kinds = {
        "forced": replace(greedy, logit_bias={9: 100.0}),
        "never": replace(greedy, bad_token_ids=((plain[0],), pair)),
        "no pair": replace(greedy, bad_token_ids=(pair,)),
        "no repeats": replace(greedy, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=100.0),
        "long": replace(greedy, stop_token_ids=tuple(range(40)), min_tokens=10),
    }
    chunks = run(engine, [Request(name, (5, 6, 7), kind) for name, kind in kinds.items()])
    out = outputs_of(chunks)
    assert set(out["forced"]) == {9}
    assert plain[0] not in out["never"]
    assert pair not in set(itertools.pairwise(out["no pair"]))
    assert out["no pair"][0] == pair[0], "the first token of a bad word may come"
    assert len(set(out["no repeats"])) > len(set(plain))
    assert len(out["long"]) > 10 or out["long"][-1] < 40
    assert min(out["long"][:10]) >= 40


@pytest.mark.parametrize("asked", [{"stop": ("x",)}, {"n": 2, "temperature": 1.0}, {"bad_words": ("x",)}, {"min_p": 2.0}])
def test_an_engine_refuses_what_it_cannot_do(asked: dict, tiny_target: str, tiny_head: str) -> None:
    engine = make_engine(None, tiny_target, tiny_head)
    with pytest.raises(InvalidRequest, match=r"not for an engine|min_p is 2\.0"):
        engine.submit(Request("a", (5, 6), replace(PLAIN, seed=1, **asked)))
    assert not engine.has_work


def test_penalties_and_bad_words_are_those_of_transformers() -> None:
    history, prompt = [3, 5, 5, 7, 2], (3, 5)
    asked = SamplingParams(repetition_penalty=1.3, bad_token_ids=((7, 2, 4), (9,), (2, 2), (5, 2, 6)))
    sequence = Sequence(Request("a", prompt, asked), QueueKey(0.0, 0), history, NO_SLOTS)
    work = ScheduledSequence(sequence, np.arange(1), 4, None)
    logits = 3 * torch.randn(1, 16, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([history])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())
    expected = NoBadWordsLogitsProcessor([list(word) for word in asked.bad_token_ids], eos_token_id=1)(ids, expected)
    assert torch.equal(LogitRules(frozenset({1})).applied(logits, [work.logit_rows]), expected)
