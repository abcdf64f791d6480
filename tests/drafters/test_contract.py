"""One suite for every drafter, local and remote: the contract of eyas.drafters.base."""

import math
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.config import DraftClientConfig, TreeConfig
from eyas.drafters.base import Draft, DraftContext, Drafter, LocalDrafter
from eyas.drafters.neural import NeuralDrafter
from eyas.drafters.sessions import KVLedger, SessionLedger
from eyas.protocol.commit import Commit, KnownLogitBias, NoiseKey, Proposal, ResyncRequired, TreeBudget
from eyas.protocol.tree import DraftTree
from eyas.rpc.messages import DrafterInfo, ModelInfo
from eyas.services.verifier.draft_client import RemoteDrafter
from tests.support.corpora import write_datastore
from tests.support.methods import CASES, Case
from tests.support.services.toy_drafting import eventually, serving

TREE = TreeBudget(max_nodes=10, max_depth=3)
VOCAB, HIDDEN, NUM_WORDS = 48, 32, 3
NOISES = (NoiseKey(0), NoiseKey(2**63 + 5, 0.9), NoiseKey(3, 1.0, 8, 0.9))


LOCAL = (*(name for name in CASES if name.partition("-")[2] in ("", "normed", "prefix", "int8")), "rest+eagle3")
# One of each kind of needs, and a head of blocks: the wire does not know methods.
REMOTE = ("eagle3", "dspark", "sps", "suffix", "lookahead", "eagle3+lookahead")


def build(name: str, target: str, head: str) -> LocalDrafter:
    """A drafter, or two combined, for small trees; its datastore holds the tokens of the sessions here."""
    store = Path(head, "datastore")
    if "rest" in name and not store.exists():
        write_datastore(Path(target), [commit("", 40, seed=seed).tokens for seed in range(7)], store)
    return Case(name, target, head, store).drafter(TreeConfig(16, 4, 3), num_slots=2048)


@pytest.fixture(scope="module", params=[*LOCAL, *(f"remote {name}" for name in REMOTE)])
def shared(request: pytest.FixtureRequest, tiny_target: str, tiny_head: str) -> Iterator[tuple[Drafter, LocalDrafter]]:
    """A drafter for all tests, and the one in this process that works for it or is it."""
    name = str(request.param)
    local = build(name.removeprefix("remote "), tiny_target, tiny_head)
    if not name.startswith("remote "):
        yield local, local
        return
    needs, proposal = local.needs, "sampled" if local.can_sample else "deterministic"
    info = DrafterInfo(ModelInfo("tiny", "f", VOCAB, 256), name, needs.features, needs.samples, HIDDEN, local.can_sample)
    with (
        serving(local, info) as address,
        closing(
            RemoteDrafter(address, needs, DraftClientConfig(draft_timeout_s=30, max_message_tokens=5), proposal)
        ) as remote,
    ):
        eventually(lambda: remote.connected)
        yield remote, local


@pytest.fixture
def drafter(shared: tuple[Drafter, LocalDrafter]) -> Iterator[Drafter]:
    """A drafter without sessions. Released at the end of the test, they leave nothing."""
    drafter, local = shared
    with patch.object(drafter, "request", wraps=drafter.request) as request:
        yield drafter
    drafter.release(sorted({context.session for call in request.call_args_list for context in call.args[0]}))
    ledgers = ledgers_of(local)
    assert ledgers
    eventually(lambda: not any(map(len, ledgers)))
    for ledger in ledgers if drafter is local else ():
        if isinstance(ledger, KVLedger):
            ledger.check()


def ledgers_of(drafter: LocalDrafter) -> list[SessionLedger[Any]]:
    """Its own, and those of the drafters that it combines."""
    own = [value for value in vars(drafter).values() if isinstance(value, SessionLedger)]
    return own + [ledger for side in vars(drafter).get("sides", ()) for ledger in ledgers_of(side)]


