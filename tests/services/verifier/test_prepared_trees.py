"""Trees that a drafter sends before the commits that they are for: a foreseen commit costs no round trip."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from eyas.api.request import Request, SamplingParams
from eyas.config import DraftAheadConfig, DraftingConfig, EngineConfig, TreeConfig
from eyas.drafters.ahead.drafter import DraftAheadDrafter
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter, Pending, PreparedTrees
from eyas.drafters.draft_head import DraftHead
from eyas.engine.budget.account import GainAccount
from eyas.protocol.tree import DraftTree, PreparedTree
from eyas.rpc.messages import DraftResponse
from eyas.services.verifier import draft_client
from eyas.services.verifier.draft_client import MAX_UNPREPARED, RemoteDrafter
from tests.support.runs import assert_plain, run
from tests.support.services.toy_drafting import PATIENT, VOCAB, ToyDrafter, connect, context, drafting, eventually, serving
from tests.support.tiny import build_engine, fixed_config

TOKENS = tuple(range(10, 40))
TREE = TreeConfig(num_draft_tokens=8, num_steps=3, top_k=3)
AHEAD = DraftAheadConfig(top_k=24, num_candidates=24, num_steps=7)


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
    with serving(drafter := PreparingDrafter(free)) as address, connect(address) as remote:
        try:
            assert remote.request([context("a", TOKENS[:5])])() == [DraftTree.chain([14, 15, 16, 17])]
            eventually(lambda: "a" in remote.prepared.by_session)
            free.clear()
            (found,) = remote.request([context("a", TOKENS[:7], base=5)])()
            assert found == DraftTree.of((16, 17, 18, 19), (0, 0, 1, 2), (0.0,) * 4, grown_ahead=True)
            free.set()
            eventually(lambda: list(drafter.sessions.values()) == [list(TOKENS[:7])])
            eventually(lambda: "a" in remote.prepared.by_session)
            unforeseen = (*TOKENS[:7], 60)
            assert remote.request([context("a", unforeseen, base=7)])() == [DraftTree.chain([60, 61, 62, 63])]
            assert remote.num_answered == 2
            remote.release(["a"])
            assert not remote.prepared.by_session
        finally:
            free.set()


def test_prepared_trees_that_are_invalid_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    free.set()
    drafter = PreparingDrafter(free)
    drafter.bad_token = VOCAB
    with serving(drafter) as address, connect(address) as remote:
        failures: list[int] = []
        monkeypatch.setattr(remote.breaker, "failed", lambda: failures.append(1))
        for length in (5, 6, 7):
            base = length - 1 if length > 5 else 0
            (found,) = remote.request([context("a", TOKENS[:length], base=base)])()
            assert isinstance(found, DraftTree)
            assert not found.grown_ahead
            eventually(lambda length=length: len(failures) == length - 4)
        assert not remote.prepared.by_session


def test_a_reply_with_many_invalid_trees_is_one_failure() -> None:
    """Valid ones beside them are kept; as many such replies as max_failures open the circuit."""
    with serving(ToyDrafter()) as address, connect(address, replace(PATIENT, breaker_max_failures=3)) as remote:
        remote.request([context(name, TOKENS[:5]) for name in "abcdefgh"])()
        valid, invalid = (DraftTree.chain((14, token)) for token in (15, VOCAB))
        trees = [PreparedTree(name, 0, 5, valid if name == "h" else invalid) for name in "abcdefgh"]
        for number in range(3):
            assert remote.breaker.state == "closed", f"after {number} replies"
            remote.receive(DraftResponse(0, prepared=tuple(trees)))
            assert list(remote.prepared.by_session) == ["h"]
        assert remote.breaker.state == "open"


def test_a_prepared_tree_beyond_the_limit_of_nodes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreparedTree, "MAX_NODES", 12)
    with serving(ToyDrafter()) as address, connect(address) as remote:
        remote.request([context(name, TOKENS[:5]) for name in "ab"])()
        trees = [DraftTree.chain(range(14, 14 + num_nodes)) for num_nodes in (12, 13)]
        prepared = tuple(PreparedTree(name, 0, 5, tree) for name, tree in zip("ab", trees, strict=True))
        remote.receive(DraftResponse(0, prepared=prepared))
        assert list(remote.prepared.by_session) == ["a"]


@pytest.mark.parametrize(
    ("change", "taken"),
    [({}, True), ({"epoch": 1}, False), ({"start_position": 4}, False), ({"proposal": "sampled"}, False)],
)  # fmt: skip
def test_a_prepared_tree_serves_only_the_commit_after_its_root(change: dict[str, object], taken: bool) -> None:
    trees = PreparedTrees()
    trees.put(PreparedTree("a", 0, 5, DraftTree.chain(range(14, 30))))
    commit = context("a", TOKENS[:6], base=5)._replace(**change)  # type: ignore[arg-type]
    assert (trees.take(commit) is not None) == taken
    assert trees.take(commit) is None, "it is used up"


def test_a_step_waits_only_if_half_of_its_trees_are_missing() -> None:
    """Or for a session that had none in many steps, as its commits may have got lost."""
    tokens, sizes = tuple(range(10, 60)), dict[str, int]()
    with serving(ToyDrafter()) as address, connect(address) as remote:

        def step(prepared: str, missing: str) -> list[int]:
            """Commit a token of each session. Returns how many tokens the trees of `missing` have."""
            root = {name: tokens[sizes[name] - 1 : sizes[name] + 9] for name in prepared}
            trees = [PreparedTree(name, 0, sizes[name], DraftTree.chain(root[name])) for name in prepared]
            remote.receive(DraftResponse(0, prepared=tuple(trees)))
            names, before = prepared + missing, dict(sizes)
            sizes.update({name: sizes.get(name, 4) + 1 for name in names})
            batch = [context(name, tokens[: sizes[name]], base=before.get(name, 0)) for name in names]
            drafts = remote.request(batch)()
            return [tree.num_drafted for tree in drafts[len(prepared) :] if isinstance(tree, DraftTree)]

        assert step("", "abc") == [3, 3, 3]
        assert step("ab", "c") == [0]
        assert step("b", "c") == [3]
        found = [step("ab", "c") for _ in range(MAX_UNPREPARED)]
        assert found == [[0]] * (MAX_UNPREPARED - 1) + [[3]]
        assert step("", "c") == [3], "alone"


class WatchedDrafter(LocalDrafter):
    """Another drafter, whose prepared trees are counted. is_idle: whether there is nothing left to prepare."""

    def __init__(self, drafter: LocalDrafter) -> None:
        self.drafter = drafter
        self.num_prepared, self.is_idle, self._has_more = 0, True, False

    @property
    def needs(self) -> DrafterNeeds:
        return self.drafter.needs

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self.is_idle = False
        return self.drafter.propose(contexts)

    def release(self, sessions: Sequence[str]) -> None:
        self.drafter.release(sessions)

    def draft_ahead(self) -> bool:
        self._has_more = self.drafter.draft_ahead()
        return self._has_more

    def take_prepared(self) -> list[PreparedTree]:
        found = self.drafter.take_prepared()
        self.num_prepared += len(found)
        self.is_idle = not self._has_more
        return found


class PatientVerifier(RemoteDrafter):
    """Commits when the drafter has nothing left to prepare, as if verify passes took long."""

    drafter: WatchedDrafter
    num_received = 0

    def request(self, contexts: Sequence[DraftContext]) -> Pending:
        end = time.monotonic() + 1.0  # what a session that ended has prepared may never arrive
        while not (self.drafter.is_idle and self.num_received == self.drafter.num_prepared) and time.monotonic() < end:
            time.sleep(0.0005)
        return super().request(contexts)

    def receive(self, response: DraftResponse) -> None:
        super().receive(response)
        self.num_received += len(response.prepared)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sessions of prepared trees that were used."""
    sessions, take = list[str](), PreparedTrees.take

    def counted(trees: PreparedTrees, context: DraftContext) -> DraftTree | None:
        tree = take(trees, context)
        sessions.extend([context.session] if tree else [])
        return tree

    monkeypatch.setattr(PreparedTrees, "take", counted)
    return sessions


