"""The verifier service over real sockets, without head, drafter and registry: each of them is dispensable."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eyas.api.outputs import TextChunk
from eyas.api.request import Request, SamplingParams
from eyas.config import EngineConfig, RegistryConfig, ServerConfig, TreeConfig, VerifierConfig
from eyas.errors import EyasError, Overloaded, Unavailable
from eyas.rpc import convert
from eyas.rpc.channel import open_channel
from eyas.rpc.messages import NO_DRAFTER, GenerateCall, TargetInfo
from eyas.rpc.status import status_error
from eyas.services.local.cluster import free_port
from eyas.services.verifier.__main__ import END_SECONDS, outputs_fingerprint, run
from eyas.v1 import generation_pb2, generation_pb2_grpc
from tests.engine.test_async_engine import join_engines
from tests.support.strategies import unchecked
from tests.support.tiers import nightly

SAMPLING = SamplingParams(12, temperature=0.8, seed=7, ignore_eos=True)
CALL = GenerateCall(Request("r", (0, 282, 659, 276), SAMPLING))

ENGINE = EngineConfig(max_kv_tokens=1200, max_num_seqs=1, max_queued_requests=1, draft_budget="fixed")


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@asynccontextmanager
async def serving(
    stop: Callable[[], None] = terminate, **settings: Any
) -> AsyncIterator[generation_pb2_grpc.GenerationAsyncStub]:
    """Run a verifier with these settings; yields a stub, and calls `stop`, after which the verifier must end by itself."""
    settings = {"engine": EngineConfig(max_kv_tokens=1200, max_num_seqs=1, max_queued_requests=1)} | settings
    config = VerifierConfig(
        served_model_name="demo",
        model="models/demo/target",
        threads=1,
        server=ServerConfig(port=free_port(), graceful_shutdown_timeout_s=100),
        registry=RegistryConfig(url=f"redis://127.0.0.1:{free_port()}/0"),
        **settings,
    )
    service = asyncio.create_task(run(config))
    async with open_channel(f"127.0.0.1:{config.server.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        while answer.status != health_pb2.HealthCheckResponse.SERVING:
            await asyncio.sleep(0.01)
            answer = await health.Check(health_pb2.HealthCheckRequest())
        async with asyncio.timeout(120):
            yield generation_pb2_grpc.GenerationStub(channel)
        stop()
        await asyncio.wait_for(service, 100)


async def test_a_stuck_step_ends_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every long step counts as stuck here. The system ends the process if it does not end by itself."""
    alarms: list[int] = []
    monkeypatch.setattr("signal.alarm", alarms.append)
    prompt = tuple(range(5, 1005))
    ends = pytest.raises(Unavailable, match="a step has not ended")
    with ends:
        async with serving(lambda: None, stuck_step_timeout_s=0.001, stuck_step_exit_timeout_s=0.002) as stub:
            code, details = await status_of(stub, replace(CALL, request=replace(CALL.request, prompt_ids=prompt)))
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "a step has not ended" in details
    join_engines()
    assert alarms == [END_SECONDS]


async def generate(stub: generation_pb2_grpc.GenerationAsyncStub, call: GenerateCall) -> list[TextChunk]:
    return [convert.text_chunk_from_proto(message) async for message in stub.Generate(convert.generate_call_to_proto(call))]


async def status_of(stub: generation_pb2_grpc.GenerationAsyncStub, call: GenerateCall) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate(stub, call)
    return raised.value.code(), raised.value.details() or ""


def changed(**sampling: Any) -> GenerateCall:
    return replace(CALL, request=replace(CALL.request, sampling=unchecked(SAMPLING, **sampling)))


