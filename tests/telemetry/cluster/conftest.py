"""One run of the whole cluster under a collector, and a Prometheus where there is one, for all tests that look at it."""

from collections.abc import Iterator

import pytest

from tests.telemetry.cluster.recording import Watched, watched


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched(tmp_path_factory.mktemp("prometheus")) as run:
        yield run
