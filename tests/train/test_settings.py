"""Settings of a run: what a method does not read is refused, a warm start keeps its head, and devices may differ."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.config.loader import load
from eyas.errors import ConfigError
from eyas.train.config import HEAD_SETTINGS, LOSS_SETTINGS, EvalConfig, HeadConfig, LossConfig, TrainConfig
from eyas.train.evaluate import Evaluator, heldout_prompts
from eyas.train.features import OnlineTarget
from eyas.train.methods import build_evaluator, build_online_target, build_trainer
from eyas.train.windows import Windows
from tests.support.tiny_block import tiny_block_head
from tests.support.tiny_medusa_hydra import tiny_heads
from tests.train.small_runs import settings

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        ("eagle3", "loss__loss_decay", "dpace"), ("eagle3", "head__hidden_size", 7), ("dflash", "head__markov_rank", 8),
        ("eagle1", "head__target_layer_ids", [1]), ("medusa", "head__num_hidden_layers", 2),
        ("draft_model", "head__draft_vocab_size", 9), ("peagle", "loss__ttt_steps", 3), ("dspark", "loss__noise", 0.2),
    ],
)  # fmt: skip
def test_settings_that_a_method_ignores_are_refused(method: str, key: str, value: object, folder: Path) -> None:
    section, _, name = key.partition("__")
    with pytest.raises(ConfigError, match=rf"{section}\.{name} is .*, but {method} does not read it"):
        settings(folder, str(folder / "target"), method, **{key: value})


def test_a_run_without_data_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"data\.path is empty; name the folder"):
        load(TrainConfig, None, ["model=m", "out=o"])


def test_every_setting_is_read_by_a_method() -> None:
    for section, read in ((HeadConfig, HEAD_SETTINGS), (LossConfig, LOSS_SETTINGS)):
        assert set().union(*read.values()) == set(section.__dataclass_fields__)


@pytest.mark.parametrize("file", sorted((ROOT / "examples" / "demo_model").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_demos_settings_load(file: Path) -> None:
    assert load(TrainConfig, file).optimizer.max_steps > 0


def test_the_settings_of_the_guide_load(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "training.md").read_text()
    (tmp_path / "run.yaml").write_text(text.split("```yaml\n")[1].split("```")[0])
    assert load(TrainConfig, tmp_path / "run.yaml").head.block_size == 7


@pytest.mark.parametrize(
    ("method", "key", "value", "found"),
    [
        ("dspark", "head__draft_vocab_size", 9, "draft_vocab_size is 9, but .* has 48"),
        ("dspark", "head__mask_token_id", 3, "mask_token_id is 3, but"),
        ("medusa", "head__num_heads", 3, "num_heads is 3, but .* has 2"),
        ("hydra", "head__draft_vocab_size", 9, "draft_vocab_size is 9, but .* has 48"),
        ("eagle3", "head__num_hidden_layers", 2, "num_hidden_layers is 2, but .* has 1"),
        ("eagle3", "head__target_layer_ids", [0], "names 1 layers, but the head in .* reads 2"),
        ("draft_model", "head__hidden_size", 8, "hidden_size is 8, but .* has 16"),
    ],
)
def test_a_warm_start_keeps_its_head(method: str, key: str, value: Any, found: str, folder: Path, tmp_path: Path) -> None:
    target, out = str(folder / "target"), str(tmp_path)
    build_trainer(settings(folder, target, method, out=out)).write_head("head")
    with pytest.raises(ConfigError, match=found):
        build_trainer(settings(folder, target, method, out=out, draft_model=str(tmp_path / "head"), **{key: value}))


def test_what_a_warm_start_keeps_of_the_defaults_is_said(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A setting that is given as its default cannot be seen, so it is named with what the head has in its place."""
    target, out = str(folder / "target"), str(tmp_path)
    build_trainer(settings(folder, target, out=out)).write_head("head")
    assert not caplog.messages
    build_trainer(settings(folder, target, out=out, draft_model=str(tmp_path / "head"), head={"block_size": 7}))
    (message,) = caplog.messages
    assert message.endswith("in place of the defaults: head.block_size 4, not 7; head.markov_rank 8, not 256")


def test_a_prefix_layer_is_not_dropped(folder: Path) -> None:
    target = str(folder / "target")
    with pytest.raises(ConfigError, match="prefix-mlp, whose prefix layer is not trained"):
        build_trainer(settings(folder, target, "hydra", draft_model=tiny_heads("hydra-prefix", target), head={}))