def commit(
    session: str,
    end: int,
    base: int = 0,
    seed: int = 0,
    budget: TreeBudget = TREE,
    noise: NoiseKey = NOISES[0],
    epoch: int = 0,
) -> DraftContext:
    """A commit of a session whose tokens and features follow from `seed`. It has few distinct tokens: they repeat."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(3, VOCAB, (NUM_WORDS,), generator=generator)
    tokens = words[torch.randint(NUM_WORDS, (40,), generator=generator)].tolist()
    features = torch.randn(40, HIDDEN, generator=generator)
    new = features[max(base - 1, 0) : end - 1]
    return Commit(session, epoch, base, tuple(tokens[base:end]), new, noise, budget, samples=())


def propose(drafter: Drafter, contexts: list[DraftContext]) -> list[Draft]:
    """Request and collect, as the engine does over two steps."""
    assert all(drafter.can_draft(context.session) for context in contexts)
    return drafter.request(contexts)()


@pytest.mark.parametrize("noise", NOISES)
def test_every_context_gets_a_valid_tree_of_its_own_in_order(drafter: Drafter, noise: NoiseKey) -> None:
    contexts = [commit(f"s{i}", 5 + 7 * i, seed=i, noise=noise) for i in range(4)]
    drafts = propose(drafter, contexts)
    for context, draft in zip(contexts, drafts, strict=True):
        assert isinstance(draft, DraftTree)
        draft.validate(context.tokens[-1], VOCAB, TREE.max_nodes, TREE.max_depth)
        assert draft.num_drafted > 0
    drafter.release([context.session for context in contexts])


@pytest.mark.parametrize("noise", NOISES)
def test_a_tree_depends_on_its_own_session_only(drafter: Drafter, noise: NoiseKey) -> None:
    alone = propose(drafter, [commit("a", 20, noise=noise)])
    among = propose(
        drafter, [commit("x", 33, seed=5), commit("b", 20, noise=noise), commit("y", 4, seed=6, noise=NOISES[1])]
    )
    assert _shape(alone[0]) == _shape(among[1])


def test_a_tree_does_not_depend_on_how_the_commits_were_cut(drafter: Drafter) -> None:
    whole = propose(drafter, [commit("a", 30)])
    base = 0
    for end in (3, 11, 12, 17, 29):
        propose(drafter, [commit("b", end, base, budget=TREE if end % 2 else TreeBudget(1, 0))])
        base = end
    assert _shape(propose(drafter, [commit("b", 30, base)])[0]) == _shape(whole[0])


def test_bookkeeping_gets_the_root_alone(drafter: Drafter) -> None:
    for budget in (TreeBudget(1, 0), TreeBudget(1, 5), TreeBudget(9, 0)):
        context = commit(f"{budget}", 8, budget=budget)
        assert propose(drafter, [context]) == [DraftTree.root_only(context.tokens[-1])]


@pytest.mark.parametrize("proposal", ["deterministic", "sampled"])
def test_banned_tokens_are_never_proposed(drafter: Drafter, proposal: Proposal) -> None:
    if proposal == "sampled" and not drafter.can_sample:
        pytest.skip("the drafter cannot sample")
    free = commit("free", 20, noise=NOISES[1])._replace(proposal=proposal)
    draft = propose(drafter, [free])[0]
    assert isinstance(draft, DraftTree)
    first, deep = (
        set(draft.tokens[1:2]),
        {token for token, depth in zip(draft.tokens, draft.depths, strict=True) if depth > 1},
    )
    bans = [KnownLogitBias(token, -math.inf, 1) for token in first]
    bans += [KnownLogitBias(token, -math.inf, 9) for token in deep] + [KnownLogitBias(47, 0.5, 9)]
    others = propose(drafter, [free._replace(session="bound", logit_biases=tuple(bans)), free._replace(session="other")])
    bound, other = (draft for draft in others if isinstance(draft, DraftTree))
    assert not deep & set(bound.tokens[1:])
    assert not first & {bound.tokens[node] for node in bound.families.get(0, ())}
    assert _shape(other) == _shape(draft)


def test_a_gap_is_refused_and_healed_by_a_resend(drafter: Drafter) -> None:
    propose(drafter, [commit("a", 8)])
    assert propose(drafter, [commit("a", 14, base=10)]) == [ResyncRequired("a", 0, 8)]
    healed = propose(drafter, [commit("a", 14, base=8)])
    assert _shape(healed[0]) == _shape(propose(drafter, [commit("b", 14)])[0])


def test_a_repeated_commit_is_rejected_with_the_committed_length(drafter: Drafter) -> None:
    propose(drafter, [commit("a", 8)])
    propose(drafter, [commit("a", 11, base=8)])
    assert propose(drafter, [commit("a", 11, base=8)]) == [ResyncRequired("a", 0, 11)]


def test_released_and_unknown_sessions_need_a_full_resync(drafter: Drafter) -> None:
    propose(drafter, [commit("a", 8), commit("b", 8)])
    drafter.release(["a", "never seen"])
    assert propose(drafter, [commit("a", 10, base=8), commit("c", 10, base=4)]) == [
        ResyncRequired("a", 0, 0),
        ResyncRequired("c", 0, 0),
    ]
    assert isinstance(propose(drafter, [commit("b", 10, base=8)])[0], DraftTree)


def test_a_new_epoch_starts_without_state(drafter: Drafter) -> None:
    propose(drafter, [commit("a", 8, seed=1)])
    assert propose(drafter, [commit("a", 10, base=8, epoch=1)]) == [ResyncRequired("a", 1, 0)]
    renewed = propose(drafter, [commit("a", 10, epoch=1)])
    assert _shape(renewed[0]) == _shape(propose(drafter, [commit("b", 10)])[0])


def _shape(draft: object) -> tuple[tuple[int, ...], ...]:
    assert isinstance(draft, DraftTree)
    return draft.tokens, draft.parents


def test_a_first_token_alone_is_followed(drafter: Drafter) -> None:
    draft = propose(drafter, [commit("a", 1), commit("b", 9)])[0]
    assert isinstance(draft, DraftTree)
    draft.validate(commit("a", 1).tokens[-1], VOCAB, TREE.max_nodes, TREE.max_depth)
    assert _shape(propose(drafter, [commit("a", 9, base=1)])[0]) == _shape(propose(drafter, [commit("c", 9)])[0])


@pytest.mark.parametrize("noise", NOISES[1:])
def test_a_sampled_proposal_follows_its_stated_probs(drafter: Drafter, noise: NoiseKey) -> None:
    if not drafter.can_sample:
        pytest.skip("the drafter cannot sample")
    contexts = [
        commit(f"s{i}", 5 + 7 * i, seed=i, noise=noise)._replace(proposal=proposal)
        for i, proposal in enumerate(("sampled", "deterministic", "sampled"))
    ]
    drafts = propose(drafter, contexts)
    for context, draft in zip(contexts, drafts, strict=True):
        assert isinstance(draft, DraftTree)
        draft.validate(context.tokens[-1], VOCAB, TREE.max_nodes, TREE.max_depth)
        assert draft.num_drafted > 0
        assert (draft.sampled is not None) == (context.proposal == "sampled")
        alone = propose(drafter, [context._replace(session=f"{context.session} alone")])
        assert _shape(alone[0]) == _shape(draft)


@pytest.mark.parametrize("proposal", ["deterministic", "sampled"])
def test_features_that_are_no_numbers_cost_one_tree(drafter: Drafter, proposal: Proposal) -> None:
    if not drafter.needs.features or (proposal == "sampled" and not drafter.can_sample):
        pytest.skip("the drafter has no features, or cannot sample")
    good, bad = (commit(name, 20, noise=NOISES[2])._replace(proposal=proposal) for name in ("good", "bad"))
    assert bad.features is not None
    drafts = propose(drafter, [bad._replace(features=torch.full_like(bad.features, torch.nan)), good])
    assert isinstance(drafts[0], DraftTree)
    drafts[0].validate(bad.tokens[-1], VOCAB, TREE.max_nodes, TREE.max_depth)
    assert _shape(drafts[1]) == _shape(propose(drafter, [good._replace(session="alone")])[0])
    after = propose(drafter, [commit("bad", 24, base=20), commit("good", 24, base=20)])
    assert all(isinstance(draft, DraftTree) for draft in after), "both sessions are known still"


# Methods whose checkpoints have rows for the tokens that they draft, and the names of these tensors.
OUTPUTS = {
    "eagle3": r"lm_head\.weight", "peagle": r"lm_head\.weight", "dspark": r"markov_head\.markov_w2\.weight",
    "dspark-rnn": r"markov_head\.markov_w2\.weight", "dspark-reduced": r"lm_head\.weight", "medusa": r"\d\.2\.weight",
    "hydra": r"hydra_lm_head\.\d\.weight", "sps": r"lm_head\.weight",
    "dflash2": r"candidate_selector\.successor_codebook",
}  # fmt: skip


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", OUTPUTS)
def test_a_token_whose_logits_are_no_numbers_is_not_drafted(
    name: str, noise: NoiseKey, tiny_target: str, tiny_head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of the output layer is broken, as if its memory were; the others are drafted."""
    for module in ("checkpoint", "pass_checks"):  # a broken file is refused
        monkeypatch.setattr(f"eyas.models.{module}.is_finite", lambda tensor: True)
    case, shape = Case(name, tiny_target, tiny_head), TreeConfig(16, 4, 3)
    whole = case.drafter(shape)
    assert isinstance(whole, NeuralDrafter)
    draft = whole.propose([commit("a", 20, noise=noise)])[0]
    assert isinstance(draft, DraftTree)
    token = draft.tokens[1]
    folder = shutil.copytree(case.folder, tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    broken = [key for key in tensors if re.fullmatch(OUTPUTS[name], key)]
    for key in broken:
        tensors[key][whole.draft_ids.tolist().index(token)] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    drafter = replace(case, own_folder=str(folder)).drafter(shape)
    for proposal in ("deterministic", "sampled"):
        context = commit(proposal, 20, noise=noise)._replace(proposal=proposal)
        draft = drafter.propose([context])[0]
        assert isinstance(draft, DraftTree)
        draft.validate(context.tokens[-1], VOCAB, TREE.max_nodes, TREE.max_depth)
        assert draft.num_drafted > 0
        assert token not in draft.tokens[1:]


def test_the_lowest_temperatures_draft_as_others(drafter: Drafter) -> None:
    noises = [NoiseKey(3, temperature, top_k) for temperature in (5e-324, 1e-30, 1e-7) for top_k in (0, 8)]
    for draft in propose(drafter, [commit(f"{i}", 20, noise=noise) for i, noise in enumerate(noises)]):
        assert isinstance(draft, DraftTree)
        draft.validate(draft.tokens[0], VOCAB, TREE.max_nodes, TREE.max_depth)
        assert draft.num_drafted > 0
