"""A router's processor time can be measured on every route, and the split against one process."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.scripts import split_work, streaming_work
from eyas.progress import Progress


@pytest.mark.nightly
def test_the_work_of_a_router_is_measured_on_all_routes() -> None:
    settings = streaming_work.Settings((str(Path().resolve()),), streaming_work.APIS, (2,), 6, 2, 5.0, 1)
    with Progress() as progress:
        found = asyncio.run(streaming_work.measure(settings, progress))
    assert [work.api for work in found] == ["chat", "completions", "gRPC"]
    assert all(work.us.low > 0 and work.verifier_us > 0 for work in found)
    assert all(0 < work.chunks <= 0.5 for work in found), "a chunk has two tokens, and a late router joins chunks"
    assert len(streaming_work.table(found).rows) == 3


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
