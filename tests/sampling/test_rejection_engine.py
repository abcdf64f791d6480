"""The rule `rejection` through the engine: the target's distribution with drafters that sample, else plain decoding."""

import functools
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from eyas.api.request import Chunk, Request, SamplingParams, StructuredOutputs
from eyas.config import AcceptanceRule, EngineConfig, TreeConfig
from eyas.drafters.base import Drafter, LocalDrafter
from eyas.engine.build import assemble_engine
from eyas.engine.engine import Engine
from eyas.errors import ConfigError
from eyas.protocol.commit import NoiseKey
from eyas.protocol.tree import DraftProbs, SampledProposal
from eyas.text.tokenizer import load_tokenizer
from tests.support import reference
from tests.support.bad_drafters import RandomDrafter
from tests.support.methods import Case
from tests.support.runs import assert_plain, chi_square_is_plausible, outputs_of, run, stats_of, tokens_of
from tests.support.sampling_drafters import BigramDrafter, Disguised, bigram_logits
from tests.support.tiers import nightly
from tests.support.tiny import fixed_config, shared_target, token_without_numbers, write_spelling_tokenizer, write_target

TREE = TreeConfig(num_draft_tokens=12, num_steps=3, top_k=4)
PROMPT = (7, 8, 9)
PARAMS = SamplingParams(max_tokens=20, temperature=0.9, ignore_eos=True)
FILTERED = replace(PARAMS, temperature=1.2, top_k=20, top_p=0.9)
METHODS = ("eagle1", "eagle3", "peagle", "dspark", "dflash", "dflash2", "medusa", "hydra", "sps")
ALL_DRAFTERS = (
    *("chain", "siblings-replaced", "eagle3", "dspark", "sps"),
    *map(nightly, ("siblings", "eagle1", "peagle", "dflash", "dflash2", "medusa", "hydra")),
)
# Whole and filtered probabilities for some; for the others one of them, as the code that filters is the same for all.
DAILY_LAWS = (("eagle3", "whole"), ("siblings", "filtered"), ("siblings-replaced", "whole"), ("dspark", "whole"))
# Daily the contract's tests compare what each of these drafters draws with the probabilities that it states.
NIGHTLY_LAWS = (
    ("eagle3", "filtered"), ("siblings", "whole"), ("chain", "whole"), ("eagle1", "filtered"),
    ("peagle", "filtered"), ("dflash", "filtered"), ("dflash2", "whole"),
    ("medusa", "filtered"), ("hydra", "whole"), ("sps", "filtered"),
)  # fmt: skip
LAWS = (*DAILY_LAWS, *(nightly(*law) for law in NIGHTLY_LAWS))
# Requests whose tokens are counted.
COUNT = 400


def make_drafter(name: str, target: str, head: str) -> LocalDrafter:
    if name in METHODS:
        return Case(name, target, head).drafter(TREE, num_slots=8192, proposal_top_k=10)
    widths = (1, 1, 1) if name == "chain" else (3, 2)
    return BigramDrafter(bigram_logits(target), widths, replacement=name == "siblings-replaced")


def make_engine(
    drafter: Drafter | None, target: str, head: str, rule: AcceptanceRule = "rejection", features: str = "eagle3"
) -> Engine:
    """features: the method whose features are collected."""
    fuser = Case(features, target, head).fuser()
    config = fixed_config(max_kv_tokens=8192, max_num_seqs=256, max_queued_requests=2000, acceptance=rule)
    return assemble_engine(
        shared_target(target, fuser.aux_hidden_state_layers if fuser else ()), fuser, config, TREE, drafter
    )


def engine_of(name: str, target: str, head: str) -> Engine:
    """With the drafter `name`, and the features that it needs."""
    return make_engine(make_drafter(name, target, head), target, head, features=name if name in METHODS else "eagle3")


def requests(count: int, sampling: SamplingParams = PARAMS) -> list[Request]:
    return [Request(f"{i}", (*PROMPT, 3 + i % 40), replace(sampling, seed=2**64 - 1 - i)) for i in range(count)]


def target_rows(target: str, prefixes: list[tuple[int, ...]], params: SamplingParams) -> torch.Tensor:
    with torch.inference_mode():
        logits = reference.load_reference(target)(input_ids=torch.tensor(prefixes)).logits[:, -1]
    rows = torch.tensor([reference.target_probs(row, params) for row in logits], dtype=torch.float64)
    return rows / rows.sum(1, keepdim=True)


