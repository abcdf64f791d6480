"""What is trained is what is served: training-mode logits, overfitting, losses, and other projects' layouts."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from eyas import LLM, SamplingParams
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.peagle import parallel_logits
from eyas.errors import CheckpointError, ConfigError
from eyas.models.checkpoint import Checkpoint
from eyas.models.heads.block import load_block_head
from eyas.models.heads.eagle import EagleHead, load_head
from eyas.models.heads.eagle_config import Kind, read_head_config
from eyas.protocol.commit import TreeBudget
from eyas.train import losses
from eyas.train.block import BlockTrainer
from eyas.train.config import LossConfig, LossType, OptimizerConfig, Scheduler
from eyas.train.data import prepare
from eyas.train.eagle import Ancestry, attend_ancestors
from eyas.train.export import export_head
from eyas.train.features import load_target_weights
from eyas.train.losses import (
    CHANCE,
    CROSS_ENTROPY,
    LOSS,
    OVERLAP,
    depth_weights,
    next_token_losses,
    row_losses,
    weighted_sum,
)
from eyas.train.methods import build_trainer
from eyas.train.peagle import Pairs, PEagleTrainer, kept_pairs, segments
from eyas.train.trainer import learning_rates
from eyas.train.windows import Batch
from tests.drafters.trees.test_eagle_trees import GREEDY, commit
from tests.support.naive_eagle import NaiveEagle
from tests.train.small_runs import MASK, settings, tiny_target


@pytest.mark.nightly
def test_dspark_overfits_20_sequences_at_all_depths(tmp_path: Path) -> None:
    """The target's greedy answers to 20 prompts are learned, so that the engine's chains for these prompts are accepted."""
    target, depths = tiny_target(tmp_path), 4
    weights = load_file(tmp_path / "target" / "model.safetensors")
    weights["lm_head.weight"][MASK] = 0  # so that it writes no mask token
    save_file(weights, tmp_path / "target" / "model.safetensors", {"format": "pt"})
    prompts = torch.randint(3, 48, (20, 4), generator=torch.Generator().manual_seed(0)).tolist()
    llm, sampling = LLM(target, dtype="float32", device="cpu"), SamplingParams(1 + 3 * (depths + 1), 0.0, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    rows = [[*prompt, *answer.outputs[0].token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
    entries = ({"token_ids": row, "num_prompt_tokens": 4} for row in rows)
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    prepare(target, [tmp_path / "ids.jsonl"], tmp_path / "data", 0.0, len(rows[0]), 2, 0)
    changes: dict[str, Any] = {
        "data__max_length": len(rows[0]), "loss__num_anchors": 16, "loss__loss_type": "ce", "loss__loss_decay": "none",
        "optimizer__name": "muon", "optimizer__muon_learning_rate": 0.02, "optimizer__learning_rate": 5e-3,
        "optimizer__batch_size": 20, "optimizer__max_steps": 50, "head__num_hidden_layers": 2,
        "head__intermediate_size": 256, "head__target_layer_ids": [0, 1, 2], "eval__num_prompts": 20, "eval__top_k": 1,
        "eval__max_tokens": sampling.max_tokens, "eval__num_draft_tokens": depths + 1, "eval__temperatures": [0.0],
        "head__block_size": depths,
    }  # fmt: skip
    trainer = build_trainer(settings(tmp_path, target, **changes))
    assert len(trainer.windows) == 20
    trainer.run()
    found = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1])["acceptance_t0"]
    assert (len(found), min(found) > 0.95) == (depths, True), found


@pytest.mark.parametrize("layout", ["author", "specforge", "speculators"])
def test_a_block_head_in_each_layout_is_the_same_head(layout: str, folder: Path, tmp_path: Path) -> None:
    target = str(folder / "target")
    trainer = build_trainer(settings(folder, target, out=str(tmp_path / "run")))
    trainer.step()
    trainer.trainee.write(tmp_path / "head")
    export_head(str(tmp_path / "head"), target, tmp_path / "out", "eyas" if layout == "author" else layout)
    one, two = (load_block_head(str(tmp_path / name), target) for name in ("head", "out"))
    assert one.config.wiring == two.config.wiring
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


LAYOUTS = [(method, layout) for method in ("eagle3", "eagle3.1", "peagle") for layout in ("specforge", "speculators")]
# A key of config.json that only this layout has.
LAYOUT_MARKS = {"safeailab": "eagle_aux_hidden_state_layer_ids", "specforge": "eagle_config"}


@pytest.mark.parametrize(("method", "layout"), [*LAYOUTS, ("eagle1", "safeailab"), ("eagle3", "safeailab")])
def test_an_eagle_head_in_each_layout_is_the_same_head(method: str, layout: str, folder: Path, tmp_path: Path) -> None:
    target, layers = str(folder / "target"), {"head__target_layer_ids": [1, 2, 3]} if method != "eagle1" else {}
    trainer = build_trainer(settings(folder, target, method, out=str(tmp_path / "run"), **layers))
    kind: Kind = "eagle" if method == "eagle1" else "peagle" if method == "peagle" else "eagle3"
    trainer.step()
    trainer.trainee.write(tmp_path / "head")
    export_head(str(tmp_path / "head"), target, tmp_path / "out", layout)
    one, two = (load_head(str(tmp_path / name), target, kind=kind) for name in ("head", "out"))
    if method != "eagle1":
        assert LAYOUT_MARKS.get(layout, "speculators_config") in json.loads((tmp_path / "out" / "config.json").read_text())
    assert one.config == two.config
    assert one.config.depth == (trainer.config.loss.num_depths if method == "peagle" else 0)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_an_eagle1_head_is_not_exported_under_a_false_name(layout: str, folder: Path, tmp_path: Path) -> None:
    target = str(folder / "target")
    trainer = build_trainer(settings(folder, target, "eagle1", out=str(tmp_path)))
    trainer.write_head("head")
    with pytest.raises(CheckpointError, match=f"an EAGLE-1 head, which {layout} has no layout for"):
        export_head(str(tmp_path / "head"), target, tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()


def test_eagle3_training_unrolls_the_heads_own_drafts(folder: Path, tmp_path: Path) -> None:
    """Row i of step k equals the state after k drafted tokens that follow the rows up to i - k."""
    target = str(folder / "target")
    trainer = build_trainer(settings(folder, target, "eagle3", out=str(tmp_path), data__max_length=24, loss__ttt_steps=3))
    batch = trainer.windows.batch([0])
    states, trainee = trainer.source.states(batch), trainer.trainee
    with torch.no_grad():
        found = float(trainee(batch, states, 0, "kl")["draft_loss"])
    trainee.write(tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    config = read_head_config(Checkpoint(tmp_path / "head"), Checkpoint(folder / "target").text_config)
    weights = load_target_weights(target)
    naive = NaiveEagle(tensors, weights.embedding, heads=config.num_heads, kv_heads=config.num_kv_heads)
    features, tokens = states.aux[0] @ tensors["fc.weight"].T, batch.tokens[0]
    teacher = states.final[0] @ weights.lm_head.T
    steps: list[list[torch.Tensor]] = [[], [], []]
    for first in range(22):
        pairs = list(zip(features[: first + 1], tokens[1 : first + 2].tolist(), strict=True))
        for row, own in zip(range(first, 22), steps, strict=False):
            state = naive.state(pairs)
            own.append(row_losses(naive.logits(state)[None], teacher[row + 1][None], "kl")[0, LOSS])
            pairs.append((state, int(tokens[row + 2])))
    shares = [0.8**step for step in range(3)]
    expected = sum(w * torch.stack(own).mean() for w, own in zip(shares, steps, strict=True)) / sum(shares)
    assert found == pytest.approx(float(expected), rel=1e-4)


def attended_densely(
    query: Tensor, first: tuple[Tensor, Tensor], behind: list[tuple[Tensor, Tensor]], ancestry: Ancestry
) -> Tensor:
    """Run `attend_ancestors` as it is defined, with all scores in memory, [N, J, G, L - 1, L - 1 + s]."""
    documents, length = ancestry.documents, query.shape[1]
    scores = torch.einsum("bljgd,bmjd->bjglm", query, first[0]).float()
    at = torch.arange(length, device=query.device)
    hidden = (at[None] > at[:, None] - len(behind)) | (documents[:, :, None] != documents[:, None])
    scores = scores.masked_fill(hidden[:, None, None], -1e9)
    own = [torch.einsum("bljgd,bljd->bjgl", query, k).float()[..., None] for k, _ in behind]
    weights = torch.softmax(torch.cat([scores, *own], -1), -1).to(query.dtype)
    out = torch.einsum("bjglm,bmjd->bljgd", weights[..., :length], first[1])
    for j, (_, v) in enumerate(behind):
        out = out + torch.einsum("bjgl,bljd->bljgd", weights[..., length + j], v)
    return out


@pytest.mark.parametrize("lengths", [(21,), (9, 1, 6)])
def test_ancestors_are_attended_to_without_a_score_matrix(lengths: tuple[int, ...]) -> None:
    """With torch's kernel that keeps no scores, of a document alone and of several before padding; gradients too."""
    padding = 21 - sum(lengths)
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(padding, dtype=torch.int64)])[None]
    ancestry = Ancestry.of(documents, positions)
    assert (ancestry.mask is None) == (len(lengths) == 1)
    for step in range(4):
        found = []
        for attend in (attend_ancestors, attended_densely):
            generator = torch.Generator().manual_seed(step)
            query = torch.randn(1, 21, 2, 3, 8, generator=generator).requires_grad_()
            rows = torch.randn(2 + 2 * step, 1, 21, 2, 8, generator=generator).requires_grad_()
            first, *behind = zip(rows[::2].unbind(), rows[1::2].unbind(), strict=True)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = attend(query, first, behind, ancestry)[(positions >= step) & (documents >= 0)]
            found.append((out, *torch.autograd.grad(out.square().sum(), (query, rows))))
        for own, expected in zip(*found, strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss_type", ["kl", "ce", "tv", "lk", "lk_hybrid"])
def test_each_loss_is_least_at_the_law(loss_type: str) -> None:
    law = torch.tensor([[2.0, 0.5, -1.0, 0.0]])
    p = torch.softmax(law, -1)
    at_law = row_losses(law, law, loss_type)[0, LOSS]  # type: ignore[arg-type]
    other = row_losses(torch.zeros(1, 4), law, loss_type)[0, LOSS]  # type: ignore[arg-type]
    expected = {"kl": 0.0, "tv": 0.0, "lk": 0.0, "lk_hybrid": 0.0, "ce": -float(p[0, 0].log())}
    assert float(at_law) == pytest.approx(expected[loss_type], abs=1e-5)
    assert other > at_law


def test_the_loss_on_text_is_that_of_a_target_sure_of_it() -> None:
    logits, tokens = torch.randn(5, 9, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 0, 8, 3, 2])
    sure = torch.full((5, 9), -1e9).scatter(1, tokens[:, None], 0.0)
    expected = row_losses(logits, sure, "ce", (CROSS_ENTROPY, OVERLAP))
    torch.testing.assert_close(next_token_losses(logits, tokens), expected)


