"""What is trained is what is served: training-mode logits, overfitting, a planted law, and other projects' layouts."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from eyas.models.checkpoint import read_target_config
from eyas.models.heads.block import load_block_head
from eyas.models.heads.eagle import load_head
from eyas.models.heads.eagle_config import read_head_config
from eyas.train.config import LossConfig
from eyas.train.export import export_head
from eyas.train.losses import LOSS, depth_weights, in_chunks, row_losses
from eyas.train.methods import build_trainer
from tests.drafters.naive_eagle import NaiveEagle
from tests.train.small_runs import prepared, settings, tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    prepared(folder, tiny_target(folder), count=12)
    return folder


def test_dspark_overfits_a_few_sequences(folder: Path, tmp_path: Path) -> None:
    changes = {"optimizer__max_steps": 250, "optimizer__learning_rate": 5e-3, "loss__num_anchors": 16}
    trainer = build_trainer(settings(folder, str(folder / "target"), out=str(tmp_path), **changes))
    trainer.windows.packs = trainer.windows.packs[:2]
    for _ in range(250):
        figures = trainer.step()
    assert float(figures["agreement_1"]) > 0.95


@pytest.mark.parametrize("layout", ["author", "specforge", "speculators"])
def test_a_block_head_in_each_layout_is_the_same_head(layout: str, folder: Path, tmp_path: Path) -> None:
    target = str(folder / "target")
    trainer = build_trainer(settings(folder, target, out=str(tmp_path / "run")))
    trainer.step()
    trainer.trainee.write(tmp_path / "head")  # type: ignore[operator]
    export_head(str(tmp_path / "head"), target, tmp_path / "out", "eyas" if layout == "author" else layout)
    one, two = (load_block_head(str(tmp_path / name), target) for name in ("head", "out"))
    assert one.config.wiring == two.config.wiring
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("layout", ["safeailab", "specforge", "speculators"])
def test_an_eagle3_head_in_each_layout_is_the_same_head(layout: str, folder: Path, tmp_path: Path) -> None:
    target = str(folder / "target")
    trainer = build_trainer(settings(folder, target, "eagle3", out=str(tmp_path / "run"), head__target_layer_ids=[1, 2, 3]))
    trainer.step()
    trainer.trainee.write(tmp_path / "head")  # type: ignore[operator]
    export_head(str(tmp_path / "head"), target, tmp_path / "out", layout)
    one, two = (load_head(str(tmp_path / name), target) for name in ("head", "out"))
    assert one.config.wiring == two.config.wiring
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_eagle3_training_unrolls_the_heads_own_drafts(folder: Path, tmp_path: Path) -> None:
    """Row i of step k equals the state after k drafted tokens that follow the rows up to i - k."""
    target = str(folder / "target")
    trainer = build_trainer(settings(folder, target, "eagle3", out=str(tmp_path), data__max_length=24, loss__ttt_steps=3))
    batch = trainer.windows.batch([0])
    states, trainee = trainer.source.states(batch), trainer.trainee
    with torch.no_grad():
        found = float(trainee(batch, states, 0, "kl")["draft_loss"])
    trainee.write(tmp_path / "head")  # type: ignore[operator]
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "head" / "model.safetensors")
    config = read_head_config(tmp_path / "head", read_target_config(folder / "target"))
    from eyas.train.features import load_target_weights

    weights = load_target_weights(target)
    naive = NaiveEagle(tensors, weights.embedding, heads=config.num_heads, kv_heads=config.num_kv_heads)
    features, tokens = states.aux[0] @ tensors["fc.weight"].T, batch.tokens[0]
    teacher = states.final[0] @ weights.lm_head.T
    steps: list[list[torch.Tensor]] = [[], [], []]
    for first in range(22):
        pairs = list(zip(features[: first + 1], tokens[1 : first + 2].tolist(), strict=True))
        for row, losses in zip(range(first, 22), steps, strict=False):
            state = naive.state(pairs)
            losses.append(row_losses(naive.logits(state)[None], teacher[row + 1][None], "kl")[0, LOSS])
            pairs.append((state, int(tokens[row + 2])))
    shares = [0.8**step for step in range(3)]
    expected = sum(w * torch.stack(own).mean() for w, own in zip(shares, steps, strict=True)) / sum(shares)
    assert found == pytest.approx(float(expected), rel=1e-4)


def test_a_head_of_a_planted_law_accepts_what_theory_predicts() -> None:
    """Rows that can express the law reach it: the p/q acceptance becomes 1, the match rule's the mean of max p."""
    generator = torch.Generator().manual_seed(0)
    law = torch.randn(5, 12, generator=generator) * 2
    table = torch.zeros(5, 12, requires_grad=True)
    optimiser = torch.optim.Adam([table], 0.2)
    for _ in range(200):
        rows = torch.randint(0, 5, (64,), generator=generator)
        loss = row_losses(table[rows], law[rows], "kl")[:, LOSS].mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    p, q = torch.softmax(law, -1), torch.softmax(table.detach(), -1)
    assert float(torch.minimum(p, q).sum(-1).min()) > 0.98
    assert row_losses(table.detach(), law, "kl")[:, 1].mean() == pytest.approx(float(p.amax(-1).mean()), abs=1e-6)


