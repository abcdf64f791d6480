"""The stages of a step add up to the step, and each part gets its own time. Parts move a fake clock."""

from collections.abc import Sequence

from eyas.api.request import Request, SamplingParams
from eyas.bench.timing import STAGES, TimedStep, summarise, timed_stages
from eyas.config import TreeConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.engine.build import assemble_engine
from eyas.engine.engine import Engine
from eyas.models.loading import load_target
from eyas.protocol.tree import DraftTree
from tests.support.tiny import fixed_config

DRAFTING, FORWARD = 7.0, 11.0


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.moment = 0.0

    def now(self) -> float:
        return self.moment

    def move(self, seconds: float) -> None:
        self.moment += seconds


class ChainDrafter(LocalDrafter):
    """Takes DRAFTING seconds to guess one token."""

    needs = DrafterNeeds()

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self._clock.move(DRAFTING)
        return [DraftTree.chain((c.tokens[-1], 3)[: c.budget.max_nodes]) for c in contexts]

    def release(self, sessions: Sequence[str]) -> None:
        pass


def make_engine(target: str, clock: Clock) -> Engine:
    model = load_target(target)
    model.model.register_forward_hook(lambda *_: clock.move(FORWARD))
    engine = assemble_engine(model, None, fixed_config(max_kv_tokens=256), TreeConfig(2, 1, 1), ChainDrafter(clock))
    for name in ("a", "b"):
        engine.submit(Request(name, (5, 6, 7), SamplingParams(8, 0.0, seed=0, ignore_eos=True)))
    return engine


def test_stages_add_up_to_the_step_and_belong_to_their_parts(tiny_target: str) -> None:
    clock = Clock()
    engine = make_engine(tiny_target, clock)
    with timed_stages(engine, clock.now) as marks:
        while engine.has_work:
            started = clock.moment
            engine.step()
            assert marks.steps[-1].seconds == clock.moment - started
    first, second = marks.steps[:2]
    assert (first.prefills, second.prefills) == (True, False)
    assert second.num_sequences == 2
    assert second.stages == {**dict.fromkeys(STAGES, 0.0), "drafts": DRAFTING, "forward": FORWARD}


def test_an_engine_is_unchanged_when_tracing_stops(tiny_target: str) -> None:
    engine = make_engine(tiny_target, Clock())
    before = set(vars(engine)) | set(vars(engine.scheduler)) | set(vars(engine.runner))
    with timed_stages(engine, float) as marks:
        engine.step()
    engine.step()
    assert len(marks.steps) == 1
    assert set(vars(engine)) | set(vars(engine.scheduler)) | set(vars(engine.runner)) == before


def step(num_sequences: int, prefills: bool = False, **stages: float) -> TimedStep:
    return TimedStep(dict.fromkeys(STAGES, 0.0) | stages, num_sequences, prefills)


def test_a_summary_covers_decode_steps_at_full_batch() -> None:
    steps = [
        step(9, prefills=True, forward=50.0),
        step(2, forward=3.0, commit=1.0),
        step(2, forward=5.0, commit=1.0),
        step(1, forward=99.0),
    ]
    found = summarise(steps, waited=("forward",))
    assert (found.num_steps, found.num_sequences) == (2, 2)
    assert found.step_ms.values == (4000.0, 6000.0)
    assert found.stages_ms["forward"] == 4000.0
    assert found.host_share == 0.2
