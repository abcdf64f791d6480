"""Validation finds the wiring of a head, and refuses a head that guesses no better than chance."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from eyas.cli.main import app
from eyas.config import VerifierConfig
from eyas.drafters.draft_head import DraftHead
from eyas.errors import CheckpointError
from eyas.models.checkpoint import Checkpoint
from eyas.models.fingerprints import head_fingerprint
from eyas.models.heads import validation
from eyas.models.heads.eagle_config import HeadWiring, read_head_config
from eyas.models.heads.validation import Window, WiringReport, WiringScore, compared, observe, validate_head
from eyas.models.loading import load_target
from eyas.models.parallel.workers import TargetWorkers
from eyas.models.target import TargetModel
from eyas.rpc.channel import Peers
from eyas.rpc.messages import TargetInfo
from eyas.services.verifier.__main__ import load_engine
from tests.support.reference import load_reference
from tests.support.tiers import nightly, tiered
from tests.support.tiny import DEMO, fixed_config, write_target
from tests.support.tiny_block import tiny_peagle_head

TARGET, HEAD = str(DEMO / "target"), DEMO / "eagle3"
RIGHT = HeadWiring((2, 6, 9))
PROMPT = "class Queue:\n    def put(self, item):\n"


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return load_target(TARGET)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less text, which is enough to see what is wrong."""
    monkeypatch.setattr(validation, "MAX_WINDOWS", 3)
    monkeypatch.setattr(validation, "SAMPLED_LENGTH", 48)


def with_config(folder: Path, head: Path = HEAD, **changes: object) -> str:
    """A demo head with other settings in its config."""
    folder.mkdir(parents=True)
    folder.joinpath("config.json").write_text(json.dumps({**Checkpoint(head).config, **changes}))
    folder.joinpath("model.safetensors").symlink_to((head / "model.safetensors").resolve())
    return str(folder)


WRONG: dict[str, dict[str, object]] = {
    "layers counted as outputs": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]},
    "layers one too late": {"eagle_aux_hidden_state_layer_ids": [3, 7, 10]},
    "the residual flipped and layers shifted": {
        "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 5, 8]
    },
    "the output without its norm": {"norm_output": False},
    "the normed state read by the next step": {"architectures": ["Eagle3LlamaForCausalLM"], "norm_output": True},
}  # fmt: skip


# The other one is corrected by the command below.
@pytest.mark.parametrize(
    "wrong",
    [
        "the residual flipped and layers shifted",
        nightly("the normed state read by the next step"),
        nightly("layers one too late"),  # a verifier meets it below
        nightly("the output without its norm"),
    ],
)
def test_a_wrong_config_is_corrected(wrong: str, target: TargetModel, tmp_path: Path, short: None) -> None:
    head = with_config(tmp_path / "head", **WRONG[wrong])
    assert read_head_config(Checkpoint(head), Checkpoint(TARGET).text_config).wiring != RIGHT
    report = validate_head(target, head, TARGET, "float32", "cpu")
    assert report.best.wiring == RIGHT
    assert not report.failed


OFF_BY_ONE: dict[str, dict[str, object]] = {
    "EAGLE's key, counted as outputs": {"eagle_aux_hidden_state_layer_ids": [1, 5, 11]},
    "speculators' key, counted as outputs, and the residual flipped": {
        "speculators_model_type": "peagle", "eagle_aux_hidden_state_layer_ids": None,
        "aux_hidden_state_layer_ids": [1, 5, 11], "norm_before_residual": True,
    },
    "eagle_config's, which begin with 1 and so are outputs": {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 11]}
    },
}  # fmt: skip


@pytest.mark.parametrize("dialect", tiered(OFF_BY_ONE, [next(iter(OFF_BY_ONE))]))
def test_layer_ids_of_a_peagle_head_are_not_guessed(dialect: str, target: TargetModel, tmp_path: Path, short: None) -> None:
    """The ids of eagle_config are read as they are meant; validation corrects the others."""
    head = with_config(tmp_path / "head", DEMO / "peagle", **OFF_BY_ONE[dialect])
    report = DraftHead(head, "peagle").validate(target, TARGET, "float32", "cpu")
    assert report is not None
    assert report.best.wiring == HeadWiring((2, 6, 12))
    assert report.config_is_right == dialect.startswith("eagle_config")
    assert report.best.second > 1.5 * report.chance, "second guesses come from the mask rows"


def test_a_peagle_head_without_layer_ids_is_judged(tiny_target: str, tiny_head: str, tmp_path: Path, short: None) -> None:
    """Left out, they are EAGLE-3's usual ones and their neighbours; a head that fits none of these is refused by name."""
    model = load_target(tiny_target)
    source = Path(tiny_peagle_head(tiny_head))
    head = with_config(tmp_path / "head", source, eagle_aux_hidden_state_layer_ids=None)
    report = DraftHead(head, "peagle").validate(model, tiny_target, "float32", "cpu")
    assert report is not None
    tried = {score.wiring.aux_hidden_state_layers for score in report.scores}
    assert tried == {(2, 2, 1), (1, 1, 0), (3, 3, 2)}
    with pytest.raises(CheckpointError, match=rf"{head} hardly ever guesses.*with inputs of layers 2, 2, 1"):
        report.require(head)


