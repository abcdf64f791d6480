"""Routing over many verifiers: affinity within load bounds, and few sessions that move when workers come and go."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.config import RoutingConfig
from eyas.errors import ConfigError
from eyas.rpc.messages import Lease, Load, ModelInfo
from eyas.services.discovery.redis_registry import Placement
from eyas.services.router.dispatch.dispatcher import SessionMap
from eyas.services.router.dispatch.routing import Pair, RoutingRequest, WorkerSnapshot, pick, prefix_match_ratio
from eyas.services.router.dispatch.workers import SentBlocks

MODEL = ModelInfo("demo", "target", 4096, 2048, "head")
BLOCKS = tuple(range(10))
DEFAULT = RoutingConfig()


def verifier(name: str, num_running: int = 0, num_waiting: int = 0, **changes: object) -> Lease:
    lease = Lease("verifier", f"{name}:1", name, MODEL, Load(num_running, num_waiting, 10_000, 32))
    return replace(lease, **changes)  # type: ignore[arg-type]


def chosen(verifiers: list[Lease], request: RoutingRequest, config: RoutingConfig = DEFAULT, **known: object) -> Pair:
    pair = pick(WorkerSnapshot(verifiers, **({"drafters": [], "in_flight": {}} | known)), request, config)  # type: ignore[arg-type]
    assert pair is not None
    return pair


def test_sent_prompts_count_before_they_are_announced() -> None:
    sent = SentBlocks()
    sent.add("b", BLOCKS)
    workers = WorkerSnapshot([verifier("a"), verifier("b")], [], {}, sent_blocks=sent.by_worker)
    assert (
        prefix_match_ratio(workers, RoutingRequest("demo", 900, block_hashes=(*BLOCKS, 77, 78)), workers.verifiers[1])
        == 10 / 12
    )
    assert prefix_match_ratio(workers, RoutingRequest("demo", 900, block_hashes=BLOCKS), workers.verifiers[0]) == 0


def test_no_affinity_overloads_a_verifier() -> None:
    request = RoutingRequest("demo", 900, last=Placement("a"), session="s", block_hashes=BLOCKS)
    verifiers = [verifier("a", prefix_hashes=frozenset(BLOCKS)), verifier("b"), verifier("c"), verifier("d")]
    in_flight: Counter[str] = Counter()
    for _ in range(200):
        in_flight[chosen(verifiers, request, in_flight=in_flight).verifier.incarnation] += 1
    assert in_flight["a"] == max(in_flight.values()) <= 1.25 * 200 / 4 + 1
    assert min(in_flight.values()) > 0


def test_bounds_follow_the_verifiers_sizes() -> None:
    verifiers = [verifier("a"), replace(verifier("b"), load=Load(0, 0, 10_000, 96))]
    in_flight: Counter[str] = Counter()
    for _ in range(200):
        in_flight[chosen(verifiers, RoutingRequest("demo", 100), in_flight=in_flight).verifier.incarnation] += 1
    assert 2.5 < in_flight["b"] / in_flight["a"] < 3.5


def test_weights_decide() -> None:
    request = RoutingRequest("demo", 900, last=Placement("a"))
    verifiers = [verifier("a", 5), verifier("b")]
    assert chosen(verifiers, request).verifier.incarnation == "a"
    assert chosen(verifiers, request, RoutingConfig(session_weight=0.1)).verifier.incarnation == "b"


@given(st.integers(2, 30), st.text(min_size=1, max_size=8), st.integers(0, 29))
def test_only_the_sessions_of_a_lost_verifier_move(count: int, session: str, lost: int) -> None:
    verifiers = [verifier(f"v{index}") for index in range(count)]
    request = RoutingRequest("demo", 100, session=session)
    before = chosen(verifiers, request).verifier
    gone = verifiers[lost % count]
    after = chosen([lease for lease in verifiers if lease is not gone], request).verifier
    assert (after is before) or before is gone


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), min_size=1, max_size=12), st.booleans())
def test_there_is_always_a_choice_with_capacity_if_any_has(loads: list[tuple[int, int]], bound: bool) -> None:
    verifiers = [verifier(f"v{index}", *load) for index, load in enumerate(loads)]
    last = Placement("v0") if bound else None
    pair = chosen(verifiers, RoutingRequest("demo", 100, last=last, session="s", block_hashes=BLOCKS))
    total = sum(map(sum, loads))
    load = pair.verifier.load
    assert load.num_running + load.num_waiting <= max(DEFAULT.min_bound, DEFAULT.load_factor * (total + 1) / len(loads) + 1)


def test_a_simulated_cluster_is_balanced_and_hits_its_caches() -> None:
    """1,500 sessions of two turns begin with some of 40 system prompts, and 324 of their requests run at any time."""
    rng = random.Random(0)
    sent = SentBlocks()
    verifiers = [verifier(f"v{index}") for index in range(20)]
    systems = rng.choices(range(40), [1 / (1 + system) for system in range(40)], k=1500)
    in_flight = Counter[str]()
    running: list[str] = []
    last: dict[int, str] = {}
    computed: set[int] = set()
    num_cached = num_computed = num_kept = 0
    worst = 0.0

    def place(session: int, workers: list[Lease]) -> tuple[str, tuple[int, ...]]:
        blocks = (*range(8 * systems[session], 8 * systems[session] + 8), *range(1000 + 4 * session, 1004 + 4 * session))
        known = Placement(last[session]) if session in last else None
        request = RoutingRequest("demo", 900, last=known, session=f"{session}", block_hashes=blocks)
        pair = chosen(workers, request, in_flight=in_flight, sent_blocks=sent.by_worker)
        return pair.verifier.incarnation, blocks

    for session in (each for start in range(1800) for each in (start, start - 300) if 0 <= each < 1500):
        name, blocks = place(session, verifiers)
        num_computed += sum(block in computed for block in blocks)
        num_cached += sum(block in sent.by_worker.get(name, ()) for block in blocks)
        num_kept += last.get(session) == name
        sent.add(name, blocks)
        computed.update(blocks)
        last[session] = name
        running.append(name)
        in_flight[name] += 1
        if len(running) > 324:
            in_flight[running.pop(rng.randrange(len(running)))] -= 1
            worst = max(worst, max(in_flight.values()) / (324 / 20))
    assert worst <= 1.25 + 1 / 16 + 0.01
    assert num_kept > 0.9 * 1500
    assert num_cached > 0.85 * num_computed > 0
    in_flight["new"] = 16  # as busy as the others

    def moved(workers: list[Lease]) -> tuple[int, int]:
        """How many of 400 sessions one verifier more moves, and one less of those that were elsewhere."""
        lost = min(workers, key=lambda lease: in_flight[lease.incarnation])  # so that the bounds of the others stay
        left = [lease for lease in workers if lease is not lost]
        placed = {session: place(session, workers)[0] for session in range(1100, 1500)}
        one_more = sum(place(session, [*workers, verifier("new")])[0] != name for session, name in placed.items())
        one_less = sum(place(session, left)[0] != name for session, name in placed.items() if name != lost.incarnation)
        return one_more, one_less

    assert max(moved(verifiers)) < 0.02 * 400, "by their last verifiers"
    last.clear()
    announced = [replace(lease, prefix_hashes=frozenset(sent.by_worker[lease.incarnation])) for lease in verifiers]
    sent = SentBlocks()
    assert max(moved(announced)) < 0.02 * 400, "by their prefixes: a new router, without Redis"
    one_more, one_less = moved(verifiers)
    assert 0 < one_more < 0.08 * 400, "by the hash alone: a new verifier gets its share of one in 21"
    assert one_less < 0.02 * 400


def test_the_sent_prefix_index_is_bounded_and_drops_ends_first() -> None:
    sent = SentBlocks(limit=6)
    sent.add("v", (1, 2, 3, 4))
    sent.add("v", (5, 6, 7, 8))
    assert [block for block in range(1, 9) if block in sent.by_worker["v"]] == [1, 2, 5, 6, 7, 8]
    sent.retain(["w"])
    assert not sent.by_worker


async def test_sessions_without_redis_are_kept_oldest_evicted_first() -> None:
    sessions = SessionMap(None, limit=2)
    for name in ("a", "b", "c"):
        await sessions.place(name, Placement(name))
    assert [await sessions.placement(name) for name in "abc"] == [None, Placement("b"), Placement("c")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefix_weight": -1.0}, "prefix_weight is -1.0; it must be at least 0"),
        ({"load_factor": 0.5}, "load_factor is 0.5; it must be at least 1"),
        ({"min_bound": 0}, "min_bound is 0; it must be above 0"),
    ],
)
def test_a_wrong_weight_is_reported(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RoutingConfig(**changes)  # type: ignore[arg-type]
