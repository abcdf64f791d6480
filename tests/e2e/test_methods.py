"""A union of drafters that also grows trees ahead, through router, verifier and draft service as processes."""

from collections.abc import Iterator

import pytest

from eyas.request import SamplingParams
from eyas.services.cluster import Cluster, free_port, running_cluster
from tests.e2e.client import Generated, generate
from tests.e2e.test_network import GREEDY, SAMPLINGS, expected, prompts
from tests.services.drafting.toy_drafting import eventually

UNION = "eagle3+prompt_lookup"
SETTINGS = (
    f"draft.drafter={UNION}", f"verifier.drafter={UNION}", "draft.drafting.draft_ahead.rows=8", "draft.tree.num_draft_tokens=12",
    "verifier.tree.num_draft_tokens=12", "verifier.draft_client.draft_timeout_s=30",
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(free_port(), SETTINGS) as running:
        for child in running.services:
            running.wait(child)
        yield running


@SAMPLINGS
def test_a_combined_tree_drafted_ahead_changes_no_token(cluster: Cluster, sampling: SamplingParams) -> None:
    for prompt in prompts()[2:5]:
        out = generate(cluster.router.address, prompt, sampling)
        assert out.token_ids == expected(prompt, sampling)
        assert out.stats.num_drafted > 0


def test_combined_trees_are_drafted_ahead(cluster: Cluster) -> None:
    """Whether there is time between two commits is the machine's affair, so it is asked until there was."""

    def grown_ahead() -> bool:
        out: Generated = generate(cluster.router.address, prompts()[3], GREEDY)
        return any(chunk.chunk.verify_step.grown_ahead for chunk in out.chunks if chunk.chunk.verify_step)

    eventually(grown_ahead, seconds=60)