@functools.cache
def marginals(target: str, params: SamplingParams) -> list[torch.Tensor]:
    """The probabilities of the first, second and third token after PROMPT."""
    tokens = range(48)
    first = target_rows(target, [PROMPT], params)[0]
    second = target_rows(target, [(*PROMPT, a) for a in tokens], params)
    third = target_rows(target, [(*PROMPT, a, b) for a in tokens for b in tokens], params).view(48, 48, 48)
    pairs = first[:, None] * second
    return [first, pairs.sum(0), torch.einsum("ab,abc->c", pairs, third)]


def counted(chunks: Mapping[str, list[Chunk]], place: int) -> torch.Tensor:
    return torch.bincount(torch.tensor([tokens[place] for tokens in outputs_of(chunks).values()]), minlength=48)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), LAWS)
def test_emitted_tokens_follow_the_target_probs(name: str, kind: str, tiny_target: str, tiny_head: str) -> None:
    """The first token comes from the prefill; the others out of drawn trees, some accepted and some not."""
    params = FILTERED if kind == "filtered" else PARAMS
    engine, count = engine_of(name, tiny_target, tiny_head), COUNT
    asked = [Request(f"{seed}", PROMPT, replace(params, seed=seed, max_tokens=4)) for seed in range(count)]
    chunks = run(engine, asked)
    stats = stats_of(chunks)
    assert count / 20 < stats.num_accepted < stats.num_drafted, "some drafts were accepted, some rejected"
    for place, probs in enumerate(marginals(tiny_target, params)):
        assert chi_square_is_plausible(counted(chunks, place), probs * count), f"token {place}"


