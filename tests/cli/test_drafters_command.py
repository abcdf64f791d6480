"""`eyas drafters` lists every method with what it needs."""

import pytest
from typer.testing import CliRunner

from eyas.cli.main import app
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.drafters.registry import METHODS, find_method
from eyas.errors import CheckpointError, ConfigError


def test_every_method_is_listed_with_its_needs() -> None:
    result = CliRunner().invoke(app, ["drafters"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    for name, method in METHODS.items():
        (line,) = [line for line in result.output.splitlines() if f" {name} " in line]
        assert (method.head or method.optional_head or "none") in line
        assert all(need in line for need in method.needs)


@pytest.mark.parametrize("name", ["eagle3", "sps"])
def test_a_method_declares_the_needs_of_its_drafter(name: str, tiny_target: str, tiny_head: str) -> None:
    head = tiny_head if name == "eagle3" else tiny_target
    drafter = DraftHead(head, name).build_drafter(tiny_target, "float32", "cpu", TreeConfig(8, 2, 2), DraftingConfig(64))
    declared = find_method(name).needs
    assert (drafter.needs.features, drafter.needs.samples) == ("features" in declared, "samples" in declared)
    fuser = DraftHead(head, name).build_fuser(tiny_target, "float32", "cpu")
    assert (fuser.width if fuser else 0) == drafter.needs.feature_size


@pytest.mark.parametrize(
    ("name", "needed"),
    [("eagle1", "a draft head of EAGLE-1"), ("medusa", "Medusa heads"), ("hydra", "Hydra heads"), ("sps", "a causal LM")],
)
def test_a_head_of_another_method_is_rejected_with_its_needs(
    name: str, needed: str, tiny_target: str, tiny_head: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"not for {name}, which needs {needed}"):
        DraftHead(tiny_head, name).build_drafter(tiny_target, "float32", "cpu", TreeConfig(8, 2, 2), DraftingConfig(64))


def test_a_featureless_drafter_needs_no_verifier_draft_model() -> None:
    assert DraftHead("", "sps").build_fuser("nowhere", "float32", "cpu") is None
    assert DraftHead("", "sps").features_fingerprint() == "none"
    with pytest.raises(ConfigError, match="drafter 'eagle3' needs a draft head of EAGLE-3; none was named"):
        DraftHead("", "eagle3").features_fingerprint()
