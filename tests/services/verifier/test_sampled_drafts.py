"""SampledProposal proposals over the wire: refused where they cannot be made, else worth the same as in one process."""

from contextlib import closing
from dataclasses import replace

import pytest

from eyas.api.request import Request, SamplingParams
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.base import Drafter
from eyas.drafters.draft_head import DraftHead
from eyas.engine.build import assemble_engine
from eyas.errors import InvalidRequest
from eyas.models.heads.eagle import load_fuser
from eyas.models.loading import load_target
from eyas.rpc.messages import DrafterInfo, ModelInfo
from eyas.services.draft.streams import admit
from eyas.services.verifier.draft_client import RemoteDrafter
from eyas.services.verifier.draft_pool import DraftPool
from tests.support.runs import outputs_of, run, stats_of
from tests.support.services.toy_drafting import INFO, NEEDS, PATIENT, ToyDrafter, context, eventually, packed, serving
from tests.support.tiny import fixed_config

TREE = TreeConfig(num_draft_tokens=8, num_steps=4, top_k=4)


def test_a_drafter_that_cannot_sample_stays_unused(caplog: pytest.LogCaptureFixture) -> None:
    with serving(ToyDrafter()) as address, closing(RemoteDrafter(address, NEEDS, PATIENT, "sampled")) as remote:
        eventually(lambda: "cannot sample trees from its own distribution" in caplog.text)
        assert remote.request([context("a", (10, 11, 12))])() == [None]


def test_a_commit_beyond_the_drafters_abilities_is_rejected() -> None:
    sent = packed(context("a", (10, 11, 12))._replace(proposal="sampled"))
    with pytest.raises(InvalidRequest, match="drafter toy cannot sample trees"):
        admit(sent, "1/a", INFO)
    assert admit(sent, "1/a", replace(INFO, can_sample=True)).proposal == "sampled"


def generate(drafter: Drafter, target: str, head: str) -> tuple[dict[str, list[int]], int]:
    """What three requests say, and how many of their tokens had been drafted."""
    fuser = load_fuser(head, target)
    engine = assemble_engine(
        load_target(target, aux_hidden_state_layers=fuser.aux_hidden_state_layers),
        fuser,
        fixed_config(max_kv_tokens=512, acceptance="rejection"),
        TREE,
        drafter,
    )
    requests = [
        Request(name, (5 + i, 6, 7), SamplingParams(24, 0.9 if i else 0.0, top_p=0.95, seed=i, ignore_eos=True))
        for i, name in enumerate("abc")
    ]
    chunks = run(engine, requests)
    return outputs_of(chunks), stats_of(chunks).num_accepted


def test_a_request_gets_equal_output_remote_and_in_process(tiny_target: str, tiny_head: str) -> None:
    def eagle() -> Drafter:
        return DraftHead(tiny_head, "eagle3").build_drafter(
            tiny_target, "float32", "cpu", TREE, DraftingConfig(max_kv_tokens=512)
        )

    expected, num_accepted = generate(eagle(), tiny_target, tiny_head)
    assert num_accepted > 0
    info = DrafterInfo(ModelInfo("tiny", "f", 48, 256), "eagle3", True, False, 32, can_sample=True)
    with serving(eagle(), info) as address, closing(DraftPool(PATIENT, NEEDS, "sampled")) as pool:
        for name in "abc":
            pool.assign(name, address)
        eventually(lambda: all(pool.can_draft(name) for name in "abc"))
        assert generate(pool, tiny_target, tiny_head) == (expected, num_accepted)