@pytest.fixture(scope="module")
def spelling_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny target with a tokenizer of letters, digits and a few longer texts."""
    folder = write_target(tmp_path_factory.mktemp("spelling"))
    write_spelling_tokenizer(folder)
    return str(folder)


@functools.cache
def constrained_marginals(target: str, params: SamplingParams) -> list[torch.Tensor]:
    """Those of three letters or digits and the end, by enumeration; index 48 stands for no token, behind the end."""
    tokenizer = load_tokenizer(target)
    pieces = [tokenizer.decode([token]) for token in range(48)]

    def law(prefixes: list[tuple[int, ...]]) -> torch.Tensor:
        """The probabilities behind each prefix of the output, [P, 49]."""
        rows = torch.zeros(len(prefixes), 49, dtype=torch.float64)
        texts = ["".join(pieces[token] for token in prefix) for prefix in prefixes]
        ended = {i for i, prefix in enumerate(prefixes) if 1 in prefix}
        open_ = [i for i, text in enumerate(texts) if i not in ended and len(text) < 3]
        probs = target_rows(target, [(*PROMPT, *prefixes[i]) for i in open_], params)
        for i, row in zip(open_, probs, strict=True):
            fits = [bool(piece) and (texts[i] + piece).isalnum() and len(texts[i] + piece) <= 3 for piece in pieces]
            rows[i, :48] = row * torch.tensor([fit and token > 2 for token, fit in enumerate(fits)])
            rows[i] /= rows[i].sum().clamp(min=1e-300)  # nothing fits behind a prefix that is not allowed itself
        for i in {*range(len(prefixes))} - {*open_}:
            rows[i, 48 if i in ended else 1] = 1.0
        return rows

    tokens = range(48)
    first = law([()])[0]
    second = law([(a,) for a in tokens])
    third = law([(a, b) for a in tokens for b in tokens]).view(48, 48, 49)
    pairs = first[:48, None] * second
    thirds = torch.einsum("ab,abc->c", pairs[:, :48], third)
    thirds[48] += pairs[:, 48].sum()
    return [first, pairs.sum(0), thirds]


@pytest.mark.slow
@pytest.mark.parametrize("name", [nightly("siblings"), "eagle3"])
def test_constrained_tokens_follow_the_masked_target_probs(name: str, spelling_target: str, tiny_head: str) -> None:
    """`siblings` drafts tokens that the grammar rejects, a head none below the root."""
    engine, count = engine_of(name, spelling_target, tiny_head), 200
    params = replace(PARAMS, max_tokens=5, structured_outputs=StructuredOutputs(regex="[a-z0-9]{3}"))
    asked = [Request(f"{seed}", PROMPT, replace(params, seed=seed)) for seed in range(count)]
    chunks = run(engine, asked)
    stats = stats_of(chunks)
    assert count / 50 < stats.num_accepted < stats.num_drafted, "some drafts were accepted, some rejected"
    for place, probs in enumerate(constrained_marginals(spelling_target, PARAMS)):
        found = [tokens[place] if place < len(tokens) else 48 for tokens in outputs_of(chunks).values()]
        assert chi_square_is_plausible(torch.bincount(torch.tensor(found), minlength=49), probs * count), f"token {place}"


@pytest.mark.slow
def test_a_drafter_with_wrong_proposal_probs_is_detected(tiny_target: str, tiny_head: str) -> None:
    class Greedy(BigramDrafter):
        def _siblings(self, probs: DraftProbs, width: int, seed: int, position: int) -> list[int]:
            return list(probs.ids[:width])

    engine, count = make_engine(Greedy(bigram_logits(tiny_target), (1, 1)), tiny_target, tiny_head), 1000
    asked = [Request(f"{seed}", PROMPT, replace(PARAMS, seed=seed, max_tokens=3)) for seed in range(count)]
    probs = marginals(tiny_target, PARAMS)[1]
    assert not chi_square_is_plausible(counted(run(engine, asked), 1), probs * count)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL_DRAFTERS)
def test_a_batch_gives_greedy_tokens_and_those_of_each_alone(name: str, tiny_target: str, tiny_head: str) -> None:
    greedy = requests(3, replace(PARAMS, temperature=0.0))
    hot = [replace(request, id=f"hot {request.id}") for request in requests(2, replace(PARAMS, max_tokens=10))]
    among = run(engine_of(name, tiny_target, tiny_head), greedy + hot)
    assert_plain(tiny_target, greedy, among)
    for request in hot:  # in an engine of its own, which has no keys of the batch
        alone = run(engine_of(name, tiny_target, tiny_head), [request])
        assert tokens_of(alone[request.id]) == tokens_of(among[request.id])


@pytest.mark.parametrize(
    "sampled",
    [
        None,
        SampledProposal({}),
        SampledProposal({0: DraftProbs((1, 2), (0.5, 0.6))}),
        SampledProposal({0: DraftProbs((1, 1), (0.5, 0.5))}),
        SampledProposal({0: DraftProbs((1, 99), (0.5, 0.5))}),
    ],
    ids=["deterministic", "no probabilities", "too much", "twice", "outside"],
)
def test_a_tree_without_valid_probs_counts_as_no_tree(
    sampled: SampledProposal | None, tiny_target: str, tiny_head: str
) -> None:
    """And without trees, the rule gives the very tokens of plain decoding."""
    chain = make_drafter("chain", tiny_target, tiny_head)
    chunks = run(make_engine(Disguised(chain, sampled=sampled), tiny_target, tiny_head), requests(3))
    assert stats_of(chunks).num_drafted == 0
    assert_plain(tiny_target, requests(3), chunks)


def test_under_match_a_drawn_tree_counts_as_none(tiny_target: str, tiny_head: str) -> None:
    engine = make_engine(make_drafter("chain", tiny_target, tiny_head), tiny_target, tiny_head, "match")
    chunks = run(engine, requests(3))
    assert stats_of(chunks).num_drafted == 0
    assert_plain(tiny_target, requests(3), chunks)


def test_a_drafter_that_cannot_sample_is_refused_at_the_start(tiny_target: str, tiny_head: str) -> None:
    with pytest.raises(
        ConfigError, match=r"RandomDrafter cannot sample trees from its own distribution; set engine\.acceptance to match"
    ):
        make_engine(RandomDrafter(48), tiny_target, tiny_head)


def test_an_unknown_acceptance_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="acceptance is 'typical'; it must be one of match, rejection"):
        EngineConfig(acceptance="typical")  # type: ignore[arg-type]


def test_a_sampling_drafter_does_not_get_the_target_noise(tiny_target: str, tiny_head: str) -> None:
    received: list[NoiseKey] = []

    class Curious(BigramDrafter):
        def propose(self, contexts):  # type: ignore[no-untyped-def]
            received.extend(context.noise for context in contexts)
            return super().propose(contexts)

    run(make_engine(Curious(bigram_logits(tiny_target), (1,)), tiny_target, tiny_head), requests(2))
    assert len({key.seed for key in received}) == 2
    assert not {key.seed for key in received} & {request.sampling.seed for request in requests(2)}
    assert {key.temperature for key in received} == {PARAMS.temperature}


def test_logits_that_are_not_numbers_fail_their_own_request_only(tiny_target: str, tiny_head: str) -> None:
    engine = make_engine(make_drafter("chain", tiny_target, tiny_head), tiny_target, tiny_head)
    engine.submit(Request("bad", (47, 5), replace(PARAMS, seed=0, logprobs=2, prompt_logprobs=1)))
    engine.submit(Request("good", (9, 10), replace(PARAMS, seed=0, max_tokens=3)))
    ends = {}
    with token_without_numbers(engine, 47):
        while engine.has_work:
            ends |= {chunk.request_id: chunk.finish_reason for chunk in engine.step() if chunk.finish_reason}
    assert ends == {"bad": "error", "good": "length"}
