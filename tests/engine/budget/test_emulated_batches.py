"""Adaptive trees on emulated GPUs, in virtual time: a poor drafter loses little."""

import pytest

from eyas.config import DraftBudgetPolicy, DraftingConfig, EngineConfig, TreeConfig
from eyas.config.device_costs import DeviceCosts
from eyas.drafters.neural import NeuralDrafter
from eyas.drafters.registry import build_drafter, build_fuser
from eyas.engine.build import assemble_engine
from eyas.models.emulation import EmulatedDevice, VirtualClock
from eyas.models.target import load_target
from eyas.request import Request, SamplingParams

TREE = TreeConfig(24, 5, 8)
H200 = "llama-3.1-8b@h200"
TOKENS = 64


def emulated_seconds(target: str, head: str, batch: int, policy: DraftBudgetPolicy | None) -> tuple[float, list[list[int]]]:
    """Virtual seconds to decode a batch, and its outputs; plainly without a policy."""
    fuser, clock = build_fuser("eagle3", head, target, "float32", "cpu"), VirtualClock()
    assert fuser is not None
    drafter = None
    if policy:
        drafter = build_drafter("eagle3", target, head, "float32", "cpu", TREE, DraftingConfig(16384))
        assert isinstance(drafter, NeuralDrafter)
        drafter.emulate(EmulatedDevice(DeviceCosts.read("eagle3-8b@h200"), clock))
    config = EngineConfig(
        max_kv_tokens=batch * (TOKENS + 40), max_num_seqs=batch, draft_budget=policy or "fixed", emulated_device=H200
    )
    model = load_target(target, "float32", "cpu", fuser.aux_hidden_state_layers)
    engine = assemble_engine(model, fuser, config, TREE, drafter, clock=clock)
    outputs: list[list[int]] = [[] for _ in range(batch)]
    sampling = SamplingParams(TOKENS, 0.8, ignore_eos=True)
    for index in range(batch):
        seeded = SamplingParams(**{**vars(sampling), "seed": index})
        engine.submit(Request(f"{index}", (3 + index % 40, 5, 7, 9), seeded))
    began = clock()
    while engine.has_work:
        for chunk in engine.step():
            outputs[int(chunk.request_id)] += chunk.token_ids
    return clock() - began, outputs


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_poor_drafter_costs_two_percent_at_most(tiny_target: str, tiny_head: str, batch: int) -> None:
    plain_s, plain = emulated_seconds(tiny_target, tiny_head, batch, None)
    adaptive_s, adaptive = emulated_seconds(tiny_target, tiny_head, batch, "adaptive")
    assert adaptive == plain
    assert plain_s / adaptive_s >= 0.98
