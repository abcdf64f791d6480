"""Without memory a start fails with an error that says what to lower, and a step loses only what cannot be run."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from eyas.api.request import Chunk, Request
from eyas.cache import kv_cache
from eyas.config import DraftingConfig, EngineConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.drafters.trees.cuda_graphs import capture_or_explain
from eyas.engine import build
from eyas.engine.engine import Engine
from eyas.errors import EyasError, OutOfMemory
from eyas.models.backends.attention_metadata import Tiling
from eyas.models.backends.cuda import KernelBackend
from eyas.models.backends.cuda_graphs import CaptureLimits, GraphBackend
from eyas.models.inputs import Segment
from eyas.sampling.acceptance import StepLogits
from tests.engine.test_equality import PARAMS, make_drafter, make_engine, prompts, shared_target
from tests.support.runs import assert_plain, run


def no_memory(*args: Any, **named: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")


def test_weights_without_memory_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "load_target", no_memory)
    with pytest.raises(
        OutOfMemory, match=r"no memory for the weights of 'big' on cpu.*quantised.*Tried to allocate 2\.00"
    ) as e:
        build.load_model("big", None, "float32", "cpu", EngineConfig())
    assert isinstance(e.value, EyasError)
    assert "More lines" not in str(e.value)


def test_a_kv_cache_without_memory_names_its_settings(tiny_target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = shared_target(tiny_target)
    monkeypatch.setattr(kv_cache, "new_pool", no_memory)
    with pytest.raises(OutOfMemory, match=r"a KV cache of 99 tokens .* engine\.max_kv_tokens .*gpu_memory_utilization"):
        build.assemble_engine(target, None, EngineConfig(max_kv_tokens=99), TreeConfig(), None)
    monkeypatch.undo()
    with pytest.raises(OutOfMemory, match=r"a KV cache of 1000000000000 tokens on cpu.*Unable to allocate"):
        build.assemble_engine(target, None, EngineConfig(max_kv_tokens=10**12), TreeConfig(), None)


def test_a_capture_without_memory_is_no_fault_of_the_model(tiny_target: str) -> None:
    target = shared_target(tiny_target)
    launched, kv = KernelBackend(target, Tiling(2, 2, 4), 20), target.new_kv_cache(20)
    with pytest.raises(OutOfMemory, match=r"a CUDA graph of 8 rows .*engine\.max_num_seqs.*engine\.cuda_graphs"):
        GraphBackend(launched, kv, CaptureLimits(8, 2, 40), no_memory)


@pytest.mark.parametrize("place", ["eyas.drafters.registry.load_head", "eyas.drafters.eagle.EagleDrafter.warm_up"])
def test_a_drafter_that_does_not_fit_names_its_settings(
    place: str, tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, no_memory)
    with pytest.raises(OutOfMemory, match=r"for the drafter eagle3 on cpu.* drafting\.max_kv_tokens .*Tried to allocate"):
        DraftHead(tiny_head, "eagle3").build_drafter(tiny_target, "float32", "cpu", TreeConfig(), DraftingConfig())


def test_a_drafter_captured_without_memory_is_not_blamed() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        capture_or_explain(no_memory, lambda: None)


def limited(engine: Engine, monkeypatch: pytest.MonkeyPatch, fits: Callable[[Sequence[Segment]], bool]) -> list[int]:
    """Let passes that do not fit run out of memory. Returns the segments of each pass that ran."""
    forward, counts = engine.runner.forward, list[int]()

    def run_if_it_fits(segments: Sequence[Segment]) -> StepLogits:
        if not fits(segments):
            no_memory()
        counts.append(len(segments))
        return forward(segments)

    monkeypatch.setattr(engine.runner, "forward", run_if_it_fits)
    return counts


@pytest.mark.parametrize("name", ["random", "none"])
def test_a_step_without_memory_is_run_in_parts(
    name: str, tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences fit at once. No token changes, and other work of the host is done once for each step."""
    engine = make_engine(make_drafter(name, tiny_target, tiny_head), tiny_target, tiny_head)
    counts = limited(engine, monkeypatch, lambda segments: len(segments) <= 2)
    requests = [
        Request(f"r{i}", tuple(prompt), replace(PARAMS["sampled"], seed=i, max_tokens=8))
        for i, prompt in enumerate(prompts(5, seed=6))
    ]
    step, worked = engine.step, list[int]()

    def step_with_work() -> list[Chunk]:
        worked.clear()
        chunks = step(lambda: worked.append(1))
        assert worked == [1]
        return chunks

    monkeypatch.setattr(engine, "step", step_with_work)
    assert_plain(tiny_target, requests, run(engine, requests))
    assert max(counts) == 2


def test_a_request_that_fits_in_no_pass_ends_alone(
    tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(make_drafter("random", tiny_target, tiny_head), tiny_target, tiny_head)
    limited(engine, monkeypatch, lambda segments: all(len(s.prefix) < 12 or s.tokens[0] != 7 for s in segments))
    prompt = (*range(3, 17), 7)  # its last token is a row of its own
    requests = [Request(name, own, replace(PARAMS["greedy"], seed=0, max_tokens=6)) for name, own in
                (("bad", (*prompt, 7, 7)), ("good", (5, 6, 8)), ("other", (9, 4)))]  # fmt: skip
    limit = engine.load.free_kv_tokens
    chunks = run(engine, requests)
    assert chunks["bad"][-1].finish_reason == "error"
    assert "no memory for a step" in chunks["bad"][-1].message
    assert "engine.max_num_seqs" in chunks["bad"][-1].message
    assert_plain(tiny_target, requests[1:], chunks)
    assert engine.load.free_kv_tokens == limit


@pytest.mark.parametrize("place", ["request", "collect"])
def test_a_drafter_without_memory_costs_drafts_only(
    place: str, tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is freed where no error holds tensors any more."""
    drafter, held = make_drafter("eagle3", tiny_target, tiny_head), list[object]()
    assert drafter is not None
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.append(sys.exception()))
    engine, right, rounds = make_engine(drafter, tiny_target, tiny_head), drafter.request, list[int]()

    def fail_at_times(contexts: Any) -> Any:
        rounds.append(len(rounds))
        if rounds[-1] % 3 != 1:
            return right(contexts)
        return no_memory() if place == "request" else no_memory

    monkeypatch.setattr(drafter, "request", fail_at_times)
    requests = [
        Request(f"r{i}", tuple(prompt), replace(PARAMS["sampled"], seed=i, max_tokens=16))
        for i, prompt in enumerate(prompts(3, seed=2))
    ]
    chunks = run(engine, requests)
    assert_plain(tiny_target, requests, chunks)
    assert len(rounds) > 6
    assert held
    assert not any(held)
    assert any(c.verify_step and c.verify_step.drafted for c in chunks["r0"])
