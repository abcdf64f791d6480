"""The softness s found while serving is the one that the targets' samples follow; it changes drafts and nothing else."""

import math
from collections.abc import Callable

import pytest
import torch

from eyas.config import DraftingConfig, EngineConfig, TreeConfig
from eyas.draft_protocol import Commit, TreeBudget
from eyas.drafters.neural import NeuralDrafter
from eyas.drafters.noise_scale import GRID, NoiseScale
from eyas.drafters.registry import build_drafter, build_fuser
from eyas.drafters.scoring import PerturbedScorer, PlainScorer, make_scorer
from eyas.drafters.tree_growth import Candidates, Expansion, StaticTree, grow_dynamic, grow_static
from eyas.request import NoiseKey, Request, SamplingParams
from tests import reference
from tests.tiny import build_engine, write_small
from tests.tiny_medusa_hydra import tiny_heads

VOCAB, SESSIONS, SHAPE = 24, 20, TreeConfig(40, 3, 4)
CONFIG = DraftingConfig(noise_scale=0)
IDS = 2 * torch.arange(VOCAB)  # of the target's vocabulary

Grow = Callable[[Expansion, TreeConfig], Candidates]


class LevelLogits:
    """An expansion with the same draft logits at every node of a level, and the perturbed log-scores behind them."""

    def __init__(self, scorer: PlainScorer | PerturbedScorer, logits: torch.Tensor, contexts: list[Commit]) -> None:
        """logits [S, L, D]."""
        self.scorer, self.logits = scorer, logits
        single = make_scorer(contexts, DraftingConfig(noise_scale=1.0), logits.shape[1], IDS, NoiseScale(1.0))
        self.perturbed = torch.cat([single.scores(logits[:, None, level], level) for level in range(logits.shape[1])], 1)

    def first(self) -> torch.Tensor:
        return self.scorer.scores(self.logits[:, None, 0], 0)

    def next(self, level: int, parents: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.scorer.scores(self.logits[:, None, level].expand(-1, tokens.shape[1], -1), level)


def serve(
    scale: NoiseScale,
    softness: float,
    rounds: int,
    seed: int,
    expansion_of: type[LevelLogits] = LevelLogits,
    grow: Grow = grow_dynamic,
) -> None:
    """Rounds in which the target draws from softmax(a / softness) at every position."""
    generator = torch.Generator().manual_seed(seed)
    base = 1
    for _ in range(rounds):
        noises = [NoiseKey(int(torch.randint(2**40, (1,), generator=generator)), 1.0) for _ in range(SESSIONS)]
        contexts = [Commit(f"{s}", 0, base - 1, (0,), None, noise, TreeBudget(40, 3)) for s, noise in enumerate(noises)]
        scorer = make_scorer(contexts, CONFIG, SHAPE.num_steps, IDS, scale, scale.grid)
        expansion = expansion_of(scorer, 2 * torch.randn(SESSIONS, SHAPE.num_steps, VOCAB, generator=generator), contexts)
        scale.record_all(contexts, grow_dynamic(expansion, SHAPE), scorer.log_norms, IDS)
        drawn = torch.multinomial(torch.softmax(expansion.perturbed / softness, -1).flatten(0, 1), 1, generator=generator)
        tokens = IDS[drawn].view(SESSIONS, SHAPE.num_steps).tolist()
        scale.update(
            [Commit(f"{s}", 0, base, tuple(row), None, noises[s], TreeBudget(40, 3)) for s, row in enumerate(tokens)]
        )


class OneRow(LevelLogits):
    """The same, said by one row for all nodes of a level, as Medusa's heads do."""

    def next(self, level: int, parents: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return super().next(level, parents[:, :1], tokens[:, :1])


def uneven(expansion: Expansion, shape: TreeConfig) -> Candidates:
    """A tree whose nodes have different numbers of children."""
    paths = ((0,), (1,), (2,), (3,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (0, 1, 1), (0, 1, 2), (2, 0, 0))
    return grow_static(expansion, StaticTree(paths), shape.num_steps)


@pytest.mark.parametrize("softness", [0.5, 0.7, 1.0, 1.5, 2.0])
def test_the_temperature_estimate_converges_on_sampled_data(softness: float) -> None:
    scale = NoiseScale()
    assert scale.value(1.0) == 1.0, "before anything is known"
    serve(scale, softness, rounds=160, seed=int(10 * softness))
    assert abs(GRID.index(scale.value(1.0)) - GRID.index(softness)) <= 1
    assert scale.value(0.5) == scale.value(1.5) == 1.0, "other temperatures have expansion of their own"


@pytest.mark.parametrize("softness", [0.6, 1.75])
@pytest.mark.parametrize("expansion_of", [LevelLogits, OneRow])
@pytest.mark.parametrize("grow", [grow_dynamic, uneven])
def test_the_estimate_converges_for_trees_of_any_shape(grow: Grow, expansion_of: type[LevelLogits], softness: float) -> None:
    scale = NoiseScale()
    serve(scale, softness, 160, int(10 * softness), expansion_of, grow)
    assert abs(GRID.index(scale.value(1.0)) - GRID.index(softness)) <= 1


def test_the_estimate_follows_when_the_samples_change() -> None:
    scale = NoiseScale()
    serve(scale, 0.5, rounds=160, seed=1)
    before = scale.value(1.0)
    serve(scale, 2.0, rounds=700, seed=2)
    assert before <= 0.6
    assert scale.value(1.0) >= 1.5


def test_logprobs_are_those_of_the_unmodified_probs() -> None:
    """Every first sample there is, child or not, at every s: together they have probability 1."""
    noise = NoiseKey(5, 1.0)
    contexts, scale = [Commit("a", 0, 0, (0,), None, noise, TreeBudget(40, 3))], NoiseScale()
    scorer = make_scorer(contexts, CONFIG, SHAPE.num_steps, IDS, scale, scale.grid)
    expansion = LevelLogits(
        scorer, torch.randn(1, SHAPE.num_steps, VOCAB, generator=torch.Generator().manual_seed(3)), contexts
    )
    scale.record_all(contexts, grow_dynamic(expansion, SHAPE), scorer.log_norms, IDS)
    pending = scale._pending["a"]
    for place, s in enumerate(GRID):
        law = torch.softmax(expansion.perturbed[0, 0] / s, -1)
        found = {token: next(pending.tree.log_likelihoods([token], pending.scale_index))[place] for token in IDS.tolist()}
        children = law.topk(SHAPE.top_k).indices.tolist()
        for token in range(VOCAB):
            expected = law[token] if token in children else 1 - law[children].sum()
            assert math.isclose(math.exp(found[2 * token]), float(expected), rel_tol=1e-3, abs_tol=1e-6)


def test_greedy_sessions_and_broken_commits_teach_nothing() -> None:
    scale = NoiseScale()
    for noise, base in ((NoiseKey(0), 1), (NoiseKey(5, 1.0), 3)):
        contexts = [Commit("a", 0, 0, (0,), None, noise, TreeBudget(40, 3))]
        scorer = make_scorer(contexts, CONFIG, SHAPE.num_steps, IDS, scale, scale.grid)
        scale.record_all(
            contexts, grow_dynamic(LevelLogits(scorer, torch.zeros(1, 3, VOCAB), contexts), SHAPE), scorer.log_norms, IDS
        )
        scale.update([Commit("a", 0, base, (4,), None, noise, TreeBudget(40, 3))])
    assert not any(estimate.count for estimate in scale._estimates)
    assert not scale._pending


def test_a_configured_scale_stays() -> None:
    assert NoiseScale.from_config(DraftingConfig(noise_scale=0.8)).fixed == 0.8
    assert NoiseScale.from_config(CONFIG).fixed is None


def head_of(name: str, target: str, head: str) -> str:
    """What a method loads."""
    return {
        "eagle1": f"{head}/eagle1", "eagle3": head, "medusa": tiny_heads("medusa", head), "hydra": tiny_heads("hydra", head),
        "sps": write_small(target),
    }[name]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "medusa", "hydra", "sps"])
def test_outputs_are_the_plain_ones_while_it_is_found(name: str, tiny_target: str, tiny_head: str) -> None:
    """The drafters are random, so that what they score is worth little: s grows."""
    head = head_of(name, tiny_target, tiny_head)
    tree = TreeConfig(12, 3, 4)
    drafter = build_drafter(name, tiny_target, head, "float32", "cpu", tree, DraftingConfig(4096, noise_scale=0))
    assert isinstance(drafter, NeuralDrafter)
    fuser = build_fuser(name, head, tiny_target, "float32", "cpu")
    engine = build_engine(tiny_target, fuser, "float32", "cpu", EngineConfig(max_kv_tokens=2048), tree, drafter)
    requests = [Request(f"{i}", (7, 8, 9 + i), SamplingParams(40, 0.9, seed=i, ignore_eos=True)) for i in range(12)]
    said: dict[str, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for chunk in engine.step():
            said[chunk.request_id] += chunk.token_ids
    for request in requests:
        assert said[request.id] == reference.generate(tiny_target, list(request.prompt_ids), request.sampling)
    assert drafter._scale.value(0.9) > 1
    drafter.check()
