"""Trees that a drafter sends before the commits that they are for: a foreseen commit costs no round trip."""

import threading
from dataclasses import replace

import pytest

from eyas.config import DraftClientConfig
from eyas.drafters.base import DrafterNeeds, PreparedTree, PreparedTrees
from eyas.services.verifier.draft_client import RemoteDrafter
from eyas.tree import DraftTree
from tests.services.drafting.toy_drafting import VOCAB, ToyDrafter, context, eventually, serving

TOKENS = tuple(range(10, 40))


class PreparingDrafter(ToyDrafter):
    """Prepares a chain of 12 below every session that it has answered. bad_token: stands at its end, unless it is 0."""

    def __init__(self, before: threading.Event) -> None:
        super().__init__(before.wait)
        self.sent: set[tuple[str, int]] = set()
        self.bad_token = 0

    def draft_ahead(self) -> bool:
        return False

    def take_prepared(self) -> list[PreparedTree]:
        new = {(name, len(tokens)) for name, tokens in self.sessions.items()} - self.sent
        self.sent |= new
        found = []
        for name, length in new:
            root = self.sessions[name][-1]
            chain = DraftTree.chain([root, *range(root + 1, root + 12), *([self.bad_token] if self.bad_token else [])])
            found.append(PreparedTree(name, 0, length, chain))
        return found


def test_a_foreseen_commit_needs_no_answer_of_the_drafter() -> None:
    free = threading.Event()
    free.set()
    with serving(drafter := PreparingDrafter(free)) as address:
        remote = RemoteDrafter(address, DrafterNeeds(features=True), DraftClientConfig(draft_timeout_s=10.0))
        try:
            eventually(lambda: remote.connected)
            assert remote.request([context("a", TOKENS[:5])])() == [DraftTree.chain([14, 15, 16, 17])]
            eventually(lambda: "a" in remote._prepared._trees)
            free.clear()
            (found,) = remote.request([context("a", TOKENS[:7], base=5)])()
            assert found == replace(DraftTree.chain([16, 17, 18, 19]), grown_ahead=True)
            free.set()
            eventually(lambda: list(drafter.sessions.values()) == [list(TOKENS[:7])])
            eventually(lambda: "a" in remote._prepared._trees)
            unforeseen = (*TOKENS[:7], 60)
            assert remote.request([context("a", unforeseen, base=7)])() == [DraftTree.chain([60, 61, 62, 63])]
            assert remote.num_answered == 2
            remote.release(["a"])
            assert not remote._prepared._trees
        finally:
            free.set()
            remote.close()


def test_prepared_trees_that_are_invalid_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    free.set()
    drafter = PreparingDrafter(free)
    drafter.bad_token = VOCAB
    with serving(drafter) as address:
        remote = RemoteDrafter(address, DrafterNeeds(features=True), DraftClientConfig(draft_timeout_s=10.0))
        try:
            eventually(lambda: remote.connected)
            failures: list[int] = []
            monkeypatch.setattr(remote.breaker, "failed", lambda: failures.append(1))
            for length in (5, 6, 7):
                base = length - 1 if length > 5 else 0
                (found,) = remote.request([context("a", TOKENS[:length], base=base)])()
                assert isinstance(found, DraftTree)
                assert not found.grown_ahead
            eventually(lambda: len(failures) == 3)
            assert not remote._prepared._trees
        finally:
            remote.close()


@pytest.mark.parametrize(
    ("change", "taken"),
    [({}, True), ({"epoch": 1}, False), ({"start_position": 4}, False), ({"proposal": "sampled"}, False)],
)  # fmt: skip
def test_a_prepared_tree_serves_only_the_commit_after_its_root(change: dict[str, object], taken: bool) -> None:
    trees = PreparedTrees()
    trees.put(PreparedTree("a", 0, 5, DraftTree.chain(range(14, 30))))
    commit = replace(context("a", TOKENS[:6], base=5), **change)  # type: ignore[arg-type]
    assert (trees.take(commit) is not None) == taken
    assert trees.take(commit) is None, "it is used up"