@pytest.mark.parametrize("loss_type", ["kl", "ce", "lk_hybrid"])
def test_chunks_have_the_sum_and_gradients_of_all_rows(loss_type: LossType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against logits of all rows in memory, with rows of weight 0 in between, and without any other row."""
    generator = torch.Generator().manual_seed(0)
    teacher, weights = torch.randn(10, 2, 9, generator=generator), torch.rand(10, 2, generator=generator)
    weights[::3] = 0
    for own_weights in (weights, torch.zeros(10, 2)):
        head = torch.nn.Linear(4, 9, bias=False)
        rows = torch.randn(10, 2, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()

        def function(x: Tensor, t: Tensor, head: torch.nn.Linear = head) -> Tensor:
            return row_losses(head(x), t, loss_type)

        table = function(rows, teacher)
        expected = (table[..., LOSS] * own_weights).sum()
        gradients = torch.autograd.grad(2 * expected, (rows, head.weight))
        for logits in (1, 60, 1000):
            monkeypatch.setattr(losses, "LOGITS_AT_A_TIME", logits)
            total, found = weighted_sum(function, (rows[None], teacher[None]), own_weights[None], head, 9)
            torch.testing.assert_close((total, found[0]), (expected, table * (own_weights.sum(1) > 0)[:, None, None]))
            torch.testing.assert_close(torch.autograd.grad(2 * total, (rows, head.weight)), gradients)
            assert not found.requires_grad


@pytest.mark.parametrize("loss_type", ["kl", "ce", "tv", "lk", "lk_hybrid"])
def test_rows_that_share_a_teacher_have_its_losses(loss_type: LossType) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(5, 3, 7, generator=generator), torch.randn(5, 7, generator=generator)
    needed = (CROSS_ENTROPY, OVERLAP)
    shared = row_losses(logits, teacher[:, None], loss_type, needed)
    alone = [row_losses(logits[:, step], teacher, loss_type, needed) for step in range(3)]
    torch.testing.assert_close(shared, torch.stack(alone, 1))


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

    from eyas.cli.main import app

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
    assert all(f"{what}:" in dry.output for what in ("time", "evaluation", "memory, evaluation included", "disk"))
    load_block_head(str(out / "dry-run"), config.model)
    heads, checkpoints = (float(figure) * 2**20 for figure in re.findall(r"(\d+\.\d+) MiB", dry.output))
    done = CliRunner().invoke(app, ["train", "run", "--config", str(file), "--set", "loss.num_anchors=4"])
    assert done.exit_code == 0, done.output
    assert "tau" in (out / "best" / "README.md").read_text()
    (saved,) = (out / "checkpoints").iterdir()
    assert checkpoints == pytest.approx(3 * saved.stat().st_size, rel=0.5), "most of this small file is its index"
    assert heads == pytest.approx(4 * (out / "last" / "model.safetensors").stat().st_size, rel=0.1)
    assert (out / "training.png").stat().st_size > 0
    assert json.loads((out / "log.jsonl").read_text().splitlines()[0])["step"] == 1


def test_peagle_rows_have_the_logits_of_the_drafter(folder: Path, tmp_path: Path) -> None:
    """Mask rows behind any pair of any document, in one pass or in segments, are those that the drafter runs behind it."""
    target, depths = str(folder / "target"), 4
    config = settings(folder, target, "peagle", out=str(tmp_path), head__num_hidden_layers=2, loss__num_depths=depths)
    trainer = build_trainer(config)
    trainer.step()
    trainer.trainee.write(tmp_path / "head")
    trainee, batch = trainer.trainee, trainer.windows.batch([0, 1])
    assert isinstance(trainee, PEagleTrainer)
    states = trainer.source.states(batch)
    drafter = DraftHead(str(tmp_path / "head"), "peagle").build_drafter(
        target, "float32", "cpu", TreeConfig(8, depths, 2), DraftingConfig()
    )
    assert isinstance(drafter, EagleDrafter)
    with torch.no_grad():
        features = trainee.fuser(states.aux.flatten(0, 1)).view(*batch.tokens.shape, -1)
        context = pairs_of(trainee, batch, features)
        pairs = torch.arange(batch.tokens.shape[1] - 1).expand(2, -1)
        count = pairs.shape[1]
        found = trainee.mask_states(
            pairs, batch.positions[:, :-1], [count] * (depths - 1), batch.documents[:, :-1], *context.flat
        )
        logits = trainee.head.logits(found).view(2, depths - 1, count, -1)
    checked = 0
    for window in range(2):
        for document in range(int(batch.documents[window].max()) + 1):
            own = (batch.documents[window] == document).nonzero()[:, 0].tolist()
            for end in range(2, len(own) + 1, 5):
                tokens = tuple(batch.tokens[window, own[:end]].tolist())
                expected = inference_logits(drafter, tokens, features[window, own[: end - 1]], depths)
                torch.testing.assert_close(logits[window, :, own[end - 2]], expected[1:], rtol=1e-4, atol=1e-4)
                checked += 1
    assert checked > 8


def pairs_of(trainee: PEagleTrainer, batch: Batch, features: Tensor) -> Pairs:
    """Keys and values of all pairs of a batch."""
    context = Pairs(batch.documents[:, :-1])
    inputs = features[:, :-1].flatten(0, 1), batch.tokens[:, 1:].flatten(), batch.positions[:, :-1].flatten()
    trainee.head.run(*inputs, context)
    return context


def inference_logits(drafter: EagleDrafter, tokens: tuple[int, ...], features: Tensor, depths: int) -> Tensor:
    """Logits [depths, D] that the drafter ranks behind committed tokens."""
    context = commit("a", list(tokens), features, 0, len(tokens), GREEDY, TreeBudget(8, depths))
    drafter.propose([context])
    state = drafter.sessions["a"].state  # type: ignore[index]
    assert state is not None
    roots = drafter._roots([context], state[None])
    head = drafter._head
    assert isinstance(head, EagleHead)
    with torch.no_grad():
        found = parallel_logits(head, drafter._kv, roots, depths)[0]
    drafter.release(["a"])
    return found


def test_segments_change_no_peagle_gradient(folder: Path, tmp_path: Path) -> None:
    gradients = []
    for chunk_rows in (0, 40):
        config = settings(folder, str(folder / "target"), "peagle", out=str(tmp_path), loss__chunk_rows=chunk_rows)
        trainer = build_trainer(config)
        batch = trainer.windows.batch([0, 1])
        trainer.trainee(batch, trainer.source.states(batch), 0, "kl")["loss"].backward()
        gradients.append({name: parameter.grad for name, parameter in trainer.trained.items()})
    for name, gradient in gradients[0].items():
        assert gradient is not None
        assert float(gradient.abs().max()) > 0, name
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_an_embedding_of_its_own_stays_with_the_head(folder: Path, tmp_path: Path) -> None:
    """P-EAGLE's trained one is written; a run that starts from this head keeps it, and trains it only if asked to."""
    target, weights = str(folder / "target"), load_target_weights(str(folder / "target"))
    first = build_trainer(settings(folder, target, "peagle", out=str(tmp_path), head__train_embeddings=True))
    first.step()
    first.trainee.write(tmp_path / "head")
    head = load_head(str(tmp_path / "head"), target, kind="peagle")
    assert not torch.equal(head.embedding, weights.embedding)
    again = build_trainer(settings(folder, target, "peagle", out=str(tmp_path), draft_model=str(tmp_path / "head")))
    again.step()
    again.trainee.write(tmp_path / "again")
    assert torch.equal(load_head(str(tmp_path / "again"), target, kind="peagle").embedding, head.embedding)


def test_deeper_rows_are_kept_behind_fewer_pairs() -> None:
    config = LossConfig(num_depths=9, down_sample_ratio=0.7)
    kept = kept_pairs(100, config)
    assert kept == [70, 49, 35, 25, 20, 20, 20, 20]
    ranges = segments(kept, windows=2, chunk_rows=300)
    assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == 70
    rows = [2 * sum(max(0, min(end, count) - start) for count in kept) for start, end in ranges]
    assert max(rows) <= 300
    assert sum(rows) == 2 * sum(kept)


def test_the_soft_loss_has_autograds_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 9, generator=generator, dtype=torch.float64).float().requires_grad_()
    teacher, scale = torch.randn(6, 9, generator=generator), torch.rand(6, generator=generator)
    found = row_losses(logits, teacher, "kl")[:, LOSS]
    plain = F.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(found, plain)
    gradients = [torch.autograd.grad((loss * scale).sum(), logits)[0] for loss in (found, plain)]
    torch.testing.assert_close(*gradients)


