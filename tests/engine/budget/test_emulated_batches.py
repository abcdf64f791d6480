"""Adaptive trees on emulated GPUs, in virtual time: a poor drafter loses little."""

import pytest

from eyas.api.request import Request, SamplingParams
from eyas.config import DraftBudgetPolicy, DraftingConfig, EngineConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.drafters.neural import NeuralDrafter
from eyas.emulation.costs import DeviceCosts
from eyas.emulation.device import EmulatedDevice, VirtualClock
from eyas.engine.build import assemble_engine
from eyas.models.loading import load_target
from tests.support.runs import outputs_of, run
from tests.support.tiers import nightly

TREE = TreeConfig(24, 5, 8)
H200 = "llama-3.1-8b@h200"
TOKENS = 64


def emulated_seconds(
    target: str, head: str, batch: int, policy: DraftBudgetPolicy | None
) -> tuple[float, dict[str, list[int]]]:
    """Virtual seconds to decode a batch on an emulated H200, and its outputs; plainly without a policy."""
    fuser, clock = DraftHead(head, "eagle3").build_fuser(target, "float32", "cpu"), VirtualClock()
    assert fuser is not None
    drafter = None
    if policy:
        drafting = DraftingConfig(16384, emulated_device="eagle3-8b@h200")
        drafter = DraftHead(head, "eagle3").build_drafter(target, "float32", "cpu", TREE, drafting)
        assert isinstance(drafter, NeuralDrafter)
        drafter.device = EmulatedDevice(DeviceCosts.read("eagle3-8b@h200"), clock)
    config = EngineConfig(
        max_kv_tokens=batch * (TOKENS + 40), max_num_seqs=batch, draft_budget=policy or "fixed", emulated_device=H200
    )
    model = load_target(target, "float32", "cpu", fuser.aux_hidden_state_layers)
    engine = assemble_engine(model, fuser, config, TREE, drafter, clock=clock)
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
