"""A combined drafter sends what follows its trees before the commits: looked up, and from a side that drafts ahead."""

from contextlib import closing
from dataclasses import replace
from typing import Literal

import pytest

from eyas.api.request import Request, SamplingParams
from eyas.config import DraftAheadConfig, DraftClientConfig, DraftingConfig, TreeConfig
from eyas.drafters.base import DraftContext, PreparedTrees
from eyas.drafters.combined import CombinedDrafter
from eyas.drafters.draft_head import DraftHead
from eyas.engine.budget.adaptive import AdaptiveDraftBudget
from eyas.protocol.tree import DraftTree
from eyas.rpc.messages import DrafterInfo, ModelInfo
from tests.services.verifier.test_prepared_trees import PatientVerifier, WatchedDrafter
from tests.support.runs import assert_plain, run
from tests.support.services.toy_drafting import eventually, serving
from tests.support.tiers import nightly
from tests.support.tiny import build_engine, fixed_config
from tests.support.tiny_block import tiny_block_head

TREE = TreeConfig(num_draft_tokens=8, num_steps=7, top_k=3)
AHEAD = DraftAheadConfig(top_k=8, num_candidates=8, num_steps=4)


@pytest.mark.parametrize(
    ("mode", "method", "budget"),
    [
        nightly("never", "dspark", "fixed"), ("always", "eagle3", "adaptive"), ("never", "lookahead", "fixed"),
        nightly("never", "eagle3", "adaptive"),
        nightly("always", "eagle3", "fixed"),
    ],
)  # fmt: skip
def test_combined_trees_sent_ahead_change_no_token(
    mode: Literal["never", "always"],
    method: str,
    budget: str,
    tiny_target: str,
    tiny_head: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """mode: of the side with a head. Lookups below the leaves are sent in any case."""
    taken, take = list[str](), PreparedTrees.take

    def counted(trees: PreparedTrees, context: DraftContext) -> DraftTree | None:
        tree = take(trees, context)
        taken.extend([context.session] if tree else [])
        return tree

    monkeypatch.setattr(PreparedTrees, "take", counted)
    monkeypatch.setattr(AdaptiveDraftBudget, "_stop", lambda *args: None)  # a random head would soon draft no more
    monkeypatch.setattr(AdaptiveDraftBudget, "_wait", lambda *args: None)
    monkeypatch.setattr(PreparedTrees, "MIN_DRAFTED", 1)
    monkeypatch.setattr("eyas.drafters.combined.MIN_CLAIM", 0.5)
    heads = {"dspark": lambda: tiny_block_head(method, tiny_target), "eagle3": lambda: tiny_head, "lookahead": lambda: ""}
    head, name = heads[method](), f"{method}+prompt_lookup"
    drafting = DraftingConfig(2048, ranking_temperature=1, draft_ahead=replace(AHEAD, mode=mode))
    built = DraftHead(head, name).build_drafter(tiny_target, "float32", "cpu", TREE, drafting, has_idle_time=True)
    assert isinstance(built, CombinedDrafter)
    drafter, fuser = WatchedDrafter(built), DraftHead(head, name).build_fuser(tiny_target, "float32", "cpu")
    needs = built.needs
    info = DrafterInfo(ModelInfo("tiny", "f", 48, 256), name, needs.features, needs.samples, needs.feature_size)
    samplings = [SamplingParams(14, t, seed=50, ignore_eos=True) for t in (0.0, 0.4, 1.0)]
    prompts = [tuple([9, 8, 7, 9 + i] * 6) for i in range(len(samplings))]
    requests = [Request(f"{i}", own, sampling) for i, (own, sampling) in enumerate(zip(prompts, samplings, strict=True))]
    config = DraftClientConfig(draft_timeout_s=30.0)
    with serving(drafter, info) as address, closing(PatientVerifier(address, needs, config)) as remote:
        remote.drafter = drafter
        eventually(lambda: remote.connected)
        engine_config = fixed_config(max_kv_tokens=1024, draft_budget=budget)
        engine = build_engine(tiny_target, fuser, "float32", "cpu", engine_config, TREE, remote)
        chunks = run(engine, requests)
        assert remote.num_lost == 0
    assert taken or method == "lookahead"
    assert_plain(tiny_target, requests, chunks)
