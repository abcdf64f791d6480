"""Random schedules: every slot has one owner, and every request gets the output that it gets alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.config import TreeConfig
from tests.support.toy_engine import ToyEngine, generate

actions = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 3), st.integers(1, 24), st.integers(1, 20), st.integers(0, 8)),
    st.tuples(st.just("cancel"), st.integers(0, 12)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("wait"), st.integers(1, 40)),
)


@settings(max_examples=60)
@given(st.lists(actions, max_size=40), st.integers(0, 99), st.sampled_from([0, 1]), st.sampled_from([1, 6]))
def test_any_trace_gives_right_tokens_and_loses_no_slot(
    trace: list[tuple[str, ...]], seed: int, cached: int, nodes: int
) -> None:
    engine = ToyEngine(seed, TreeConfig(nodes, 3, 2), prefix_cache=bool(cached), session_cache_ttl_s=20)
    requests = []
    for action, *numbers in trace:
        if action == "submit":
            family, length, max_tokens, kind = map(int, numbers)
            tenant, priority = "abc"[kind // 3], kind % 3
            prompt = [(family + i // 5) % 7 for i in range(length)]
            name, session = f"{len(requests)}", f"{family}" if family else ""
            requests.append(engine.submit(name, prompt, max_tokens, session, priority, tenant))
        elif action == "cancel":
            engine.scheduler.cancel(f"{numbers[0]}")
        elif action == "step":
            for _ in range(int(numbers[0])):
                engine.step()
        else:
            engine.clock.now += int(numbers[0])
    engine.run()
    for request in requests:
        expected, reason = generate(request), engine.chunks[request.id][-1].finish_reason
        found = engine.output(request.id)
        assert found == expected if reason == "length" else found == expected[: len(found)]
    assert engine.scheduler.cache.num_available == 48
    assert cached or not engine.scheduler.cache.num_cached


def test_the_last_request_is_preempted_and_the_first_never() -> None:
    engine = ToyEngine(max_kv_tokens=40)
    requests = [engine.submit(f"{i}", [i] * 4, 30, priority=priority) for i, priority in enumerate((0, 1, 0))]
    running = []
    while not engine.scheduler.num_preemptions:
        engine.step()
        running.append([s.request.id for s in engine.scheduler.running])
    assert running[-2:] == [["1", "0"], ["1"]]
    engine.run()
    assert [engine.output(r.id) for r in requests] == [generate(r) for r in requests]


@pytest.mark.parametrize("limits", [{"max_num_seqs": 2, "max_kv_tokens": 200}, {"max_kv_tokens": 40, "max_num_seqs": 8}])
def test_urgent_requests_preempt_at_once_and_output_stays_equal(limits: dict[str, int]) -> None:
    engine = ToyEngine(**limits)
    requests = [engine.submit(f"{i}", [i] * 4, 12) for i in range(2)]
    engine.step()
    engine.step()
    assert [s.request.id for s in engine.scheduler.running] == ["0", "1"]
    requests.append(engine.submit("urgent", [5] * 4, 12, priority=1))
    engine.step()
    assert [s.request.id for s in engine.scheduler.running] == ["urgent", "0"]
    assert engine.scheduler.num_preemptions == 1
    engine.run()
    assert [engine.output(r.id) for r in requests] == [generate(r) for r in requests]


def test_equal_or_aged_priority_does_not_preempt() -> None:
    engine = ToyEngine(max_num_seqs=1, max_kv_tokens=200, priority_aging_s=10)
    engine.submit("old", [1] * 4, 12)
    engine.step()
    engine.clock.now = 11
    engine.submit("equal", [2] * 4, 4)
    engine.submit("urgent", [3] * 4, 4, priority=1)
    engine.step()
    assert [s.request.id for s in engine.scheduler.running] == ["old"]
    engine.run()
    assert engine.scheduler.num_preemptions == 0


def test_no_request_is_preempted_without_effect() -> None:
    engine = ToyEngine(max_kv_tokens=48, max_num_seqs=8)
    engine.submit("first", [1] * 20, 12, priority=2)
    engine.submit("last", [2] * 4, 4)
    engine.step()
    engine.submit("long", [3] * 30, 12, priority=1)
    engine.step()
    assert [s.request.id for s in engine.scheduler.running] == ["first", "last"]
    assert engine.scheduler.num_preemptions == 0
    engine.run()


@settings(max_examples=8)
@given(st.integers(0, 99), st.integers(1, 3))
def test_all_requests_finish_despite_preemptions(seed: int, running: int) -> None:
    engine = ToyEngine(seed, max_num_seqs=running, max_kv_tokens=60, priority_aging_s=3)
    requests = []
    for number in range(12):
        requests.append(engine.submit(f"{number}", [number % 5] * (1 + seed % 7), 8, priority=number % 4))
        engine.step()
        engine.clock.now += 1
    for _ in range(12 * (8 + 2) * 2):
        engine.step()
    assert [engine.output(r.id) for r in requests] == [generate(r) for r in requests]


def test_trees_shrink_before_a_sequence_is_preempted() -> None:
    engine = ToyEngine(max_kv_tokens=34, max_num_seqs=2)
    engine.submit("a", [0, 1], 15)
    engine.submit("b", [1, 0], 15)
    engine.run()
    assert engine.scheduler.num_preemptions == 0


def test_a_long_prompt_never_delays_a_row_that_decodes() -> None:
    engine = ToyEngine(max_kv_tokens=400, max_prefill_tokens=5)
    engine.submit("short", [1], 40)
    engine.step()
    engine.submit("long", [2] * 60, 4)
    for _ in range(6):
        before = len(engine.chunks["short"])
        engine.step()
        assert len(engine.chunks["short"]) == before + 1
        assert engine.num_rows <= 5 + 6
    engine.run()
    assert len(engine.output("long")) == 4


def test_cancelling_at_any_moment_frees_everything_at_once() -> None:
    for moment in range(12):
        engine = ToyEngine(max_kv_tokens=40, prefix_cache=False)
        for i in range(4):
            engine.submit(f"{i}", [i] * 9, 20)
        for _ in range(moment):
            engine.step()
        for i in range(4):
            engine.scheduler.cancel(f"{i}")
        engine.scheduler.reap()
        engine.scheduler.check()
        assert (engine.scheduler.cache.num_available, engine.scheduler.sequences) == (40, {})
