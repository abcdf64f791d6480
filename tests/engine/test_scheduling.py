"""Scheduling changes no token: chunks, preemption, priorities, small trees."""

from dataclasses import replace
from itertools import cycle

import pytest

from eyas.api.request import Request
from tests.engine.test_equality import BATCHES, PARAMS, make_drafter, make_engine, prompts
from tests.support.runs import assert_plain, run
from tests.support.tiers import nightly


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kinds"),
    [nightly("eagle3", "greedy"), ("eagle3", "mixed"), ("random", "mixed"), ("dying", "mixed"), nightly("none", "greedy")],
)
def test_preempted_requests_equal_the_plain_loop(name: str, kinds: str, tiny_target: str, tiny_head: str) -> None:
    engine = make_engine(
        make_drafter(name, tiny_target, tiny_head),
        tiny_target,
        tiny_head,
        max_kv_tokens=90,
        max_prefill_tokens=9,
        max_num_seqs=4,
    )
    requests = [
        Request(f"r{i}", tuple(prompt), replace(params, seed=50 + i, max_tokens=28), priority=i % 3)
        for i, (prompt, params) in enumerate(zip(prompts(5, seed=3), cycle(BATCHES[kinds]), strict=False))
    ]
    chunks = run(engine, requests[:2], {2: requests[2:4], 9: requests[4:]})
    assert_plain(tiny_target, requests, chunks)
    assert engine.scheduler.num_preemptions > 0
    assert engine.load.free_kv_tokens == 90


@pytest.mark.parametrize(
    "limits", [{"max_prefill_tokens": 1}, {"max_prefill_tokens": 3, "max_verify_tokens": 9}, {"prefix_cache": False}]
)
@pytest.mark.parametrize("name", ["eagle3", "random"])
def test_limits_of_a_step_do_not_show(name: str, limits: dict[str, int], tiny_target: str, tiny_head: str) -> None:
    engine = make_engine(make_drafter(name, tiny_target, tiny_head), tiny_target, tiny_head, **limits)
    requests = [
        Request(f"r{i}", tuple(prompt), replace(PARAMS["sampled"], seed=i, max_tokens=12))
        for i, prompt in enumerate(prompts(4, seed=6))
    ]
    chunks = run(engine, requests[:3], {4: requests[3:]})
    assert_plain(tiny_target, requests, chunks)


def test_a_preempted_request_drafts_again(tiny_target: str, tiny_head: str) -> None:
    engine = make_engine(make_drafter("eagle3", tiny_target, tiny_head), tiny_target, tiny_head, max_kv_tokens=80)
    requests = [Request(f"r{i}", (i + 3, 5, 6), replace(PARAMS["greedy"], seed=0, max_tokens=60)) for i in range(2)]
    chunks = run(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    last = [chunk.verify_step for chunk in chunks["r1"] if chunk.verify_step][-12:]
    assert sum(r.drafted > 0 for r in last if r) > 6


def test_a_cancelled_request_is_released_by_its_drafter(tiny_target: str, tiny_head: str) -> None:
    drafter = make_drafter("eagle3", tiny_target, tiny_head)
    engine = make_engine(drafter, tiny_target, tiny_head)
    for steps in (1, 2, 3):
        engine.submit(Request("a", (5, 6, 7), replace(PARAMS["greedy"], seed=0)))
        for _ in range(steps):
            engine.step()
        engine.cancel("a")
        engine.step()
        assert not engine.has_work
        assert drafter.sessions.num_free == 4096  # type: ignore[union-attr]


def test_a_flood_of_one_tenant_changes_no_output_of_another(tiny_target: str, tiny_head: str) -> None:
    engine = make_engine(
        make_drafter("eagle3", tiny_target, tiny_head), tiny_target, tiny_head, max_num_seqs=3, max_prefill_tokens=9
    )
    requests = [
        Request(
            f"{tenant}{i}", (5, 6, 7, i), replace(PARAMS["sampled"], seed=i, max_tokens=10), tenant=tenant, cache_salt=salt
        )
        for tenant, salt, num in (("a", "x", 12), ("b", "y", 2))
        for i in range(num)
    ]
    chunks = run(engine, requests[:12], {3: requests[12:]})
    assert_plain(tiny_target, requests, chunks)
    assert list(chunks).index("b1") < 9, "two requests of b pass a's queue"
    assert chunks["b0"][0].num_cached == 0
    assert chunks["a11"][0].num_cached == 3, "a's own prefix is shared"
