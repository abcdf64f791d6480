"""Each method trains, lowers its loss, and writes a head that the serving path loads."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import tracking
from accelerate.utils import LoggerType
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from eyas.device import placement
from eyas.errors import ConfigError
from eyas.train.evaluate import Evaluation
from eyas.train.features import NoStates, OnlineTarget
from eyas.train.methods import TRAINEES, build_trainer
from tests.support.tiers import tiered
from tests.train.small_runs import loss, settings

TRACKIO = """
logged = []
finish = lambda: None
def init(project, **_): return __import__(__name__)
def log(values, step=None, **_): logged.append((step, values))
"""


DAILY = ("dspark", "peagle", "eagle3", "medusa", "draft_model")  # a class of trainees each


@pytest.mark.parametrize("method", tiered(TRAINEES, DAILY))
def test_a_method_trains_and_its_head_drafts_in_the_engine(method: str, folder: Path, tmp_path: Path) -> None:
    config = settings(folder, str(folder / "target"), method, out=str(tmp_path / "run"), optimizer__max_steps=8)
    trainer = build_trainer(config)
    first = loss(trainer)
    progress = trainer.run()
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert loss(trainer) < first
    assert progress.best_tau >= 1
    assert {"tau_t0", "tau_t1"} <= records[-1].keys()


def test_the_head_with_the_best_trees_is_kept(folder: Path, tmp_path: Path) -> None:
    """Not the last one, whose trees are worse."""
    heads, taus = [], [1.5, 2.5, 1.25]

    def measure(head: Path, *_: object) -> Evaluation:
        heads.append((head / "model.safetensors").read_bytes())
        tau = taus[len(heads) - 1]
        return Evaluation({0.0: tau, 1.0: tau - 0.25}, {0.0: (0.5, 0.25), 1.0: (0.25,)})

    trainer = build_trainer(
        settings(folder, str(folder / "target"), "medusa", out=str(tmp_path / "run"), eval__every=2, optimizer__max_steps=6)
    )
    trainer.evaluator = SimpleNamespace(measure=measure, written={}, written_share=1.0)  # type: ignore[assignment]
    progress = trainer.run()
    assert len({*heads}) == 3
    assert (tmp_path / "run" / "best" / "model.safetensors").read_bytes() == heads[1]
    assert (tmp_path / "run" / "last" / "model.safetensors").read_bytes() == heads[2]
    assert (progress.best_step, progress.best_tau) == (4, 2.375)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    found = [line for line in lines if "tau_t0" in line]
    assert [(line["step"], line["tau_t0"], line["tau_t1"]) for line in found] == [
        (2, 1.5, 1.25),
        (4, 2.5, 2.25),
        (6, 1.25, 1.0),
    ]
    assert found[0]["acceptance_t0"] == [0.5, 0.25]


def test_a_draft_model_learns_text_without_the_target(folder: Path, tmp_path: Path) -> None:
    config = settings(
        folder, str(folder / "target"), "draft_model", out=str(tmp_path / "run"), loss__loss_type="next_token",
        head__tie_word_embeddings=False, optimizer__max_steps=16,
    )  # fmt: skip
    trainer = build_trainer(config)
    assert isinstance(trainer.source, NoStates)
    batch = trainer.windows.batch(range(len(trainer.windows)))

    def loss() -> float:
        return float(trainer.trainee(batch, trainer.source.states(batch), 0, "next_token")["draft_loss"])

    before = loss()
    trainer.run()
    after, written = loss(), AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "last").eval()
    assert after < before
    assert not written.config.tie_word_embeddings
    losses = []
    for tokens, numbers, mask in zip(batch.tokens, batch.documents, batch.loss_mask, strict=True):
        for number in numbers.unique():
            own, counts = tokens[numbers == number], mask[numbers == number][1:]
            found = written(own[None]).logits[0, :-1].detach()
            losses.append(cross_entropy(found, own[1:], reduction="none")[counts])
    assert float(torch.cat(losses).mean()) == pytest.approx(after, rel=1e-4)


def test_a_warm_start_keeps_the_heads_vocabulary_and_kind(folder: Path, tmp_path: Path) -> None:
    target = str(folder / "target")
    first = build_trainer(settings(folder, target, "eagle3", out=str(tmp_path / "run"), head__draft_vocab_size=20))
    first.write_head("last")
    head = str(tmp_path / "run" / "last")
    again = build_trainer(settings(folder, target, "eagle3", out=str(tmp_path / "again"), draft_model=head))
    assert torch.equal(again.trainee.head.draft_ids, first.trainee.head.draft_ids)  # type: ignore[union-attr, arg-type]
    wider = build_trainer(
        settings(folder, target, "eagle3", out=str(tmp_path / "wide"), draft_model=head, head__draft_vocab_size=48)
    )
    assert len(wider.trainee.head.draft_ids) == 48  # type: ignore[union-attr, arg-type]
    with pytest.raises(ConfigError, match=r"is a head of the method eagle3; name that"):
        build_trainer(settings(folder, target, "eagle3.1", out=str(tmp_path / "other"), draft_model=head))


def test_the_target_runs_only_where_the_loss_needs_it(folder: Path, tmp_path: Path) -> None:
    changes = {"loss__loss_type": "next_token", "loss__final_loss_type": "kl", "loss__final_loss_ratio": 0.5}
    trainer = build_trainer(settings(folder, str(folder / "target"), "draft_model", out=str(tmp_path / "run"), **changes))
    source, asked = trainer.source, []
    trainer.source = SimpleNamespace(states=lambda batch: asked.append(trainer.progress.step) or source.states(batch))
    for _ in range(4):
        trainer.step()
    assert asked == [2, 3]


def test_a_head_shares_the_targets_embedding(folder: Path, tmp_path: Path) -> None:
    """In memory, as it is large; trained tensors are the head's own, and the head that is written has no embedding."""
    trainer = build_trainer(settings(folder, str(folder / "target"), "eagle3", out=str(tmp_path)))
    assert isinstance(trainer.source, OnlineTarget)
    embedding = trainer.source.model.get_input_embeddings().weight
    assert trainer.trainee.head.embedding.data_ptr() == embedding.data_ptr()  # type: ignore[operator, union-attr]
    trainer.write_head("last")
    assert "embed_tokens.weight" not in load_file(tmp_path / "last" / "model.safetensors")


