"""Makes every run of the tests the same run: one torch thread, the same hypothesis examples, no clock in them, Ctrl-C heard.

Also writes the tiny models that tests of several rooms share.
"""

import importlib.util
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("eyas", derandomize=True, deadline=None)
settings.load_profile("eyas")

os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start; several tests run at once

signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it, and so do its children

if importlib.util.find_spec("torch"):
    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported; kernels then run on the CPU


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny random target."""
    from tests.tiny import write_target

    return str(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="session")
def tiny_head(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny random EAGLE-3 head for `tiny_target`; an EAGLE-1 head is in its subfolder eagle1."""
    from tests.tiny import write_eagle1_head, write_head

    folder: Path = tmp_path_factory.mktemp("head")
    write_eagle1_head(folder / "eagle1")
    return str(write_head(folder))
