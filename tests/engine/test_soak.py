"""A short soak; `make soak` runs it in full."""

import os
import subprocess
import sys

import pytest

from tests.support.memory import FEW_PRODUCTS


@pytest.mark.nightly
def test_soak_with_cancellations_leaks_no_slots_and_no_memory() -> None:
    """In a process of its own, whose memory no other test has grown."""
    command = [sys.executable, "-m", "tests.engine.soak", "200"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ | FEW_PRODUCTS)
    assert ended.returncode == 0, ended.stderr
