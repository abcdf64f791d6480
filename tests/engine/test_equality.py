"""The central property: whatever the drafter does, the tokens are those of a plain loop over transformers' forward."""

import random
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.api.request import Request, SamplingParams
from eyas.config import DraftAheadConfig, TreeConfig
from eyas.drafters.ahead.drafter import DraftAheadDrafter
from eyas.drafters.base import Drafter
from eyas.emulation.device import Clock
from eyas.engine.build import assemble_engine
from eyas.engine.engine import Engine
from tests.support import reference
from tests.support.bad_drafters import DyingDrafter, MovingDrafter, RandomDrafter, WorkingDrafter
from tests.support.corpora import write_datastore
from tests.support.methods import CASES, Case
from tests.support.runs import assert_plain, chi_square_is_plausible, outputs_of, run, stats_of, tokens_of
from tests.support.tiers import nightly
from tests.support.tiny import fixed_config, shared_target, token_without_numbers

TREE = TreeConfig(num_draft_tokens=12, num_steps=4, top_k=4)
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PARAMS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(max_tokens=24, temperature=0.8, ignore_eos=True),
    "filtered": SamplingParams(max_tokens=24, temperature=1.1, top_k=12, top_p=0.85, ignore_eos=True),
    "stopping": SamplingParams(max_tokens=24, temperature=1.0, stop_token_ids=tuple(range(4, 10))),
}
DRAFTERS = (*CASES, "random", "dying", "none")
# Variants of methods that are tried nightly; EAGLE-3's are tried daily.
VARIANTS = {
    "dspark-rnn", "dspark-reduced", "dspark-crowded", "dflash-window", "mtp-crowded", "sps-crowded", "dflash2-int8",
    "mtp-int8", "medusa-int8", "hydra-int8",
}  # fmt: skip
# Greedy requests alone take other paths through these; among others they are in every mixed batch.
GREEDY_ALONE = ("eagle3", "none", "dspark", "sps", "prompt_lookup")
# Requests of a batch take these in turn.
BATCHES = {"greedy": (GREEDY,), "mixed": tuple(PARAMS.values())}


def make_drafter(name: str, target: str, head: str) -> Drafter | None:
    if name == "none":
        return None
    if name == "random":
        return RandomDrafter(48)
    drafter = case_of(name, target, head).drafter(TREE)
    if name.endswith("-ahead"):
        return WorkingDrafter(drafter)
    return DyingDrafter(drafter, dies=4, returns=9) if name == "dying" else drafter


def case_of(name: str, target: str, head: str) -> Case:
    """The method of that name, else EAGLE-3. The datastore holds two greedy outputs."""
    store = Path(head, "outputs")
    if name == "rest" and not store.exists():
        outputs = [reference.generate(target, prompt, replace(GREEDY, seed=0)) for prompt in prompts(2)]
        write_datastore(Path(target), outputs, store)
    return Case(name if name in CASES else "eagle3", target, head, store)


class UnevenClock(Clock):
    """Each look at it takes up to 2 ms: what the engine chooses by time varies in a run, and is the same in each."""

    def __init__(self, seed: int) -> None:
        self._random, self._now = random.Random(seed), 0.0

    def __call__(self) -> float:
        self._now += self._random.uniform(0, 0.002)
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


def make_engine(
    drafter: Drafter | None, target: str, head: str, name: str = "eagle3", clock: Clock | None = None, **limits: Any
) -> Engine:
    fuser = case_of(name, target, head).fuser()
    config = fixed_config(**{"max_kv_tokens": 1024, "max_prefill_tokens": 16, **limits})
    return assemble_engine(
        shared_target(target, fuser.aux_hidden_state_layers if fuser else ()), fuser, config, TREE, drafter, clock=clock
    )


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 48, int(rng.integers(1, 40))).tolist() for _ in range(count)]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        *(nightly(name, "mixed") if name in VARIANTS else (name, "mixed") for name in DRAFTERS),
        *(nightly(name, "greedy") if place > 1 else (name, "greedy") for place, name in enumerate(GREEDY_ALONE)),
    ],
)
def test_a_batch_with_staggered_arrivals_equals_the_plain_loop(
    name: str, kinds: str, tiny_target: str, tiny_head: str
) -> None:
    engine = make_engine(make_drafter(name, tiny_target, tiny_head), tiny_target, tiny_head, name, max_num_seqs=4)
    requests = [
        Request(f"r{i}", tuple(prompt), replace(params, seed=100 + i, max_tokens=16 - i))
        for i, (prompt, params) in enumerate(zip(prompts(6), cycle(BATCHES[kinds]), strict=False))
    ]
    chunks = run(engine, requests[:2], {2: requests[2:4], 6: requests[4:]})
    assert_plain(tiny_target, requests, chunks)
    assert engine.load.free_kv_tokens == 1024


