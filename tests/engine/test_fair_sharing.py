"""Tenants share an engine fairly, whatever one of them asks for; in ints, without a model."""

from collections import Counter

import pytest

from eyas.api.validation import MAX_INT
from eyas.engine.waiting_queue import RESERVED_SHARE
from eyas.errors import Overloaded
from tests.support.toy_engine import ToyEngine, generate

ROOMY = {"max_kv_tokens": 400, "max_num_seqs": 4}


def flood(engine: ToyEngine, tenant: str, num: int = 64, max_tokens: int = 12, priority: int = 0) -> None:
    for i in range(num):
        engine.submit(f"{tenant}{i}", [i % 7] * 4, max_tokens, priority=priority, tenant=tenant)


def steps_until_done(engine: ToyEngine, name: str) -> int:
    """Steps from now to the end of a request."""
    num_steps = 0
    while name in engine.scheduler.sequences:
        engine.step()
        num_steps += 1
    return num_steps


def emitted(engine: ToyEngine) -> Counter[str]:
    """Output tokens by the first letter of the request, which is its tenant."""
    return sum((Counter({name[0]: len(engine.output(name))}) for name in engine.chunks), Counter())


def test_a_flood_delays_another_tenant_by_two_steps_at_most() -> None:
    alone = ToyEngine(**ROOMY)
    alone.submit("b", [1] * 4, 12, tenant="b")
    expected = steps_until_done(alone, "b")
    engine = ToyEngine(**ROOMY)
    flood(engine, "a")
    for _ in range(3):
        engine.step()
    request = engine.submit("b", [1] * 4, 12, tenant="b")
    assert steps_until_done(engine, "b") <= expected + 4, "trees differ, so a few steps more are luck"
    assert engine.output("b") == generate(request)
    assert len(engine.scheduler.waiting) > 50, "the flood goes on"


def test_two_floods_get_equal_service() -> None:
    engine = ToyEngine(**ROOMY)
    flood(engine, "a", max_tokens=20)
    for _ in range(5):
        engine.step()
    before = emitted(engine)["a"]
    flood(engine, "b", num=200, max_tokens=5)
    for _ in range(60):
        engine.step()
    found = emitted(engine)
    assert 0.7 < (found["a"] - before) / found["b"] < 1.4, f"{found}, {before} before"


def test_tenants_seldom_preempt_each_other() -> None:
    engine = ToyEngine(**ROOMY)
    flood(engine, "a", num=20)
    engine.step()
    flood(engine, "b", num=20)
    engine.run()
    assert engine.scheduler.num_preemptions <= 8, "of 40 requests: only for a tenant without a running one"


def test_a_tenant_alone_is_served_in_order_of_arrival() -> None:
    engine = ToyEngine(**ROOMY)
    flood(engine, "a", num=12)
    admitted = []
    while engine.scheduler.sequences:
        engine.step()
        admitted += engine.scheduler.admitted
    assert admitted == [f"a{i}" for i in range(12)]
    assert engine.scheduler.num_preemptions == 0
    assert not engine.scheduler.waiting.served, "service is forgotten without competition"


@pytest.mark.parametrize("tenant", ["", "b"])
def test_a_flood_of_urgent_requests_starves_no_other(tenant: str) -> None:
    engine = ToyEngine(max_kv_tokens=400, max_num_seqs=1)
    admitted: list[str] = []
    for number in range(100):
        engine.submit(f"urgent{number}", [1] * 4, 3, priority=MAX_INT)
        if number == 2:
            engine.submit("normal", [2] * 4, 3, tenant=tenant)
        engine.step()
        admitted += engine.scheduler.admitted
    assert admitted.index("normal") <= RESERVED_SHARE, admitted
    assert engine.chunks["normal"][-1].finish_reason == "length"
    assert engine.scheduler.num_preemptions == 0, "one that got a reserved place keeps it"


def test_a_flood_of_ever_new_tenants_starves_no_other() -> None:
    engine = ToyEngine(max_kv_tokens=400, max_num_seqs=1)
    engine.submit("served", [2] * 4, 12, tenant="old")
    engine.submit("new", [1] * 4, 3, tenant="new")
    steps_until_done(engine, "served")
    admitted: list[str] = []
    for number in range(200):
        engine.submit(f"new{number}", [1] * 4, 3, tenant=f"new{number}")
        if number == 2:
            engine.submit("old", [2] * 4, 3, tenant="old")
        engine.step()
        admitted += engine.scheduler.admitted
    assert "old" in admitted[: 2 * RESERVED_SHARE**2]


def test_no_sequence_is_preempted_for_one_that_fits() -> None:
    engine = ToyEngine(max_kv_tokens=60, max_num_seqs=6)
    for number in range(RESERVED_SHARE - 1):
        engine.submit(f"small{number}", [1] * 4, 4)
    engine.step()
    engine.submit("large", [2] * 30, 20)  # the next place is reserved for it, but it does not fit
    engine.submit("urgent", [3] * 4, 4, priority=5)
    engine.step()
    assert (engine.scheduler.admitted, engine.scheduler.num_preemptions) == (["urgent"], 0)
    engine.run()


@pytest.mark.parametrize(("max_tokens", "steps"), [(3, 100), (150, 60)], ids=["comes back", "asks for little"])
def test_a_tenant_that_asked_for_little_saves_up_no_service(max_tokens: int, steps: int) -> None:
    """It asked once long ago, or has run all the time in one place of four."""
    engine = ToyEngine(**ROOMY)
    flood(engine, "a", num=200)
    engine.submit("b", [1] * 4, max_tokens, tenant="b")
    for _ in range(steps):
        engine.step()
    assert ("b" in engine.scheduler.sequences) == (max_tokens > steps)
    before = emitted(engine)
    flood(engine, "b", num=200)
    for _ in range(40):
        engine.step()
    found = emitted(engine) - before
    assert found["a"] > 0.6 * found["b"], found


def test_a_tenant_that_fills_the_queue_leaves_others_theirs() -> None:
    engine = ToyEngine(max_queued_requests=10, max_num_seqs=2)
    flood(engine, "a", num=12)
    with pytest.raises(Overloaded):
        engine.submit("one more", [1] * 4, 3, tenant="a")
    flood(engine, "b", num=6)
    with pytest.raises(Overloaded):
        engine.submit("too many", [1] * 4, 3, tenant="b")
    flood(engine, "c", num=1)
    engine.run()


def test_prompts_of_two_tenants_are_prefilled_in_turns() -> None:
    engine = ToyEngine(max_kv_tokens=400, max_num_seqs=8, max_prefill_tokens=8)
    for i in range(6):
        engine.submit(f"a{i}", [i] * 16, 3, tenant="a")
    engine.step()
    engine.submit("b", [1] * 16, 3, tenant="b")
    while "b" not in engine.chunks:
        engine.step()
    assert len(engine.chunks) <= 3, "b's prompt waits for one of a's, not for six"


def test_no_request_finds_a_prefix_of_another_salt() -> None:
    engine = ToyEngine(max_kv_tokens=100)
    prompt = [3] * 20
    for name, tenant in (("first", "a"), ("other", "b"), ("again", "a"), ("none", "")):
        engine.submit(name, prompt, 3, tenant=tenant)
        engine.run()
    assert {name: engine.num_cached(name) for name in ("first", "other", "again", "none")} == {
        "first": 0,
        "other": 0,
        "again": 19,
        "none": 0,
    }
