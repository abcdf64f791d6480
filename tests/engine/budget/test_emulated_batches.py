"""Adaptive trees on emulated GPUs, in virtual time: a poor drafter loses little, also while the load changes."""

from itertools import pairwise

import pytest

from eyas.api.request import Request, SamplingParams
from eyas.config import DraftBudgetPolicy, DraftingConfig, EngineConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.drafters.neural import NeuralDrafter
from eyas.emulation.costs import DeviceCosts
from eyas.emulation.device import EmulatedDevice, VirtualClock
from eyas.engine.build import assemble_engine
from eyas.engine.engine import Engine
from eyas.models.loading import load_target
from tests.support.runs import outputs_of, run
from tests.support.tiers import nightly

TREE = TreeConfig(24, 5, 8)
H200 = "llama-3.1-8b@h200"
TOKENS, ALONE = 64, 256


def emulated_engine(target: str, head: str, batch: int, policy: DraftBudgetPolicy | None) -> tuple[Engine, VirtualClock]:
    """An engine on an emulated H200, and its clock; without a policy it decodes plainly."""
    fuser, clock = DraftHead(head, "eagle3").build_fuser(target, "float32", "cpu"), VirtualClock()
    assert fuser is not None
    drafter = None
    if policy:
        drafting = DraftingConfig(16384, emulated_device="eagle3-8b@h200")
        drafter = DraftHead(head, "eagle3").build_drafter(target, "float32", "cpu", TREE, drafting)
        assert isinstance(drafter, NeuralDrafter)
        drafter.device = EmulatedDevice(DeviceCosts.read("eagle3-8b@h200"), clock)
    config = EngineConfig(
        max_kv_tokens=batch * (TOKENS + 40) + ALONE, max_num_seqs=batch, draft_budget=policy or "fixed", emulated_device=H200
    )
    model = load_target(target, "float32", "cpu", fuser.aux_hidden_state_layers)
    return assemble_engine(model, fuser, config, TREE, drafter, clock=clock), clock


def emulated_seconds(
    target: str, head: str, batch: int, policy: DraftBudgetPolicy | None
) -> tuple[float, dict[str, list[int]]]:
    """Virtual seconds to decode a batch, and its outputs; plainly without a policy."""
    engine, clock = emulated_engine(target, head, batch, policy)
    requests = [
        Request(f"{index}", (3 + index % 40, 5, 7, 9), SamplingParams(TOKENS, 0.8, seed=index, ignore_eos=True))
        for index in range(batch)
    ]
    began, chunks = clock(), run(engine, requests)
    return clock() - began, outputs_of(chunks)


@pytest.mark.parametrize("batch", [nightly(1), 8, nightly(64)])
def test_a_poor_drafter_costs_two_percent_at_most(tiny_target: str, tiny_head: str, batch: int) -> None:
    plain_s, plain = emulated_seconds(tiny_target, tiny_head, batch, None)
    adaptive_s, adaptive = emulated_seconds(tiny_target, tiny_head, batch, "adaptive")
    assert adaptive == plain
    assert plain_s / adaptive_s >= 0.98


def ramp(target: str, head: str, policy: DraftBudgetPolicy | None) -> tuple[list[float], float, list[list[int]]]:
    """One sequence, 31 more after 80 tokens of it, and the one alone again.

    Returns the virtual seconds of a token in these three phases, those of the longest step, and the outputs.
    """
    engine, clock = emulated_engine(target, head, 32, policy)
    outputs: list[list[int]] = [[] for _ in range(32)]
    engine.submit(Request("0", (3, 5, 7, 9), SamplingParams(240, 0.8, seed=0, ignore_eos=True)))
    marks, longest = [(clock(), 0)], 0.0
    while engine.has_work:
        began = clock()
        for chunk in engine.step():
            outputs[int(chunk.request_id)] += chunk.token_ids
        longest = max(longest, clock() - began)
        if len(marks) == 1 and len(outputs[0]) >= 80:
            marks.append((clock(), sum(map(len, outputs))))
            for number in range(1, 32):
                sampling = SamplingParams(TOKENS, 0.8, seed=number, ignore_eos=True)
                engine.submit(Request(f"{number}", (3 + number % 40, 5, 7, 9), sampling))
        elif len(marks) == 2 and engine.load.num_running == 1:
            marks.append((clock(), sum(map(len, outputs))))
    marks.append((clock(), sum(map(len, outputs))))
    return [(b - a) / (m - n) for (a, n), (b, m) in pairwise(marks)], longest, outputs


@pytest.mark.nightly
def test_load_that_jumps_up_and_down_costs_two_percent_at_most(tiny_target: str, tiny_head: str) -> None:
    plain, plain_longest, expected = ramp(tiny_target, tiny_head, None)
    adaptive, longest, outputs = ramp(tiny_target, tiny_head, "adaptive")
    assert outputs == expected
    ratios = [a / b for a, b in zip(plain, adaptive, strict=True)]
    assert min(ratios) >= 0.98, ratios
    assert longest < 1.5 * plain_longest, "no step stalls the others"
