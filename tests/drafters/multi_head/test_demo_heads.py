"""The demo's trained heads predict the demo target; wired wrongly, they are right far less often."""

import json

import pytest

from eyas.api.request import Request, SamplingParams
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from tests.support.runs import run, stats_of
from tests.support.tiny import DEMO, build_engine, fixed_config

TREE = TreeConfig(num_draft_tokens=16, num_steps=4, top_k=8)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "least"), [("medusa", 1.5), ("hydra", 1.75)])
def test_trained_heads_foresee_the_targets_tokens(name: str, least: float) -> None:
    target, head = str(DEMO / "target"), str(DEMO / name)
    drafter = DraftHead(head, name).build_drafter(target, "float32", "cpu", TREE, DraftingConfig())
    fuser = DraftHead(head, name).build_fuser(target, "float32", "cpu")
    engine = build_engine(target, fuser, "float32", "cpu", fixed_config(max_kv_tokens=2048), TREE, drafter)
    prompts = map(json.loads, (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:8])
    sampling = SamplingParams(24, 0.0, seed=0, ignore_eos=True)
    chunks = run(engine, [Request(f"{prompt['id']}", tuple(prompt["token_ids"]), sampling) for prompt in prompts])
    assert stats_of(chunks).acceptance_length > least
