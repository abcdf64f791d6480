"""Every drafting method over real sockets: a verifier's output equals its output without a drafter."""

from dataclasses import replace

import pytest

from eyas.api.request import Request, SamplingParams
from eyas.config import DraftClientConfig
from eyas.drafters.base import DrafterNeeds
from eyas.services.verifier.draft_client import RemoteDrafter
from tests.engine.test_equality import TREE, case_of
from tests.support.methods import CLASSES_OF_DRAFTERS, KINDS_OF_DRAFTS
from tests.support.runs import assert_plain, run, stats_of
from tests.support.services.toy_drafting import drafting
from tests.support.tiers import tiered
from tests.support.tiny import build_engine, fixed_config

LINK = DraftClientConfig(draft_timeout_s=30.0, max_message_tokens=5)
SAMPLING = SamplingParams(12, 0.0, ignore_eos=True)
SAMPLINGS = (SAMPLING, replace(SAMPLING, temperature=0.8), replace(SAMPLING, temperature=1.1, top_k=12, top_p=0.85))
PROMPT = (9, 8, 7, 9, 8, 7, 9, 8)


@pytest.mark.parametrize("name", tiered(KINDS_OF_DRAFTS, CLASSES_OF_DRAFTERS))
def test_remote_drafts_of_every_method_change_no_token(name: str, tiny_target: str, tiny_head: str) -> None:
    case = case_of(name, tiny_target, tiny_head)
    drafter, fuser = case.drafter(TREE), case.fuser()
    collected = DrafterNeeds(features=fuser is not None, samples=True)
    requests = [Request(f"{i}", PROMPT[i:], replace(each, seed=50 + i)) for i, each in enumerate(SAMPLINGS)]
    with drafting(drafter, name, RemoteDrafter, collected, LINK) as remote:
        engine = build_engine(
            tiny_target, fuser, "float32", "cpu", fixed_config(max_kv_tokens=512, max_prefill_tokens=16), TREE, remote
        )
        chunks = run(engine, requests)
    assert stats_of(chunks).num_drafted > 0
    assert_plain(tiny_target, requests, chunks)
