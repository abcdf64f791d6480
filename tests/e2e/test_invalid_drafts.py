"""A draft service whose answers are no trees for their requests is left alone, and changes no token."""

from contextlib import closing

import pytest

from eyas.api.request import Chunk, Request, SamplingParams
from eyas.config import DraftClientConfig, TreeConfig
from eyas.drafters.base import Draft, DraftContext, Drafter, DrafterNeeds
from eyas.engine.engine import Engine
from eyas.models.heads.eagle import load_fuser
from eyas.protocol.commit import ResyncRequired
from eyas.protocol.tree import DraftTree
from eyas.rpc.messages import DrafterInfo, ModelInfo
from eyas.services.verifier.draft_pool import DraftPool
from tests.support.bad_drafters import StatelessDrafter
from tests.support.runs import tokens_of
from tests.support.services.toy_drafting import eventually, serving
from tests.support.tiny import DEMO, build_engine, fixed_config

TARGET, HEAD = str(DEMO / "target"), str(DEMO / "eagle3")
INFO = DrafterInfo(ModelInfo("demo", "f", 4096, 2048), "eagle3", True, False, 256)
REQUEST = Request("r", (0, 282, 659, 276), SamplingParams(max_tokens=200, temperature=0.8, ignore_eos=True, seed=7))


class InvalidDrafter(StatelessDrafter):
    """Answers with trees of tokens outside the vocabulary, or with lengths that no session has."""

    def __init__(self, answers: str) -> None:
        self._answers = answers

    def draft(self, context: DraftContext) -> Draft:
        if self._answers == "trees":
            return DraftTree.chain([context.tokens[-1], INFO.model.vocab_size])
        return ResyncRequired(context.session, context.epoch, 10**6)


def engine_with(drafter: Drafter | None) -> Engine:
    """An engine with one request."""
    fuser = load_fuser(HEAD, TARGET) if drafter else None
    engine = build_engine(TARGET, fuser, "float32", "cpu", fixed_config(max_kv_tokens=1024), TreeConfig(8, 3, 3), drafter)
    engine.submit(REQUEST)
    return engine


def steps(engine: Engine, count: int) -> list[Chunk]:
    return [chunk for _ in range(count) for chunk in engine.step()]


@pytest.mark.parametrize("answers", ["trees", "resyncs"])
def test_invalid_answers_open_the_breaker(answers: str, caplog: pytest.LogCaptureFixture) -> None:
    config = DraftClientConfig(draft_timeout_s=30, breaker_max_failures=3, breaker_reset_s=60)
    with (
        serving(InvalidDrafter(answers), INFO) as address,
        closing(DraftPool(config, DrafterNeeds(features=True))) as pool,
    ):
        pool.assign("r", address)
        engine = engine_with(pool)
        eventually(lambda: pool.can_draft("r"))
        chunks = steps(engine, 16)
        (status,) = pool.status
        assert (status.circuit, status.num_answered) == ("open", 3)
        later = steps(engine, 4)
        assert not any(chunk.verify_step and chunk.verify_step.drafted for chunk in later)
        tokens = tokens_of([*chunks, *later])
        engine.check()
    assert tokens == tokens_of(steps(engine_with(None), len(tokens)))
    dropped = [record for record in caplog.records if "dropped a draft tree" in record.getMessage()]
    assert len(dropped) == (3 if answers == "trees" else 0)
    assert all(vars(record)["rate_limited"] for record in dropped)
