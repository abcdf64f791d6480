"""Policy in ints: admission, prefill budget, trimming and bookkeeping, without a model."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from eyas.api.request import Chunk, Request, SamplingParams
from eyas.config import EngineConfig, TreeConfig
from eyas.engine.scheduler import Scheduler
from eyas.engine.sequence import DraftReply, ScheduledSequence
from eyas.errors import InvalidRequest, Overloaded
from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftTree
from eyas.sampling.acceptance import Accepted
from tests.support.clock import Clock
from tests.support.strategies import outputs_of
from tests.support.toy_engine import largest_budgets

EOS = 1


def make_scheduler(nodes: int = 4, clock: Callable[[], float] = time.monotonic, **limits: float) -> Scheduler:
    config = EngineConfig(**{"max_kv_tokens": 64, **limits})  # type: ignore[arg-type]
    return Scheduler(config, TreeConfig(nodes, 3, 2), frozenset({EOS}), clock)


def request(name: str, prompt: int = 5, max_tokens: int = 8, **sampling: object) -> Request:
    return Request(name, tuple(range(10, 10 + prompt)), SamplingParams(max_tokens=max_tokens, seed=0, **sampling))  # type: ignore[arg-type]


def output(scheduled: ScheduledSequence, tokens: tuple[int, ...]) -> Accepted | None:
    """As if the whole chain had been accepted."""
    tokens = tokens[: len(scheduled.tree)] if scheduled.tree else tokens
    return Accepted(tuple(range(len(tokens))), tokens) if scheduled.logit_rows.tree else None


def step(scheduler: Scheduler, tokens: tuple[int, ...] = (20,)) -> list[Chunk]:
    budgets = largest_budgets(scheduler, scheduler.running)
    drafts = [DraftReply(s, chain(own, tokens), 0, 0) for s, own in zip(scheduler.running, budgets, strict=True)]
    batch = scheduler.schedule(drafts)
    return scheduler.commit(batch, outputs_of([output(each, tokens if each.tree else tokens[-1:]) for each in batch]))


def chain(budget: TreeBudget, tokens: tuple[int, ...]) -> DraftTree:
    return DraftTree.chain((0, *tokens[: budget.max_depth][: len(tokens) - 1]))


def test_a_request_waits_for_the_slots_of_its_next_steps() -> None:
    scheduler = make_scheduler(max_kv_tokens=60)
    scheduler.add(request("first", prompt=20, max_tokens=40))
    scheduler.add(request("second", prompt=12, max_tokens=8))
    scheduler.schedule([])
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 0), "20 + 16 to grow, 12 + 8 at most"
    scheduler = make_scheduler(max_kv_tokens=60)
    scheduler.add(request("first", prompt=20, max_tokens=40))
    scheduler.add(request("second", prompt=17, max_tokens=8))
    scheduler.schedule([])
    assert (len(scheduler.running), len(scheduler.waiting)) == (1, 1)
    scheduler.cancel("first")
    assert [chunk.finish_reason for chunk in scheduler.reap()] == ["cancelled"]
    scheduler.schedule([])
    assert (len(scheduler.running), len(scheduler.waiting)) == (1, 0)


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    make_scheduler().add(request("a", prompt=5, max_tokens=59))
    with pytest.raises(InvalidRequest, match="65 token slots"):
        make_scheduler().add(request("a", prompt=5, max_tokens=60))


def test_a_full_queue_rejects_with_retry_after_and_drops_nothing() -> None:
    clock = Clock()
    scheduler = make_scheduler(clock=clock, max_kv_tokens=200, max_queued_requests=1, max_num_seqs=3)
    for name in "abcd":  # three to start, and one to wait
        scheduler.add(request(name))
    with pytest.raises(Overloaded, match=r"4 requests are waiting already; try again in 1\.0 s") as raised:
        scheduler.add(request("e"))
    assert (len(scheduler.waiting), raised.value.retry_after) == (4, 1.0)
    scheduler.schedule([])
    clock.now += 6
    with pytest.raises(Overloaded, match="1 requests are waiting") as raised:
        scheduler.add(request("e"))
    assert raised.value.retry_after == 2, "three were admitted in the last six seconds"


def test_the_more_urgent_go_first_and_of_equals_the_earlier() -> None:
    scheduler = make_scheduler(clock=Clock(), max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 2), ("c", 0), ("d", 2), ("e", 1)):
        scheduler.add(replace(request(name, max_tokens=1), priority=priority))
    assert [step(scheduler)[0].request_id for _ in range(5)] == ["b", "d", "e", "a", "c"]


def test_a_long_waiting_request_precedes_every_newcomer() -> None:
    clock = Clock()
    scheduler = make_scheduler(clock=clock, max_num_seqs=1, priority_aging_s=10)
    scheduler.add(request("patient", max_tokens=1))
    served = []
    for number in range(8):
        scheduler.add(replace(request(f"urgent{number}", max_tokens=1), priority=1))
        served.append(step(scheduler)[0].request_id)
        clock.now += 7
    assert served.index("patient") == 2, "a priority is worth ten seconds"


def test_trees_shrink_so_that_a_step_keeps_its_rows() -> None:
    scheduler = make_scheduler(nodes=8, max_kv_tokens=400, max_verify_tokens=20)
    nodes = []
    for count in range(1, 13):
        scheduler.add(request(f"{count}", max_tokens=20))
        scheduler.commit(works := scheduler.schedule([]), outputs_of([output(work, (20,)) for work in works]))
        nodes.append(largest_budgets(scheduler, scheduler.running)[-1].max_nodes)
    assert nodes == [8, 8, 6, 5, 4, 3, 2, 2, 2, 2, 1, 1]


def test_a_running_id_cannot_be_used_again() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    with pytest.raises(InvalidRequest, match="already running"):
        scheduler.add(request("a"))


def test_a_stop_inside_an_accepted_path_trims_the_rest() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", stop_token_ids=(31,)))
    step(scheduler)
    (chunk,) = step(scheduler, (30, 31, 32))
    assert (chunk.token_ids, chunk.is_draft_token, chunk.finish_reason) == ((30, 31), (True, True), "stop")
    assert not scheduler.sequences


def test_ignore_eos_ignores_only_the_models_own_end() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", ignore_eos=True, stop_token_ids=(31,)))
    step(scheduler)
    (chunk,) = step(scheduler, (EOS, 31, 32))
    assert (chunk.token_ids, chunk.finish_reason) == ((EOS, 31), "stop")


def test_a_stop_token_at_max_tokens_finishes_with_stop() -> None:
    scheduler = make_scheduler()
    for name, tokens, reason in (("a", (30, 1, 32), "stop"), ("b", (30, 31, 32), "length")):
        scheduler.add(request(name, max_tokens=3))
        step(scheduler)
        (chunk,) = step(scheduler, tokens)
        assert (chunk.token_ids, chunk.finish_reason) == (tokens[:2], reason)


def test_the_tree_is_clamped_to_what_may_still_be_emitted() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", max_tokens=3))
    step(scheduler)
    assert largest_budgets(scheduler, scheduler.running) == [TreeBudget(4, 1)]
    scheduler = make_scheduler()
    scheduler.add(request("a", max_tokens=2))
    step(scheduler)
    assert largest_budgets(scheduler, scheduler.running) == [TreeBudget(1, 0)]


def test_slots_of_a_step_that_failed_come_back() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    scheduler.schedule([])
    scheduler.check()
    scheduler.cancel("a")
    scheduler.reap()
    scheduler.schedule([])
    scheduler.check()
    assert scheduler.cache.num_available == 64
