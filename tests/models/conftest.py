"""What tests of models share."""

import pytest


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads keep the tensors that were read, to be compared: layers packed for the CPU show none of theirs."""
    monkeypatch.setattr("eyas.models.heads.eagle_loader.optimize_for_cpu", lambda head: None)
