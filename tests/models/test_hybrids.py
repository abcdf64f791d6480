"""Targets with recurrent layers: states follow chunks and accepted paths, and the tests see what would go wrong."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.arrays import NO_ROWS, Ints
from eyas.cache.states import START, StateStep
from eyas.config import DraftingConfig, DraftModelConfig
from eyas.drafters.draft_model import ModelDrafter
from eyas.engine.build import assemble_engine
from eyas.errors import ConfigError
from eyas.models import recurrent_rows
from eyas.models.backends.attention_metadata import Tiling
from eyas.models.backends.base import ForwardBackend
from eyas.models.backends.cuda import KernelBackend, check_kernels, why_no_kernel
from eyas.models.inputs import Segment
from eyas.models.loading import load_target
from eyas.models.target import TargetModel
from eyas.protocol.tree import DraftTree
from tests.models.test_more_families import NODES, SLOTS, TREE
from tests.models.test_target import expected, make_kv_cache, run, segment
from tests.support.families import config_of, write_model
from tests.support.family_configs import HYBRIDS
from tests.support.tiers import nightly, tiered
from tests.support.tiny import fixed_config

PROMPT = np.random.default_rng(3).integers(3, 48, 150).tolist()
# One of each kind of recurrence; the others run nightly.
DAILY = ("falcon_h1", "jamba", "kimi_linear", "lfm2", "qwen3_5_text")
EACH = tiered(HYBRIDS, DAILY)


@pytest.fixture(scope="module", params=EACH)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    kind = request.param
    return write_model(tmp_path_factory.mktemp(kind), config_of(kind, **HYBRIDS[kind]))


@pytest.fixture(scope="module")
def target(folder: str) -> TargetModel:
    return load_target(folder)


class Turns:
    """A sequence whose passes take turns between two rows of the pools, and between the halves of the stash."""

    def __init__(self, target: TargetModel, tokens: Sequence[int], backend: ForwardBackend | None = None) -> None:
        self.backend = backend or target
        self.tokens = list(tokens)
        self.kv_cache = make_kv_cache(target)
        self.slots: Ints = SLOTS[:0]
        self.spare: Ints = SLOTS[200:]
        self.row = START
        self.pending = NO_ROWS
        self.stash = 8

    def prompt(self, count: int, marks: tuple[tuple[int, int], ...] = ()) -> torch.Tensor:
        """Logits of the next tokens."""
        start = len(self.slots)
        own = SLOTS[start : start + count]
        prefix = self.slots
        step = self._step(-1)._replace(marks=marks)
        (logits,) = self.run([segment(self.tokens[start : start + count], start, own, prefix, step)])
        self.slots = np.concatenate([prefix, own])
        self.pending = NO_ROWS
        return logits

    def tree(self, path: Sequence[int]) -> torch.Tensor:
        """Logits of the nodes of a tree after the tokens. `path` is accepted."""
        start = len(self.slots)
        own, self.spare = self.spare[: len(NODES)], self.spare[len(NODES) :]
        self.stash = 8 - self.stash
        rows = np.arange(len(NODES))
        fields = (np.array(NODES.tokens), start + np.array(NODES.depths), own, self.slots, NODES.ancestor_mask(), rows)
        (logits,) = self.run([Segment(*fields, states=self._step(self.stash))])
        self.slots = np.concatenate([self.slots, own[list(path)]])
        self.tokens += [NODES.tokens[node] for node in path]
        self.pending = self.stash + np.array(path)
        return logits

    def run(self, segments: list[Segment]) -> list[torch.Tensor]:
        """Logits of each segment."""
        logits = self.backend.forward(self.backend.pack(segments), self.kv_cache).logits
        return list(logits.split([len(s.logits_indices) for s in segments]))

    def _step(self, stash: int) -> StateStep:
        read = self.row
        self.row = 1 if read != 1 else 2
        return StateStep(read, self.row, self.pending, stash)


def check_nodes(logits: torch.Tensor, folder: str, tokens: Sequence[int]) -> None:
    for node in (5, 6, 1):  # every other node is on one of their paths
        path = NODES.path(node)
        whole = expected(folder, [*tokens, *(NODES.tokens[one] for one in path)])[-len(path) :]
        torch.testing.assert_close(logits[list(path)], whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sizes", [(1, 3, 63, 64, 19), nightly((65, 2, 83))])
def test_chunks_of_any_size_equal_one_pass(sizes: tuple[int, ...], target: TargetModel, folder: str) -> None:
    sequence = Turns(target, PROMPT)
    found = torch.cat([sequence.prompt(size) for size in sizes])
    torch.testing.assert_close(found, expected(folder, PROMPT), atol=4e-4, rtol=1e-4)


@pytest.mark.parametrize("paths", [[NODES.path(5), (0,), NODES.path(6)], nightly([(0,), (0,), NODES.path(1)])])
def test_trees_follow_the_accepted_path(paths: list[tuple[int, ...]], target: TargetModel, folder: str) -> None:
    sequence = Turns(target, PROMPT[:40])
    sequence.prompt(40)
    for path in paths:
        before = list(sequence.tokens)
        check_nodes(sequence.tree(path), folder, before)
    sequence.tokens += [9, 11]
    # States of several trees have been rounded one after the other.
    torch.testing.assert_close(sequence.prompt(2), expected(folder, sequence.tokens)[-2:], atol=1e-3, rtol=1e-4)


def test_a_mark_is_the_state_inside_a_chunk(target: TargetModel, folder: str) -> None:
    sequence = Turns(target, PROMPT)
    whole = sequence.prompt(150, marks=((7, 4), (64, 5), (150, 6)))
    for after, row in ((7, 4), (64, 5)):
        step = StateStep(row, 3)
        rest = segment(PROMPT[after:], after, SLOTS[after:150], SLOTS[:after], step)
        (found,) = run(target, [rest], sequence.kv_cache)
        torch.testing.assert_close(found, whole[after:], atol=4e-4, rtol=1e-4)
    (found,) = run(target, [segment([5], 150, SLOTS[150:151], SLOTS[:150], StateStep(6, 3))], sequence.kv_cache)
    torch.testing.assert_close(found, expected(folder, [*PROMPT, 5])[-1:], atol=1e-4, rtol=1e-4)


def test_a_pass_can_be_run_again(target: TargetModel, folder: str) -> None:
    """It writes to no row that it reads: what fails is lost without a trace."""
    sequence = Turns(target, PROMPT[:40])
    sequence.prompt(40)
    sequence.tree(NODES.path(5))
    row, pending, slots, tokens = sequence.row, sequence.pending, sequence.slots, list(sequence.tokens)
    first = sequence.tree((0,))
    sequence.row, sequence.pending, sequence.slots, sequence.tokens = row, pending, slots, tokens
    sequence.stash = 8 - sequence.stash
    torch.testing.assert_close(sequence.tree((0,)), first, atol=0, rtol=0)


@pytest.mark.parametrize("folder", tiered(DAILY, ("qwen3_5_text",)), indirect=True)
def test_passes_of_kernels_equal_plain_ones(target: TargetModel) -> None:
    """Prompts, marks, trees behind trees, and lone roots; also beside another sequence."""
    pytest.importorskip("triton", reason="triton is not installed")
    if reason := why_no_kernel(target):
        assert "latent attention" in reason
        return
    tiling = Tiling(target.heads_per_kv, target.num_kv_heads, 4)
    kernels = KernelBackend(target, tiling, 400)
    check_kernels(kernels)
    found = list[torch.Tensor]()
    for backend in (target, kernels):
        sequence = Turns(target, PROMPT, backend)
        logits = [sequence.prompt(70, marks=((40, 5),)), sequence.prompt(9)]
        logits += [sequence.tree(path) for path in (NODES.path(5), (0,), NODES.path(6))]
        slots = SLOTS[:40], SLOTS[90:123], SLOTS[140:145]
        after_mark = segment(PROMPT[40:73], 40, slots[1], slots[0], StateStep(5, 6))
        logits += sequence.run([after_mark, segment([5, 9, 5, 7, 3], 40, slots[2], slots[0], StateStep(5, 7))])
        found.append(torch.cat(logits))
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    assert not torch.equal(found[1], found[0]), "both passes were plain"


def wrong_parent(monkeypatch: pytest.MonkeyPatch, sequence: Turns) -> None:
    """Node 3 follows its parent's sibling."""
    mask = np.array(NODES.ancestor_mask())
    mask[3:6, [1, 2]] = mask[3:6, [2, 1]]
    monkeypatch.setattr(DraftTree, "ancestor_mask", lambda tree: mask)