@pytest.mark.parametrize(
    ("name", "kind"), [("eagle3", "greedy"), ("eagle3", "filtered"), ("random", "sampled"), ("random", "stopping")]
)
def test_a_single_request_equals_the_plain_loop(name: str, kind: str, tiny_target: str, tiny_head: str) -> None:
    engine = make_engine(make_drafter(name, tiny_target, tiny_head), tiny_target, tiny_head, draft_budget="adaptive")
    request = Request("one", tuple(prompts(1, seed=5)[0]), SamplingParams(**{**vars(PARAMS[kind]), "seed": 2**64 - 1}))
    chunks = run(engine, [request])
    assert_plain(tiny_target, [request], chunks)


def test_adaptive_trees_drafted_ahead_change_no_token(tiny_target: str, tiny_head: str) -> None:
    """What the budget chooses depends on time, and no token does."""
    name = "eagle3-ahead"
    ahead = case_of(name, tiny_target, tiny_head).drafter(TREE)
    assert isinstance(ahead, DraftAheadDrafter)
    drafter = WorkingDrafter(DraftAheadDrafter(ahead.drafter, DraftAheadConfig(6, 16, 7)))
    engine = make_engine(drafter, tiny_target, tiny_head, name, UnevenClock(4), draft_budget="adaptive")
    requests = [
        Request(f"r{i}", tuple(prompt), replace(params, seed=i, max_tokens=12))
        for i, (prompt, params) in enumerate(zip(prompts(4), cycle(BATCHES["mixed"]), strict=False))
    ]
    chunks = run(engine, requests[:1], {5: requests[1:]})
    assert any(chunk.verify_step and chunk.verify_step.drafted for own in chunks.values() for chunk in own)
    assert_plain(tiny_target, requests, chunks)


def test_a_drafter_that_returns_drafts_for_running_requests(tiny_target: str, tiny_head: str) -> None:
    drafter = make_drafter("dying", tiny_target, tiny_head)
    engine = make_engine(drafter, tiny_target, tiny_head)
    (chunks,) = run(engine, [Request("a", (5, 6, 7), SamplingParams(24, 0.0, seed=0, ignore_eos=True))]).values()
    drafted = [chunk.verify_step.drafted if chunk.verify_step else 0 for chunk in chunks]
    assert 0 in drafted[2:10], "the drafter was away for some rounds"
    assert drafted[-4] > 0, "and drafted again afterwards"


def test_a_moved_session_is_sent_again_once(tiny_target: str, tiny_head: str) -> None:
    first, second = (case_of("eagle3", tiny_target, tiny_head).drafter(TREE) for _ in range(2))
    drafter = MovingDrafter(first, second, moves=6)
    engine = make_engine(drafter, tiny_target, tiny_head, max_prefill_tokens=128)
    requests = [
        Request(f"r{i}", tuple(prompt), replace(params, seed=i))
        for i, (prompt, params) in enumerate(zip(prompts(4), cycle(BATCHES["mixed"][:3]), strict=False))
    ]
    chunks = run(engine, requests)
    assert len(drafter.length_at_move) == 4
    for request in requests:
        expected = reference.generate(tiny_target, list(request.prompt_ids), request.sampling)
        assert tokens_of(chunks[request.id]) == expected
        assert drafter.num_resyncs[request.id] == 1
        length = len(request.prompt_ids) + len(expected)
        assert drafter.num_tokens[request.id] <= length + drafter.length_at_move[request.id], "no token a third time"
    assert sum(start == 0 for start, _, _ in drafter.taken) == 8, "each session begins at both"
    assert all(num_features == num_tokens - (start == 0) for start, num_tokens, num_features in drafter.taken)


