"""Fixtures of the model tests."""

import pytest


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a head's layers unpacked, so that tests can compare the tensors that were read."""
    monkeypatch.setattr("eyas.models.heads.layers.optimize_for_cpu", lambda head, **_: None)
