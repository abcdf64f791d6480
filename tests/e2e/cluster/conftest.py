"""The cluster that the tests of this folder share; they run in one process, see tests/conftest.py."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest
from openai import OpenAI

from eyas.services.local.cluster import Cluster, free_port
from eyas.services.local.demo import running_demo
from tests.support.services.forks import forked_services
from tests.support.services.grpc_client import wait_for_drafts

RUNNING = ExitStack()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Stop the cluster after the last test of this folder: idle services take processor time until all tests are done."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        running.cache_clear()
        RUNNING.close()


@cache
def running() -> Cluster:
    """The cluster; it starts if it does not run."""
    return RUNNING.enter_context(started())


@pytest.fixture(scope="session", autouse=True)
def stopped_early() -> Iterator[None]:
    """Stop the cluster also if the run ends early."""
    with RUNNING:
        yield


@pytest.fixture(scope="module")
def demo_cluster() -> Cluster:
    """The demo's cluster."""
    return running()


@pytest.fixture(scope="module")
def client(demo_cluster: Cluster) -> Iterator[OpenAI]:
    """OpenAI's client of the demo's cluster."""
    with OpenAI(base_url=f"{demo_cluster.http}/v1", api_key="none", max_retries=0) as made:
        yield made


@contextmanager
def started() -> Iterator[Cluster]:
    """The demo's cluster, whose services are ready. Drafts may take long: the machine is shared. Heads are not checked."""
    patient = "verifier.draft_client.draft_timeout_s=30"
    settings = (patient, "verifier.engine.draft_budget=fixed", "verifier.validate_head=never")
    with forked_services(), running_demo(free_port(), settings) as cluster:
        for child in cluster.services:
            cluster.wait(child)
        wait_for_drafts(cluster["router"].address)
        yield cluster
