"""Puts an engine together: where the weights are in, an Engine out."""

from __future__ import annotations

import logging
from dataclasses import replace

from eyas.cache.kv import SlotPools, bytes_per_slot, slots_that_fit
from eyas.config import EngineConfig, TreeConfig
from eyas.drafters.base import Drafter
from eyas.engine.drafting import Drafting
from eyas.engine.engine import Engine
from eyas.engine.fixed import FixedRunner
from eyas.engine.runner import ModelRunner
from eyas.engine.scheduler import Scheduler
from eyas.models.cuda.passes import build_passes
from eyas.models.heads.eagle import FeatureFuser, load_fuser
from eyas.models.target import TargetModel, load_target

PLAIN = TreeConfig(1, 0, 1)

log = logging.getLogger(__name__)


def build_engine(
    target: str,
    head: str,
    dtype: str,
    device: str,
    engine: EngineConfig,
    tree: TreeConfig,
    drafter: Drafter | None,
) -> Engine:
    """Load `target`, and of the draft head only what fuses features; an empty `head` collects none."""
    fuser = load_fuser(head, target, dtype, device) if head else None
    model = load_target(target, dtype, device, fuser.taps if fuser else (), engine.context_length)
    return assemble_engine(model, fuser, engine, tree, drafter)


def assemble_engine(
    target: TargetModel, fuser: FeatureFuser | None, engine: EngineConfig, tree: TreeConfig, drafter: Drafter | None
) -> Engine:
    """An engine over loaded parts. Without a drafter no room is kept for trees. Raises ConfigError for a drafter that does
    not suit the acceptance rule."""
    fuser = fuser.to(target.dtype) if fuser else None
    width = fuser.width if fuser else 0
    slot_bytes = bytes_per_slot(target.kv_shapes, width, target.dtype)
    num_slots = engine.num_slots or slots_that_fit(slot_bytes, engine.memory_fraction, target.device)
    log.info("KV cache: %d tokens, %.2f GiB on %s", num_slots, num_slots * slot_bytes / 2**30, target.device)
    engine = replace(engine, num_slots=num_slots)
    pools = SlotPools(num_slots, target.kv_shapes, width, target.dtype, target.device)
    context_length = min(engine.context_length or target.context_length, target.context_length)
    runner: ModelRunner
    if engine.deterministic:
        runner = FixedRunner(target, pools, fuser, tree.nodes)
    else:
        passes = build_passes(target, pools, pools.scratch, engine, tree if drafter else PLAIN, context_length)
        runner = ModelRunner(target, pools, fuser, passes)
    scheduler = Scheduler(engine, tree if drafter else PLAIN, target.eos_ids)
    return Engine(scheduler, Drafting(drafter, runner, engine.rule), runner, context_length)
