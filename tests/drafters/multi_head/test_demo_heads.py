"""The demo's trained heads predict the demo target; wired wrongly, they are right far less often."""

import json

import pytest

from eyas.api.request import GenerationStats, Request, SamplingParams
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from tests.support.tiny import DEMO, build_engine, fixed_config

TREE = TreeConfig(num_draft_tokens=16, num_steps=4, top_k=8)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "least"), [("medusa", 1.5), ("hydra", 1.75)])
def test_trained_heads_foresee_the_targets_tokens(name: str, least: float) -> None:
    target, head = str(DEMO / "target"), str(DEMO / name)
    drafter = DraftHead(head, name).build_drafter(target, "float32", "cpu", TREE, DraftingConfig())
    fuser = DraftHead(head, name).build_fuser(target, "float32", "cpu")
    engine = build_engine(target, fuser, "float32", "cpu", fixed_config(max_kv_tokens=2048), TREE, drafter)
    for line in (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:8]:
        prompt = json.loads(line)
        engine.submit(
            Request(f"{prompt['id']}", tuple(prompt["token_ids"]), SamplingParams(24, 0.0, seed=0, ignore_eos=True))
        )
    stats = GenerationStats()
    while engine.has_work:
        for chunk in engine.step():
            stats.add(chunk)
    assert stats.acceptance_length > least
