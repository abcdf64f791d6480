"""A cached prefix is as good as a computed one: the same tokens, the same features, the same draft trees."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import pytest
import torch

from eyas.api.request import Request, SamplingParams
from eyas.drafters.base import Draft, DraftContext, LocalDrafter
from eyas.engine.engine import Engine
from tests.engine.test_equality import BATCHES, GREEDY, PARAMS, make_drafter, make_engine, prompts
from tests.support import reference
from tests.support.bad_drafters import DrafterAround
from tests.support.runs import assert_plain, run, tokens_of
from tests.support.tiny import token_without_numbers

SHARED = prompts(1, seed=9)[0]


class RecordingDrafter(DrafterAround):
    """Records its input and its replies."""

    def __init__(self, drafter: LocalDrafter) -> None:
        super().__init__(drafter)
        self.contexts: list[DraftContext] = []
        self.drafts: list[Draft] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        drafts = super().propose(contexts)
        self.contexts += contexts
        self.drafts += drafts
        return drafts


def num_cached(chunks: Sequence[object]) -> int:
    return sum(chunk.num_cached for chunk in chunks)  # type: ignore[attr-defined]


def family(count: int, samplings: Sequence[SamplingParams] = (GREEDY,)) -> list[Request]:
    """Requests whose prompts begin alike; they take the samplings in turn."""
    return [
        Request(f"r{i}", (*SHARED, *tail[: 3 * i]), replace(sampling, seed=i, max_tokens=14))
        for i, (tail, sampling) in enumerate(zip(prompts(count, seed=4), cycle(samplings), strict=False))
    ]


@pytest.mark.parametrize(
    ("name", "kinds"), [("eagle3", "greedy"), ("eagle3", "mixed"), ("random", "mixed"), ("none", "mixed")]
)
def test_requests_with_a_cached_prefix_equal_the_plain_loop(name: str, kinds: str, tiny_target: str, tiny_head: str) -> None:
    engine = make_engine(make_drafter(name, tiny_target, tiny_head), tiny_target, tiny_head, max_prefill_tokens=7)
    first, second, *others = family(6, BATCHES[kinds])
    chunks = run(engine, [first])
    chunks |= run(engine, [second, *others[:2]], {3: others[2:]})
    assert_plain(tiny_target, (first, second, *others), chunks)
    assert num_cached(chunks[first.id]) == 0
    assert all(num_cached(chunks[r.id]) >= len(SHARED) - 1 for r in (second, *others))


@pytest.mark.parametrize("name", ["eagle3", "none"])
def test_turns_of_a_conversation_equal_the_plain_loop(name: str, tiny_target: str, tiny_head: str) -> None:
    engine = make_engine(make_drafter(name, tiny_target, tiny_head), tiny_target, tiny_head)
    history: list[int] = []
    for turn in range(4):
        prompt = [*history, *prompts(1, seed=turn)[0][:12]]
        request = Request(f"{turn}", tuple(prompt), replace(PARAMS["sampled"], seed=turn, max_tokens=15), session="s")
        chunks = run(engine, [request])[request.id]
        assert tokens_of(chunks) == reference.generate(tiny_target, prompt, request.sampling)
        assert num_cached(chunks) == max(len(history) - 1, 0)
        history = [*prompt, *tokens_of(chunks)]


def test_cached_and_computed_prefixes_send_equal_drafter_input(tiny_target: str, tiny_head: str) -> None:
    request = family(3)[2]
    recorded: list[RecordingDrafter] = []
    for before in ([], [family(1)[0]], [request]):
        recorder = RecordingDrafter(make_drafter("eagle3", tiny_target, tiny_head))  # type: ignore[arg-type]
        engine = make_engine(recorder, tiny_target, tiny_head, max_prefill_tokens=7)
        run(engine, [replace(r, id="before") for r in before])
        recorder.contexts.clear()
        recorder.drafts.clear()
        chunks = run(engine, [request])[request.id]
        assert (num_cached(chunks) > 0) == bool(before)
        recorded.append(recorder)
    cold, *warm = map(reported, recorded)
    assert all(trees == cold[0] for trees, _ in warm)
    for _, features in warm:
        torch.testing.assert_close(features, cold[1], rtol=1e-4, atol=1e-5)


def reported(recorder: RecordingDrafter) -> tuple[list[Draft], torch.Tensor]:
    """The trees of a request, and all features in order; every position exactly once."""
    base = 0
    for context in recorder.contexts:
        assert (context.epoch, context.start_position) == (0, base)
        base = context.committed_length
    features = torch.cat([c.features for c in recorder.contexts if c.features is not None])
    assert len(features) == base - 1
    trees = [
        (d.tokens, d.parents, d.sampled)
        for d, c in zip(recorder.drafts, recorder.contexts, strict=True)
        if c.budget.wants_tree
    ]  # type: ignore[type-var]
    return trees, features  # type: ignore[return-value]


def test_rejected_rows_never_enter_the_cache(tiny_target: str, tiny_head: str) -> None:
    used = make_engine(make_drafter("random", tiny_target, tiny_head), tiny_target, tiny_head)
    request = Request("a", tuple(SHARED), replace(GREEDY, seed=0, max_tokens=30))
    tokens = [*SHARED, *tokens_of(run(used, [request])["a"])]
    fresh = make_engine(None, tiny_target, tiny_head)
    run(fresh, [Request("a", tuple(tokens), replace(GREEDY, seed=0, max_tokens=1))])
    for pools in zip(*(contents(engine, tokens[:-1]) for engine in (used, fresh)), strict=True):
        torch.testing.assert_close(*pools, rtol=1e-4, atol=1e-5)


def contents(engine: Engine, tokens: list[int]) -> list[torch.Tensor]:
    """Keys, values and features that the cache holds for tokens; it must hold all of them."""
    cache, pools = engine.scheduler.cache, engine.runner.kv_cache
    prefix = cache.find(torch.tensor(tokens).numpy())
    assert len(prefix.slots) == len(tokens)
    cache.release(prefix, 0.0)
    return [pool[prefix.slots] for pool in (*pools.keys, *pools.values, pools.features)]


def test_a_failed_request_leaves_nothing_in_the_prefix_cache(tiny_target: str, tiny_head: str) -> None:
    engine = make_engine(None, tiny_target, tiny_head)
    with token_without_numbers(engine, 47):
        chunks = run(engine, [Request("bad", (47, 5, 6), replace(GREEDY, seed=0))])
    assert chunks["bad"][-1].finish_reason == "error"
    assert (engine.scheduler.cache.num_cached, engine.load.free_kv_tokens) == (0, 1024)