def test_losses_do_not_depend_on_the_rows_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    teacher, scale = torch.randn(7, 1, 9, generator=generator), torch.rand(7, 3, generator=generator)
    found = []
    for cached in (2**18, 60, 1):
        monkeypatch.setattr(losses, "CACHED_LOGITS", cached)
        logits = torch.randn(7, 3, 9, generator=torch.Generator().manual_seed(1)).requires_grad_()
        columns = row_losses(logits, teacher, "kl", (CROSS_ENTROPY, OVERLAP))
        (columns[..., LOSS] * scale).sum().backward()
        found.append((columns, logits.grad))
    assert all(torch.equal(own, first) for other in found[1:] for own, first in zip(other, found[0], strict=True))  # type: ignore[arg-type]


def test_the_rate_rises_stays_and_falls() -> None:
    """Over 20 steps with a warm-up of 4: to the peak, and to zero over the last 10, in a cosine, or not at all."""
    config = OptimizerConfig(warmup_ratio=0.2, max_steps=20, decay_ratio=0.5)
    at = {kind: learning_rates(replace(config, lr_scheduler=kind)) for kind in get_args(Scheduler)}
    assert [[share(step) for step in range(4)] for share in at.values()] == [[0.25, 0.5, 0.75, 1.0]] * 3
    assert [at["wsd"](step) for step in (4, 10, 15, 20)] == [1.0, 1.0, 0.5, 0.0]
    assert [at["cosine"](step) for step in (4, 12, 20)] == pytest.approx([1.0, 0.5, 0.0])
    assert {at["constant"](step) for step in range(4, 30)} == {1.0}


