"""What a target's folder holds before a head is trained."""

from pathlib import Path

import pytest

from tests.train.small_runs import prepared, tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tiny target and prepared data of it; of a module, whose runs leave their files there."""
    folder = tmp_path_factory.mktemp("train")
    prepared(folder, tiny_target(folder), count=12)
    return folder
