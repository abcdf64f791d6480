"""Heads begin with linear predictions of the target's next states, and learn less than the whole vocabulary."""

from pathlib import Path

import pytest
import torch

from eyas.errors import CheckpointError, ConfigError
from eyas.train import start
from eyas.train.methods import build_online_target, build_trainer
from eyas.train.multi_head import DraftModelTrainer
from eyas.train.start import Samples, low_rank, solve
from eyas.train.windows import Windows
from tests.support.families import config_of, write_model
from tests.support.family_configs import SERVED
from tests.support.tiers import nightly, tiered
from tests.support.tiny import write_spelling_tokenizer
from tests.train.small_runs import loss, prepared, settings, tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    prepared(folder, tiny_target(folder), count=60)
    return folder


def first_loss(folder: Path, out: Path, method: str, start: str, **changes: object) -> float:
    trainer = build_trainer(settings(folder, str(folder / "target"), method, out=str(out), start=start, **changes))
    return float(trainer.step()["loss"])


@pytest.mark.parametrize("method", ["eagle1", "eagle3", nightly("eagle3.1"), "medusa", nightly("hydra"), "dspark"])
def test_a_least_squares_start_is_ahead_of_random_weights(method: str, folder: Path, tmp_path: Path) -> None:
    found = first_loss(folder, tmp_path / "a", method, "least_squares")
    assert found < 0.9 * first_loss(folder, tmp_path / "b", method, "random")


@pytest.mark.parametrize("method", ["dflash", "peagle"])
def test_other_methods_keep_random_weights(method: str, folder: Path, tmp_path: Path) -> None:
    """Of DFlash's states, the start finds the scales alone."""
    target = str(folder / "target")
    started = build_trainer(settings(folder, target, method, out=str(tmp_path / "a")))
    random = build_trainer(settings(folder, target, method, out=str(tmp_path / "b"), start="random"))
    assert started.trained.keys() == random.trained.keys()
    assert all(torch.equal(started.trained[name], tensor) for name, tensor in random.trained.items())
    scales = started.kept.get("input_scales")
    assert (scales is not None and not torch.equal(scales, random.kept["input_scales"])) == (method == "dflash")


@pytest.mark.parametrize(
    "method",
    tiered(
        ("eagle3", "medusa", "dspark", "peagle", "draft_model", "eagle1", "eagle3.1", "hydra", "dflash"),
        ("eagle3", "medusa", "dspark", "peagle", "draft_model"),
    ),
)
def test_a_written_head_starts_another_run_where_it_was(method: str, folder: Path, tmp_path: Path) -> None:
    """The scales of its inputs are part of the weights that are written."""
    target = str(folder / "target")
    trainer = build_trainer(settings(folder, target, method, out=str(tmp_path / "a")))
    trainer.step()
    trainer.write_head("last")
    written = {"head": {}, "draft_model": str(tmp_path / "a" / "last")}
    again = build_trainer(settings(folder, target, method, out=str(tmp_path / "b"), **written))
    assert loss(again) == pytest.approx(loss(trainer), abs=1e-5)


