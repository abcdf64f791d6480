"""Which drafters draft ahead, what their passes run and send, and what is left of a pass that fails."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.arrays import Ints, Reals
from eyas.cache.prefix_cache import SlotAllocator
from eyas.config import DraftAheadMode, DraftingConfig, MethodsConfig
from eyas.drafters.ahead import eagle as eagle_ahead
from eyas.drafters.ahead import grown_tree
from eyas.drafters.ahead.drafter import DraftAheadDrafter
from eyas.drafters.ahead.grown_tree import GrownTree
from eyas.drafters.base import LocalDrafter
from eyas.drafters.draft_head import DraftHead
from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.registry import DrafterParts
from eyas.drafters.trees.rows import GrownRows
from eyas.emulation.costs import flat
from eyas.emulation.device import EmulatedDevice, VirtualClock
from eyas.kernels.choice import tree_kernels
from eyas.kernels.plain import trees as plain_trees
from eyas.models.checkpoint import Checkpoint
from eyas.protocol.commit import NO_TREE
from eyas.protocol.tree import DraftTree, PreparedTree
from tests.drafters.ahead.test_draft_ahead import (
    AHEAD,
    SHAPE,
    assert_equal_trees,
    going_on,
    last_of,
    likeliest,
    make,
    session,
    work,
)


@pytest.mark.parametrize(
    ("mode", "device", "has_idle_time", "expected"),
    [
        ("", "cuda", True, True),
        ("", "cuda", False, False),
        ("", "cpu", True, False),
        ("always", "cpu", False, True),
        ("never", "cuda", True, False),
    ],
)
def test_draft_services_on_gpus_draft_ahead_by_default(
    mode: DraftAheadMode, device: str, has_idle_time: bool, expected: bool, tiny_target: str, tiny_head: str
) -> None:
    drafting = DraftingConfig(2048, draft_ahead=replace(AHEAD, mode=mode))
    target, head = Checkpoint(tiny_target), Checkpoint(tiny_head)
    parts = DrafterParts(target, head, "float32", device, SHAPE, drafting, MethodsConfig(), has_idle_time=has_idle_time)
    assert parts.drafts_ahead is expected
    emulated = replace(drafting, emulated_device="eagle3-8b@h200")
    assert replace(parts, device="cpu", drafting=emulated).drafts_ahead is (expected or (not mode and has_idle_time))


@pytest.mark.parametrize(("mode", "kind"), [("", EagleDrafter), ("always", DraftAheadDrafter), ("never", EagleDrafter)])
def test_a_draft_service_on_a_cpu_drafts_ahead_if_asked(
    mode: DraftAheadMode, kind: type[LocalDrafter], tiny_target: str, tiny_head: str
) -> None:
    drafting = DraftingConfig(2048, draft_ahead=replace(AHEAD, mode=mode))
    head = DraftHead(tiny_head, "eagle3")
    assert type(head.build_drafter(tiny_target, "float32", "cpu", SHAPE, drafting, has_idle_time=True)) is kind


def test_half_of_the_passes_send_a_prepared_tree(tiny_target: str, tiny_head: str) -> None:
    drafter = DraftAheadDrafter(make(tiny_target, tiny_head), AHEAD)
    last_of(drafter, [session("a", 9)])
    sent = []
    while True:
        more = drafter.draft_ahead()
        sent.append(drafter.take_prepared())
        if not more:
            break
    numbers = [number for number, trees in enumerate(sent, 1) if trees]
    likely = [number for number in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if number < len(sent)]
    assert len(sent) > 8
    assert numbers == [*likely, *numbers[len(likely) :]]
    assert numbers[-1] in (len(sent), len(sent) - 1), "the last one as well"


def test_a_prepared_tree_is_cut_to_the_limit_of_nodes(
    tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreparedTree, "MAX_NODES", 12)
    drafter = DraftAheadDrafter(make(tiny_target, tiny_head), AHEAD)
    last_of(drafter, [session("a", 9)])
    work(drafter)
    (prepared,) = drafter.take_prepared()
    assert len(drafter.ahead.grown["a"].tree.tokens) > 12
    assert len(prepared.tree.tokens) == 12


@pytest.mark.parametrize("place", ["run_rows", "_best_next"])
def test_a_pass_ahead_that_fails_keeps_no_slots(
    place: str, tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = DraftAheadDrafter(make(tiny_target, tiny_head), AHEAD)
    ahead, first = drafter.ahead, session("a", 9)
    last_of(drafter, [first, session("b", 20)])
    assert drafter.draft_ahead()
    with monkeypatch.context() as patch:
        patch.setattr(EagleDrafter, place, lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drafter.draft_ahead()
    drafter.release(["a", "b"])
    assert not drafter.draft_ahead()
    ahead.pool.check_owners([])
    last_of(drafter, [first])
    work(drafter)
    ahead.pool.check_owners([own.tree.slots for own in ahead.grown.values()])


@pytest.mark.parametrize("step", [0.0, 0.25], ids=["distinct", "ties"])
def test_kernels_choose_the_rows_of_the_plain_way(step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    rng, kernels = np.random.default_rng(3), (tree_kernels(), plain_trees)

    def found(count: int) -> tuple[Ints, Reals]:
        scores = -rng.exponential(1.0, (count, 9))
        return np.stack([rng.permutation(40)[:9] for _ in range(count)]), np.round(scores / step) * step if step else scores

    (candidates,), (scores,) = found(1)
    trees = [GrownTree(1, torch.zeros(4), candidates, scores.copy(), SlotAllocator(90)) for _ in range(2)]
    for number in range(30):
        rows = list[GrownRows]()
        for tree, used in zip(trees, kernels, strict=True):
            monkeypatch.setattr(grown_tree, "tree_kernels", lambda used=used: used)
            rows += [chosen] if (chosen := tree.take_rows(tree.useful(20, 6, 60)[0])) else []
        if rows:
            for name in ("tokens", "slots", "nodes", "parents", "is_exact", "others", "visible"):
                assert np.array_equal(getattr(rows[0], name), getattr(rows[1], name))
            states, results = torch.randn(len(rows[0].tokens), 4), found(len(rows[0].tokens))
        for i, (tree, used) in enumerate(zip(trees, kernels, strict=True)):
            monkeypatch.setattr(grown_tree, "tree_kernels", lambda used=used: used)
            if rows:
                tree.apply(rows[i], states, *(each.copy() for each in results), 60)
            if number % 5 == 4:
                tree.move_root(2)
                tree.set_root(torch.zeros(4), candidates, scores.copy())
        for name in ("tokens", "parents", "depths", "slots", "is_exact", "cumulative", "expanded"):
            assert np.array_equal(getattr(trees[0], name), getattr(trees[1], name))
        assert torch.equal(trees[0].states, trees[1].states)


def growing(target: str, head: str) -> DraftAheadDrafter:
    """Trees of three sessions after two passes."""
    drafter = DraftAheadDrafter(make(target, head), AHEAD)
    drafter.propose([session("a", 9), session("b", 20), session("c", 14)])
    for _ in range(2):
        drafter.draft_ahead()
    return drafter


def test_sessions_share_the_rows_of_a_pass_by_worth(
    tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chosen rows are worth more than those left out, whichever tree has them."""
    drafter, names = growing(tiny_target, tiny_head), ["a", "b", "c"]
    ahead = drafter.ahead
    monkeypatch.setattr(eagle_ahead, "MAX_ROWS", 20)
    worth = {name: np.sort(ahead.grown[name].tree.useful(24, 7, 99)[1])[::-1] for name in names}
    planned = ahead.plan(names)
    counts = {name: len(planned[name].tokens) if name in planned else 0 for name in names}
    assert sum(counts.values()) == 20
    least = min(worth[name][counts[name] - 1] for name in names if counts[name])
    assert all(least >= worth[name][counts[name]] for name in names if counts[name] < len(worth[name]))


