"""The trainers under examples/ reduce the loss and write heads that the drafters load unchanged."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file

from eyas.models.checkpoint import read_target_config
from eyas.models.heads.eagle import load_head
from eyas.models.heads.eagle_config import read_head_config
from eyas.models.heads.hydra import load_hydra
from eyas.models.heads.medusa import load_medusa
from tests.drafters.naive_eagle import NaiveEagle
from tests.tiny import write_target

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
VOCABULARY = 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("trained") / "target"))


@pytest.fixture(scope="module")
def text(target: str) -> Path:
    """The target's greedy continuations of random tokens, with their states."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target).eval()
    tokens = torch.randint(3, 48, (96, 2), generator=torch.Generator().manual_seed(0))
    file = Path(target).parent / "text.pt"
    with torch.inference_mode():
        for _ in range(14):
            tokens = torch.cat([tokens, model(input_ids=tokens).logits[:, -1:].argmax(-1)], 1)
        states = model.get_decoder()(tokens).last_hidden_state
    torch.save({"tokens": tokens, "states": states.bfloat16()}, file)
    return file


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The scripts as modules; examples/ is on sys.path, as when one is run."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import target_text
    import train_eagle3
    import train_hydra
    import train_medusa

    return {"text": target_text, "medusa": train_medusa, "hydra": train_hydra, "eagle3": train_eagle3}


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_trained_heads_load_as_written(
    kind: str, trainers: dict[str, ModuleType], text: Path, target: str, tmp_path: Path
) -> None:
    script, data, losses = trainers[kind], trainers["text"].read_text(text), []
    for epochs in (0, 12):
        out = tmp_path / f"{epochs}"
        script.main(text, out, model=target, num_heads=2, vocabulary=VOCABULARY, epochs=epochs, seed=0)
        losses.append(loss_once_loaded(kind, out, target, data))
    assert losses[1] < losses[0] - 0.2


def test_eagle3_training_unrolls_the_heads_own_drafts(
    trainers: dict[str, ModuleType], tiny_target: str, tiny_head: str
) -> None:
    """Row i of step k equals the state after k drafted tokens that follow the rows up to i - k."""
    script, generator = trainers["eagle3"], torch.Generator().manual_seed(4)
    tensors, embedding = load_file(Path(tiny_head, "model.safetensors")), torch.randn(48, 32, generator=generator)
    head = script.Head(read_head_config(Path(tiny_head), read_target_config(Path(tiny_target))), tensors, embedding)
    tokens, states = torch.randint(48, (1, 9), generator=generator), torch.randn(1, 9, 96, generator=generator)
    probs = torch.softmax(torch.randn(1, 9, 24, generator=generator), -1)
    naive, features = NaiveEagle(tensors, embedding, heads=4, kv_heads=2), states[0] @ tensors["fc.weight"].T
    steps: list[list[torch.Tensor]] = [[], [], []]
    for first in range(7):
        pairs = list(zip(features[: first + 1], tokens[0, 1 : first + 2].tolist(), strict=True))
        for row, losses in zip(range(first, 7), steps, strict=False):
            state = naive.state(pairs)
            losses.append(F.cross_entropy(naive.logits(state), probs[0, row + 1]))
            pairs.append((state, int(tokens[0, row + 2])))
    weights = [script.STEP_WEIGHT**step for step in range(3)]
    expected = sum(w * torch.stack(losses).mean() for w, losses in zip(weights, steps, strict=True)) / sum(weights)
    torch.testing.assert_close(head(script.Example(tokens, states, probs), 3), expected, rtol=1e-5, atol=1e-5)


def test_a_trained_eagle3_head_loads_and_can_be_trained_on(
    trainers: dict[str, ModuleType], text: Path, target: str, tiny_head: str, tmp_path: Path
) -> None:
    script, start = trainers["eagle3"], Path(tiny_head)
    for out in (tmp_path / "once", tmp_path / "again"):
        script.main(
            text,
            out,
            model=target,
            draft_model=start,
            aux_hidden_state_layers="0,1,2",
            unroll=2,
            minutes=0.0,
            rate=1e-3,
            seed=0,
        )
        start = out
    once, again = (load_head(f"{tmp_path / name}", target) for name in ("once", "again"))
    assert once.draft_ids.tolist() == list(range(48))
    assert all(torch.equal(a, b) for a, b in zip(once.parameters(), again.parameters(), strict=True))
    with pytest.raises(typer.BadParameter, match="reads 3 layers, --aux-hidden-state-layers has 2"):
        script.main(text, tmp_path / "other", model=target, draft_model=start, aux_hidden_state_layers="1,2")


def loss_once_loaded(kind: str, folder: Path, target: str, data) -> float:  # type: ignore[no-untyped-def]
    """Cross-entropy of the second head, as the drafter computes it, on the tokens of the text."""
    states, tokens = data.states[:, :-3].float().flatten(0, 1), data.tokens
    if kind == "medusa":
        head = load_medusa(str(folder), target)
        logits = head.logits(states, 2)[:, 1]
    else:
        head = load_hydra(str(folder), target)
        embedded = F.embedding(tokens, head.embedding)
        between = [embedded[:, 1 + i : tokens.shape[1] - 2 + i].flatten(0, 1) for i in range(2)]
        logits = head.logits(torch.cat([states, *between], -1), 1)
    wanted = tokens[:, 3:].flatten()
    known = torch.isin(wanted, head.draft_ids)
    places = torch.searchsorted(head.draft_ids, wanted[known])
    return float(F.cross_entropy(logits[known], places))
