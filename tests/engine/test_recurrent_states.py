"""Engines over recurrent targets: whatever is drafted, cached, preempted or fails, the output is that of `generate`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.api.request import Request, SamplingParams
from eyas.cache.prefix_cache import PrefixCache
from eyas.cache.state_pools import StatePlan, StateShape, states_that_fit
from eyas.cache.states import START, StateRows, StateSizes
from eyas.drafters.base import Drafter
from eyas.engine import recurrent_states
from eyas.engine.build import assemble_engine
from eyas.engine.engine import Engine
from eyas.engine.recurrent_states import SequenceStates
from eyas.models.inputs import Segment
from eyas.models.loading import load_target
from eyas.models.target import TargetModel
from eyas.protocol.prefix_hash import block_hashes
from tests.models.test_more_families import TREE
from tests.support.bad_drafters import KnowingDrafter, RandomDrafter
from tests.support.corpora import write_datastore
from tests.support.families import config_of, write_model
from tests.support.family_configs import HYBRIDS
from tests.support.methods import KINDS_OF_DRAFTS, Case
from tests.support.reference import generated
from tests.support.runs import outputs_of, run, stats_of
from tests.support.tiers import nightly, tiered
from tests.support.tiny import fixed_config, shared_target

RNG = np.random.default_rng(1)
LONG = RNG.integers(3, 48, 90).tolist()
# The fourth leaves the third after 60 tokens, the fifth is the third again.
PROMPTS = [[5, 9, 11], RNG.integers(3, 48, 37).tolist(), LONG, [*LONG[:60], 7, 8, 9], LONG]
KINDS = ("qwen3_5_text", nightly("falcon_h1"), nightly("jamba"))
# One of each kind: with features, ahead, without features, and lookups.
DAILY = ("dspark", "eagle3-ahead", "sps", "suffix")


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp(request.param), config_of(request.param, **HYBRIDS[request.param]))


@pytest.fixture(scope="module")
def target(folder: str) -> TargetModel:
    return load_target(folder)


def engine_of(target: TargetModel, drafter: Drafter | None = None, **limits: object) -> Engine:
    config = fixed_config(**{"max_kv_tokens": 512, "max_prefill_tokens": 16, "max_num_seqs": 4, **limits})
    return assemble_engine(target, None, config, TREE, drafter)


def requests(turn: int = 0, temperature: float = 0.0, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Request]:
    return [Request(f"{turn}-{i}", tuple(p), SamplingParams(12, temperature, seed=i)) for i, p in enumerate(prompts)]


def knowing(folder: str, asked: Sequence[Request]) -> KnowingDrafter:
    return KnowingDrafter({r.id: [*r.prompt_ids, *generated(folder, r.prompt_ids)] for r in asked}, 48)


def check(folder: str, engine: Engine, asked: Sequence[Request]) -> None:
    assert outputs_of(run(engine, asked)) == {r.id: generated(folder, r.prompt_ids) for r in asked}


def test_deep_trees_are_accepted_and_change_nothing(folder: str, target: TargetModel) -> None:
    asked = requests()
    engine = engine_of(target, knowing(folder, asked))
    chunks = run(engine, asked)
    assert outputs_of(chunks) == {r.id: generated(folder, r.prompt_ids) for r in asked}
    assert stats_of(chunks).acceptance_length > 2


@pytest.mark.parametrize("temperature", [0.8, nightly(1.1)])
def test_drafted_output_is_plain_output(temperature: float, target: TargetModel) -> None:
    asked = requests(temperature=temperature)
    plain, drafted = (outputs_of(run(engine_of(target, d), asked)) for d in (None, RandomDrafter(48)))
    assert drafted == plain


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target with as many layers as heads of `tiny_head` read."""
    types = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    settings = HYBRIDS["qwen3_5_text"] | {"num_hidden_layers": 4, "layer_types": types, "head_dim": 8}
    return write_model(tmp_path_factory.mktemp("deep"), config_of("qwen3_5_text", **settings))


@pytest.mark.parametrize("name", tiered([name for name in KINDS_OF_DRAFTS if not name.startswith("mtp")], DAILY))
def test_every_method_drafts_for_a_recurrent_target(name: str, deep: str, tiny_head: str) -> None:
    """Modules of such targets have tests of their own."""
    store = Path(deep, "outputs")
    if name == "rest":
        write_datastore(Path(deep), [generated(deep, tuple(prompt)) for prompt in PROMPTS[:3]], store)
    case = Case(name, deep, tiny_head, store)
    fuser = case.fuser()
    target = shared_target(deep, fuser.aux_hidden_state_layers if fuser else ())
    config = fixed_config(max_kv_tokens=512, max_prefill_tokens=16, max_num_seqs=4)
    asked = [*requests(0, prompts=PROMPTS[:3]), *requests(1, 0.8, PROMPTS[:3])]
    chunks = run(assemble_engine(target, fuser, config, TREE, case.drafter(TREE)), asked)
    assert outputs_of(chunks) == outputs_of(run(assemble_engine(target, None, config, TREE, None), asked))
    assert stats_of(chunks).num_drafted, "it drafts"