def order_of_rows(monkeypatch: pytest.MonkeyPatch, sequence: Turns) -> None:
    """Convolutions see the rows before theirs."""
    monkeypatch.setattr(recurrent_rows, "_parents", lambda own, start: start + np.arange(-1, len(own.tokens) - 1))


def state_of_the_last_row(monkeypatch: pytest.MonkeyPatch, sequence: Turns) -> None:
    """The state takes all nodes instead of the accepted ones."""
    sequence.pending = sequence.stash + np.arange(len(NODES))


def nothing_accepted(monkeypatch: pytest.MonkeyPatch, sequence: Turns) -> None:
    """The state stays before the root."""
    sequence.pending = NO_ROWS


@pytest.mark.parametrize("folder", tiered(DAILY, ("qwen3_5_text",)), indirect=True)
@pytest.mark.parametrize("mistake", [wrong_parent, order_of_rows, state_of_the_last_row, nothing_accepted])
def test_mistakes_show_in_the_logits(
    mistake: Any, target: TargetModel, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mistake is order_of_rows and not any(shape.channels for shape in target.state_shapes.values()):
        pytest.skip("it has no convolution")
    sequence = Turns(target, PROMPT[:40])
    sequence.prompt(40)
    sequence.tree(NODES.path(6))
    before = list(sequence.tokens)
    mistake(monkeypatch, sequence)
    with pytest.raises(AssertionError):
        check_nodes(sequence.tree((0,)), folder, before)


def test_rows_do_not_see_another_sequence(target: TargetModel) -> None:
    """A segment's logits are the same next to others of other sizes."""
    kv_cache = make_kv_cache(target)
    first = segment(PROMPT[:70], 0, SLOTS[:70], SLOTS[:0], StateStep(START, 1))
    others = [
        segment(PROMPT[70 + i :][:i], 0, SLOTS[100 + 20 * i :][:i], SLOTS[:0], StateStep(START, 1 + i)) for i in (1, 5)
    ]
    alone, beside = run(target, [first], kv_cache)[0], run(target, [others[0], first, others[1]], kv_cache)[1]
    torch.testing.assert_close(beside, alone, atol=1e-4, rtol=1e-4)


def test_only_attention_has_keys_in_slots(target: TargetModel) -> None:
    kv_cache = make_kv_cache(target)
    assert kv_cache.recurrent is not None
    attending = [layer for layer, keys in enumerate(kv_cache.keys) if keys.numel()]
    assert attending
    assert len(attending) + len(kv_cache.recurrent.layers) >= 3


def test_deterministic_mode_refuses_recurrent_layers(target: TargetModel) -> None:
    with pytest.raises(ConfigError, match=r"deterministic mode cannot hold for .*(recurrent layers|experts)"):
        assemble_engine(target, None, fixed_config(deterministic=True, max_kv_tokens=64), TREE, None)


def test_a_recurrent_draft_model_is_refused(tmp_path: Path) -> None:
    target = load_target(write_model(tmp_path, config_of("lfm2", **HYBRIDS["lfm2"])))
    with pytest.raises(ConfigError, match="it can be a target but no draft model"):
        ModelDrafter(target, TREE, DraftingConfig(), DraftModelConfig())