def test_a_miss_that_is_not_waited_for_joins_the_next_pass(
    tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, first = growing(tiny_target, tiny_head), session("a", 9)
    missed = going_on(first, [47])
    monkeypatch.setattr(drafter.drafter, "_admit", None)
    (answer,) = drafter.propose([missed._replace(has_tree=True, budget=NO_TREE)])
    monkeypatch.undo()
    assert answer == DraftTree.root_only(47), "without a pass"
    work(drafter)
    assert not drafter.sessions["a"].backlog
    (tree,) = drafter.ahead.trees([missed], [()])
    plain = make(tiny_target, tiny_head)
    plain.propose([first])
    assert_equal_trees(tree, plain.propose([missed])[0])  # type: ignore[arg-type]


def test_nothing_grows_once_all_sessions_have_ended(tiny_target: str, tiny_head: str) -> None:
    drafter = growing(tiny_target, tiny_head)
    drafter.release(["a", "b", "c"])
    assert not drafter.draft_ahead()


def test_only_nodes_behind_a_predicted_state_are_repaired(
    tiny_target: str, tiny_head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree grown on demand has none; after a hit, all below the new root are. The log names passes that repair."""
    eagle, log = make(tiny_target, tiny_head, "1ms"), tmp_path / "log"
    eagle.device = EmulatedDevice(replace(flat("short", draft_level=1.0), log=str(log)), VirtualClock())
    drafter, first = DraftAheadDrafter(eagle, AHEAD), session("a", 9)
    (tree,) = last_of(drafter, [first])
    work(drafter)
    assert {json.loads(line)["label"] for line in log.read_text().splitlines()} == {"", "grow"}
    log.unlink()
    last_of(drafter, [going_on(first, likeliest(tree)[:1])])
    work(drafter)
    assert {json.loads(line)["label"] for line in log.read_text().splitlines()} == {"grow", "repair"}
