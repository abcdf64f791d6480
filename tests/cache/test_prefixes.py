"""What the prefix cache spares, what it keeps and what it gives up first; without a model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.cache.prefix_cache import CachedPrefix, PrefixCache
from tests.support.toy_engine import ToyEngine, generate

NUM_SLOTS = 40


def ints(*values: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.array(values, dtype=np.int64)


def stored(cache: PrefixCache, tokens: list[int], used: float = 0.0) -> None:
    """As if somebody had computed these tokens."""
    slots = cache.take(len(tokens))
    cache.release(cache.store(ints(*tokens), slots, cache.find(ints())), used)


def known(cache: PrefixCache, tokens: list[int]) -> int:
    prefix = cache.find(ints(*tokens))
    cache.release(prefix, prefix.node.used)
    return len(prefix.slots)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=9), st.integers(0, 3), st.booleans()), max_size=30))
def test_the_longest_known_prefix_is_found_whatever_was_stored(trace: list[tuple[list[int], int, bool]]) -> None:
    cache, held, contents = PrefixCache(300), list[CachedPrefix](), list[list[int]]()
    for tokens, kept, holds in trace:
        best = max((sum(1 for _ in common(tokens, other)) for other in contents), default=0)
        prefix = cache.find(ints(*tokens))
        assert len(prefix.slots) == best
        own = cache.take(len(tokens) - best)
        prefix = cache.store(ints(*tokens), np.concatenate([prefix.slots, own]), prefix)
        assert len(prefix.slots) == len(tokens)
        contents.append(tokens)
        if holds:
            held.append(prefix)
        else:
            cache.release(prefix, float(kept))
        cache.check([], held)
    for prefix in held:
        cache.release(prefix, 0.0)
    cache.take(300)
    assert cache.num_cached == 0


def common(left: list[int], right: list[int]) -> list[int]:
    length = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return left[:length]


def test_held_slots_are_never_evicted() -> None:
    cache = PrefixCache(NUM_SLOTS)
    stored(cache, [1, 2, 3, 4])
    held = cache.find(ints(1, 2))
    assert cache.num_available == NUM_SLOTS - 2
    cache.take(NUM_SLOTS - 2)
    assert known(cache, [1, 2, 3, 4]) == 2
    with pytest.raises(AssertionError, match="1 slots to be evicted, 0 evictable"):
        cache.take(1)
    cache.release(held, 0.0)


def test_the_end_of_the_least_recently_used_prefix_goes_first() -> None:
    cache = PrefixCache(NUM_SLOTS)
    for used, start in ((1, 10), (3, 20), (2, 30)):
        stored(cache, [start, start + 1, start + 2, start + 3], used)
    cache.take(cache.num_available - 7)
    assert [known(cache, [start + i for i in range(4)]) for start in (10, 20, 30)] == [0, 4, 3]


def test_two_requests_with_equal_prompts_end_with_one_copy() -> None:
    cache = PrefixCache(NUM_SLOTS)
    one, other = cache.find(ints(1, 2, 3)), cache.find(ints(1, 2, 4))
    first = cache.store(ints(1, 2, 3), cache.take(3), one)
    second = cache.store(ints(1, 2, 4), cache.take(3), other)
    assert first.slots[:2].tolist() == second.slots[:2].tolist()
    assert (cache.num_cached, cache.num_available) == (4, NUM_SLOTS - 4)
    cache.check([], [first, second])


def test_a_prompt_seen_before_is_computed_in_its_last_row_only() -> None:
    engine = ToyEngine()
    for name in ("cold", "warm"):
        request = engine.submit(name, [1, 2, 0, 1, 1, 2], 5)
        engine.step()
        assert engine.num_rows == (6 if name == "cold" else 1)
        engine.run()
        assert engine.output(name) == generate(request)
    assert [engine.num_cached(name) for name in ("cold", "warm")] == [0, 5]


def test_a_running_request_shares_its_prompt_already() -> None:
    engine = ToyEngine()
    requests = [engine.submit("first", [1, 2, 0, 1, 1, 2], 9)]
    engine.step()
    requests.append(engine.submit("second", [1, 2, 0, 1, 2], 9))
    engine.run()
    assert engine.num_cached("second") == 4
    assert [engine.output(r.id) for r in requests] == [generate(r) for r in requests]


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    engine = ToyEngine(prefix_cache=False)
    for name in ("a", "b"):
        engine.submit(name, [1, 2, 0, 1], 3)
        engine.run()
    assert (engine.num_cached("b"), engine.scheduler.cache.num_cached, engine.scheduler.cache.num_available) == (0, 0, 48)


@pytest.mark.parametrize(("waited", "found"), [(30, 12), (90, 0)])
def test_a_session_stays_cached_while_other_requests_run(waited: int, found: int) -> None:
    engine = ToyEngine(session_cache_ttl_s=60, max_kv_tokens=48)
    engine.submit("turn", [1] * 9, 4, session="s")
    engine.run()
    engine.clock.now += waited
    for i in range(9):
        engine.submit(f"{i}", [2 + i] * 8, 3)
        engine.run()
        engine.clock.now += 0.1
    engine.submit("again", [1] * 9 + engine.output("turn") + [0], 2, session="s")
    engine.run()
    assert engine.num_cached("again") == found


def test_cached_sessions_are_evicted_before_any_preemption() -> None:
    engine = ToyEngine(session_cache_ttl_s=60, max_kv_tokens=48)
    engine.submit("turn", [1] * 9, 4, session="s")
    engine.run()
    engine.submit("large", [2] * 20, 26)
    engine.run()
    assert engine.scheduler.num_preemptions == 0
    assert engine.chunks["large"][-1].finish_reason == "length"
