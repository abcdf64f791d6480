"""The split is measured against one process."""

import pytest

from benchmarks.scripts import split_work
from eyas.progress import Progress


@pytest.mark.nightly
def test_the_split_gives_the_texts_of_one_process() -> None:
    settings = split_work.Settings("models/demo/target", "models/demo/eagle3", "", (2,), 8, 1)
    with Progress() as progress:
        found = split_work.measure(settings, progress)
    assert [(work.mode, work.contender) for work in found] == [
        ("plain", "one process"), ("plain", "split"), ("speculative", "one process"), ("speculative", "split"),
    ]  # fmt: skip
    assert all(work.identical for work in found)
    assert set(found[1].cpu_us) == {"redis", "draft", "verifier", "router"}
