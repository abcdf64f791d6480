"""What drafting ahead gains, in virtual time: passes take the times of a table, and host work takes none."""

import json
from collections.abc import Sequence

from eyas.api.request import Request, SamplingParams
from eyas.config import DraftAheadConfig, DraftingConfig, TreeConfig
from eyas.drafters.ahead.drafter import DraftAheadDrafter
from eyas.drafters.ahead.eagle import NUM_GROWN_SLOTS
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.drafters.draft_head import DraftHead
from eyas.drafters.eagle import EagleDrafter
from eyas.emulation.costs import flat
from eyas.emulation.device import EmulatedDevice, VirtualClock
from eyas.engine.build import assemble_engine
from eyas.models.heads.eagle import load_head
from eyas.models.loading import load_target
from tests.support.runs import run
from tests.support.tiny import DEMO, fixed_config

TREE = TreeConfig(num_draft_tokens=24, num_steps=5)
# Seconds of a verify pass, of one level of a draft, and of a message's way.
PASS_S, LEVEL_S, WIRE_S = 1.0, 0.1, 0.03


class Apart(LocalDrafter):
    """A drafter on a device of its own, which works while the target verifies. A message takes its time each way."""

    def __init__(self, drafter: EagleDrafter | DraftAheadDrafter, clock: VirtualClock) -> None:
        self.drafter, self.clock = drafter, clock
        self.num_trees = self.num_grown_ahead = 0

    @property
    def needs(self) -> DrafterNeeds:
        return self.drafter.needs

    def release(self, sessions: Sequence[str]) -> None:
        self.drafter.release(sessions)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """The target has verified the last trees in the meantime."""
        end = self.clock.now + PASS_S
        while self.clock.now < end and self.drafter.draft_ahead():
            self.clock.sleep(min(self.drafter.busy_s, end - self.clock.now))
        self.clock.now = end + WIRE_S
        drafts = self.drafter.propose(contexts)
        self.clock.sleep(WIRE_S)  # reading the tree has waited for its passes
        self.num_trees += len(drafts)
        self.num_grown_ahead += sum(getattr(draft, "grown_ahead", False) for draft in drafts)
        return drafts


def seconds(is_ahead: bool) -> tuple[float, float]:
    """Virtual seconds of a greedy answer of 48 tokens, and the share of its trees that were ready."""
    clock = VirtualClock()
    target, path = (str(DEMO / name) for name in ("target", "eagle3-full"))
    head = DraftHead(path, "eagle3")
    drafting = DraftingConfig(4096, emulated_device="1ms")
    eagle = EagleDrafter(load_head(path, target), TREE, drafting, num_grown_slots=NUM_GROWN_SLOTS)
    eagle.device = EmulatedDevice(flat("apart", draft_level=1e3 * LEVEL_S), clock)
    apart = Apart(DraftAheadDrafter(eagle, DraftAheadConfig(top_k=64)) if is_ahead else eagle, clock)
    fuser = head.build_fuser(target, "float32", "cpu")
    assert fuser is not None
    model = load_target(target, "float32", "cpu", fuser.aux_hidden_state_layers)
    engine = assemble_engine(model, fuser, fixed_config(max_kv_tokens=2048), TREE, apart)
    prompt = json.loads((DEMO / "prompts.jsonl").read_text().splitlines()[0])["token_ids"]
    run(engine, [Request("a", tuple(prompt), SamplingParams(max_tokens=48, temperature=0.0, seed=1))])
    return clock.now, apart.num_grown_ahead / apart.num_trees


def test_drafting_ahead_gains_tokens_per_virtual_second() -> None:
    serial, none_ready = seconds(is_ahead=False)
    ahead, ready = seconds(is_ahead=True)
    assert none_ready == 0
    assert ready > 0.4
    assert serial > 1.1 * ahead
