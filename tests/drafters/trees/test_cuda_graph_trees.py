"""Trees from captured graphs equal those of the plain path in every bucket."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import pytest
import torch

from eyas.api.request import Request, SamplingParams
from eyas.config import DraftAheadConfig, DraftingConfig, TreeConfig
from eyas.drafters.ahead.drafter import DraftAheadDrafter
from eyas.drafters.base import LocalDrafter
from eyas.drafters.draft_head import DraftHead
from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.trees.cuda_graphs import TreeGraphs
from eyas.errors import ConfigError
from eyas.models.backends.cuda_graphs import padded_size
from eyas.models.heads.eagle import load_head
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.drafters.trees.test_eagle_trees import commit, session
from tests.support.devices.emulated_graphs import DEVICE, METHODS, capturing, checked_capture, make
from tests.support.runs import assert_plain, run
from tests.support.tiers import tiered
from tests.support.tiny import build_engine, fixed_config

Out = TypeVar("Out")

SHAPE = TreeConfig(num_draft_tokens=11, num_steps=3, top_k=3)
CONFIG = DraftingConfig(max_kv_tokens=2048)
GREEDY, NOISED, FILTERED = NoiseKey(0), NoiseKey(2**64 - 9, 0.8), NoiseKey(5, 1.2, top_k=9, top_p=0.9, min_p=0.01)
BUDGETS = (TreeBudget(20, 5), TreeBudget(6, 2), TreeBudget(2, 9), TreeBudget(20, 1))
DAILY = ("eagle3", "mtp", "sps", "dspark", "medusa", "hydra-prefix")


def buckets_of(drafter: LocalDrafter) -> set[tuple[int, str]]:
    """Sessions and kind of noise of the captured rounds."""
    found = drafter.graphs  # type: ignore[attr-defined]
    assert isinstance(found, TreeGraphs)
    return {(sessions, kind) for kind, rounds in found.rounds.items() for sessions in rounds.buckets}


def assert_same(drafter: LocalDrafter, plain: LocalDrafter, contexts: Sequence[Commit]) -> list[DraftTree]:
    return assert_equal(drafter.propose(contexts), plain.propose(contexts))


def assert_equal(drafts: Sequence[object], expected: Sequence[object]) -> list[DraftTree]:
    found = []
    for ours, theirs in zip(drafts, expected, strict=True):
        assert isinstance(ours, DraftTree)
        assert isinstance(theirs, DraftTree)
        assert (ours.tokens, ours.parents) == (theirs.tokens, theirs.parents)
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-3)
        found.append(ours)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", tiered(METHODS, DAILY))
def test_trees_are_the_plain_ones_in_every_bucket(method: str, tiny_target: str, tiny_head: str) -> None:
    drafter = make(method, tiny_target, tiny_head, SHAPE, CONFIG, capturing())
    plain = make(method, tiny_target, tiny_head, SHAPE, CONFIG, None)
    rounds = {
        "alone": ([9], [GREEDY]),
        "three": ([7, 20, 4], [GREEDY, NOISED, FILTERED]),
        "full": ([9, 7, 3, 1], [NOISED, GREEDY, FILTERED, NOISED]),
        "again": ([12], [GREEDY]),
    }
    for number, (name, (lengths, noises)) in enumerate(rounds.items()):  # with other budgets where a graph runs again
        contexts = []
        for i, (length, noise) in enumerate(zip(lengths, noises, strict=True)):
            tokens, features = session(length, length)
            contexts.append(commit(f"{name}{i}", tokens, features, 0, length, noise, BUDGETS[(i - number) % len(BUDGETS)]))
        assert_same(drafter, plain, contexts)
    assert buckets_of(drafter) == {(1, "plain"), (4, "filtered")}


@pytest.mark.parametrize("method", ["eagle3", "sps", "dspark"])
def test_a_round_grows_only_levels_that_budgets_can_use(method: str, tiny_target: str, tiny_head: str) -> None:
    """Deeper levels hold candidates of older rounds, which no tree has."""
    runs = list[int]()

    def counted(run: Callable[[], Out]) -> Callable[[], Out]:
        replay = capturing()(run)
        return lambda: (runs.append(1), replay())[1]

    drafter, plain = (make(method, tiny_target, tiny_head, SHAPE, CONFIG, way) for way in (counted, None))
    counts = []
    for number, budget in enumerate((BUDGETS[0], *BUDGETS, TreeBudget(3, 9))):
        del runs[:]
        tokens, features = session(number, 9)
        assert_same(drafter, plain, [commit(f"{number}", tokens, features, 0, 9, GREEDY, budget)])
        counts.append(len(runs))
    assert [count - counts[-2] for count in counts[1:]] == [2, 1, 0, 0, 1], "the first round captures"


@pytest.mark.parametrize("allowed", [b"", b"\xff" * 6], ids=["eager", "grammar"])
@pytest.mark.parametrize("method", tiered(("eagle1", "eagle3", "mtp", "sps"), ("eagle3",)))
def test_rows_in_slots_grow_without_a_graph_too(method: str, allowed: bytes, tiny_target: str, tiny_head: str) -> None:
    """As on CUDA where nothing is captured, and beside graphs for grammars: levels are wider than small budgets can use."""
    drafter, plain = (make(method, tiny_target, tiny_head, SHAPE, CONFIG, way) for way in (capturing(), None))
    if not allowed:
        drafter.graphs = drafter.chain_graphs = None  # type: ignore[attr-defined]
    for number, budget in enumerate((*BUDGETS, TreeBudget(3, 9))):
        tokens, features = session(number, 9)
        first = commit(f"{number}", tokens, features, 0, 9, NOISED, budget)._replace(allowed=allowed)
        (tree,) = assert_same(drafter, plain, [first])
        accepted = [tree.tokens[node] for node in tree.path(len(tree) - 1)[1:]]  # a draft model keeps their rows
        further = first._replace(start_position=9, tokens=(*accepted, 7), features=features[: len(accepted) + 1])
        assert_same(drafter, plain, [further])


def test_growing_sessions_replay_one_captured_graph(tiny_target: str, tiny_head: str) -> None:
    captures: list[int] = []

    def count(run: Callable[[], Out]) -> Callable[[], Out]:
        captures.append(1)
        return capturing()(run)

    drafter = make("eagle3", tiny_target, tiny_head, SHAPE, CONFIG, count)
    plain = make("eagle3", tiny_target, tiny_head, SHAPE, CONFIG, None)
    tokens, features = session(3, 38)
    ends = [2, 9, 30, 38]
    for base, end in zip([0, *ends], ends, strict=False):
        assert_same(drafter, plain, [commit("a", tokens, features, base, end, NOISED, BUDGETS[0])])
    assert len(captures) == 2 * SHAPE.num_steps + 3, "each level, the choice of nodes after it, and three for new rows"


def test_graph_and_plain_draft_model_trees_keep_equal_state(tiny_target: str, tiny_head: str) -> None:
    drafter, plain = (make("sps", tiny_target, tiny_head, SHAPE, CONFIG, way) for way in (capturing(), None))
    texts = {name: session(seed, 5 + seed)[0] for seed, name in enumerate("ab")}
    bases = dict.fromkeys(texts, 0)
    for round_number in range(3):
        contexts = [
            Commit(name, 0, bases[name], tuple(t[bases[name] :]), None, FILTERED, BUDGETS[0]) for name, t in texts.items()
        ]
        for name, tree in zip(texts, assert_same(drafter, plain, contexts), strict=True):
            path = tree.path(max(tree.parents) if name == "a" else len(tree) - 1 - round_number)
            assert len(path) > 1
            bases[name] = len(texts[name])
            texts[name] = [*texts[name], *(tree.tokens[node] for node in path[1:]), 7]
        ours, theirs = (each.sessions for each in (drafter, plain))  # type: ignore[attr-defined]
        assert [list(ours[name].slots) for name in texts] == [list(theirs[name].slots) for name in texts]
        if round_number:
            assert ours["a"].num_new == 1, "of a path through inner nodes the bonus token alone is run"
            assert ours["b"].num_new <= 2, "of a path to a leaf, the leaf too"
    assert buckets_of(drafter)


@pytest.mark.parametrize("method", ["eagle1", "dspark", "sps"])
def test_captured_chains_are_the_plain_ones(method: str, tiny_target: str, tiny_head: str) -> None:
    drafter = make(method, tiny_target, tiny_head, TreeConfig(5, 3, 2), CONFIG, capturing())
    plain = make(method, tiny_target, tiny_head, TreeConfig(5, 3, 2), CONFIG, None)
    for name, noise in (("free", NOISED), ("filtered", FILTERED)):
        contexts = [
            commit(f"{name}{n}", *session(n, n), 0, n, each, BUDGETS[n % 2])._replace(proposal="sampled")
            for n, each in ((6, noise), (11, NOISED), (3, noise))
        ]
        assert_same(drafter, plain, contexts)
    assert not buckets_of(drafter)


def test_captured_trees_ahead_are_the_plain_ones(tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = DraftAheadConfig(top_k=12, num_candidates=12, num_steps=3, mode="always")
    config, shape = DraftingConfig(max_kv_tokens=2048, draft_ahead=ahead), TreeConfig(6, 2, 2)
    head = load_head(tiny_head, tiny_target, "float32", DEVICE)
    drafters = [
        DraftAheadDrafter(EagleDrafter(head, shape, config, capture=capture, num_grown_slots=999), ahead)
        for capture in (capturing(), None)
    ]
    texts = {name: session(seed, 9) for seed, name in enumerate("abc")}
    contexts = [
        commit(name, *text, 0, 9, noise, BUDGETS[0])
        for (name, text), noise in zip(texts.items(), (GREEDY, NOISED, FILTERED), strict=True)
    ]
    trees = assert_same(*drafters, contexts)
    for drafter in drafters:
        while drafter.draft_ahead():
            pass
    for tree, context in zip(trees, contexts, strict=True):
        path = tree.path(len(tree) - 1)[1:]
        features = torch.zeros(len(path), 32)
        further = tuple(tree.tokens[node] for node in path)
        (found,) = assert_same(*drafters, [context._replace(start_position=9, tokens=further, features=features)])
        assert found.grown_ahead
        for drafter in drafters:
            drafter.draft_ahead()  # the next growth leaves what the other sessions still need


@pytest.mark.parametrize("method", ["eagle3", "sps"])
def test_no_round_captures_a_graph_after_warmup(method: str, tiny_target: str, tiny_head: str) -> None:
    captures: list[int] = []

    def count(run: Callable[[], Out]) -> Callable[[], Out]:
        captures.append(1)
        return capturing()(run)

    config = DraftingConfig(max_kv_tokens=2048, cuda_graph_max_batch=2)
    drafter = make(method, tiny_target, tiny_head, TreeConfig(6, 2, 2), config, count)
    plain = make(method, tiny_target, tiny_head, TreeConfig(6, 2, 2), config, None)
    drafter.warm_up()
    assert drafter.sessions.num_free == plain.sessions.num_free  # type: ignore[attr-defined]
    at_start = len(captures)
    for noise in (GREEDY, NOISED, FILTERED):
        assert_same(drafter, plain, [commit(f"{noise}", *session(7, 7), 0, 7, noise, BUDGETS[0])])
    many = [commit(f"{n}", *session(n, n), 0, n, NOISED, BUDGETS[0]) for n in (20, 7, 9)]
    assert_same(drafter, plain, many)
    assert len(captures) == at_start, "rounds of more sessions than a graph holds run in parts"


def test_a_head_without_cuda_graph_support_is_rejected(tiny_target: str, tiny_head: str) -> None:
    def fail(run: Callable[[], Out]) -> Callable[[], Out]:
        raise RuntimeError("operation not permitted when stream is capturing")

    drafter = make("eagle3", tiny_target, tiny_head, SHAPE, CONFIG, fail)
    with pytest.raises(ConfigError, match=r"set drafting\.cuda_graphs to false: operation not permitted"):
        drafter.propose([commit("a", *session(7, 7), 0, 7, GREEDY, BUDGETS[0])])


def test_a_replay_that_reads_freed_memory_is_refused() -> None:
    kept = [torch.zeros(2)]

    def add_to_last_run() -> torch.Tensor:
        kept[0] = kept[0] + 1
        return kept[0]

    with pytest.raises(RuntimeError, match="add of a replay would use memory that has been freed"):
        checked_capture(add_to_last_run)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 4), (4, 4), (5, 6), (7, 8), (9, 12)])
def test_sizes_are_padded_by_half_at_most(count: int, size: int) -> None:
    assert padded_size(count) == size


def test_padding_reaches_every_size_and_never_falls_short() -> None:
    sizes = [padded_size(count) for count in range(1, 3000)]
    assert sizes == sorted(sizes)
    assert all(count <= size <= 1.5 * count for count, size in enumerate(sizes, 1))


def test_outputs_are_the_plain_ones(tiny_target: str, tiny_head: str) -> None:
    drafter = make("eagle3", tiny_target, tiny_head, SHAPE, CONFIG, capturing())
    fuser = DraftHead(tiny_head, "eagle3").build_fuser(tiny_target, "float32", DEVICE)
    engine = build_engine(tiny_target, fuser, "float32", DEVICE, fixed_config(max_kv_tokens=1024), SHAPE, drafter)
    requests = [Request(f"{i}", (7, 8, 9 + i), SamplingParams(8, 0.9 * i, seed=i, ignore_eos=True)) for i in range(2)]
    assert_plain(tiny_target, requests, run(engine, requests))
    assert buckets_of(drafter)


def test_states_of_earlier_drafts_do_not_matter(tiny_target: str, tiny_head: str) -> None:
    """Padding rows of a bucket hold values of earlier drafts; even NaN there changes nothing."""
    drafter = make("eagle3", tiny_target, tiny_head, SHAPE, CONFIG, capturing())
    plain = make("eagle3", tiny_target, tiny_head, SHAPE, CONFIG, None)
    tokens, features = session(5, 9)
    spoilt = torch.full_like(features, float("nan"))
    drafter.propose([commit(f"{i}", tokens, spoilt, 0, 9, NOISED, BUDGETS[1]) for i in range(4)])
    drafter.release([f"{i}" for i in range(4)])
    assert_same(drafter, plain, [commit(f"good{i}", tokens, features, 0, 9, NOISED, BUDGETS[0]) for i in range(3)])


@pytest.mark.parametrize("noise", [NOISED, FILTERED])
def test_trees_of_the_kernels_are_the_plain_ones(
    noise: NoiseKey, tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    drafter, plain = (make("eagle3", tiny_target, tiny_head, SHAPE, CONFIG, way) for way in (lambda run: run, None))
    contexts = [
        commit(f"{i}", *session(i, 9), 0, 9, each, BUDGETS[0])
        for i, each in enumerate((noise, GREEDY, replace(noise, seed=7, temperature=0.05)))
    ]
    expected = plain.propose(contexts)
    monkeypatch.setattr("eyas.kernels.by_device.runs_triton", lambda device: True)
    assert_equal(drafter.propose(contexts), expected)


@pytest.mark.parametrize("method", ["eagle3", "sps"])
def test_chains_of_the_kernels_are_the_plain_ones(
    method: str, tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    shape = TreeConfig(5, 3, 2)
    drafter, plain = (make(method, tiny_target, tiny_head, shape, CONFIG, way) for way in (lambda run: run, None))
    contexts = [
        commit(f"{n}", *session(n, n), 0, n, each, BUDGETS[0])._replace(proposal="sampled")
        for n, each in ((6, NOISED), (11, FILTERED), (3, replace(FILTERED, temperature=0.05)))
    ]
    expected = plain.propose(contexts)
    monkeypatch.setattr("eyas.kernels.by_device.runs_triton", lambda device: True)
    for ours, theirs in zip(drafter.propose(contexts), expected, strict=True):
        assert isinstance(ours, DraftTree)
        assert isinstance(theirs, DraftTree)
        assert ours.tokens == theirs.tokens
        assert ours.sampled is not None
        assert theirs.sampled is not None
        for node, stated in theirs.sampled.draft_probs.items():
            assert ours.sampled.draft_probs[node].ids == stated.ids
            assert ours.sampled.draft_probs[node].probs == pytest.approx(stated.probs, rel=1e-4)
