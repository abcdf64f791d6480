"""`eyas drafters` lists every method with what it needs."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas.cli.main import app
from eyas.config import DraftAheadConfig, DraftingConfig, TreeConfig
from eyas.config.drafting import METHOD_FACTS
from eyas.drafters.ahead.drafter import DraftAheadDrafter
from eyas.drafters.draft_head import DraftHead
from eyas.errors import CheckpointError, ConfigError
from tests.support.corpora import write_datastore
from tests.support.methods import CASES, Case


def test_every_method_is_listed_with_its_needs() -> None:
    result = CliRunner().invoke(app, ["drafters"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    for name, facts in METHOD_FACTS.items():
        (line,) = [line for line in result.output.splitlines() if f" {name} " in line]
        assert (facts.head or facts.optional_head or "none") in line
        assert all(need in line for need in facts.needs)


@pytest.mark.parametrize("name", METHOD_FACTS)
def test_the_facts_of_a_method_are_true_of_its_drafter(name: str, tiny_target: str, tiny_head: str, tmp_path: Path) -> None:
    """Every method has a case in tests.support.methods."""
    facts, tree = METHOD_FACTS[name], TreeConfig(16, 4, 3)
    datastore = write_datastore(Path(tiny_target), [range(3, 40)], tmp_path / "store")
    case = Case(next(each for each in CASES if each.partition("-")[0] == name), tiny_target, tiny_head, datastore)
    drafter, fuser = case.drafter(tree), case.fuser()
    assert (drafter.needs.features, drafter.needs.samples) == ("features" in facts.needs, "samples" in facts.needs)
    assert drafter.can_sample == facts.has_head
    assert (fuser.width if fuser else 0) == drafter.needs.feature_size
    ahead = DraftingConfig(draft_ahead=DraftAheadConfig(6, 16, 7, mode="always"))
    built = DraftHead(case.folder, name).build_drafter(tiny_target, "float32", "cpu", tree, ahead, case.methods)
    assert isinstance(built, DraftAheadDrafter) == facts.drafts_ahead


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
