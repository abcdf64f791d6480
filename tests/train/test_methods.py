"""Each method trains, lowers its loss, and writes a head that the serving path loads."""

import json
from pathlib import Path

import pytest
import torch

from eyas.train.config import SERVED_BY
from eyas.train.methods import TRAINEES, build_trainer
from eyas.train.trainer import Trainer
from tests.train.small_runs import prepared, settings, tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("methods")
    prepared(folder, tiny_target(folder))
    return folder


def loss(trainer: Trainer) -> float:
    """The loss of all windows with the same anchors."""
    batch = trainer.windows.batch(range(len(trainer.windows)))
    with torch.no_grad():
        return float(trainer.trainee(batch, trainer.source.states(batch), 0, "kl")["loss"])


@pytest.mark.parametrize("method", TRAINEES)
def test_a_method_trains_and_its_head_drafts_in_the_engine(method: str, folder: Path, tmp_path: Path) -> None:
    config = settings(
        folder, str(folder / "target"), method, out=str(tmp_path / "run"), loss__noise=0, optimizer__max_steps=16
    )
    trainer = build_trainer(config)
    first = loss(trainer)
    progress = trainer.run()
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert loss(trainer) < first
    assert progress.best_tau >= 1
    assert {"tau_t0", "tau_t1"} <= records[-1].keys()


@pytest.mark.parametrize("method", TRAINEES)
def test_a_written_head_starts_another_run_where_it_was(method: str, folder: Path, tmp_path: Path) -> None:
    config = settings(folder, str(folder / "target"), method, out=str(tmp_path / "run"), loss__noise=0)
    trainer = build_trainer(config)
    trainer.step()
    trainer.trainee.write(tmp_path / "head")  # type: ignore[operator]
    warm = settings(
        folder, str(folder / "target"), method, out=str(tmp_path / "warm"), draft_model=str(tmp_path / "head"), loss__noise=0
    )
    assert SERVED_BY.get(method, method)
    assert loss(build_trainer(warm)) == pytest.approx(loss(trainer), abs=1e-5)