def test_prompts_go_on_behind_cached_states(folder: str, target: TargetModel) -> None:
    """The same prompt behind all but its last token, another one where it leaves that, once it is known to."""
    engine = engine_of(target, max_num_seqs=1)
    check(folder, engine, requests(0, prompts=[LONG]))
    check(folder, engine, requests(1, prompts=[LONG]))
    assert engine.scheduler.num_cached_tokens == len(LONG) - 1
    for turn, cached in ((2, 0), (3, 60)):
        before = engine.scheduler.num_cached_tokens
        check(folder, engine, requests(turn, prompts=[[*LONG[:60], 7 + turn, 8, 9]]))
        assert engine.scheduler.num_cached_tokens - before == cached, "the second time there is a state"


def test_a_conversation_goes_on_near_its_end(folder: str, target: TargetModel) -> None:
    asked = requests(0, prompts=[LONG])
    engine = engine_of(target, knowing(folder, asked))
    check(folder, engine, asked)
    whole = [*LONG, *generated(folder, tuple(LONG))]
    later = requests(1, prompts=[[*whole, 4, 5]])  # `generate` would take a 2 for padding
    assert outputs_of(run(engine, later)) == outputs_of(run(engine_of(target), later))
    assert len(whole) - 6 < engine.scheduler.num_cached_tokens < len(whole)


def test_long_prompts_keep_some_states_in_passing(folder: str, target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_states, "FIRST_MARK", 32)
    engine = engine_of(target, max_num_seqs=1)
    check(folder, engine, requests(0, prompts=[LONG]))
    check(folder, engine, requests(1, prompts=[[*LONG[:50], 3, 3]]))
    assert engine.scheduler.num_cached_tokens == 32


@pytest.mark.parametrize("drafted", [False, True])
def test_preempted_sequences_go_on_behind_their_state(drafted: bool, folder: str, target: TargetModel) -> None:
    asked = requests(prompts=[LONG])
    urgent = [Request("urgent", tuple(PROMPTS[1]), SamplingParams(12, 0.0, seed=0), priority=5)]
    drafter = knowing(folder, [*asked, *urgent]) if drafted else None
    engine = engine_of(target, drafter, max_kv_tokens=128)
    chunks = run(engine, asked, {8: urgent})
    assert outputs_of(chunks) == {r.id: generated(folder, r.prompt_ids) for r in [*asked, *urgent]}
    assert engine.scheduler.num_preemptions == 1
    assert engine.scheduler.preempted == []


def test_without_a_prefix_cache_nothing_is_kept(folder: str, target: TargetModel) -> None:
    engine = engine_of(target, RandomDrafter(48), prefix_cache=False)
    for turn in range(2):
        check(folder, engine, requests(turn))
    rows = engine.scheduler.cache.states
    assert rows is not None
    assert rows.num_free == 2 * 4, "all but the zero row"
    assert not engine.scheduler.num_cached_tokens


