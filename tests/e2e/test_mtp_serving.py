"""`eyas serve` of a target that brings a module along: the draft service reads it, and no token depends on it."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.api.request import SamplingParams
from eyas.cli.options import Setting
from eyas.rpc.messages import NO_DRAFTER
from eyas.services.local.cluster import running_cluster
from eyas.services.local.serve import plan
from tests.support import reference
from tests.support.services.forks import forked_services
from tests.support.services.grpc_client import generate
from tests.support.tiers import nightly
from tests.support.tiny import write_spelling_tokenizer
from tests.support.tiny_mtp import write_mtp

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, seed=0)
SETTINGS = ("verifier.draft_client.draft_timeout_s=30", "verifier.engine.draft_budget=fixed")


@pytest.mark.parametrize("family", [nightly("glm4_moe"), "qwen3_5_text"])
def test_the_default_is_a_draft_service_with_the_targets_module(family: str, tmp_path: Path) -> None:
    folder = write_mtp(tmp_path / "target", family, agrees=True)
    write_spelling_tokenizer(Path(folder))
    services = plan(folder, names=["m"], settings=list(map(Setting, SETTINGS)))
    assert [service.name for service in services] == ["draft", "verifier", "router"]
    assert [service.name for service in plan(folder, method="none")] == ["verifier", "router"]
    with forked_services(), running_cluster(services, 1) as cluster:
        for child in cluster.services:
            cluster.wait(child)
        address = cluster["router"].address
        while not generate(address, (5, 6, 7), GREEDY).stats.num_drafted:
            time.sleep(0.1)  # the verifier may not have found its draft service yet
        for sampling in (GREEDY, replace(GREEDY, temperature=0.8, seed=7)):
            drafted, plain = (generate(address, (5, 6, 7), sampling, drafter) for drafter in ("", NO_DRAFTER))
            assert drafted.token_ids == plain.token_ids == reference.generate(folder, [5, 6, 7], sampling)
            assert drafted.stats.acceptance_length > 2.5
