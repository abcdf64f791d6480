"""Draft services start, die and return over real sockets while one request runs; the test steps the engine."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest

from eyas.api.request import Request, SamplingParams
from eyas.config import DraftClientConfig, DraftingConfig, TreeConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.drafters.draft_head import DraftHead
from eyas.engine.engine import Engine
from eyas.models.heads.eagle import load_fuser
from eyas.protocol.commit import ResyncRequired
from eyas.protocol.tree import DraftTree
from eyas.rpc.messages import DrafterInfo, ModelInfo
from eyas.services.local.cluster import free_port
from eyas.services.verifier.draft_pool import DraftPool
from tests.support.services.toy_drafting import eventually, serving
from tests.support.tiny import DEMO, build_engine, fixed_config

TARGET, HEAD = str(DEMO / "target"), str(DEMO / "eagle3")
INFO = DrafterInfo(ModelInfo("demo", "f", 4096, 2048), "eagle3", True, False, 256)
TREE = TreeConfig(8, 3, 3)
PROMPT = (0, 282, 659, 276)
SAMPLING = SamplingParams(max_tokens=200, temperature=0.8, ignore_eos=True, seed=7)


def drafter() -> LocalDrafter:
    return DraftHead(HEAD, "eagle3").build_drafter(TARGET, "float32", "cpu", TREE, DraftingConfig())


@pytest.fixture
def pool() -> Iterator[DraftPool]:
    with closing(
        DraftPool(DraftClientConfig(draft_timeout_s=30, breaker_reset_s=0.05), DrafterNeeds(features=True))
    ) as pool:
        yield pool


class Running:
    """One request in an engine whose drafters are those of `pool`."""

    def __init__(self, pool: DraftPool) -> None:
        self._pool = pool
        self._engine: Engine = build_engine(
            TARGET, load_fuser(HEAD, TARGET), "float32", "cpu", fixed_config(max_kv_tokens=1024), TREE, pool
        )
        self._engine.submit(Request("r", PROMPT, SAMPLING))
        self.token_ids: list[int] = []

    def wait_for_drafter(self) -> None:
        """Wait until the request's drafter is available."""
        eventually(lambda: self._pool.can_draft("r"))

    def drafted(self, num_steps: int) -> int:
        """Run steps; return how many drafted tokens they verify."""
        chunks = [chunk for _ in range(num_steps) for chunk in self._engine.step()]
        self.token_ids += [token for chunk in chunks for token in chunk.token_ids]
        return sum(chunk.verify_step.drafted for chunk in chunks if chunk.verify_step)

    def check(self) -> None:
        """Check the tokens so far against plain decoding."""
        plain = build_engine(TARGET, "", "float32", "cpu", fixed_config(max_kv_tokens=1024), TREE, None)
        plain.submit(Request("plain", PROMPT, SAMPLING))
        expected: list[int] = []
        while len(expected) < len(self.token_ids):
            expected += [token for chunk in plain.step() for token in chunk.token_ids]
        assert self.token_ids == expected
        self._engine.check()


def test_a_restarted_drafter_drafts_for_a_running_request(pool: DraftPool) -> None:
    port = free_port()
    pool.assign("r", f"127.0.0.1:{port}")
    running = Running(pool)
    assert running.drafted(num_steps=4) == 0
    for _ in range(2):
        with serving(drafter(), INFO, port):
            running.wait_for_drafter()
            assert running.drafted(num_steps=6) > 0
        eventually(lambda: not pool.can_draft("r"))
        running.drafted(num_steps=1)
        assert running.drafted(num_steps=4) == 0
    running.check()


def test_a_session_moves_to_another_drafter_for_one_refeed(pool: DraftPool) -> None:
    """The other one gets every committed token once, after it has refused the first commit; and features of as many."""
    other, commits = drafter(), list[tuple[int, int, int]]()
    propose = other.propose

    def counted(contexts: Sequence[DraftContext]) -> list[Draft]:
        commits.extend(
            (context.start_position, len(context.tokens), 0 if context.features is None else len(context.features))
            for context in contexts
        )
        return propose(contexts)

    other.propose = counted  # type: ignore[method-assign]
    with serving(other, INFO) as second:
        with serving(drafter(), INFO) as first:
            pool.assign("r", first)
            running = Running(pool)
            running.wait_for_drafter()
            assert running.drafted(num_steps=12) > 0
        eventually(lambda: not pool.can_draft("r"))
        pool.rebalance([second])
        running.wait_for_drafter()
        assert running.drafted(num_steps=6) > 0
        running.check()
    refused, refeed, *later = commits
    assert refused[0] > 0
    assert refeed[0] == 0
    assert refeed[1] >= refused[0] + refused[1]
    for (start, length, _), (following, *_) in itertools.pairwise([refeed, *later]):
        assert following == start + length, "no token is sent twice"
    assert [num_features for *_, num_features in (refeed, *later)] == [refeed[1] - 1, *(length for _, length, _ in later)]


class Invalid(LocalDrafter):
    """Answers with trees of tokens outside the vocabulary, or with lengths that no session has."""

    def __init__(self, answers: str) -> None:
        self._answers = answers

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        if self._answers == "trees":
            return [DraftTree.chain([context.tokens[-1], INFO.model.vocab_size]) for context in contexts]
        return [ResyncRequired(context.session, context.epoch, 10**6) for context in contexts]

    def release(self, sessions: Sequence[str]) -> None:
        return


@pytest.mark.parametrize("answers", ["trees", "resyncs"])
def test_invalid_answers_open_the_breaker(answers: str, caplog: pytest.LogCaptureFixture) -> None:
    config = DraftClientConfig(draft_timeout_s=30, breaker_max_failures=3, breaker_reset_s=60)
    with serving(Invalid(answers), INFO) as address, closing(DraftPool(config, DrafterNeeds(features=True))) as pool:
        pool.assign("r", address)
        running = Running(pool)
        running.wait_for_drafter()
        running.drafted(num_steps=16)
        [(drafter, _)] = pool.drafters
        assert (drafter.breaker.state, drafter.num_answered) == ("open", 3)
        assert running.drafted(num_steps=4) == 0
        running.check()
    dropped = [record for record in caplog.records if "dropped a draft tree" in record.getMessage()]
    assert len(dropped) == (3 if answers == "trees" else 0)
    assert all(vars(record)["rate_limited"] for record in dropped)
