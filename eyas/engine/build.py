"""Puts an engine together: where the weights are in, an Engine out; and the ranks that share the work, if there are more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from eyas.cache.kv import SlotPools
from eyas.config import EngineConfig, TreeConfig
from eyas.drafters.base import Drafter
from eyas.engine.drafting import Drafting
from eyas.engine.engine import Engine
from eyas.engine.runner import ModelRunner
from eyas.engine.scheduler import Scheduler
from eyas.errors import ConfigError
from eyas.models.heads.eagle import FeatureFuser, load_fuser
from eyas.models.parallel.joining import Follower, lead
from eyas.models.parallel.orders import Allot
from eyas.models.parallel.ranks import Alone, Place, Ranks
from eyas.models.parallel.shard import Share
from eyas.models.target import TargetModel, check_heads, load_target


def build_engine(
    target: str,
    head: str,
    dtype: str,
    device: str,
    engine: EngineConfig,
    tree: TreeConfig,
    drafter: Drafter | None,
    ranks: Ranks | None = None,
) -> Engine:
    """Load `target`, and of the draft head only what fuses features; an empty `head` collects none.

    ranks: what `gather_ranks` gave, if the target is shared; they are not closed here.
    """
    fuser = load_fuser(head, target, dtype, device) if head else None
    share = Share(0, ranks.size) if ranks and ranks.size > 1 else None
    model = load_target(target, dtype, device, fuser.taps if fuser else (), share)
    return assemble_engine(model, fuser, engine, tree, drafter, ranks)


def assemble_engine(
    target: TargetModel,
    fuser: FeatureFuser | None,
    engine: EngineConfig,
    tree: TreeConfig,
    drafter: Drafter | None,
    ranks: Ranks | None = None,
) -> Engine:
    """An engine over loaded parts. Without a drafter no room is kept for trees. Raises ConfigError when the ranks are not
    as many as `engine.tensor_parallel` says."""
    ranks = ranks or Alone()
    if ranks.size != engine.tensor_parallel:
        raise ConfigError(f"engine.tensor_parallel is {engine.tensor_parallel}, but the target is loaded for {ranks.size}")
    ranks.allot(engine.num_slots)
    pools = SlotPools(engine.num_slots, target.kv_shapes, fuser.width if fuser else 0, target.dtype, target.device)
    runner = ModelRunner(target, pools, fuser, ranks)
    scheduler = Scheduler(engine, tree if drafter else TreeConfig(1, 0, 1), target.eos_ids)
    context_length = min(engine.context_length or target.context_length, target.context_length)
    return Engine(scheduler, Drafting(drafter, runner), runner, context_length)


def gather_ranks(place: Place, target: str, dtype: str) -> Ranks:
    """The other ranks of `place`, which is rank 0's; they begin to load the target, and rank 0 must load its share too.

    Raises CheckpointError when the target cannot be shared by so many, Unavailable when they do not come together.
    """
    if place.size == 1:
        return Alone()
    check_heads(target, place.size)
    return lead(place, partial(follow, target, dtype))


def follow(target: str, dtype: str, place: Place, ready: Callable[[], None] = lambda: None) -> None:
    """What every other rank does: join, load its share, call `ready`, and run what rank 0 runs until it stops.

    Raises Unavailable when rank 0 is gone, CheckpointError when the target does not load.
    """
    follower = Follower(place)
    model = load_target(target, dtype, place.device, share=Share(place.rank, place.size))
    ready()
    runner = ModelRunner(model, _pools(model, 1), None)
    for order in follower.orders():
        if isinstance(order, Allot):
            runner = ModelRunner(model, _pools(model, order.num_slots), None)
        else:
            runner.run(order.segments)


def _pools(target: TargetModel, num_slots: int) -> SlotPools:
    return SlotPools(num_slots, target.kv_shapes, 0, target.dtype, target.device)
