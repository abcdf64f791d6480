"""A step waits for the device once, whatever its requests ask for. Paths found on the device equal those of the host."""

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.api.request import Chunk, Request
from eyas.cache.kv_cache import KVCache
from eyas.config import AcceptanceRule
from eyas.device.transfer import download
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.engine.engine import Engine
from eyas.kernels.arguments import Draws
from eyas.models.backends.attention_metadata import Tiling
from eyas.models.backends.cuda import KernelBackend
from eyas.models.heads.eagle import load_fuser
from eyas.models.inputs import PackedInputs, Segment
from eyas.models.target import TargetModel, TargetOutput
from eyas.protocol.tree import DraftProbs, DraftTree, SampledProposal
from eyas.sampling.acceptance import DrawnRows, LogitRows, StepLogits, StepOutputs, VerifyOutput, pack_trees
from eyas.sampling.logit_rules import LogitRules
from eyas.sampling.logprobs import accepted_paths
from eyas.sampling.rejection import SiblingVerdicts
from eyas.sampling.verify import accept_drafts, verify
from tests.sampling.test_rejection_engine import METHODS, PARAMS, make_drafter, make_engine
from tests.support.bad_drafters import RandomDrafter
from tests.support.devices.device_syncs import Waits, unwatched, watched
from tests.support.devices.launches import FREE
from tests.support.strategies import accept, trees, walk
from tests.support.tiers import tiered

GREEDY = replace(PARAMS, temperature=0.0)
# Calls of Python functions that each sequence may add to a step.
MAX_CALLS = 19
ASKED = (
    PARAMS,
    GREEDY,
    replace(PARAMS, logprobs=3),
    replace(GREEDY, logprobs=1, prompt_logprobs=2),
    replace(PARAMS, top_k=9, top_p=0.9, min_p=0.02, repetition_penalty=1.3, frequency_penalty=0.2, logprobs=0),
    replace(GREEDY, logit_bias=((9, 2.0),), min_tokens=5, bad_token_ids=((3, 4), (5,)), ignore_eos=False),
)


def run(engine: Engine, more: int = 3) -> list[list[str]]:
    """The waits of each step with requests that ask for everything, alone and side by side. Each has `more` tokens more."""
    forward, noted = engine.runner.backend.forward, list[list[str]]()
    engine.runner.backend.forward = unwatched(forward)  # type: ignore[method-assign]
    for i, sampling in enumerate(ASKED):
        engine.submit(Request(f"{i}", tuple(range(3, 10 + i)), replace(sampling, seed=i, max_tokens=8 + more * i)))
    step = watched(engine.step, noted)
    while engine.has_work:
        step()
    return noted


@pytest.mark.parametrize(("name", "rule"), [("siblings", "rejection"), ("chain", "rejection"), ("random", "match")])
def test_a_step_waits_for_the_device_once(name: str, rule: AcceptanceRule, tiny_target: str, tiny_head: str) -> None:
    drafter = RandomDrafter(48) if name == "random" else make_drafter(name, tiny_target, tiny_head)
    drafter.propose = unwatched(drafter.propose)  # type: ignore[method-assign]
    noted = run(make_engine(drafter, tiny_target, tiny_head, rule))
    assert len(noted) > 10
    assert all(names == ["cpu"] for names in noted)


class ChainDrafter(LocalDrafter):
    """Trees that are chains of wrong guesses."""

    needs = DrafterNeeds(features=True)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [DraftTree.chain((context.tokens[-1], *[2] * context.budget.max_depth)) for context in contexts]

    def release(self, sessions: Sequence[str]) -> None:
        pass


class Operations(TorchDispatchMode):
    """Notes operations of torch that a GPU would launch."""

    def __init__(self, noted: list[str]) -> None:
        super().__init__()
        self._noted = noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) not in FREE:
            self._noted.append(name)
        return func(*args, **(kwargs or {}))


class Uploads(TorchFunctionMode):
    """Notes copies to the device."""

    def __init__(self, noted: list[str]) -> None:
        super().__init__()
        self._noted = noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "to" and "non_blocking" in (kwargs or {}):
            self._noted.append("upload")
        return func(*args, **(kwargs or {}))


