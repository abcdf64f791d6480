"""The whole application on a local Ray: what it says, and how it breathes."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from eyas import SamplingParams
from eyas.config import RegistryConfig
from eyas.errors import InvalidRequest
from eyas.rpc.messages import NO_DRAFTER
from services.registry import Registry
from tests.e2e.client import generate
from tests.ray.cluster.application import RayApplication, running_application
from tests.ray.cluster.load import Asked, breathe, plainly

pytest.importorskip("ray.serve", reason="needs Ray: pip install 'eyas[ray]'")

pytestmark = pytest.mark.timeout(300)

ENDLESS = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return plainly(num_requests=8, max_tokens=48)


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayApplication]:
    with running_application(tmp_path_factory.mktemp("ray")) as running:
        yield running


def test_both_doors_say_what_plain_decoding_says(application: RayApplication, asked: list[Asked]) -> None:
    for one in asked[:2]:
        outs = [generate(application.grpc, one.prompt, one.sampling, drafter) for drafter in ("", NO_DRAFTER)]
        assert [tuple(out.token_ids) for out in outs] == [one.expected] * 2
        assert [out.stats.num_drafted > 0 for out in outs] == [True, False]
        body = {
            "prompt": list(one.prompt), "max_tokens": one.sampling.max_tokens, "seed": one.sampling.seed,
            "temperature": one.sampling.temperature, "ignore_eos": True,
        }  # fmt: skip
        whole = httpx.post(f"{application.http}/v1/completions", json=body, timeout=60).json()
        streamed = httpx.post(f"{application.http}/v1/completions", json=body | {"stream": True}, timeout=60)
        assert whole["choices"][0]["text"] == outs[0].text
        assert streamed.text.count("data: ") > 3
        assert streamed.text.endswith("data: [DONE]\n\n")


def test_a_refused_request_bears_the_status_of_its_error(application: RayApplication) -> None:
    with pytest.raises(InvalidRequest, match="temperature is -1"):
        generate(application.grpc, "a", SamplingParams(temperature=-1.0))
    assert httpx.post(f"{application.http}/v1/completions", json={"prompt": "a", "n": 0}).status_code == 400


def test_clients_that_leave_the_grpc_door_take_their_requests_with_them(application: RayApplication) -> None:
    def leave(after: int) -> int:
        enough = [lambda out: len(out.chunks) > after, lambda out: len(out.chunks) > after and busy(application)]
        return len(generate(application.grpc, "def f():", ENDLESS, enough=enough[after % 2]).token_ids)

    with ThreadPoolExecutor(4) as clients:
        assert max(clients.map(leave, range(12))) < ENDLESS.max_tokens
    application.wait(lambda: not busy(application), 10, "requests go on")
    assert application.ready()


def test_a_client_that_leaves_the_http_door_takes_its_request_with_it(application: RayApplication) -> None:
    body = {"prompt": "def f():", "max_tokens": ENDLESS.max_tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{application.http}/v1/completions", json=body, timeout=60) as answer:
        events = answer.iter_lines()
        while not busy(application):
            next(events)
    application.wait(lambda: not busy(application), 10, "the request goes on")


def busy(application: RayApplication) -> int:
    """Requests in the verifiers, as their leases say."""

    async def count() -> int:
        registry = Registry(RegistryConfig(application.registry))
        try:
            leases = await registry.leases("verifier")
            return sum(lease.load.num_running + lease.load.num_waiting for lease in leases)
        finally:
            await registry.close()

    return asyncio.run(count())


def test_pools_grow_under_load_and_shrink_in_quiet_and_no_request_fails(
    application: RayApplication, asked: list[Asked]
) -> None:
    breath = breathe(application, asked)
    assert breath.failures == []
    assert breath.num_drafted > 0
