"""Documents that share a window are trained as if each had one of its own."""

from pathlib import Path

import pytest
import torch

from eyas.train.data import Batch
from eyas.train.methods import TRAINEES, build_trainer
from tests.train.small_runs import prepared, read_by, settings, tiny_target

DOCUMENTS, LENGTH = 3, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packing")
    prepared(folder, tiny_target(folder))
    return folder


def batches() -> tuple[Batch, Batch]:
    """The same documents in windows of their own, and in one. Their first tokens are predicted by nothing."""
    tokens = torch.randint(3, 48, (DOCUMENTS, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    numbers, positions = torch.arange(DOCUMENTS)[:, None].expand_as(tokens), torch.arange(LENGTH).expand_as(tokens)
    apart = Batch(tokens, mask, torch.zeros_like(tokens), positions, tuple(range(DOCUMENTS)))
    packed = Batch(*(x.reshape(1, -1) for x in (tokens, mask, numbers, positions)), index=(0,))
    return apart, packed


@pytest.mark.parametrize("method", TRAINEES)
def test_a_document_sees_and_predicts_itself_alone(method: str, folder: Path, tmp_path: Path) -> None:
    changes = read_by(method, loss__noise=0, loss__num_anchors=DOCUMENTS * LENGTH, loss__down_sample_ratio=1)
    trainer = build_trainer(settings(folder, str(folder / "target"), method, out=str(tmp_path / "run"), **changes))
    for _ in range(3):
        trainer.step()  # a new head may be the same everywhere
    found, states = [], []
    with torch.no_grad():
        for batch in batches():
            seen = trainer.source.states(batch)
            states.append((seen.aux.reshape(DOCUMENTS * LENGTH, -1), seen.final.reshape(DOCUMENTS * LENGTH, -1)))
            found.append({name: float(value) for name, value in trainer.trainee(batch, seen, 0, "kl").items()})
    for alone, among in zip(*states, strict=True):
        torch.testing.assert_close(among, alone, rtol=1e-4, atol=1e-5)
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)