def test_statistics_add_up_to_the_tokens(tiny_target: str, tiny_head: str) -> None:
    engine = make_engine(make_drafter("eagle3", tiny_target, tiny_head), tiny_target, tiny_head)
    stats = stats_of(run(engine, [Request("a", (5, 6), SamplingParams(20, 0.0, seed=0, ignore_eos=True))]))
    assert stats.num_emitted == 19  # the prefill's token belongs to no round
    assert stats.num_accepted + stats.num_verify_steps >= stats.num_emitted
    assert stats.acceptance_length == stats.num_emitted / stats.num_verify_steps


@pytest.mark.slow
def test_sampled_tokens_follow_the_target_probs(tiny_target: str, tiny_head: str) -> None:
    """Chi-square of the first two emitted tokens over many seeds on a small vocabulary, the second out of a draft tree."""
    engine = make_engine(
        make_drafter("eagle3", tiny_target, tiny_head),
        tiny_target,
        tiny_head,
        max_num_seqs=64,
        max_kv_tokens=8192,
        max_queued_requests=1000,
    )
    count, prompt = 1000, (7, 8, 9)
    sampling = SamplingParams(3, 0.9, ignore_eos=True)
    chunks = run(engine, [Request(f"{seed}", prompt, replace(sampling, seed=seed)) for seed in range(count)])
    assert stats_of(chunks).num_drafted >= count
    with torch.inference_mode():
        model = reference.load_reference(tiny_target)
        first = torch.softmax(model(input_ids=torch.tensor([prompt])).logits[0, -1] / 0.9, -1)
        rows = torch.tensor([[*prompt, token] for token in range(48)])
        second = first @ torch.softmax(model(input_ids=rows).logits[:, -1] / 0.9, -1)
    for place, probs in enumerate((first, second)):
        counts = torch.bincount(torch.tensor([tokens[place] for tokens in outputs_of(chunks).values()]), minlength=48)
        assert chi_square_is_plausible(counts, probs * count)


def test_a_session_at_max_model_len_drafts_beside_others(tiny_target: str, tiny_head: str) -> None:
    engine = make_engine(make_drafter("eagle3", tiny_target, tiny_head), tiny_target, tiny_head)
    requests = [
        Request("long", tuple(prompts(1, seed=2)[0] * 20)[:232], replace(GREEDY, seed=0)),
        Request("short", (5, 6, 7), replace(GREEDY, seed=0, max_tokens=60)),
    ]
    chunks = run(engine, requests)
    assert_plain(tiny_target, requests, chunks)


def test_extreme_settings_of_one_request_harm_no_other(tiny_target: str, tiny_head: str) -> None:
    engine = make_engine(make_drafter("eagle3", tiny_target, tiny_head), tiny_target, tiny_head)
    extreme = {"cold": {"temperature": 1e-46}, "narrow": {"top_p": 1e-46}, "wide": {"top_k": 2**31 - 1}}
    requests = [
        Request(name, (5, 6, 7), replace(GREEDY, seed=3, **{"temperature": 1.0, **e})) for name, e in extreme.items()
    ]
    requests.append(Request("plain", (9, 10), replace(GREEDY, seed=0)))
    chunks = run(engine, requests)
    greedy = reference.generate(tiny_target, [5, 6, 7], GREEDY)
    assert tokens_of(chunks["cold"]) == tokens_of(chunks["narrow"]) == greedy
    assert tokens_of(chunks["plain"]) == reference.generate(tiny_target, [9, 10], GREEDY)


def test_logits_that_are_not_numbers_fail_their_own_request_only(tiny_target: str, tiny_head: str) -> None:
    engine = make_engine(make_drafter("eagle3", tiny_target, tiny_head), tiny_target, tiny_head)
    good = Request("good", (9, 10), replace(GREEDY, seed=0, max_tokens=3))
    with token_without_numbers(engine, 47):
        chunks = run(engine, [Request("bad", (47, 5), replace(GREEDY, seed=0)), good])
    assert chunks["bad"][-1].finish_reason == "error"
    assert "not numbers" in chunks["bad"][-1].message
    assert chunks["good"][-1].finish_reason == "length"
