"""The example configs are what the services take, and the parts of each cluster fit together."""

from pathlib import Path

import pytest

from eyas.config import DraftConfig, RouterConfig, VerifierConfig, load

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


@pytest.mark.parametrize("place", ["local", "gpu"])
def test_the_services_of_a_cluster_agree(place: str) -> None:
    router = load(RouterConfig, CONFIGS / place / "router.yaml")
    verifier = load(VerifierConfig, CONFIGS / place / "verifier.yaml")
    draft = load(DraftConfig, CONFIGS / place / "draft.yaml")
    assert [model.name for model in router.models] == [verifier.model] == [draft.model]
    assert (verifier.target, verifier.head, verifier.tree) == (draft.target, draft.head, draft.tree)
    assert router.registry == verifier.registry == draft.registry


def test_every_example_is_tested() -> None:
    assert sorted(file.stem for file in CONFIGS.rglob("*.yaml")) == sorted(["router", "verifier", "draft"] * 2)
