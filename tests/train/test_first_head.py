"""From a model to a head without reading code: what a run chooses, says and leaves behind by itself."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eyas import LLM, SamplingParams
from eyas.cli.train import conclude
from eyas.train.data import read_prepared
from eyas.train.draft_vocabulary import covering_size
from eyas.train.evaluate import Evaluation
from eyas.train.methods import build_trainer
from tests.support.tiers import nightly
from tests.train.small_runs import settings


def test_the_mask_token_is_one_that_never_occurs(folder: Path, tmp_path: Path) -> None:
    """The data hold 3 to 47; of the rest, ends of texts occur while serving."""
    target = str(folder / "target")
    config = json.loads((folder / "target" / "config.json").read_text())
    found = read_prepared(folder / "data").mask_token_id
    assert found in {0, 1, 2} - {config.get("bos_token_id"), config.get("eos_token_id")}
    for method in ("dspark", "peagle"):
        trainer = build_trainer(settings(folder, target, method, out=str(tmp_path), head__mask_token_id=-1))
        assert trainer.trainee.head.config.mask_token_id == found  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("frequent", "expected"), [(100, 8192), (20_000, 19_968), (45_000, 0)], ids=["few words", "some", "nearly all"]
)
def test_the_draft_vocabulary_covers_99_percent_and_a_half(frequent: int, expected: int) -> None:
    """The other tokens of 50,000 never occur."""
    counts = torch.zeros(50_000, dtype=torch.int64)
    counts[torch.randperm(50_000, generator=torch.Generator().manual_seed(0))[:frequent]] = 1000
    size = covering_size(counts)
    assert size == expected
    if size:
        assert counts.sort(descending=True).values[:size].sum() >= 0.995 * counts.sum()
        assert size % 128 == 0


def test_a_small_vocabulary_stays_whole(folder: Path, tmp_path: Path) -> None:
    trainer = build_trainer(settings(folder, str(folder / "target"), "eagle3", out=str(tmp_path)))
    assert trainer.trainee.head.config.draft_vocab_size == 48  # type: ignore[union-attr]


@pytest.mark.parametrize("method", ["eagle3", nightly("dspark")])
def test_a_head_that_learnt_nothing_is_served_with_a_warning(
    method: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its config records the wiring, and the tokens are those of plain decoding."""
    target = str(folder / "target")
    trainer = build_trainer(settings(folder, target, method, out=str(tmp_path)))
    with torch.no_grad():  # guesses one token for ever
        for parameter in trainer.trainee.parameters():
            parameter.zero_()
    trainer.write_head("head")
    assert "eyas" in json.loads((tmp_path / "head" / "config.json").read_text())
    prompts = [[5, 6, 7], [9, 8]]
    sampling = SamplingParams(6, 0.0, ignore_eos=True)
    with caplog.at_level(logging.WARNING):
        drafted = LLM(target, str(tmp_path / "head"), dtype="float32", device="cpu").generate(
            prompts, sampling, use_tqdm=False
        )
    assert "--validate-head never" in caplog.text
    plain = LLM(target, dtype="float32", device="cpu").generate(prompts, sampling, use_tqdm=False)
    assert [out.outputs[0].token_ids for out in drafted] == [out.outputs[0].token_ids for out in plain]


def test_a_head_that_was_never_evaluated_is_called_untested(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = build_trainer(settings(folder, str(folder / "target"), "medusa", out=str(tmp_path), eval__num_prompts=0))
    trainer.run()
    conclude(trainer)
    printed = capsys.readouterr().out
    assert f"{tmp_path / 'best'} is the last head, untested" in printed
    assert printed.endswith(f"serve it: eyas serve {folder / 'target'} --draft-model {tmp_path / 'best'}\n")
    assert "**Untested**: no evaluation has run" in (tmp_path / "best" / "README.md").read_text()
    assert (tmp_path / "best" / "model.safetensors").read_bytes() == (tmp_path / "last" / "model.safetensors").read_bytes()


class Clock:
    """Seconds that pass with each look at the clock, and in evaluations."""

    def __init__(self, evaluation_s: float) -> None:
        self.now, self._evaluation_s = 0.0, evaluation_s
        self.limits: list[float] = []
        self.written: dict[float, int] = {}
        self.written_share = 1.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now

    def measure(self, head: Path, show: object, limit_s: float) -> Evaluation:
        self.limits.append(limit_s)
        self.now += min(self._evaluation_s, 2 * limit_s)
        return Evaluation({0.0: 2.0}, {0.0: (0.5,)})


@pytest.mark.parametrize(("evaluation_s", "count"), [(0.0, 4), (5.0, 1), (1000.0, 1)])
def test_evaluation_takes_a_tenth_of_the_run_at_most(
    evaluation_s: float, count: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 steps of a second each; an evaluation also looks at the clock, which takes a second here."""
    changes = {"eval__every": 0, "optimizer__max_steps": 40, "save_every": 100}
    trainer = build_trainer(settings(folder, str(folder / "target"), "medusa", out=str(tmp_path), **changes))
    clock = Clock(evaluation_s)
    monkeypatch.setattr("eyas.train.trainer.time", SimpleNamespace(monotonic=clock.monotonic))
    trainer.evaluator = clock  # type: ignore[assignment]
    done = trainer.run()
    assert done.seconds == 40
    assert len(clock.limits) >= count
    assert done.evaluation_s <= 0.1 * done.seconds + len(clock.limits)
