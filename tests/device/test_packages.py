"""Packages that are installed and do not work."""

import importlib
import logging
from importlib.util import find_spec
from typing import Any

import pytest

from eyas.device.host import has_numba
from eyas.errors import install_command


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
def test_a_broken_numba_counts_for_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refused(name: str) -> Any:
        raise ImportError("Numba needs NumPy 2.4 or less. Got NumPy 9.0.")

    monkeypatch.setattr(importlib, "import_module", refused)
    with caplog.at_level(logging.WARNING):
        assert not has_numba.__wrapped__()
    assert install_command("cpu") in caplog.text
    assert "Got NumPy 9.0" in caplog.text
