"""The clusters that the tests of this folder share; they run in one process, see tests/conftest.py."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from openai import OpenAI

from eyas import SamplingParams
from eyas.services.local.cluster import Cluster, free_port
from eyas.services.local.demo import running_demo
from tests.support.services.forks import forked_services
from tests.support.services.grpc_client import generate
from tests.support.tiny import write_head

RUNNING, CLUSTERS = ExitStack(), dict[str, Cluster]()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Stop the clusters after the last test of this folder: idle services take processor time until all tests are done."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        CLUSTERS.clear()
        RUNNING.close()


def running(name: str, *settings: str) -> Cluster:
    """The cluster of this name; it starts if it does not run."""
    if name not in CLUSTERS:
        CLUSTERS[name] = RUNNING.enter_context(started(*settings))
    return CLUSTERS[name]


@pytest.fixture(scope="session", autouse=True)
def stopped_early() -> Iterator[None]:
    """Stop the clusters also if the run ends early."""
    with RUNNING:
        yield


@pytest.fixture(scope="module")
def demo_cluster() -> Cluster:
    """The demo's cluster."""
    return running("demo")


@pytest.fixture(scope="module")
def client(demo_cluster: Cluster) -> Iterator[OpenAI]:
    """OpenAI's client of the demo's cluster."""
    with OpenAI(base_url=f"{demo_cluster.http}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def random_cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A cluster whose draft head has random weights."""
    head = write_head(tmp_path_factory.mktemp("head"), vocab_size=4096, draft_vocab=512, hidden=256)
    config = Path(head, "config.json")
    config.write_text(config.read_text().replace("[1, 2, 3]", "[2, 6, 9]"))
    return running("random", "draft.method=eagle3", f"draft.draft_model={head}", f"verifier.draft_model={head}")


@contextmanager
def started(*settings: str) -> Iterator[Cluster]:
    """A running cluster whose services are ready. Drafts may take long: the machine is shared. Heads are not checked."""
    patient = "verifier.draft_client.draft_timeout_s=30"
    settings = (*settings, patient, "verifier.engine.draft_budget=fixed", "verifier.validate_head=never")
    with forked_services(), running_demo(free_port(), settings) as cluster:
        for child in cluster.services:
            cluster.wait(child)
        while not generate(cluster["router"].address, (5, 6, 7), SamplingParams(max_tokens=8)).stats.num_drafted:
            time.sleep(0.1)  # the verifier may not have found its draft service yet
        yield cluster