class PackedForKernels:
    """A backend that packs as one for a GPU does, and computes plainly."""

    def __init__(self, target: TargetModel, noted: list[str]) -> None:
        self._launched, self._noted = KernelBackend(target, Tiling(2, 2, 100), 0), noted
        self._segments: Sequence[Segment] = ()

    def pack(self, segments: Sequence[Segment]) -> PackedInputs:
        self._segments = segments
        return self._launched.pack(segments)

    def forward(self, packed: PackedInputs, kv_cache: KVCache) -> TargetOutput:
        self._noted.append("pass")
        target = self._launched.target
        return target.forward(target.pack(self._segments), kv_cache)


def keep_features(engine: Engine, width: int) -> None:
    """Fuse the states of each pass in the pass, as on a GPU."""
    kv_cache = engine.runner.kv_cache
    kv_cache.features = kv_cache.features.new_zeros(kv_cache.scratch + 1, width)
    kv_cache.state_layers = ()


@pytest.mark.parametrize("num_requests", [1, 9])
def test_little_stands_between_results_and_the_next_pass(
    num_requests: int, tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features of all sessions are gathered at once, and a pass is uploaded in one copy: whatever the batch."""
    drafter = RandomDrafter(48)
    drafter.needs = DrafterNeeds(features=True)
    drafter.propose = unwatched(drafter.propose)  # type: ignore[method-assign]
    engine, noted = make_engine(drafter, tiny_target, tiny_head, "match"), list[str]()
    engine.runner.backend = PackedForKernels(engine.target, noted)
    keep_features(engine, load_fuser(tiny_head, tiny_target).width)

    def noted_download(*tensors: torch.Tensor) -> list[npt.NDArray[np.float64]]:
        found = download(*tensors)
        noted.append("results")
        return found

    monkeypatch.setattr("eyas.sampling.verify.download", noted_download)
    for i in range(num_requests):
        engine.submit(Request(f"{i}", tuple(range(3, 10)), replace(GREEDY, seed=i, max_tokens=30)))
    with Operations(noted), Uploads(noted):
        while engine.has_work:
            engine.step()
    steps = " ".join(noted).split("results")[1:-1]
    between = {tuple(step.split("pass")[0].split()) for step in steps}
    packed, features = ("upload", "_to_copy"), ("upload", "index_select")
    assert {(*features, *packed)} <= between <= {(*features, *packed), packed}


def calls_of_a_step(engine: Engine, drafter: Any, num_requests: int) -> int:
    """The most calls of Python functions of a step in which all decode, without drafter and pass."""
    counts, is_paused = [0], [False]

    def count(frame: object, event: str, arg: object) -> None:
        counts[-1] += event == "call" and not is_paused[0]

    def unnoted(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            is_paused[0] = True
            result = work(*args)
            is_paused[0] = False
            return result

        return run

    drafter.propose, engine.runner.backend.forward = (  # type: ignore[method-assign]
        unnoted(work) for work in (drafter.propose, engine.runner.backend.forward)
    )
    for i in range(num_requests):
        engine.submit(Request(f"{i}", tuple(range(3, 10)), replace(GREEDY, seed=i, max_tokens=100)))
    chunks: Sequence[Chunk] = ()
    for _ in range(12):
        counts.append(0)
        gc.disable()  # a collection calls what other tests, and hypothesis, have registered
        sys.setprofile(count)
        try:
            chunks = engine.step(partial(list, chunks))  # read under the pass, as AsyncEngine reads them
        finally:
            sys.setprofile(None)
            gc.enable()
    return max(counts[4:])


def test_a_sequence_adds_few_calls_to_a_step(tiny_target: str, tiny_head: str) -> None:
    """The host's work grows with the calls that each sequence needs in each step."""
    calls = []
    for num_requests in (4, 12):
        drafter = ChainDrafter()
        engine = make_engine(drafter, tiny_target, tiny_head, "match")
        engine.runner.backend = PackedForKernels(engine.target, [])
        calls.append(calls_of_a_step(engine, drafter, num_requests))
    assert calls[1] - calls[0] <= 8 * MAX_CALLS, calls


@pytest.mark.slow
@pytest.mark.parametrize("method", tiered(METHODS, ("eagle3", "dspark", "hydra", "sps")))
def test_a_round_of_drafts_waits_once_for_each_way_to_propose(
    method: str, tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, noted = make_drafter(method, tiny_target, tiny_head), list[list[str]]()
    if method == "sps":
        monkeypatch.setattr(TargetModel, "forward", unwatched(TargetModel.forward))
    ways: list[int] = []
    propose = watched(drafter.propose, noted)

    def counted(contexts):  # type: ignore[no-untyped-def]
        ways.append(len({context.proposal for context in contexts if context.budget.wants_tree}))
        return propose(contexts)

    drafter.propose = counted  # type: ignore[method-assign]
    run(make_engine(drafter, tiny_target, tiny_head, features=method), more=1)
    assert max(ways) == 2
    assert [len(names) for names in noted] == ways
    assert {name for names in noted for name in names} <= {"cpu", "tolist"}


def on_host(
    found: Sequence[DraftTree], tokens: list[int], verdicts: SiblingVerdicts
) -> tuple[list[list[int]], list[list[int]]]:
    starts = np.cumsum([0, *map(len, found)])[:-1].tolist()
    rows, emitted = download(*accepted_paths(dict(zip(starts, found, strict=True)), torch.tensor(tokens), verdicts))
    own = rows.astype(int) - np.array(starts)[:, None]
    return own.tolist(), emitted.astype(int).tolist()


def rows_of(found: Sequence[DraftTree | None], positions: Sequence[int] = ()) -> DrawnRows:
    """The drawn rows of requests with these trees. positions: at which roots draw."""
    packed = pack_trees([tree for tree in found if tree is not None])
    places = np.array([number for number, tree in enumerate(found) if tree is not None])
    at = packed.depths + np.repeat(positions or [1] * len(places), packed.nodes.counts)
    keys = [Request(f"{number}", (3,), replace(PARAMS, seed=number)).noise_key for number in places.tolist()]
    return DrawnRows(packed, places, len(found), Draws(keys, at, packed.nodes.counts))


@given(st.lists(trees(vocab_size=4), min_size=2, max_size=4), st.data())
def test_a_step_accepts_what_the_plain_walk_does(found: list[DraftTree], data: st.DataObject) -> None:
    """Token 4 stands for logits that are NaN, which end a request only on its path."""
    total = sum(map(len, found))
    tokens = data.draw(st.lists(st.integers(0, data.draw(st.integers(3, 4))), min_size=total, max_size=total))
    drawn = StepLogits(torch.zeros(0, 4), torch.tensor(tokens), (True,) * len(found))
    whole = [found[0], None, *found[1:]]
    outputs = verify((), rows_of(whole), drawn, LogitRules(frozenset()))
    batch = [LogitRows(Request(f"{i}", (3,)), (3,), tree) for i, tree in enumerate(whole)]
    of_rules = verify(batch, rows_of(whole), replace(drawn, is_drawn=(True,) * len(batch)), LogitRules(frozenset()))
    assert list(outputs) == list(of_rules), "requests that ask for more than tokens change nothing of what others get"
    start = 0
    for tree, output, levels in zip(whole, outputs, outputs.levels.tolist(), strict=True):
        if tree is None:
            assert output == VerifyOutput(None)
            continue
        samples = tuple(tokens[start : start + len(tree)])
        start += len(tree)
        assert output.accepted == accept(tree, samples)
        assert output.samples == samples
        assert bool(output.details.error) == (output.accepted.tokens[-1] == 4)
        assert levels == tree.depth


@given(st.lists(trees(vocab_size=4), min_size=1, max_size=4), st.integers(0, 99))
def test_all_trees_at_once_draw_as_each_alone(found: list[DraftTree], seed: int) -> None:
    logits = torch.randn(sum(map(len, found)), 4, generator=torch.Generator().manual_seed(seed))
    at = [3 + 5 * number for number in range(len(found))]
    rows, start = rows_of(found, at), 0
    together = verify((), rows, StepLogits(logits), LogitRules(frozenset()))
    for number, tree in enumerate(found):
        own, end = rows_of([*[None] * number, tree], at[number : number + 1]), start + len(tree)
        alone = verify((), own, StepLogits(logits[start:end]), LogitRules(frozenset()))
        assert alone[number] == together[number]
        start = end


@given(st.lists(trees(), min_size=1, max_size=3), st.lists(trees(), min_size=1, max_size=3), st.integers(0, 5))
def test_outputs_of_two_parts_are_those_of_one(first: list[DraftTree], second: list[DraftTree], seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = []
    for found in (first, second):
        samples = rng.integers(0, 8, sum(map(len, found)))
        tokens = StepLogits(torch.zeros(0, 8), torch.from_numpy(samples), (True,) * len(found))
        parts.append(verify((), rows_of(found), tokens, LogitRules(frozenset())))
    joined = StepOutputs.joined(*parts)
    assert list(joined) == [*parts[0], *parts[1]]


@given(st.lists(trees(vocab_size=3), min_size=1, max_size=4), st.data())
def test_paths_on_host_and_device_equal_the_walk(found: list[DraftTree], data: st.DataObject) -> None:
    """Some trees follow the rule `match`, the others `rejection`."""
    total = sum(map(len, found))
    tokens = data.draw(st.lists(st.integers(0, 4), min_size=total, max_size=total))
    tried = data.draw(st.lists(st.booleans(), min_size=len(found), max_size=len(found)))
    probs = DraftProbs((0, 1, 2), (0.5, 0.3, 0.2))
    starts = np.cumsum([0, *map(len, found)])[:-1].tolist()
    drawn = [tree.with_sampled(SampledProposal(dict.fromkeys(tree.families, probs), True)) for tree in found]
    held = {start: tree for start, tree, yes in zip(starts, drawn, tried, strict=True) if yes and tree.families}
    width = max((len(family) for tree in held.values() for family in tree.families.values()), default=0)
    rows = [[data.draw(st.integers(0, 1)) for _ in range(width)] + [7] for tree in held.values() for _ in tree.families]
    verdicts = SiblingVerdicts(held, torch.tensor(rows, dtype=torch.int64).reshape(-1, width + 1))
    walked, emitted = on_host(found, tokens, verdicts)
    everything = np.array(rows, np.int64).reshape(-1, width + 1)
    outputs = accept_drafts(rows_of(found), np.array(tokens), verdicts, everything, np.arange(total))
    lines, columns = iter(rows), zip(starts, found, walked, emitted, outputs, strict=True)
    for start, tree, path, new_tokens, output in columns:
        own, passed = tokens[start : start + len(tree)], [False] * len(tree)
        for node, children in tree.families.items() if start in held else ():
            *family, own[node] = next(lines)
            for child, verdict in zip(children, family, strict=False):
                passed[child] = verdict == 1
        expected = walk(tree, passed, own) if start in held else accept(tree, own)
        assert output.accepted == expected
        length = len(expected.path)
        assert tuple(path[:length]) == expected.path
        assert set(path[length:]) <= {expected.path[-1]}
        assert tuple(new_tokens[:length]) == expected.tokens


def test_a_wait_for_the_device_is_recorded() -> None:
    x, mask = torch.arange(4), torch.tensor([True, False, True, False])
    ways = [lambda: x[mask], lambda: x.tolist(), lambda: int(x[0]), lambda: x[[0, 1]], lambda: torch.nonzero(x)]
    ways += [
        lambda: x.repeat_interleave(x),
        lambda: torch.tensor([1], device=x.device),
        lambda: x.to(x.device),
        lambda: bool(x[0]),
        lambda: mask.__setitem__(x, True),
    ]
    for way in ways:
        with Waits() as waits:
            way()
        assert len(waits.names) == 1
    with Waits() as waits:
        x[x].masked_fill(mask, 3).to(x.device, non_blocking=True).repeat_interleave(2)
        mask[x] = mask.new_full((), True)
        mask[1:] = False
    assert waits.names == []
