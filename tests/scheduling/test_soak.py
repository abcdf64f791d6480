"""A short soak; `make soak` runs it in full."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_soak_with_cancellations_leaks_no_slots_and_no_memory() -> None:
    """In a process of its own, whose memory no other test has grown."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.scheduling.soak", "300"], capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
