"""A combined drafter that also drafts ahead, through router, verifier and draft service as processes."""

from collections.abc import Iterator

import pytest

from eyas.request import SamplingParams
from eyas.services.cluster import Cluster
from tests.e2e.client import Generated, generate
from tests.e2e.cluster.conftest import started
from tests.e2e.cluster.test_network import GREEDY, SAMPLINGS, expected, prompts
from tests.services.drafting.toy_drafting import eventually

METHOD = "eagle3+prompt_lookup"
EAGLE = ("draft.draft_model=models/demo/eagle3-full", "verifier.draft_model=models/demo/eagle3-full")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    yield from started(
        f"draft.method={METHOD}", f"verifier.method={METHOD}", *EAGLE, "draft.drafting.max_head_steps=3",
        "draft.drafting.draft_ahead={top_k: 64, mode: always}",
        "draft.tree.num_draft_tokens=12", "verifier.tree.num_draft_tokens=12",
    )  # fmt: skip


@SAMPLINGS
def test_a_combined_tree_drafted_ahead_changes_no_token(cluster: Cluster, sampling: SamplingParams) -> None:
    for prompt in prompts()[2:5]:
        out = generate(cluster["router"].address, prompt, sampling)
        assert out.token_ids == expected(prompt, sampling)
        assert out.stats.num_drafted > 0


def test_combined_trees_are_drafted_ahead(cluster: Cluster) -> None:
    """The time between two commits depends on the machine, so the test repeats until one tree was grown ahead."""

    def drafted_ahead() -> bool:
        out: Generated = generate(cluster["router"].address, prompts()[3], GREEDY)
        return any(chunk.chunk.verify_step.grown_ahead for chunk in out.chunks if chunk.chunk.verify_step)

    eventually(drafted_ahead, seconds=60)