async def test_chunks_carry_the_seed_first_and_the_totals_last() -> None:
    async with serving() as stub:
        chunks = await generate(stub, CALL)
        assert [chunk.seed for chunk in chunks] == [7] + [None] * 11
        totals = chunks[-1].totals
        assert totals is not None
        assert (totals.num_prompt_tokens, totals.num_output_tokens) == (4, 12)
        assert all(chunk.totals is None for chunk in chunks[:-1])
        drawn = (await generate(stub, changed(seed=None)))[0].seed
        again = await generate(stub, changed(seed=drawn))
        assert again[0].seed == drawn
        models = convert.models_from_proto(await stub.ListModels(generation_pb2.ListModelsRequest()))
        assert [(model.name, model.vocab_size, model.features_fingerprint) for model in models] == [("demo", 4096, "")]
        for pin in (models[0].pin, models[0].fingerprint):
            assert len(await generate(stub, replace(CALL, target_fingerprint=pin))) == 12
        other = replace(models[0], outputs_fingerprint="x")
        code, details = await status_of(stub, replace(CALL, target_fingerprint=other.pin))
        assert (code, "dtype" in details) == (grpc.StatusCode.UNAVAILABLE, True)


# Another value of each setting of an engine, and the settings that decide which tokens it gives.
OTHER_VALUES: dict[str, Any] = {
    "max_kv_tokens": 99, "gpu_memory_utilization": 0.5, "kv_cache_dtype": "fp8", "max_num_seqs": 1,
    "max_queued_requests": 1, "max_prefill_tokens": 7, "max_verify_tokens": 7, "max_model_len": 99, "deterministic": True,
    "cuda_graphs": False, "acceptance": "rejection", "draft_budget": "fixed", "prefix_cache": False,
    "session_cache_ttl_s": 1.0, "priority_aging_s": 1.0, "emulated_device": "llama-3.1-8b@h100", "tensor_parallel_size": 2,
    "quantization": "int8", "json_whitespace_pattern": "", "layer_threads": 2,
}  # fmt: skip
DECIDING = {
    "kv_cache_dtype", "deterministic", "acceptance", "tensor_parallel_size", "quantization", "json_whitespace_pattern"
}  # fmt: skip


def test_every_setting_of_an_engine_is_decided() -> None:
    assert OTHER_VALUES.keys() == {field.name for field in fields(EngineConfig)}


def test_two_names_of_a_type_have_one_pin() -> None:
    config = VerifierConfig("m", "m", dtype="float32", device="cuda")
    target = TargetInfo("digest", "none")
    engines = [EngineConfig(kv_cache_dtype=name) for name in ("fp8", "fp8_e4m3", "fp8_e5m2")]  # type: ignore[arg-type]
    pins = [outputs_fingerprint(replace(config, engine=engine), target) for engine in engines]
    assert pins[0] == pins[1] != pins[2]


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({"dtype": "bfloat16"}, False),
        ({"device": "cpu"}, False),
        ({"device": "cuda:1"}, True),
        *(({"engine": EngineConfig(**{name: value})}, name not in DECIDING) for name, value in OTHER_VALUES.items()),
        ({"engine": EngineConfig(quantization="fp8")}, True),
    ],
)
def test_settings_that_change_tokens_change_the_pin(other: dict[str, Any], same: bool) -> None:
    config, target = VerifierConfig("m", "m", dtype="float32", device="cuda"), TargetInfo("digest", "none")
    assert (outputs_fingerprint(config, target) == outputs_fingerprint(replace(config, **other), target)) is same
    assert outputs_fingerprint(config, target) != outputs_fingerprint(config, TargetInfo("another", "none"))


def test_compiled_kernels_have_another_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    config, target = VerifierConfig("m", "m", dtype="float32", device="cpu"), TargetInfo("digest", "none")
    with_kernels = outputs_fingerprint(config, target)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert outputs_fingerprint(config, target) != with_kernels


async def test_bad_requests_get_a_status_with_a_reason() -> None:
    async with serving() as stub:
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        as_text = replace(CALL, prompt_text="def")
        cases: list[tuple[GenerateCall, grpc.StatusCode, str]] = [
            (as_text, invalid, "takes token ids"),
            (replace(CALL, model="other"), grpc.StatusCode.NOT_FOUND, "known: demo"),
            (replace(CALL, request=replace(CALL.request, prompt_ids=())), invalid, "prompt is empty"),
            (replace(CALL, request=replace(CALL.request, prompt_ids=(4096,))), invalid, "4096"),
            (changed(temperature=float("nan")), invalid, "temperature is nan"),
            (changed(max_tokens=4096), invalid, "context length 2048"),
            (replace(CALL, request=replace(CALL.request, priority=-1)), invalid, "priority is -1"),
        ]
        for call, code, words in cases:
            found = await status_of(stub, call)
            assert (found[0], words in found[1]) == (code, True), found
        assert len(await generate(stub, CALL)) == 12