def test_later_layers_add_nothing_at_the_start(folder: Path, tmp_path: Path) -> None:
    losses = [
        first_loss(folder, tmp_path / f"{layers}", "eagle3", "least_squares", head__num_hidden_layers=layers)
        for layers in (1, 3)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_wide_states_are_read_of_fewer_tokens(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(folder, str(folder / "target"), "eagle3", out=str(tmp_path))
    windows = Windows(folder / "data", 32)
    source = build_online_target(config, (1, 3))
    whole = Samples.read(source, windows, torch.device("cpu"))
    assert len(whole.tokens) == len(windows) > 2
    monkeypatch.setattr(start, "SAMPLE_NUMBERS", 2 * 32 * (whole.aux.shape[-1] + whole.final.shape[-1]))
    assert len(Samples.read(source, windows, torch.device("cpu")).tokens) == 2


@pytest.mark.parametrize("length", [3, 40])
def test_documents_that_are_too_short_are_refused(length: int) -> None:
    """In windows that are shorter than the reach of a head, too."""
    states = torch.ones(1, length, 4)
    samples = Samples(torch.zeros(1, length, dtype=torch.int64), torch.arange(length)[None] // 3, states, states)
    with pytest.raises(ConfigError, match="no document of the training data has more than 4 tokens in a window"):
        samples.pairs([(states, 0)], 4)


def test_a_linear_map_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(400, 3, generator=generator)
    second = 1e3 * torch.randn(400, 2, generator=generator)
    weights = torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)
    outputs = first @ weights[0].T + second @ weights[1].T + 7
    found = solve([first, second], outputs)
    assert torch.allclose(found.predictions, outputs, rtol=0.02, atol=0.02 * float(outputs.std()))
    assert torch.allclose(found.weights[1], weights[1], rtol=0.02)


def test_a_low_rank_map_is_nearest_on_its_inputs() -> None:
    """On inputs that vary in two directions only, a map of rank 2 is exact."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 2, generator=generator) @ torch.randn(2, 6, generator=generator)
    weight = torch.randn(5, 6, generator=generator)
    outer, inner = low_rank(weight, inputs, 2)
    assert outer.shape == (5, 2)
    assert torch.allclose(inputs @ inner.T @ outer.T, inputs @ weight.T, atol=1e-2)


def test_all_layers_of_the_target_are_the_target(folder: Path, tmp_path: Path) -> None:
    changes = {"head": {"init_layers": [0, 1, 2, 3]}}
    trainer = build_trainer(settings(folder, str(folder / "target"), "draft_model", out=str(tmp_path), **changes))
    assert float(trainer.step()["loss"]) < 1e-6
    assert isinstance(trainer.trainee, DraftModelTrainer)
    assert not any("embed" in name or "lm_head" in name for name in trainer.trained)


def test_fewer_layers_are_copies_that_learn(folder: Path, tmp_path: Path) -> None:
    changes = {"head": {"init_layers": [1, 3]}, "optimizer__learning_rate": 3e-3, "optimizer__max_steps": 12}
    trainer = build_trainer(settings(folder, str(folder / "target"), "draft_model", out=str(tmp_path), **changes))
    losses = [float(trainer.step()["loss"]) for _ in range(12)]
    assert losses[-1] < losses[0]
    trainer.write_head("last")
    again = build_trainer(
        settings(folder, str(folder / "target"), "draft_model", out=str(tmp_path / "b"), head={},
                 draft_model=str(tmp_path / "last"))
    )  # fmt: skip
    assert float(again.step()["loss"]) < losses[0]


@pytest.mark.parametrize("layers", [[0, 9], [1, 1]])
def test_layers_that_are_not_there_are_refused(layers: list[int], folder: Path, tmp_path: Path) -> None:
    config = settings(folder, str(folder / "target"), "draft_model", out=str(tmp_path), head={"init_layers": layers})
    with pytest.raises(ConfigError, match=r"head\.init_layers is .*; the target has the layers 0 to 3"):
        build_trainer(config)


@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_5_text"])
def test_layers_bring_their_kinds_or_are_refused(kind: str, tmp_path: Path) -> None:
    """Layers of GLM have experts by their numbers, layers of Qwen by lists."""
    target = write_model(tmp_path / "target", config_of(kind, **SERVED[kind]))
    write_spelling_tokenizer(Path(target))
    prepared(tmp_path, target)
    config = settings(tmp_path, target, "draft_model", out=str(tmp_path / "out"), head={"init_layers": [1]})
    if kind == "qwen3_5_text":
        assert float(build_trainer(config).step()["loss"]) > 0
        return
    with pytest.raises(CheckpointError, match=r"the layers \[1\] \(head.init_layers\) of .* are no model of their own"):
        build_trainer(config)


@pytest.mark.parametrize("method", ["medusa", nightly("hydra")])
def test_a_single_head_starts_too(method: str, folder: Path, tmp_path: Path) -> None:
    found = first_loss(folder, tmp_path / "a", method, "least_squares", head__num_heads=1)
    assert found < 0.9 * first_loss(folder, tmp_path / "b", method, "random", head__num_heads=1)


@pytest.mark.parametrize("method", ["eagle1", "draft_model"])
def test_losses_may_compare_the_frequent_tokens_alone(method: str, folder: Path, tmp_path: Path) -> None:
    """Over as many tokens as there are, the loss is that of the whole vocabulary; over few, it is another."""
    whole, some = (first_loss(folder, tmp_path / f"{size}", method, "random", loss__vocab_size=size) for size in (0, 8))
    assert some != pytest.approx(whole, rel=1e-3)
    trainer = build_trainer(settings(folder, str(folder / "target"), method, out=str(tmp_path / "c"), loss__vocab_size=8))
    assert len(trainer.trainee.teacher) == 8