def test_the_reserved_token_of_a_warm_start_is_its_own(folder: Path, tmp_path: Path) -> None:
    """It decides what the data must not hold, and needs no setting and no padding token of the target."""
    target = without_padding(folder, tmp_path)
    head = Path(shutil.copytree(tiny_block_head("dspark", str(folder / "target")), tmp_path / "head"))
    config = settings(folder, target, out=str(tmp_path), draft_model=str(head), head={})
    build_trainer(config)
    change(head, "mask_token_id", 7)
    with pytest.raises(ConfigError, match="mask_token_id is 7, which occurs"):
        build_trainer(config)


@pytest.mark.parametrize("method", ["dspark", "peagle"])
def test_a_head_needs_a_reserved_token(method: str, folder: Path, tmp_path: Path) -> None:
    """Where the data hold every token, and the target names no padding."""
    target, data = without_padding(folder, tmp_path), Path(shutil.copytree(folder / "data", tmp_path / "data"))
    config = settings(tmp_path, target, method, out=str(tmp_path), head={})
    build_trainer(config)
    info = json.loads((data / "prepared.json").read_text())
    (data / "prepared.json").write_text(json.dumps(info | {"mask_token_id": -1}))
    with pytest.raises(ConfigError, match="the target has no padding token"):
        build_trainer(config)


def without_padding(folder: Path, copy: Path) -> str:
    """A copy of the target whose config names no padding token."""
    target = Path(shutil.copytree(folder / "target", copy / "target"))
    change(target, "pad_token_id", None)
    return str(target)


def change(checkpoint: Path, key: str, value: object) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {key: value}))


def test_states_of_a_target_on_another_device_come_back(folder: Path, tmp_path: Path) -> None:
    target = str(folder / "target")
    config = settings(folder, target, target_device="cpu:0")
    batch = Windows(folder / "data", 32).batch([0, 1])
    plain = build_online_target(settings(folder, target), (1, 4)).states(batch)
    states = build_online_target(config, (1, 4)).states(batch)
    assert states.aux.device == batch.tokens.device
    assert torch.equal(states.aux, plain.aux)
    losses = [
        float(build_trainer(settings(folder, target, out=str(tmp_path), **changes)).step()["loss"])
        for changes in ({}, {"target_device": "cpu:0"}, {"device": "cpu:0", "target_device": "cpu"})
    ]
    assert losses[1:] == losses[:1] * 2
    with pytest.raises(ConfigError, match="cannot be used here"):
        build_online_target(settings(folder, target, target_device="cuda:99"), (1,))
    with pytest.raises(ConfigError, match="name one of them"):
        settings(folder, target, target_device="cpu", shard_target=True, eval__device="cpu")


def test_a_sharded_target_is_not_evaluated_by_accident(folder: Path, tmp_path: Path) -> None:
    target = str(folder / "target")
    with pytest.raises(ConfigError, match=r"name a device that holds it as eval\.device"):
        settings(folder, target, shard_target=True)
    assert settings(folder, target, shard_target=True, eval__device="cpu").shard_target
    progress = build_trainer(settings(folder, target, out=str(tmp_path), eval__num_prompts=0)).run()
    assert (progress.step, progress.best_step) == (4, 0)
    assert (tmp_path / "last").is_dir()


def test_evaluation_on_the_weights_of_training_finds_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's target shares the parameters of the one that makes states, and leaves it as it was."""
    target, head = str(folder / "target"), Path(tiny_block_head("dspark", str(folder / "target")))
    config = settings(folder, target, out=str(tmp_path))
    online, batch = build_online_target(config, (1, 4)), Windows(folder / "data", 32).batch([0])
    before = online.states(batch)
    assert build_evaluator(config, online, "cpu").given is None, "on the CPU the engine packs weights of its own"
    monkeypatch.setattr(OnlineTarget, "can_serve", lambda self, device, dtype: True)
    shared = build_evaluator(config, online, "cpu")
    assert shared.given is not None
    own = {parameter.data_ptr() for parameter in online.model.parameters()}
    assert own == {parameter.data_ptr() for parameter in shared.given.model.parameters()}
    c = EvalConfig(num_prompts=2, prompt_tokens=6, max_tokens=6, num_draft_tokens=6)
    alone = Evaluator(target, "dspark", heldout_prompts(folder / "data", c), c, "cpu")
    assert shared.measure(head) == alone.measure(head)
    assert torch.equal(online.states(batch).aux, before.aux)