async def test_a_drafter_unknown_to_discovery_is_refused_undialled() -> None:
    async with serving(method="prompt_lookup", draft_placement="service") as stub:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            code, details = await status_of(stub, replace(CALL, drafter=address))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert f"drafter {address} is not known to the discovery of this verifier" in details
            assert len(await generate(stub, CALL)) == 12
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()


@pytest.mark.parametrize("method", ["prompt_lookup", nightly("suffix"), nightly("lookahead")])
async def test_lookups_in_the_verifier_change_no_token(method: str) -> None:
    """No draft service is dialled; the first text repeats itself, so that there is something to look up."""
    prompt = (0, *(282, 659, 276, 40) * 8)
    call = replace(CALL, request=Request("r", prompt, SamplingParams(48, temperature=0, ignore_eos=True, seed=3)))
    found: list[list[int]] = []
    async with serving(method=method, tree=TreeConfig(6), engine=ENGINE) as stub:
        (model,) = convert.models_from_proto(await stub.ListModels(generation_pb2.ListModelsRequest()))
        assert model.features_fingerprint == ""
        for drafter in ("", NO_DRAFTER):
            chunks = await generate(stub, replace(call, drafter=drafter))
            found.append([token for chunk in chunks for token in chunk.chunk.token_ids])
            steps = [chunk.chunk.verify_step for chunk in chunks if chunk.chunk.verify_step]
            assert any(step.drafted for step in steps) is not bool(drafter)
    assert found[0] == found[1]
    assert len(found[0]) == 48


async def test_a_cancelled_request_frees_its_slots() -> None:
    async with serving() as stub:
        long = convert.generate_call_to_proto(changed(max_tokens=1000))
        running, waiting = stub.Generate(long), stub.Generate(long)
        await running.read()
        error = await until(grpc.StatusCode.RESOURCE_EXHAUSTED, stub)
        assert isinstance(error, Overloaded)
        assert 0.1 <= (error.retry_after or 0) <= 60
        running.cancel()
        await waiting.read()
        waiting.cancel()
        with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
            async for _ in stub.Generate(long, timeout=0.3):
                pass
        assert len(await generate(stub, CALL)) == 12


async def test_sigterm_lets_streams_finish_and_refuses_new_ones() -> None:
    async with serving(stop=lambda: None) as stub:
        running = stub.Generate(convert.generate_call_to_proto(changed(max_tokens=300)))
        last: Any = await running.read()
        terminate()
        await until(grpc.StatusCode.UNAVAILABLE, stub)
        while not last.HasField("finish"):
            last = await running.read()
        assert (last.finish.reason, last.finish.num_output_tokens) == ("length", 300)


async def until(code: grpc.StatusCode, stub: generation_pb2_grpc.GenerationAsyncStub) -> EyasError:
    """Knock until the service refuses with `code`; gives its error."""
    while True:
        try:
            await stub.Generate(convert.generate_call_to_proto(changed(max_tokens=1)), timeout=0.1).read()
        except grpc.aio.AioRpcError as error:
            if error.code() is code:
                return status_error(error)


async def test_cached_tokens_show_no_prompt_of_another_salt() -> None:
    prompt = tuple(range(300, 428))
    async with serving() as stub:
        outputs, cached = [], []
        for salt in ("a", "b", "a"):
            request = Request("r", prompt, SAMPLING, tenant=salt, cache_salt=salt)
            chunks = await generate(stub, GenerateCall(request))
            outputs.append([token for chunk in chunks for token in chunk.chunk.token_ids])
            cached.append(sum(chunk.chunk.num_cached for chunk in chunks))
            assert chunks[-1].totals is not None
            assert chunks[-1].totals.num_cached_tokens == cached[-1]
        assert cached == [0, 0, len(prompt) - 1]
        assert outputs[0] == outputs[1] == outputs[2]
