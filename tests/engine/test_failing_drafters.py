"""A drafter in this process that raises costs the drafts of its step's requests, and nothing else."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from eyas.api.request import Request
from eyas.drafters.base import Draft, LocalDrafter
from eyas.protocol.commit import Commit
from tests.engine.test_equality import PARAMS, make_drafter, make_engine, prompts
from tests.support.methods import CLASSES_OF_DRAFTERS
from tests.support.runs import assert_plain, run
from tests.support.tiers import nightly

FAILS_AT = 3  # calls
DAILY = ("eagle3-ahead", "medusa", "suffix", "lookahead", "dspark+prompt_lookup")


def requests(count: int, name: str = "r", max_tokens: int = 14) -> list[Request]:
    """Sampled requests of different seeds."""
    sampling = replace(PARAMS["sampled"], max_tokens=max_tokens)
    return [Request(f"{name}{i}", tuple(p), replace(sampling, seed=i)) for i, p in enumerate(prompts(count, seed=4))]


def failing(drafter: LocalDrafter, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a call of a drafter fail once; of its trees, all but one are missing where the place is answers."""
    num_calls, right = 0, getattr(drafter, "propose" if place == "answers" else place)

    def fails(argument: Sequence[Any]) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls != FAILS_AT or not argument:
            return right(argument)
        if place == "answers":
            found: list[Draft] = right(argument)
            return found[:1] if len(found) > 1 else []
        raise IndexError("the trie is broken")

    monkeypatch.setattr(drafter, "propose" if place == "answers" else place, fails)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, "propose") if name in DAILY else nightly(name, "propose") for name in CLASSES_OF_DRAFTERS),
        ("eagle3", "request"),
        ("suffix", "answers"),
        ("eagle3", "release"),
    ],
)
def test_a_drafter_that_raises_costs_drafts_only(
    name: str,
    place: str,
    tiny_target: str,
    tiny_head: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafter = make_drafter(name, tiny_target, tiny_head)
    assert isinstance(drafter, LocalDrafter)
    engine = make_engine(drafter, tiny_target, tiny_head, name)
    failing(drafter, place, monkeypatch)
    first, later = requests(3), requests(4, "later", max_tokens=10)
    with caplog.at_level(logging.ERROR):
        chunks = run(engine, first, {60: later})
    assert_plain(tiny_target, (*first, *later), chunks)
    (record,) = caplog.records
    assert "the drafter has failed" in record.getMessage()
    assert record.exc_info
    assert any(chunk.verify_step for chunk in chunks["later0"])


def test_a_request_that_failed_a_drafter_is_not_drafted_again(
    tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make_drafter("eagle3", tiny_target, tiny_head)
    assert isinstance(drafter, LocalDrafter)
    engine = make_engine(drafter, tiny_target, tiny_head)
    seen, released, right = list[str](), list[str](), drafter.propose

    def propose(contexts: Sequence[Commit[Any]]) -> list[Draft]:
        seen.extend(context.session for context in contexts)
        if any(context.session == "r1" for context in contexts):
            raise ValueError("no such token")
        return right(contexts)

    monkeypatch.setattr(drafter, "propose", propose)
    monkeypatch.setattr(drafter, "release", released.extend)
    run(engine, requests(2), {60: requests(1, "other")})
    assert seen.count("r1") == 1
    assert seen.count("other0") > 1
    assert {"r0", "r1"} <= set(released)