def test_deeper_tokens_of_a_block_weigh_less() -> None:
    valid = torch.tensor([[True, True, True], [True, False, False]])
    found = depth_weights(LossConfig(loss_decay="exponential", loss_decay_gamma=2.0), torch.zeros(2, 3), valid)
    torch.testing.assert_close(found, torch.tensor([[1.0, math.exp(-0.5), math.exp(-1)], [1.0, 0, 0]]))
    assert torch.equal(depth_weights(LossConfig(loss_decay="none"), torch.zeros(2, 3), valid), valid.float())


def test_accumulated_passes_are_one_step_with_a_bounded_gradient(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two passes of two windows are one of four, whose gradient is cut to max_grad_norm."""
    found, norms = [], []
    for batch_size, passes in ((4, 1), (2, 2)):
        changes = {
            "optimizer__batch_size": batch_size, "optimizer__gradient_accumulation_steps": passes,
            "optimizer__max_grad_norm": 0.01, "optimizer__warmup_ratio": 0,
        }  # fmt: skip
        trainer = build_trainer(settings(folder, str(folder / "target"), "medusa", out=str(tmp_path / "run"), **changes))
        clip = trainer.accelerator.clip_grad_norm_

        def clipped(parameters: list[torch.nn.Parameter], most: float, clip: Any = clip) -> None:
            before = float(clip(parameters, most))
            own = torch.stack([parameter.grad.norm() for parameter in parameters if parameter.grad is not None])
            norms.append((before, float(own.norm())))

        monkeypatch.setattr(trainer.accelerator, "clip_grad_norm_", clipped)
        for _ in range(2):
            trainer.step()
        found.append({name: parameter.detach().clone() for name, parameter in trainer.trained.items()})
    assert len(norms) == 4
    assert all(before > 0.02 and after == pytest.approx(0.01, rel=1e-3) for before, after in norms)
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5)


def test_a_loss_that_is_no_number_ends_the_run_with_advice(folder: Path, tmp_path: Path) -> None:
    trainer = build_trainer(settings(folder, str(folder / "target"), "medusa", out=str(tmp_path / "run")))
    next(iter(trainer.trained.values())).data.fill_(torch.nan)
    with pytest.raises(ConfigError, match=r"the loss of step 1 is nan; lower optimizer\.learning_rate"):
        trainer.step()


def test_the_hybrid_loss_moves_from_divergence_to_distance() -> None:
    """Its share of KL is exp(-3 acceptance) of the row, and has no gradient of its own."""
    law = torch.tensor([[2.0, 0.0, -1.0]])
    for logits in (torch.tensor([[-9.0, 0.0, 9.0]]), torch.tensor([[2.0, 0.1, -1.0]])):
        rows = logits.requires_grad_()
        found = {kind: row_losses(rows, law, kind)[0, LOSS] for kind in ("kl", "tv", "lk_hybrid")}  # type: ignore[arg-type]
        share = torch.exp(-3 * (1 - found["tv"])).detach()
        torch.testing.assert_close(found["lk_hybrid"], share * found["kl"] + (1 - share) * found["tv"])
        own, kl, tv = (torch.autograd.grad(found[kind], rows, retain_graph=True)[0] for kind in ("lk_hybrid", "kl", "tv"))
        torch.testing.assert_close(own, share * kl + (1 - share) * tv)


@pytest.mark.parametrize(("target_of", "column"), [("match", CHANCE), ("rejection", OVERLAP)])
def test_the_confidence_head_learns_its_rules_acceptance(target_of: str, column: int, folder: Path, tmp_path: Path) -> None:
    changes = {"loss__confidence_target": target_of, "loss__loss_decay": "none", "loss__confidence_weight": 1.0}
    trainee = build_trainer(settings(folder, str(folder / "target"), out=str(tmp_path), **changes)).trainee
    assert isinstance(trainee, BlockTrainer)
    generator = torch.Generator().manual_seed(0)
    found = torch.rand(3, trainee.head.config.num_drafted, 5, generator=generator)
    sure = torch.randn(found.shape[:2], generator=generator)
    loss = trainee.metrics(found.sum(), found, torch.ones(sure.shape, dtype=torch.bool), sure)["confidence_loss"]
    expected = F.binary_cross_entropy_with_logits(sure, found[..., column])
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    logits, teacher = torch.randn(2, 5, 8, generator=generator)
    rows = row_losses(logits, teacher, "kl", (OVERLAP,))
    overlap = torch.minimum(logits.softmax(-1), teacher.softmax(-1)).sum(-1)
    torch.testing.assert_close(rows[:, OVERLAP], overlap)