def test_a_step_in_halves_gives_the_same(folder: str, target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that write states and then fail leave nothing behind."""
    asked = requests()
    engine = engine_of(target, knowing(folder, asked))
    forward = engine.runner.forward
    failed = list[int]()

    def limited(segments: Sequence[Segment]) -> object:
        found = forward(segments)
        if len(segments) > 2:
            failed.append(len(segments))
            raise torch.OutOfMemoryError("too many rows")
        return found

    monkeypatch.setattr(engine.runner, "forward", limited)
    check(folder, engine, asked)
    assert failed


def test_a_request_that_fails_leaves_no_state(folder: str, target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(target, max_num_seqs=1)
    forward = engine.runner.forward
    run(engine, requests(0, prompts=[LONG[:40]]))

    def fail(segments: Sequence[Segment]) -> object:
        forward(segments)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(engine.runner, "forward", fail)
    chunks = run(engine, requests(1, prompts=[LONG[:40]]))
    assert chunks["1-0"][-1].finish_reason == "error"
    monkeypatch.setattr(engine.runner, "forward", forward)
    check(folder, engine, requests(2, prompts=[LONG[:40], LONG]))


def test_few_rows_limit_the_sequences_and_lose_nothing(folder: str, target: TargetModel) -> None:
    """States of the cache make room for running sequences."""
    engine = engine_of(target, RandomDrafter(48), max_num_seqs=2)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 48, int(rng.integers(2, 60))).tolist() for _ in range(12)]
    for turn in range(2):
        check(folder, engine, requests(turn, prompts=prompts))


def test_cancelled_sequences_give_their_rows_back(target: TargetModel) -> None:
    engine = engine_of(target, RandomDrafter(48))
    rng = np.random.default_rng(6)
    for turn in range(6):
        asked = requests(turn)
        for request in asked:
            engine.submit(request)
        for _ in range(int(rng.integers(1, 9))):
            engine.step()
            engine.check()
        for request in asked:
            engine.cancel(request.id)
        while engine.has_work:
            engine.step()
            engine.check()


def test_the_least_recently_used_state_makes_room() -> None:
    cache = PrefixCache(64, StateRows(5, 1))
    rows = cache.states
    assert rows is not None
    for number in range(4):
        tokens = np.array([number, number, number])
        prefix = cache.store(tokens, cache.take(3), cache.find(tokens[:0]))
        cache.keep_state(prefix, 3, cache.take_state())
        cache.release(prefix, used=float(number))
    cache.take_state()
    assert len(cache.find(np.array([0, 0, 0]), to_resume=True).slots) == 0, "its state is gone"
    assert len(cache.find(np.array([1, 1, 1]), to_resume=True).slots) == 3


def test_marks_leave_running_sequences_their_rows() -> None:
    cache = PrefixCache(64, StateRows(1 + 2 + 1, 1))
    states = SequenceStates(cache, cache.find(np.zeros(0, np.int64)), 41, 64)
    step = states.prompt_step(0, 40)
    assert [after for after, _ in step.marks] == [40]
    states.advance(40)
    assert cache.take_state(is_mark=True) == START, "the only row for marks is taken"
    states.prompt_step(40, 1)
    assert rows_of(states) == 3


def rows_of(states: SequenceStates) -> int:
    return len(set(states.held) - {START})


def test_states_take_at_most_their_share_of_memory() -> None:
    shape = {0: StateShape(2, 8, 8, 1, 16, 4)}
    state, node = shape[0].state_bytes(torch.float32), shape[0].stash_bytes(torch.float32)

    def plan(most: int, nodes: int = 0) -> StatePlan:
        return states_that_fit(shape, 8, 2, nodes, 20, torch.float32, most)

    assert plan(1000 * state) == StatePlan(StateSizes(1 + 32, 0), 34 * state, 8)
    assert plan(18 * state) == StatePlan(StateSizes(1 + 16, 0), 18 * state, 4)
    assert plan(18 * state - 1).num_running == 3
    assert plan(0).num_running == 1, "one sequence always runs"
    assert plan(1000 * state, 8) == StatePlan(StateSizes(33, 40), 34 * state + 40 * node, 8), "two steps' nodes"
    assert plan(6 * state + 16 * node, 8) == StatePlan(StateSizes(5, 16), 6 * state + 16 * node, 1)


def test_a_long_prompt_does_not_push_others_out() -> None:
    """States kept in passing go first, and the last one has a row also where few are left for marks."""
    cache = PrefixCache(4000, StateRows(1 + 2 + 3, 1))
    first = SequenceStates(cache, cache.find(np.zeros(0, np.int64)), 2500, 3000)
    step = first.prompt_step(0, 2500)
    assert [after for after, _ in step.marks] == [1024, 2048, 2499]
    first.advance(2500)
    tokens = np.arange(2500)
    prefix = cache.store(tokens, cache.take(2500), cache.find(tokens[:0]))
    first.share(prefix)
    first.leave(prefix)
    cache.release(prefix, used=5.0)
    for _ in range(3):
        cache.take_state()
    assert len(cache.find(tokens[:2499], to_resume=True).slots) == 2499, "both others are gone"


def test_blocks_after_the_last_state_are_not_announced() -> None:
    cache = PrefixCache(200, StateRows(5, 1))
    tokens = np.arange(200)
    prefix = cache.store(tokens, cache.take(200), cache.find(tokens[:0]))
    assert cache.cached_blocks(9) == []
    cache.keep_state(prefix, 100, cache.take_state())
    assert cache.cached_blocks(9) == list(block_hashes(tokens[:64].tolist()))
    assert len(cache.find(tokens, to_resume=True).slots) == 100


def test_numbers_that_are_none_stay_in_their_request(target: TargetModel) -> None:
    """The stash of a request holds NaN: another one's output is as before."""
    asked = requests(prompts=[LONG, PROMPTS[1]])
    engine = engine_of(target, KnowingDrafter({asked[0].id: [*LONG, *range(3, 40)], asked[1].id: []}, 48))
    expected = outputs_of(run(engine_of(target), asked))[asked[1].id]
    for request in asked:
        engine.submit(request)
    tokens = list[int]()
    pools = engine.runner.kv_cache.recurrent
    assert pools is not None
    while engine.has_work:
        for layer in pools.layers.values():
            for tensor in (layer.keys, layer.updates, layer.sums, layer.inputs):
                tensor.fill_(float("nan"))
        tokens += [t for chunk in engine.step() if chunk.request_id == asked[1].id for t in chunk.token_ids]
    assert tokens == expected