def test_evaluation_has_servings_threads_and_returns_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled kernels want one thread, and training takes more."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(placement, "num_cores", lambda: placement.MOST_CORES)
    trainer = build_trainer(settings(folder, str(folder / "target"), "eagle3", out=str(tmp_path)))
    assert trainer.evaluator is not None
    trainer.write_head("last")
    torch.set_num_threads(2)
    seen: set[int] = set()
    try:
        trainer.evaluator.measure(tmp_path / "last", lambda *_: seen.add(torch.get_num_threads()))
        assert (seen, torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(1)


def test_heads_learn_from_the_target_alone(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"the loss next_token is for the method draft_model; dspark learns"):
        settings(folder, str(folder / "target"), "dspark", loss__loss_type="next_token")


def test_trackers_get_the_figures_of_the_log(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard's writer as it is; of trackio what accelerate calls."""
    package = tmp_path / "site"
    (package / "trackio-0.1.dist-info").mkdir(parents=True)
    (package / "trackio-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: trackio\nVersion: 0.1\n")
    (package / "trackio.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    monkeypatch.setattr(tracking, "_available_trackers", [*tracking.get_available_trackers(), LoggerType.TRACKIO])
    trainer = build_trainer(settings(folder, str(folder / "target"), "eagle3", out=str(tmp_path / "run")))
    trainer.run()
    trainer.accelerator.end_training()
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    logged: list[tuple[int, dict[str, float]]] = importlib.import_module("trackio").logged
    losses = [(record["step"], record["loss"]) for record in records if "loss" in record]
    assert [(step, values["loss"]) for step, values in logged if "loss" in values] == losses
    assert [values["tau_t0"] for _, values in logged if "tau_t0" in values] == [records[-1]["tau_t0"]]
    events = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("events.out.tfevents.*"))
    assert all(name in events for name in (b"learning_rate", b"loss", b"tau_t0", b"tau_t1"))
