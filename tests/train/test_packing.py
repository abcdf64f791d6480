"""Documents that share a window are trained as if each had one of its own."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from eyas.errors import CheckpointError
from eyas.train.features import OnlineTarget, load_target_weights
from eyas.train.methods import TRAINEES, build_trainer
from eyas.train.windows import Batch
from tests.support.families import FAMILIES, config_of, write_model
from tests.support.reference import load_reference
from tests.train.small_runs import read_by, settings

DOCUMENTS, LENGTH = 3, 16


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


@pytest.mark.parametrize("family", ["mistral", "gemma-2", "gemma-3", "qwen-2", "phi-3"])
def test_states_of_windowed_targets_are_transformers_own(family: str, tmp_path: Path) -> None:
    """Also of a document that is longer than the window, among others and before padding."""
    kind, settings = FAMILIES[family]
    target, lengths = write_model(tmp_path, config_of(kind, **settings)), (30, 10)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, 48, (length,), generator=generator) for length in lengths]
    tokens = torch.cat([*documents, torch.zeros(4, dtype=torch.long)])[None].repeat(2, 1)
    numbers = torch.tensor([0] * lengths[0] + [1] * lengths[1] + [-1] * 4)[None].repeat(2, 1)
    positions = torch.tensor([*range(lengths[0]), *range(lengths[1]), *[0] * 4])[None].repeat(2, 1)
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), numbers, positions, index=(0, 1))
    final = OnlineTarget(str(target), (1, 2), torch.device("cpu"), torch.float32).states(batch).final
    decoder = load_reference(target).get_decoder()
    with torch.no_grad():
        wanted = torch.cat([decoder(ids[None], use_cache=False).last_hidden_state[0] for ids in documents])
    for row in final:
        torch.testing.assert_close(row[: sum(lengths)], wanted, rtol=1e-4, atol=5e-5)


def test_a_target_with_names_of_its_own_is_refused(tmp_path: Path) -> None:
    kind, settings = FAMILIES["gpt-2"]
    with pytest.raises(CheckpointError, match="'gpt2' has no hidden_size; no head can be trained for it"):
        load_target_weights(str(write_model(tmp_path, config_of(kind, **settings))))


def test_steps_keep_one_mask_of_a_packed_window(folder: Path, tmp_path: Path) -> None:
    """In bfloat16 too, where a mask made for each step would be the largest thing that a long window keeps."""
    config = settings(folder, str(folder / "target"), "eagle3", out=str(tmp_path / "run"), loss__ttt_steps=3)
    trainer, (_, packed), masks = build_trainer(config), batches(), []
    states = trainer.source.states(packed)

    def keep(saved: Tensor) -> Tensor:
        if saved.shape[-2:] == (DOCUMENTS * LENGTH - 1,) * 2:
            masks.append(saved)
        return saved

    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        trainer.trainee(packed, states, 0, "kl")
    assert {mask.dtype for mask in masks} == {torch.bfloat16}
    assert len(masks) == 3
    assert len({mask.data_ptr() for mask in masks}) == 1
