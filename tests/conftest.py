"""Settings of every test run: one torch thread, fixed hypothesis examples, event loops; and models that tests share."""

import asyncio
import gc
import importlib.util
import inspect
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from eyas import LLM

# Folders and files that take the longest. Those that wait for processes of their own are spread over those that compute.
LONGEST = (
    "tests/services/ray/cluster/", "tests/e2e/", "tests/sampling/test_rejection_engine.py", "tests/models/parallel/",
    "tests/repo/test_readme.py", "tests/deploy/running/", "tests/engine/", "tests/models/layers/test_fused.py",
    "tests/models/heads/", "tests/chaos/", "tests/train/", "tests/models/cuda/", "tests/bench/test_gpu.py",
    "tests/services/verifier/test_ranks.py", "tests/drafters/trees/test_cuda_graph_trees.py", "tests/engine/test_soak.py",
    "tests/repo/", "tests/drafters/", "tests/llm/test_ea_model.py",
    "tests/services/test_start_failures.py", "tests/fuzz/",
)  # fmt: skip

# Names of folders whose files share processes: clusters, servers that services and ranks are forks of, and parsed files.
SHARING = ("cluster", "e2e", "parallel", "repo")
# Files that share a server of forks, which takes as long to start as a service; those of tests/e2e/ have another.
FORKING = (
    "tests/deploy/running/", "tests/fuzz/test_fuzz.py", "tests/services/test_start_failures.py",
    "tests/services/verifier/test_ranks.py", "tests/telemetry/cluster/", "tests/train/test_resume.py",
    "tests/bench/test_split.py",
)  # fmt: skip

settings.register_profile("eyas", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("eyas")

os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start; several tests run at once

# Clients of HTTP first read all public authorities, which takes longer than most tests. One is enough for servers here.
ONE_AUTHORITY = Path(__file__).parent / "support" / "authority.pem"
os.environ["SSL_CERT_FILE"] = str(ONE_AUTHORITY)

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs and their children ignore it

if importlib.util.find_spec("torch"):
    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported; kernels then run on the CPU


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny random target."""
    from tests.support.tiny import write_target

    return str(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="session")
def tiny_head(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny random EAGLE-3 head for `tiny_target`; an EAGLE-1 head is in its subfolder eagle1."""
    from tests.support.tiny import write_eagle1_head, write_head

    folder: Path = tmp_path_factory.mktemp("head")
    write_eagle1_head(folder / "eagle1")
    return str(write_head(folder))


@pytest.fixture(scope="session")
def plain_llm() -> "LLM":
    """The demo target without a drafter."""
    return _demo_llm(None)


@pytest.fixture(scope="session")
def eagle3_llm() -> "LLM":
    """The demo target with its EAGLE-3 head."""
    return _demo_llm("models/demo/eagle3")


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """URL of a Redis that the tests of a process share."""
    from eyas.services.local.cluster import free_port
    from tests.support.services.redis_server import running_redis

    with running_redis(free_port()) as url:
        yield url


@pytest.fixture
def url(redis_url: str) -> str:
    """URL of an empty registry."""
    from redis import Redis

    with Redis.from_url(redis_url) as client:
        client.flushall()
    return redis_url


def _demo_llm(head: str | None) -> "LLM":
    from eyas import LLM
    from tests.support.tiny import fixed_config

    return LLM("models/demo/target", head, engine=fixed_config(max_kv_tokens=8192), validate_head="never")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that none is left alone at the end."""

    def rank(item: pytest.Item) -> int:
        return next((n for n, start in enumerate(LONGEST) if item.nodeid.startswith(start)), len(LONGEST))

    items.sort(key=rank)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in arguments}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect no garbage while modules are imported, nor later what they have made: it stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    """Quicken Triton's interpreter, if tests may use it."""
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET"):
        from tests.support.devices.interpreter import quicken

        quicken()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run all files of a folder of SHARING in one process, because they share processes; any other file by itself."""
    from xdist.scheduler import LoadScopeScheduling

    class SharedProcesses(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(FORKING):
                return "forks"
            folders = nodeid.partition("::")[0].split("/")[:-1]
            ends = [number for number, name in enumerate(folders, 1) if name in SHARING]
            return "/".join(folders[: ends[0]]) if ends else super()._split_scope(nodeid)

    return SharedProcesses(config, log)