@pytest.mark.parametrize("loss_type", ["kl", "soft_ce", "ce", "tv", "lk", "lk_hybrid"])
def test_each_loss_is_least_at_the_law(loss_type: str) -> None:
    law = torch.tensor([[2.0, 0.5, -1.0, 0.0]])
    p = torch.softmax(law, -1)
    at_law = row_losses(law, law, loss_type)[0, LOSS]  # type: ignore[arg-type]
    other = row_losses(torch.zeros(1, 4), law, loss_type)[0, LOSS]  # type: ignore[arg-type]
    expected = {"kl": 0.0, "tv": 0.0, "lk": 0.0, "lk_hybrid": 0.0, "ce": -float(p[0, 0].log())}
    expected["soft_ce"] = float(torch.special.entr(p).sum())
    assert float(at_law) == pytest.approx(expected[loss_type], abs=1e-5)
    assert other > at_law


def test_chunks_with_recomputation_change_no_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, teacher = torch.randn(9, 4, generator=generator), torch.randn(10, 9, generator=generator)
    gradients = []
    for chunk_rows in (0, 3):
        rows = torch.randn(10, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        found = in_chunks(lambda x, t: row_losses(F.linear(x, weight), t, "kl"), (rows, teacher), chunk_rows)
        found[:, LOSS].sum().backward()
        gradients.append(rows.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_dpace_weights_are_sums_of_survivals() -> None:
    valid = torch.tensor([[True, True, True], [True, False, False]])
    cross_entropy = torch.tensor([[0.0, 1.0, 2.0], [0.5, 9.0, 9.0]])
    found = depth_weights(LossConfig(loss_decay="dpace", dpace_alpha=0.5), cross_entropy, valid)
    s = 0.5 * torch.exp(-cross_entropy) + 0.5
    first = [s[0, 0], s[0, 0] * s[0, 1], s[0, 0] * s[0, 1] * s[0, 2]]
    torch.testing.assert_close(found[0], torch.stack([sum(first), first[1] + first[2], first[2]]))
    torch.testing.assert_close(found[1], torch.stack([s[1, 0], torch.tensor(0.0), torch.tensor(0.0)]))


def test_a_dry_run_and_a_run_leave_a_head_card_and_plot(folder: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from eyas.cli import app

    out = tmp_path / "run"
    config = settings(folder, str(folder / "target"))
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {config.model}\nmethod: dspark\nout: {out}\ndevice: cpu\n"
        f"data: {{path: {config.data.path}, max_length: 32}}\n"
        "head: {num_hidden_layers: 1, target_layer_ids: [0, 2], block_size: 4, markov_rank: 8, mask_token_id: 2}\n"
        "optimizer: {batch_size: 2, max_steps: 2, precision: fp32}\n"
        "eval: {num_prompts: 1, prompt_tokens: 6, max_tokens: 4, num_draft_tokens: 4}\n"
    )
    dry = CliRunner().invoke(app, ["train", "run", "--config", str(file), "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "time:" in dry.output
    load_block_head(str(out / "dry-run"), config.model)
    done = CliRunner().invoke(app, ["train", "run", "--config", str(file), "--set", "loss.num_anchors=4"])
    assert done.exit_code == 0, done.output
    assert "tau" in (out / "best" / "README.md").read_text()
    assert (out / "training.png").stat().st_size > 0
    assert json.loads((out / "log.jsonl").read_text().splitlines()[0])["step"] == 1