def test_trees_sent_ahead_and_steps_without_any_change_no_token(
    tiny_target: str, tiny_head: str, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sequences; of the steps in which one has no tree, every third waits, and the others decode plainly."""
    monkeypatch.setattr(draft_client, "WAITED_SHARE", 1.1)
    monkeypatch.setattr(draft_client, "MAX_UNPREPARED", 3)
    head = DraftHead(tiny_head, "eagle3")
    settings = DraftingConfig(2048, ranking_temperature=1, draft_ahead=replace(AHEAD, mode="always"))
    built = head.build_drafter(tiny_target, "float32", "cpu", TREE, settings)
    assert isinstance(built, DraftAheadDrafter)
    drafter, fuser = WatchedDrafter(built), head.build_fuser(tiny_target, "float32", "cpu")
    samplings = [SamplingParams(18, t, seed=50, ignore_eos=True) for t in (0.0, 0.8, 1.0)]
    requests = [Request(f"{i}", (9, 8, 7, 9 + i, 8), sampling) for i, sampling in enumerate(samplings)]
    with drafting(drafter, "eagle3", PatientVerifier, built.needs) as remote:
        remote.drafter = drafter
        engine = build_engine(tiny_target, fuser, "float32", "cpu", fixed_config(max_kv_tokens=512), TREE, remote)
        chunks = run(engine, requests)
    assert len(set(taken)) > 1
    assert_plain(tiny_target, requests, chunks)


def test_adaptive_trees_drafted_ahead_change_no_token(
    tiny_target: str, tiny_head: str, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are the defaults on a GPU. Both depend on time, and no token does."""
    monkeypatch.setattr(GainAccount, "_wait", lambda *args: None)  # a random head would soon draft no more
    head = DraftHead(tiny_head, "eagle3")
    settings = DraftingConfig(2048, ranking_temperature=1, draft_ahead=replace(AHEAD, num_steps=4, mode="always"))
    built = head.build_drafter(tiny_target, "float32", "cpu", TREE, settings, has_idle_time=True)
    assert isinstance(built, DraftAheadDrafter)
    drafter, fuser = WatchedDrafter(built), head.build_fuser(tiny_target, "float32", "cpu")
    samplings = [SamplingParams(24, t, seed=70, ignore_eos=True) for t in (0.0, 0.8, 1.0, 0.0)]
    requests = [Request(f"{i}", (9, 8, 7, 9 + i, 8), sampling) for i, sampling in enumerate(samplings)]
    with drafting(drafter, "eagle3", PatientVerifier, built.needs) as remote:
        remote.drafter = drafter
        config = EngineConfig(max_kv_tokens=512, draft_budget="adaptive")
        engine = build_engine(tiny_target, fuser, "float32", "cpu", config, TREE, remote)
        chunks = run(engine, requests[:1], {6 + i: [request] for i, request in enumerate(requests[1:])})
    assert taken
    assert_plain(tiny_target, requests, chunks)
