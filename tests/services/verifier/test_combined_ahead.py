"""A combined drafter in a draft service: what it sends before the commits, and lookups that draft alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest

from eyas.api.request import Request, SamplingParams
from eyas.config import DraftAheadConfig, DraftingConfig, TreeConfig
from eyas.drafters.base import Draft, DraftContext, PreparedTrees
from eyas.drafters.combined import CombinedDrafter
from eyas.drafters.draft_head import DraftHead
from eyas.engine.budget.account import GainAccount
from eyas.errors import InvalidRequest
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from eyas.rpc.messages import ModelInfo
from eyas.services.draft.__main__ import describe
from eyas.services.draft.streams import admit
from eyas.services.verifier.draft_client import RemoteDrafter
from tests.engine.budget.test_pair import Alternating
from tests.services.verifier.test_prepared_trees import PatientVerifier, WatchedDrafter, taken
from tests.support.runs import assert_plain, run
from tests.support.services.toy_drafting import drafting
from tests.support.tiers import nightly
from tests.support.tiny import build_engine, fixed_config

__all__ = ["taken"]

TREE = TreeConfig(num_draft_tokens=8, num_steps=7, top_k=3)
AHEAD = DraftAheadConfig(top_k=24, num_candidates=24, num_steps=8)


@pytest.mark.parametrize(
    ("lookup", "budget"),
    [("prompt_lookup", "adaptive"), nightly("prompt_lookup", "fixed"), ("lookahead", "fixed")],
)
def test_combined_trees_sent_ahead_change_no_token(
    lookup: str, budget: str, tiny_target: str, tiny_head: str, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GainAccount, "stop", lambda *args: None)  # a random head would soon draft no more
    monkeypatch.setattr(GainAccount, "_wait", lambda *args: None)
    monkeypatch.setattr(PreparedTrees, "MIN_DRAFTED", 1)
    head = DraftHead(tiny_head, f"eagle3+{lookup}")
    settings = DraftingConfig(2048, ranking_temperature=1, draft_ahead=replace(AHEAD, mode="always"))
    built = head.build_drafter(tiny_target, "float32", "cpu", TREE, settings, has_idle_time=True)
    assert isinstance(built, CombinedDrafter)
    drafter, fuser = WatchedDrafter(built), head.build_fuser(tiny_target, "float32", "cpu")
    samplings = [SamplingParams(14, t, seed=50, ignore_eos=True) for t in (0.0, 0.4, 1.0)]
    prompts = [tuple([9, 8, 7, 9 + i] * 6) for i in range(len(samplings))]
    requests = [Request(f"{i}", own, sampling) for i, (own, sampling) in enumerate(zip(prompts, samplings, strict=True))]
    with drafting(drafter, head.method, PatientVerifier, built.needs) as remote:
        remote.drafter = drafter
        engine_config = fixed_config(max_kv_tokens=1024, draft_budget=budget)
        engine = build_engine(tiny_target, fuser, "float32", "cpu", engine_config, TREE, remote)
        chunks = run(engine, requests)
    assert taken
    assert_plain(tiny_target, requests, chunks)


@pytest.mark.parametrize("ahead", ["never", nightly("always")])
def test_lookups_that_draft_alone_elsewhere_change_no_token(
    ahead: Literal["never", "always"], tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network gets the tokens that it lacks, with their features, when it drafts again."""
    propose = CombinedDrafter.propose
    seen = list[DraftContext]()

    def watched(drafter: CombinedDrafter, contexts: Sequence[DraftContext]) -> list[Draft]:
        seen.extend(contexts)
        return propose(drafter, contexts)

    monkeypatch.setattr(CombinedDrafter, "propose", watched)
    head = DraftHead(tiny_head, "eagle3+prompt_lookup")
    settings = DraftingConfig(2048, draft_ahead=replace(AHEAD, mode=ahead))
    drafter = head.build_drafter(tiny_target, "float32", "cpu", TREE, settings, has_idle_time=True)
    samplings = [SamplingParams(24, t, seed=50, ignore_eos=True) for t in (0.0, 0.7)]
    requests = [Request(f"{i}", tuple([9, 8, 7, 9 + i] * 6), own) for i, own in enumerate(samplings)]
    with drafting(drafter, head.method, RemoteDrafter, drafter.needs) as remote:
        assert remote.has_lookups
        fuser = head.build_fuser(tiny_target, "float32", "cpu")
        engine = build_engine(tiny_target, fuser, "float32", "cpu", fixed_config(max_kv_tokens=1024), TREE, remote)
        engine.budget = Alternating()
        chunks = run(engine, requests)
    assert_plain(tiny_target, requests, chunks)
    assert {context.lookups_alone for context in seen} == {True, False}
    assert all((context.features is None) == context.lookups_alone for context in seen)


def test_a_drafter_without_lookups_gets_no_commit_for_them(tiny_target: str, tiny_head: str) -> None:
    head = DraftHead(tiny_head, "eagle3")
    drafter = head.build_drafter(tiny_target, "float32", "cpu", TREE, DraftingConfig(2048))
    info = describe("tiny", head, drafter, ModelInfo("tiny", "f", 48, 256))
    commit = Commit("a", 0, 0, (1, 2), None, NoiseKey(0), TreeBudget(8, 7), lookups_alone=True)
    with pytest.raises(InvalidRequest, match="eagle3 has no lookups next to a network"):
        admit(commit, "1/a", info)
    with drafting(drafter, head.method, RemoteDrafter, drafter.needs) as remote:
        assert remote.request([commit])() == [None]
        assert remote.connected
