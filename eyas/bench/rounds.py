"""How long one verify step and one draft round take by themselves: parts of an engine in, milliseconds out.

Keys, values and features are made up: what they hold does not change how long they take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from eyas.bench.contenders import now
from eyas.bench.report import Spread
from eyas.bench.results import DraftTime, VerifyTime
from eyas.bench.workloads import random_prompt
from eyas.cache.kv import SlotPools
from eyas.commit import Budget, Commit
from eyas.config import TreeConfig
from eyas.drafters.base import DraftContext, Drafter
from eyas.engine.runner import ModelRunner
from eyas.engine.sampling.draws import Draw, sample
from eyas.engine.sequence import Place, Work
from eyas.engine.sequence import Sequence as Running
from eyas.models.heads.features import FeatureFuser
from eyas.models.target import TargetModel
from eyas.request import NoiseKey, Request
from eyas.tree import DraftTree

CACHED_TOKENS = 160
NEW_TOKENS = 3
NUM_WARM_UPS = 2
NUM_REPEATS = 10
GREEDY = NoiseKey(seed=0)


def time_verify_steps(target: TargetModel, fuser: FeatureFuser | None, batch: int, sizes: Sequence[int]) -> list[VerifyTime]:
    """One time for each number of rows, measured in turn. Less is cached where the context is too short."""
    cached = min(CACHED_TOKENS, target.context_length - max(sizes) - 1)
    room = cached + max(sizes)
    pools = SlotPools(batch * room, target.kv_shapes, fuser.width if fuser else 0, target.dtype, target.device)
    runner = ModelRunner(target, pools, fuser)
    steps = [_verify_step(runner, batch, cached, room, rows) for rows in sizes]
    found = zip(sizes, _in_turn(steps, target.device), strict=True)
    return [VerifyTime(batch, rows, cached, ms) for rows, ms in found]


def time_draft_rounds(drafter: Drafter, width: int, tree: TreeConfig, target: TargetModel, batch: int) -> DraftTime:
    """Rounds of `batch` sessions that commit a few tokens each; width: of the fused features."""
    rounds = NUM_WARM_UPS + NUM_REPEATS
    cached = min(CACHED_TOKENS, target.context_length - (rounds + 1) * NEW_TOKENS - tree.depth)
    commits = [(0, cached, Budget(1, 0))]
    commits += [(cached + i * NEW_TOKENS, NEW_TOKENS, Budget(tree.nodes, tree.depth)) for i in range(rounds)]
    made = iter([[_context(f"{s}", *commit, width, target) for s in range(batch)] for commit in commits])
    drafter.ask(next(made))()
    ms = _in_turn([lambda: drafter.ask(next(made))()], target.device)[0]
    drafter.release([f"{s}" for s in range(batch)])
    return DraftTime(batch, cached, ms)


def _verify_step(runner: ModelRunner, batch: int, cached: int, room: int, rows: int) -> Callable[[], object]:
    tree = DraftTree.chain(random_prompt(runner.target.vocab_size, rows, seed=rows))
    prompt = random_prompt(runner.target.vocab_size, cached, seed=0)
    works = []
    for index in range(batch):
        slots = np.arange(index * room, index * room + cached + rows)
        sequence = Running.start(Request(f"{index}", prompt), Place(0.0, index))
        sequence.tokens.append(tree.tokens[0])
        sequence.extend(slots[:cached])
        works.append(Work(sequence, slots[cached:], cached, tree))
    draws = [Draw(GREEDY, position) for work in works for position in work.drawn]
    return lambda: sample(runner.forward(works), draws).tolist()


def _context(session: str, base: int, count: int, budget: Budget, width: int, target: TargetModel) -> DraftContext:
    tokens = random_prompt(target.vocab_size, count, seed=base)
    num_features = count if base else count - 1
    generator = torch.Generator().manual_seed(base)
    features = torch.randn(num_features, width, generator=generator).to(target.device, target.dtype)
    return Commit(session, 0, base, tokens, features, GREEDY, budget)


def _in_turn(works: Iterable[Callable[[], object]], device: torch.device) -> list[Spread]:
    """Milliseconds of each; a disturbance meets all of them alike. The first turns do not count."""
    turns = [[_milliseconds(work, device) for work in works] for _ in range(NUM_WARM_UPS + NUM_REPEATS)]
    return [Spread.of(times) for times in zip(*turns[NUM_WARM_UPS:], strict=True)]


def _milliseconds(work: Callable[[], object], device: torch.device) -> float:
    started = now(device)
    work()
    return 1e3 * (now(device) - started)
