"""The trainers under examples/ learn, and write heads that the drafters load as they were."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from eyas.models.heads.offsets.hydra import load_hydra
from eyas.models.heads.offsets.medusa import load_medusa
from tests.tiny import write_target

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
VOCABULARY = 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("trained") / "target"))


@pytest.fixture(scope="module")
def text(target: str) -> Path:
    """What the target would say greedily, from random beginnings."""
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
    """The scripts, as they find one another when they are run."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import target_text
    import train_hydra
    import train_medusa

    return {"text": target_text, "medusa": train_medusa, "hydra": train_hydra}


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_heads_learn_and_load_as_they_were_written(
    kind: str, trainers: dict[str, ModuleType], text: Path, target: str, tmp_path: Path
) -> None:
    script, data, losses = trainers[kind], trainers["text"].read_text(text), []
    for epochs in (0, 12):
        out = tmp_path / f"{epochs}"
        script.main(text, out, target=target, num_heads=2, vocabulary=VOCABULARY, epochs=epochs, seed=0)
        losses.append(loss_once_loaded(kind, out, target, data))
    assert losses[1] < losses[0] - 0.2


def loss_once_loaded(kind: str, folder: Path, target: str, data) -> float:  # type: ignore[no-untyped-def]
    """Cross-entropy of the second head, as the drafter computes it, on the tokens that came."""
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