def test_a_right_config_is_kept(target: TargetModel) -> None:
    report = validate_head(target, str(HEAD), TARGET, "float32", "cpu")
    assert report.config_is_right
    assert 1000 <= report.num_tokens <= 2000
    assert report.best.wiring == RIGHT
    assert report.best.first > 2 * report.chance
    assert "as its config says" in str(report)


def test_an_eagle1_head_has_one_wiring(target: TargetModel, short: None) -> None:
    report = validate_head(target, str(DEMO / "eagle1"), TARGET, "float32", "cpu", "eagle")
    assert len(report.scores) == 1
    assert report.best.first > 2 * report.chance


def test_the_aux_layers_of_the_target_are_unchanged(target: TargetModel, short: None) -> None:
    target.set_aux_hidden_state_layers((3,))
    observe(target, TARGET, (1, 2))
    assert target.aux_hidden_state_layers == (3,)


def test_a_target_without_a_tokenizer_samples_its_own_tokens(tmp_path: Path) -> None:
    target = str(write_target(tmp_path / "target"))
    model = load_target(target)
    windows = observe(model, target, (0, 2))
    assert sum(len(window.tokens) for window in windows) >= 1000
    with torch.inference_mode():
        plain = load_reference(target)(input_ids=windows[0].tokens[None], output_hidden_states=True)
    assert torch.equal(plain.logits[0].argmax(-1), windows[0].tops)
    torch.testing.assert_close(plain.hidden_states[2][0], windows[0].hidden_states[2], atol=1e-4, rtol=1e-4)
    again = observe(model, target, (0, 2))
    assert all(torch.equal(one.tokens, other.tokens) for one, other in zip(windows, again, strict=True))


def test_a_random_head_is_refused_with_the_numbers(tiny_target: str, tiny_head: str, short: None) -> None:
    report = validate_head(load_target(tiny_target), tiny_head, tiny_target, "float32", "cpu")
    assert report.failed
    with pytest.raises(CheckpointError, match=r"hardly ever guesses.* % with inputs of layers 1, 2, 3.*chance is .* %"):
        report.require(tiny_head)


def test_a_verifier_uses_the_wiring_that_works(tmp_path: Path, short: None) -> None:
    head = with_config(tmp_path / "head", **WRONG["layers one too late"])
    config = VerifierConfig("demo", TARGET, head, dtype="float32", device="cpu", engine=fixed_config())
    for checks, layers in ((config, RIGHT.aux_hidden_state_layers), (replace(config, validate_head="never"), (3, 7, 10))):
        engine, _ = load_engine(
            checks, Checkpoint(TARGET), DraftHead(head, "eagle3"), TargetInfo("target", "features"), TargetWorkers(), Peers()
        )
        assert engine.target.aux_hidden_state_layers == layers


def test_the_check_prints_a_table_and_writes_the_wiring(tmp_path: Path, short: None) -> None:
    head = with_config(tmp_path / "head", **WRONG["layers counted as outputs"])
    digest, options = head_fingerprint(head), ["check", "head", "--model", TARGET, "--draft-model", head]
    result = CliRunner().invoke(app, [*options, "--write"])
    assert result.exit_code == 0, result.output
    assert "not as its config says" in result.output
    assert read_head_config(Checkpoint(head), Checkpoint(TARGET).text_config).wiring == RIGHT
    assert head_fingerprint(head) == digest, "a draft service and a verifier still match"


def test_the_check_fails_for_a_random_head(tiny_target: str, tiny_head: str, short: None) -> None:
    result = CliRunner().invoke(app, ["check", "head", "--model", tiny_target, "--draft-model", tiny_head])
    assert result.exit_code == 1
    assert "hardly ever guesses" in result.output


def test_coincidence_does_not_overrule_the_config() -> None:
    generator = torch.Generator().manual_seed(0)
    stated, noise = torch.rand(2000, generator=generator), torch.randn(2000, generator=generator)

    def report(gain: float) -> WiringReport:
        scores = (
            WiringScore(RIGHT, 0.4, 0.4, stated),
            WiringScore(HeadWiring((1, 5, 8)), 0.5, 0.5, stated + gain + 0.2 * noise),
        )
        return WiringReport(scores, 0.1, 1000)

    assert report(0.001).best.wiring == RIGHT
    assert report(0.05).best.wiring == HeadWiring((1, 5, 8))


def test_only_a_clearly_beaten_wiring_is_dropped_early() -> None:
    """Those that are as good on the first window, or better, are tried on all of them."""
    overlaps = {1: 0.5, 2: 0.1, 3: 0.49, 4: 0.9}
    noise, tried = torch.rand(400, generator=torch.Generator().manual_seed(0)), list[tuple[int, int]]()

    def score(wiring: HeadWiring, windows: Sequence[Window]) -> WiringScore:
        (layer,) = wiring.aux_hidden_state_layers
        tried.append((layer, len(windows)))
        return WiringScore(wiring, 0.4, 0.4, (overlaps[layer] + 0.5 * noise).roll(40 * layer).repeat(len(windows)))

    windows = [Window(torch.zeros(1), torch.zeros(1), torch.zeros(1), {})] * 3
    stated, *others = (HeadWiring((layer,)) for layer in overlaps)
    best = score(stated, windows)
    found = [best, *compared(best, others, windows, score)]
    assert [len(one.overlaps) for one in found] == [1200, 400, 1200, 1200]
    assert WiringReport(tuple(found), 0.1, 1200).best is found[3]
    assert tried.count((2, 3)) == 0
